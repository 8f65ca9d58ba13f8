"""What the tests of names, adapters and sharded weights share: tiny models of many kinds, and what two ranks do."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from rollcli.config.schema import LoraConfig

spec = importlib.util.spec_from_file_location("fsdp_ranks", Path(__file__).with_name("fsdp_ranks.py"))
ranks = sys.modules.setdefault("fsdp_ranks", importlib.util.module_from_spec(spec))
if not hasattr(ranks, "Watched"):
    spec.loader.exec_module(ranks)

SIZES = {
    "vocab_size": ranks.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "llama": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**SIZES, **EXPERTS, "head_dim": 8},
}
"""Untied, tied, and mixtures whose experts are fused in memory."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
LORA = LoraConfig(rank=4, alpha=8.0)


def make_model(kind: str, **options) -> transformers.PreTrainedModel:
    """A random model, every tensor of which differs from every other."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**KINDS.get(kind, {}), **options})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model


def as_rank(work: Path) -> None:
    """Trains, saves, and goes on from what one rank saved; leaves what rank 0 has in `work`."""
    for kind, policy in {"mixtral": {}, "llama": {"lora": LORA}}.items():
        engine = ranks.make_engine(work / kind, **policy)
        engine.train(ranks.my_share(ranks.make_batch()), ranks.Grpo())
        try:
            engine.save(work / kind / "config.json" / "below a file")
            failed = False
        except NotADirectoryError:
            failed = True
        assert failed == (dist.get_rank() == 0)  # and the ranks are still together in what follows
        engine.save(work / f"{kind}.two")
        other = ranks.make_engine(work / kind, **policy)
        other.load(work / f"{kind}.one")
        held = {**(other.named_weights() or {}), **(other.optimizer_state() or {})}
        buckets = [
            {name: (value.a if hasattr(value, "scale") else value).clone() for name, value in (bucket or {}).items()}
            for bucket in other.weight_buckets(5000)
        ]
        if dist.get_rank() == 0:
            torch.save({"held": {name: value.clone() for name, value in held.items()}, "buckets": buckets},
                       work / f"{kind}.found")  # fmt: skip
        else:
            assert not held and not any(buckets)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    as_rank(folder)
    dist.destroy_process_group()
