"""What test_fsdp.py shares with the ranks it starts: models, batches, a slow reference, and what a rank does."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers

from rollcli.algorithms.grpo import Grpo
from rollcli.config.schema import ModelConfig, OptimizerConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.engines.fsdp import FsdpEngine
from rollcli.engines.models import load_policy

TEMPERATURE = 0.7
VOCABULARY = 61


class Watched(FsdpEngine):
    """Keeps the gradient of the last update as it was before clipping."""

    def _clip(self) -> float:
        self.gradients = {
            name: parameter.grad.full_tensor().clone() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            for name, parameter in self.model.named_parameters()
        }
        return super()._clip()


def write_model(folder: Path, kind: str = "llama", **options) -> Path:
    """Writes a small random model: Llama, or Qwen 2 with biases and tied embeddings."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}  # fmt: skip
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True, **options))
        torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    model.save_pretrained(folder)
    return folder


def make_engine(folder: Path, steps: int = 10, dtype: str = "auto", frozen: bool = False, **policy) -> Watched:
    """An engine on the model in `folder`; options are those of `PolicyConfig`, or `optimizer`'s."""
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 1e9}
    optimizer |= {name: policy.pop(name) for name in list(policy) if name in OptimizerConfig.__dataclass_fields__}
    config = PolicyConfig(optimizer=OptimizerConfig(**optimizer), **{"micro_batch_tokens": 64, **policy})
    model = load_policy(ModelConfig(str(folder)), torch.device("cpu"), 0, training=True)
    return Watched(model, config, steps, frozen=frozen, dtype=dtype)


def make_batch(lengths: tuple[int, ...] = (7, 30, 4, 12, 12, 19, 3, 25, 9, 5), seed: int = 0) -> Batch:
    """Trajectories of two groups: some of two turns, some off-policy enough to be clipped, one all masked."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    batch = Batch(
        offsets,
        {"ids": random.integers(3, VOCABULARY, total).astype(np.int32)},
        {"group": np.arange(len(lengths)) % 2, "reward": random.integers(0, 3, len(lengths)).astype(np.float64)},
    )
    place = np.arange(total) - offsets[batch.rows]
    batch.tokens["loss_mask"] = (place >= 2) & (place % 8 != 5) & (batch.rows != 4)
    batch.tokens["old_logprobs"] = (-4.1 + 0.4 * random.normal(size=total)).astype(np.float32)
    batch.tokens["reference_logprobs"] = (-4.1 + 0.4 * random.normal(size=total)).astype(np.float32)
    batch.tokens["rollout_logprobs"] = batch.tokens["old_logprobs"] + np.float32(0.25)
    return weighed(batch, Grpo())


def weighed(batch: Batch, algorithm: Grpo) -> Batch:
    """Adds what the pipeline adds before an update."""
    batch.tokens["advantages"] = algorithm.advantages(batch)
    batch.tokens["loss_weights"] = algorithm.loss_weights(batch)
    return batch


def reference_logprobs(model: torch.nn.Module, batch: Batch, temperature: float) -> list[torch.Tensor]:
    """Log-probability of every token after the first, one trajectory at a time, as the textbook has it."""
    result = []
    for row in range(len(batch)):
        ids = torch.tensor(batch.tokens["ids"][batch.offsets[row] : batch.offsets[row + 1]].astype(np.int64))
        logits = model(ids[None]).logits[0, :-1].float() / temperature
        result.append(torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]])
    return result


def reference_grpo(model: torch.nn.Module, batch: Batch, beta: float = 0.04, clip: float = 0.2) -> torch.Tensor:
    """GRPO's objective written token by token (arXiv 2402.03300, eq. 3), negated."""
    answers = []
    for row, logprobs in enumerate(reference_logprobs(model, batch, TEMPERATURE)):
        members = batch.samples["reward"][batch.samples["group"] == batch.samples["group"][row]]
        advantage = float((batch.samples["reward"][row] - members.mean()) / members.std(ddof=1))
        losses = []
        for token in range(int(batch.offsets[row]) + 1, int(batch.offsets[row + 1])):
            if not batch.tokens["loss_mask"][token]:
                continue
            logprob = logprobs[token - int(batch.offsets[row]) - 1]
            ratio = torch.exp(logprob - float(batch.tokens["old_logprobs"][token]))
            gain = torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage)
            apart = float(batch.tokens["reference_logprobs"][token]) - logprob
            losses.append(-gain + beta * (torch.exp(apart) - apart - 1))
        if losses:
            answers.append(sum(losses) / len(losses))
    return sum(answers) / len(answers)


