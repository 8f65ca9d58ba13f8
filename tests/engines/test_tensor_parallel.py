"""Tensor and expert parallelism and HSDP by real processes, against the engine on one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from rollcli.config.schema import ParallelConfig
from rollcli.engines import tensor_parallel
from rollcli.errors import EngineError

pytestmark = pytest.mark.usefixtures("one_rank")
spec = importlib.util.spec_from_file_location("parallel_ranks", Path(__file__).with_name("parallel_ranks.py"))
ranks = importlib.util.module_from_spec(spec)
sys.modules["parallel_ranks"] = ranks
spec.loader.exec_module(ranks)

CASES = {
    "tied": {"kind": "tied", "parallel": {"tensor": 2}},
    "odd vocabulary": {"kind": "odd", "parallel": {"tensor": 2}},
    "mixture by columns": {"kind": "moe", "parallel": {"tensor": 2}},
    "mixture by experts": {"kind": "mixtral", "parallel": {"expert": 2}},
    "replicated": {"kind": "moe", "engine_args": {"shard_size": 1}},
    "sharded": {"kind": "moe", "engine_args": {"shard_size": 2}},
    "continued": {"kind": "tied", "parallel": {"tensor": 2}, "load": "tied.one", "recompute_activations": True},
}
FOUR = {
    "data and tensor": {"kind": "tied", "parallel": {"tensor": 2}},
    "experts over tensor": {"kind": "moe", "parallel": {"tensor": 2, "expert": 4}},
    "replicated in pairs": {"kind": "moe", "parallel": {"expert": 2}, "engine_args": {"shard_size": 2}},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    ranks.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(work: Path) -> dict[str, dict]:
    """What one process gets of each model, and `tied` once more from its checkpoint."""
    found = {kind: ranks.run_case(ranks.make_engine(work / kind), work / f"{kind}.one") for kind in ranks.KINDS}
    engine = ranks.make_engine(work / "tied")
    engine.load(work / "tied.one")
    return found | {"continued": ranks.run_case(engine)}


@pytest.fixture(scope="module")
def two(work: Path, alone: dict) -> list[dict]:
    return ranks.run_ranks(work / "two", CASES)


@pytest.fixture(scope="module")
def four(work: Path, alone: dict) -> list[dict]:
    return ranks.run_ranks(work / "four", FOUR, count=4)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(alone, two, name: str) -> None:
    ranks.check_equal([found[name] for found in two], alone.get(name) or alone[CASES[name]["kind"]])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_compute_what_one_does(alone, four, name: str) -> None:
    ranks.check_equal([found[name] for found in four], alone[FOUR[name]["kind"]])


@pytest.mark.parametrize("name", ["tied", "mixture by columns", "mixture by experts", "replicated"])
def test_a_checkpoint_of_two_processes_loads_on_one(work, two, name: str) -> None:
    engine = ranks.make_engine(work / CASES[name]["kind"])
    engine.load(work / "two" / f"{name}.saved")
    assert ranks.shared.same(engine.named_weights(), two[0][name]["weights"])
    assert ranks.shared.same(engine.optimizer_state(), two[0][name]["state"])


def test_a_checkpoint_is_a_model_of_transformers(work, two) -> None:
    """Whole, in the hub's names, the mixture's experts apart."""
    ids = torch.arange(3, 20)[None]
    for name in ("tied", "mixture by experts"):
        folder = work / "two" / f"{name}.saved" / "model"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engine = ranks.make_engine(folder)
        with torch.no_grad():
            torch.testing.assert_close(engine.model(ids).logits, model(ids).logits)
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in two[0]["mixture by experts"]["weights"]


def test_a_mixture_on_one_process_equals_transformers(work) -> None:
    """Loss and gradient of packed micro-batches against the slow reference."""
    engine, batch = ranks.make_engine(work / "moe"), ranks.shared.make_batch()
    metrics = ranks.run_case(engine)["metrics"]
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "moe", dtype=torch.float32).eval()
    loss = ranks.shared.reference_grpo(model, batch)
    loss.backward()
    norm = sum(float(parameter.grad.square().sum()) for parameter in model.parameters()) ** 0.5
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "shard_size", "message"),
    [
        ({"pipeline": 2}, None, "has no pipeline"),
        ({}, 3, "`engine_args.shard_size` 3 does not divide the 4 processes"),
        ({"tensor": 2}, 4, "does not divide the 2 processes"),
        ({"expert": 3}, None, "`parallel.expert` 3 must divide the 4 processes"),
        ({"tensor": 4, "expert": 2}, None, "multiple of `parallel.tensor` 4"),
    ],
)
def test_sizes_that_do_not_divide_the_processes_are_refused(sizes, shard_size, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        tensor_parallel.lay_out(torch.device("cpu"), 4, ParallelConfig(**sizes), shard_size)


def test_models_without_a_plan_are_refused(work) -> None:
    pair, single = SimpleNamespace(size=lambda: 2), SimpleNamespace(size=lambda: 1)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(EngineError, match="no plan to split a `gpt2` model"):
        tensor_parallel.apply_plans(gpt2, tensor_parallel.Layout(pair, single))
    with pytest.raises(EngineError, match="no plan to split experts of a `gpt2` model"):
        tensor_parallel.apply_plans(gpt2, tensor_parallel.Layout(single, single, None, pair, single))


def test_experts_that_do_not_divide_are_refused(work) -> None:
    """Of a model whose configuration does not say their number, only the model itself can tell."""
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "moe")
    single, three = SimpleNamespace(size=lambda: 1), SimpleNamespace(size=lambda: 3)
    with pytest.raises(EngineError, match="3 does not divide the model's 4 experts"):
        tensor_parallel.apply_plans(model, tensor_parallel.Layout(single, single, None, three, single))


def test_global_norm_on_one_process_is_the_plain_norm() -> None:
    gradients = [torch.full((3, 4), 2.0), torch.tensor([-3.0, 1.0]), torch.zeros(0)]
    norm = tensor_parallel.global_norm(gradients, torch.device("cpu"), 1)
    assert float(norm) == pytest.approx((12 * 4 + 9 + 1) ** 0.5)
