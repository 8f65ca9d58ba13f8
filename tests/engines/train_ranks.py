"""What test_train_contract.py and test_deepspeed.py share with the ranks they start.

Engines by name, the reference that each is held against, and what a rank does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from rollcli import registry
from rollcli.algorithms.grpo import Grpo
from rollcli.config.schema import ModelConfig, OptimizerConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.engines.base import TrainEngine
from rollcli.engines.models import load_critic, load_policy
from rollcli.engines.objectives import LogProbs

_spec = importlib.util.spec_from_file_location("fsdp_ranks", Path(__file__).with_name("fsdp_ranks.py"))
shared = sys.modules.get("fsdp_ranks") or importlib.util.module_from_spec(_spec)
if "fsdp_ranks" not in sys.modules:
    sys.modules["fsdp_ranks"] = shared
    _spec.loader.exec_module(shared)

RATE = 1e-2
EPS = 1e-3
"""So large that a first step is smooth in the gradient; with the usual one it is hardly more than its sign."""
DECAY = 0.1
BETAS = (0.9, 0.95)
UNEVEN = [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
EMPTY = [list(range(10)), []]


@dataclass(frozen=True)
class Case:
    """An engine to hold against the contract.

    Attributes:
        engine: its registered name.
        package: what must be installed.
        options: its `engine_args`.
    """

    engine: str
    package: str
    options: dict[str, Any] = field(default_factory=dict)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """DeepSpeed's configuration; at stage 3 small parameters are cut as well."""
    small = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **small, **more}}


CASES = {
    "fsdp": Case("fsdp", "torch"),
    "zero-1": Case("deepspeed", "deepspeed", zero(1)),
    "zero-2": Case("deepspeed", "deepspeed", zero(2)),
    "zero-3": Case("deepspeed", "deepspeed", zero(3)),
    "megatron": Case("megatron", "megatron"),
}
"""Every training engine; another joins with a line here."""
VARIANTS = {
    "zero-0": Case("deepspeed", "deepspeed", zero(0)),
    "zero-1-offloaded": Case("deepspeed", "deepspeed", zero(1, offload_optimizer={"device": "cpu"})),
    "zero-3-offloaded": Case(
        "deepspeed", "deepspeed", zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    ),
    "zero-2-half": Case("deepspeed", "deepspeed", zero(2)),
    "zero-3-half": Case("deepspeed", "deepspeed", zero(3)),
}
"""What else ZeRO can do; for test_deepspeed.py."""
DTYPES = {"zero-2-half": "bfloat16", "zero-3-half": "bfloat16"}
"""Precision of the cases that do not choose it themselves."""


def installed(name: str) -> bool:
    """Whether a case can run here."""
    return importlib.util.find_spec(CASES[name].package) is not None


def make(
    folder: Path, case: Case, dtype: str = "auto", frozen: bool = False, critic: Path | None = None, **policy: Any
) -> TrainEngine:
    """An engine on the model in `folder`; options are those of `PolicyConfig`, or `optimizer`'s."""
    optimizer = {"learning_rate": RATE, "max_grad_norm": 1e9, "eps": EPS, "weight_decay": DECAY, "betas": list(BETAS)}
    optimizer |= {name: policy.pop(name) for name in list(policy) if name in OptimizerConfig.__dataclass_fields__}
    config = PolicyConfig(case.engine, optimizer=OptimizerConfig(**optimizer), **{"micro_batch_tokens": 64, **policy})
    model, device = ModelConfig(str(folder)), torch.device("cpu")
    if critic is None:
        loaded = load_policy(model, device, 0, training=True)
    else:
        loaded = load_critic(model, str(critic), device, 0)
    engine = registry.resolve("train_engines", case.engine)
    return engine(loaded, config, frozen=frozen, dtype=dtype, **case.options)


def write_mixture(folder: Path) -> None:
    """Writes a small random mixture of experts."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=shared.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.15, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def train(engine: TrainEngine, batch: Batch, rate: float = RATE) -> tuple[dict[str, float], np.ndarray]:
    """One update of the policy by GRPO."""
    return engine.update(batch, LogProbs(shared.TEMPERATURE, Grpo()), rate)


def logprobs(engine: TrainEngine, batch: Batch) -> np.ndarray:
    """Log-probabilities `[T]`."""
    return engine.forward(batch, LogProbs(shared.TEMPERATURE))


def copied(tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Tensors that a later step does not change; none on ranks that have none."""
    return {name: tensor.detach().clone() for name, tensor in (tensors or {}).items()}