def my_share(batch: Batch, indices: list[list[int]] | None = None) -> Batch:
    """This rank's part of a batch."""
    shards = batch.shards(dist.get_world_size()) if indices is None else [np.array(part, int) for part in indices]
    return batch.select(shards[dist.get_rank()])


def as_rank(work: Path) -> None:
    """Runs every case that needs two ranks, and leaves what they gave in `work`."""
    rank = dist.get_rank()
    facts: dict[str, object] = {}

    def keep(name: str, tensors: dict[str, torch.Tensor]) -> None:
        torch.save({key: value.detach().clone() for key, value in tensors.items()}, work / f"{name}.{rank}.pt")

    for kind in ("llama", "qwen2"):
        engine = make_engine(work / kind)
        batch = make_batch()
        facts[f"{kind}/metrics"] = engine.update(my_share(batch), Grpo(), TEMPERATURE)
        keep(f"{kind}.gradients", engine.gradients)
        engine.update(my_share(make_batch(seed=1)), Grpo(), TEMPERATURE)
        engine.save(work / f"{kind}.saved")
        keep(f"{kind}.state", engine._gather(engine._optimizer_state()))
        keep(f"{kind}.weights", engine.named_weights() or {})

    # One long against four short: the ranks have different numbers of micro-batches.
    engine = make_engine(work / "llama", micro_batch_tokens=4, packing=False)
    batch = make_batch((40, 4, 4, 4, 4))
    mine = my_share(batch, [[0], [1, 2, 3, 4]])
    facts["uneven/logprobs"] = engine.logprobs(mine, TEMPERATURE).tolist()
    facts["uneven/metrics"] = engine.update(mine, Grpo(), TEMPERATURE)
    # Everything on rank 0, nothing at all on rank 1.
    engine = make_engine(work / "llama")
    facts["empty/metrics"] = engine.update(my_share(make_batch(), [list(range(10)), []]), Grpo(), TEMPERATURE)
    keep("empty.gradients", engine.gradients)
    # Trained tokens on rank 0 alone.
    engine = make_engine(work / "llama")
    batch = make_batch()
    batch.tokens["loss_mask"] &= batch.rows < 5
    weighed(batch, Grpo())
    shards = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    facts["masked/metrics"] = engine.update(my_share(batch, shards), Grpo(), TEMPERATURE)
    # A gradient that is not finite on one rank is nobody's step.
    batch = make_batch()
    batch.tokens["advantages"][batch.rows == 1] = math.inf
    before = engine.named_weights()
    before = {name: value.clone() for name, value in before.items()} if before else {}
    facts["infinite/metrics"] = engine.update(my_share(batch), Grpo(), TEMPERATURE)
    after = engine.named_weights() or {}
    facts["infinite/unchanged"] = all(torch.equal(before[name], after[name]) for name in before)

    # A checkpoint of one rank on two, and a failing disk, after which the ranks are still together.
    engine = make_engine(work / "llama")
    engine.load(work / "one_rank")
    keep("loaded.state", engine._gather(engine._optimizer_state()))
    keep("loaded.weights", engine.named_weights() or {})
    (work / "file").touch()
    try:
        engine.save(work / "file")
        facts["full_disk"] = "saved"
    except OSError as error:
        facts["full_disk"] = type(error).__name__
    facts["after_full_disk"] = engine.update(my_share(make_batch()), Grpo(), TEMPERATURE)["tokens"]

    engine = make_engine(work / "llama", dtype="bfloat16")
    facts["bfloat16"] = engine.update(my_share(make_batch()), Grpo(), TEMPERATURE)
    facts["bfloat16/dtypes"] = sorted({str(p.dtype) for p in engine.model.parameters()})
    (work / f"facts.{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD"]),
    )
    as_rank(folder)
    dist.destroy_process_group()
