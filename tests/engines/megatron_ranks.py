"""What test_megatron.py shares with the ranks it starts: models, a probe of a model, and what a rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp_ranks as shared  # the test loads it by its path; here it stands beside this script
import numpy as np
import torch
import torch.distributed as dist
import transformers

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.ppo import Ppo
from rollcli.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.engines.megatron import MegatronEngine
from rollcli.engines.models import load_critic, load_policy
from rollcli.engines.objectives import LogProbs, Values

SIZES = {"vocab_size": shared.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
}
"""Small models, each with something of its own: scaled positions, a window, biases, norms of heads, experts."""
SPREADS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tensor": ({"tensor": 2}, {}),
    "sequence": ({"tensor": 2}, {"sequence_parallel": True}),
    "data": ({}, {}),
    "expert": ({"expert": 2}, {}),
    "tensor and expert": ({"tensor": 2, "expert": 2}, {}),
}
"""Ways to use two ranks: sizes of `parallel`, and `engine_args`."""


class Watched(MegatronEngine):
    """Keeps the gradient of the last update as it was before clipping, in the hub's naming, on rank 0."""

    def clip(self) -> float:
        gradients = self._gather(lambda name: self.masters[name].grad)
        self.gradients = None if gradients is None else self.naming.to_hub(gradients)
        return super().clip()

    def train(self, batch: Batch) -> dict[str, float]:
        return self.update(batch, LogProbs(shared.TEMPERATURE, Grpo()), self.config.optimizer.learning_rate)[0]


def write_models(work: Path) -> None:
    """Writes one of each kind, every vector random so that none is at its default."""
    for kind, (name, options) in KINDS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES, **options)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for weight_name, weight in model.named_parameters():
            if weight.ndim == 1:
                torch.nn.init.normal_(weight, mean=float("norm" in weight_name), std=0.2)
            if weight_name.endswith("mlp.gate.weight"):
                torch.nn.init.normal_(weight, std=0.5)
        model.save_pretrained(work / kind)
    shared.write_critic(work / "critic", work / "qwen2")


def recipe(**options: Any) -> PolicyConfig:
    """The `policy` block; options are its own or `optimizer`'s, `parallel` a mapping."""
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "weight_decay": 0.1}
    optimizer |= {name: options.pop(name) for name in list(options) if name in OptimizerConfig.__dataclass_fields__}
    parallel = ParallelConfig(**options.pop("parallel", {}))
    return PolicyConfig(
        optimizer=OptimizerConfig(**optimizer), parallel=parallel, **{"micro_batch_tokens": 64, **options}
    )


def make(folder: Path, critic: bool = False, frozen: bool = False, dtype: str = "auto", args: Any = None, **options):
    """An engine on the model in `folder`."""
    model, device = ModelConfig(str(folder)), torch.device("cpu")
    loaded = load_critic(model, str(folder), device, 0) if critic else load_policy(model, device, 0, training=True)
    return Watched(loaded, recipe(**options), frozen=frozen, dtype=dtype, **(args or {}))


PLACES = np.array([0, 0, 1, 1, 1, 1]), np.array([3, 14, 0, 5, 6, 14])
"""Rows and columns at which a probe looks."""


def probe_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions of two rows, the second of two packed sequences."""
    ids = torch.randint(0, shared.VOCABULARY, (2, 15), generator=torch.Generator().manual_seed(1))
    return ids, torch.stack([torch.arange(15), torch.cat([torch.arange(6), torch.arange(9)])])


def directions(count: int = 6, width: int = shared.VOCABULARY) -> torch.Tensor:
    """A fixed random direction of the outputs, whose gradient a probe takes; small, so that gradients are about 1."""
    return torch.randn((count, width), generator=torch.Generator().manual_seed(2)) / 100


def probe(engine: Watched) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs at the places, and gradients by hub name on rank 0."""
    outputs = engine.predict(*probe_rows(), *PLACES)
    engine.backward((outputs * directions(width=outputs.shape[1])).sum(), last=True)
    norm = engine.clip()
    engine.zero_grad()
    return outputs.detach(), (engine.gradients or {}) | {"norm": torch.tensor(norm)}


def spreads_of(kind: str) -> list[str]:
    """The ways in which two ranks train a kind."""
    return ["tensor", "data", "expert", "tensor and expert"] if "mix" in kind or "moe" in kind else ["tensor", "data"]


def run_two(work: Path) -> list[dict]:
    """Runs two ranks and returns the facts each found; a hang is a failure."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(work)], env={**os.environ, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [json.loads((work / f"megatron.{rank}.json").read_text()) for rank in range(2)]


def as_rank(work: Path) -> None:
    """Runs every case that needs two ranks, and leaves what they gave in `work`."""
    rank = dist.get_rank()
    facts: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        torch.save(value, work / f"{name}.{rank}.pt")

    def engine_of(kind: str, spread: str, **options: Any) -> Watched:
        parallel, args = SPREADS[spread]
        return make(work / kind, parallel=parallel, args=args, **options)

    for kind in KINDS:
        for spread in spreads_of(kind):
            engine = engine_of(kind, spread)
            keep(f"{kind}.{spread}.probe", probe(engine))
            batch = shared.make_batch()
            metrics = engine.train(shared.my_share(batch) if engine.data_ranks > 1 else batch)
            facts[f"{kind}/{spread}"] = metrics
            keep(f"{kind}.{spread}.update", (engine.gradients, engine.named_weights(), engine.optimizer_state()))
            engine.save(work / f"{kind}.{spread}.saved")
    facts["groups"] = [dist.get_process_group_ranks(group) for group in (engine.peers, engine.tensor_group)]
    engine = engine_of("llama", "data")
    engine.train(shared.my_share(shared.make_batch()))
    groups = (engine.data_group, engine.shared_data_group)
    facts["data groups"] = [dist.get_process_group_ranks(group) for group in groups]
    facts["owned"] = [sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())]
    facts["owned"].append(sum(master.numel() for master in engine.masters.values()))
    for kind in ("llama", "qwen3"):
        keep(f"{kind}.sequence.probe", probe(engine_of(kind, "sequence")))

    for kind, spread in (("llama", "data"), ("qwen3_moe", "tensor")):
        engine = engine_of(kind, spread)
        engine.load(work / f"{kind}.fsdp")
        keep(f"{kind}.loaded", (engine.named_weights(), engine.optimizer_state()))

    engine = make(work / "critic", critic=True, parallel={"tensor": 2}, args={"sequence_parallel": True})
    batch = shared.valued(shared.make_batch())
    metrics, values = engine.update(batch, Values(Ppo()), 1e-2)
    keep("critic", ((metrics, torch.from_numpy(values)), engine.gradients, engine.named_weights()))

    # Experts on ranks whose rows differ: everything on rank 0, nothing at all on rank 1.
    engine = engine_of("mixtral", "expert")
    engine.train(shared.my_share(shared.make_batch(), [list(range(10)), []]))
    keep("uneven", engine.gradients)
    (work / f"megatron.{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    meeting = f"file://{folder}/megatron.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=2)
    as_rank(folder)
    dist.destroy_process_group()