def gradients(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of the first step, from what AdamW kept of it."""
    return {
        name.removesuffix(".exp_avg"): moment / (1 - BETAS[0])
        for name, moment in state.items()
        if name.endswith(".exp_avg")
    }


@dataclass
class Reference:
    """Two steps of GRPO by transformers and torch alone, written token by token.

    Attributes:
        logprobs: `[T]` of each batch, before each step; 0 off the loss mask.
        losses: of each step.
        gradients: of the first step, by name.
        weights: after each step.
    """

    logprobs: list[np.ndarray]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: list[dict[str, torch.Tensor]]


def reference(folder: Path, steps: int = 2) -> Reference:
    """What every engine must find on the model in `folder`, on the batches of seeds 0, 1, …"""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    found = Reference([], [], {}, [])
    for step in range(steps):
        batch = shared.make_batch(seed=step)
        with torch.no_grad():
            rows = [torch.cat([torch.zeros(1), row]) for row in shared.reference_logprobs(model, batch)]
        found.logprobs.append(torch.cat(rows).numpy() * batch.tokens["loss_mask"])
        loss = shared.reference_grpo(model, batch)
        optimizer.zero_grad()
        loss.backward()
        found.losses.append(float(loss.detach()))
        if step == 0:
            found.gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        optimizer.step()
        found.weights.append(copied(parameters))
    return found


def run_two(work: Path, names: list[str]) -> list[dict]:
    """Runs two ranks through the cases and returns the facts each found; a hang is a failure."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(work), *names], env={**os.environ, "RANK": str(rank), "WORLD": "2"},
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
    return [json.loads((work / f"facts.{rank}.json").read_text()) for rank in range(2)]


def as_rank(work: Path, names: list[str]) -> None:
    """Runs every case that needs two ranks, and leaves what it gave in `work`."""
    rank = dist.get_rank()
    facts: dict[str, Any] = {}

    def keep(name: str, tensors: dict[str, torch.Tensor] | None) -> None:
        torch.save(copied(tensors), work / f"{name}.{rank}.pt")

    def mine(seed: int, indices: list[list[int]] | None = None) -> Batch:
        return shared.my_share(shared.make_batch(seed=seed), indices)

    for name in names:
        case, dtype = {**CASES, **VARIANTS}[name], DTYPES.get(name, "auto")
        # The first step with different numbers of micro-batches, the second with none at all on rank 1.
        engine = make(work / "qwen2", case, dtype, micro_batch_tokens=30)
        facts[f"{name}/logprobs"] = logprobs(engine, mine(0, UNEVEN)).tolist()
        facts[f"{name}/first"], column = train(engine, mine(0, UNEVEN))
        facts[f"{name}/column"] = column.tolist()
        keep(f"{name}.state", engine.optimizer_state())
        keep(f"{name}.first", engine.named_weights())
        facts[f"{name}/second"], _ = train(engine, mine(1, EMPTY))
        keep(f"{name}.second", engine.named_weights())
        engine.save(work / f"{name}.two_ranks")

        # A gradient that is not finite on one rank leaves all as they are.
        spoiled = mine(2)
        spoiled.tokens["advantages"][:] = np.nan if rank == 1 else 1
        facts[f"{name}/spoiled"], _ = train(engine, spoiled)
        keep(f"{name}.spoiled", engine.named_weights())

        # What one rank, or fsdp, wrote goes on here.
        for source in ("one_rank", "fsdp.one_rank"):
            folder = work / (f"{name}.one_rank" if source == "one_rank" else source)
            engine.load(folder)
            train(engine, mine(1))
            keep(f"{name}.from.{source}", engine.named_weights())

        frozen = make(work / "qwen2", case, dtype, frozen=True)
        facts[f"{name}/frozen"] = logprobs(frozen, mine(0)).tolist()
        keep(f"{name}.frozen", frozen.named_weights())
    (work / f"facts.{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    store = dist.FileStore(str(folder / "store"), int(os.environ["WORLD"]))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD"]))
    as_rank(folder, sys.argv[2:])
    dist.destroy_process_group()
