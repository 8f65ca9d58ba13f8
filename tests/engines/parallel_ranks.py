"""What test_tensor_parallel.py and test_context_parallel.py share with the ranks they start.

A case is a model and a layout; each rank takes two steps, and what it got must be what one process gets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.ppo import Ppo
from rollcli.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.engines.fsdp import FsdpEngine
from rollcli.engines.models import load_critic, load_policy
from rollcli.engines.objectives import LogProbs, Values

_spec = importlib.util.spec_from_file_location("fsdp_ranks", Path(__file__).with_name("fsdp_ranks.py"))
shared = sys.modules.get("fsdp_ranks") or importlib.util.module_from_spec(_spec)
if "fsdp_ranks" not in sys.modules:
    sys.modules["fsdp_ranks"] = shared
    _spec.loader.exec_module(shared)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
KINDS = {
    "llama": {"model_type": "llama", "vocab_size": 64},
    "odd": {"model_type": "llama", "vocab_size": 61},  # a vocabulary that two processes cannot share evenly
    "tied": {"model_type": "qwen3", "vocab_size": 64, "tie_word_embeddings": True},  # norms of heads
    "biased": {"model_type": "qwen2", "vocab_size": 64},
    "moe": {"model_type": "qwen3_moe", "vocab_size": 64, **EXPERTS},
    "window": {"model_type": "mistral", "vocab_size": 64, "sliding_window": 5},
    "mixtral": {"model_type": "mixtral", "vocab_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Models by what is special about them."""


class Recorded(FsdpEngine):
    """Keeps the gradient of the last step, whole."""

    def optimize(self, learning_rate: float) -> None:
        """Keeps the gradient and takes the step."""
        self.gradients = {
            name: parameter.grad.full_tensor().clone() for name, parameter in self.model.named_parameters()
        }
        super().optimize(learning_rate)


def write_models(folder: Path) -> None:
    """Writes every kind of model, random."""
    for kind, settings in KINDS.items():
        torch.manual_seed(3)
        settings = SIZES | settings
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        model.save_pretrained(folder / kind)


def make_engine(
    folder: Path,
    parallel: dict[str, int] | None = None,
    engine_args: dict | None = None,
    critic: bool = False,
    **policy,
) -> Recorded:
    """An engine on the model in `folder`; a critic's head starts at 0."""
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9, eps=1e-4)
    settings = {"micro_batch_tokens": 64, **policy}
    config = PolicyConfig(optimizer=optimizer, parallel=ParallelConfig(**(parallel or {})), **settings)
    source, device = ModelConfig(str(folder)), torch.device("cpu")
    model = load_critic(source, None, device, 0) if critic else load_policy(source, device, 0, training=True)
    return Recorded(model, config, **(engine_args or {}))


def my_share(engine: FsdpEngine, batch: Batch) -> Batch:
    """The part of a batch that this rank and its peers get."""
    return batch.select(batch.shards(engine.data_ranks)[engine.data_rank])


def run_case(engine: Recorded, folder: Path | None = None) -> dict[str, object]:
    """Two steps and a forward pass; leaves the checkpoint in `folder`."""
    critic = not engine.selects
    objective = Values(Ppo()) if critic else LogProbs(shared.TEMPERATURE, Grpo())
    batch, other = (shared.make_batch(seed=seed) for seed in (0, 1))
    for each in (batch, other) if critic else ():
        shared.valued(each)
    mine = my_share(engine, batch)
    column = np.zeros(int(batch.offsets[-1]), np.float32)
    places = np.isin(batch.rows, batch.shards(engine.data_ranks)[engine.data_rank])
    column[places] = engine.forward(mine, objective)
    metrics, updated = engine.update(mine, objective, 1e-2)
    gradients = engine.gradients
    second, later = engine.update(my_share(engine, other), objective, 1e-2)
    if folder is not None:
        engine.save(folder)
    return {
        "metrics": metrics, "second": second, "places": torch.from_numpy(places), "column": torch.from_numpy(column),
        "updated": torch.from_numpy(updated), "later": torch.from_numpy(later), "gradients": gradients,
        "weights": engine.named_weights(), "state": engine.optimizer_state(),
    }  # fmt: skip


def check_equal(found: list[dict], alone: dict) -> None:
    """Fails where ranks did not compute what one process did."""
    for rank, each in enumerate(found):
        for step in ("metrics", "second"):
            times = 1 if step == "metrics" else 10  # the weights differ by roundings then
            assert each[step]["loss"] == pytest.approx(alone[step]["loss"], abs=times * 1e-5)
            # A share counts tokens beyond a limit, which a rounding moves across where they lie on it.
            smooth = [name for name in alone[step] if not name.endswith("_share")]
            wanted = pytest.approx([alone[step][name] for name in smooth], rel=times * 1e-4, abs=times * 1e-5)
            assert [each[step][name] for name in smooth] == wanted
        part = alone["column"] * each["places"]
        torch.testing.assert_close(each["column"], part, rtol=0, atol=1e-5)
        torch.testing.assert_close(each["updated"], each["column"][each["places"]], rtol=0, atol=1e-5)
        assert (each["weights"] is None) == (each["state"] is None) == (rank > 0)
        close(each["gradients"], alone["gradients"], 1e-5)
    close(found[0]["weights"], alone["weights"], 1e-4)
    close(found[0]["state"], alone["state"], 1e-5)


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], most: float) -> None:
    """Fails where names or shapes differ, or an element by more than `most`."""
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=most, msg=lambda m, n=name: f"{n}: {m}")


def run_ranks(work: Path, cases: dict[str, dict], count: int = 2) -> list[dict]:
    """Runs cases on `count` ranks; returns what each rank found, by case. A hang is a failure."""
    work.mkdir(exist_ok=True)
    (work / "cases.json").write_text(json.dumps(cases))
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(work)], env={**os.environ, "RANK": str(rank), "WORLD": str(count)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return [torch.load(work / f"found.{rank}.pt") for rank in range(count)]


def as_rank(work: Path) -> None:
    """Runs every case; one may `load` a checkpoint first."""
    found = {}
    for name, case in json.loads((work / "cases.json").read_text()).items():
        load = case.pop("load", None)
        model = work.parent / case.pop("kind")
        engine = make_engine(model, **case)
        if load is not None:
            engine.load(work.parent / load)
        found[name] = run_case(engine, work / f"{name}.saved")
    torch.save(found, work / f"found.{dist.get_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    as_rank(folder)
    dist.destroy_process_group()
