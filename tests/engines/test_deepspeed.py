"""What is DeepSpeed's own: offloads, precision, clipping, buckets, configuration; see test_train_contract.py too.

Models, batches and the reference are those of the contract (`train_ranks.py`).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollcli.errors import CheckpointError, EngineError

pytest.importorskip("deepspeed")

from rollcli.engines import deepspeed

SCRIPT = Path(__file__).with_name("train_ranks.py")
spec = importlib.util.spec_from_file_location("train_ranks", SCRIPT)
ranks = sys.modules.get("train_ranks") or importlib.util.module_from_spec(spec)
if "train_ranks" not in sys.modules:
    sys.modules["train_ranks"] = ranks
    spec.loader.exec_module(ranks)
shared, copied, logprobs, train, zero = ranks.shared, ranks.copied, ranks.logprobs, ranks.train, ranks.zero
make_batch, same = shared.make_batch, shared.same
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@pytest.fixture(scope="module", autouse=True)
def world(one_rank):
    yield
    from deepspeed.utils import groups

    groups._release_process_group_references()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    shared.write_model(folder / "qwen2", "qwen2")
    return folder


@pytest.fixture(scope="module")
def expected(work: Path) -> Any:
    return ranks.reference(work / "qwen2")


@pytest.fixture(scope="module")
def two_ranks(work: Path) -> list[dict]:
    """What two ranks found; a hang is a failure."""
    ranks.make(work / "qwen2", ranks.CASES["fsdp"]).save(work / "fsdp.one_rank")
    for name in ranks.VARIANTS:
        ranks.make(work / "qwen2", ranks.CASES["fsdp"]).save(work / f"{name}.one_rank")
    return ranks.run_two(work, list(ranks.VARIANTS))


def make(work: Path, options: dict[str, Any], **more: Any) -> deepspeed.DeepSpeedEngine:
    return ranks.make(work / "qwen2", ranks.Case("deepspeed", "deepspeed", options), **more)


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=10 * tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def two_steps_are_the_references(engine: deepspeed.DeepSpeedEngine, expected: Any) -> None:
    metrics, _ = train(engine, make_batch())
    assert metrics["loss"] == pytest.approx(expected.losses[0], abs=1e-5)
    close(ranks.gradients(engine.optimizer_state()), expected.gradients)
    train(engine, make_batch(seed=1))
    close(copied(engine.named_weights()), expected.weights[1], 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        zero(0),
        zero(1, **OFFLOADED),
        zero(2, **OFFLOADED),
        zero(3, **OFFLOADED),
        zero(3, **OFFLOADED, offload_param={"device": "cpu"}),
        zero(3, stage3_param_persistence_threshold=100),
        zero(2, reduce_bucket_size=500, allgather_bucket_size=500, overlap_comm=False, contiguous_gradients=False),
        zero(3, sub_group_size=1000, stage3_prefetch_bucket_size=0),
        {},
    ],
    ids=str,
)
def test_two_steps_are_the_references_whatever_zero_does(work, expected, options: dict) -> None:
    two_steps_are_the_references(make(work, options), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_recomputing_activations_changes_nothing(work, expected, stage: int) -> None:
    two_steps_are_the_references(make(work, zero(stage), recompute_activations=True), expected)


@pytest.mark.parametrize("micro_batch_tokens", [1, 100_000])
def test_micro_batches_are_summed(work, expected, micro_batch_tokens: int) -> None:
    for stage in (1, 2, 3):
        two_steps_are_the_references(make(work, zero(stage), micro_batch_tokens=micro_batch_tokens), expected)


@pytest.mark.parametrize("options", [zero(0), zero(1), zero(2, **OFFLOADED), zero(3)], ids=str)
def test_a_long_gradient_is_scaled_down(work, options: dict) -> None:
    """Two steps, since the first moment carries the scale on."""
    engine = make(work, options, max_grad_norm=0.05)
    other = ranks.make(work / "qwen2", ranks.CASES["fsdp"], max_grad_norm=0.05)
    for seed in range(2):
        metrics, wanted = train(engine, make_batch(seed=seed))[0], train(other, make_batch(seed=seed))[0]
        assert metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5) and metrics["grad_norm"] > 0.05
    close(copied(engine.optimizer_state()), copied(other.optimizer_state()))
    close(copied(engine.named_weights()), copied(other.named_weights()))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_limit_scales_nothing(work, expected, stage: int) -> None:
    engine = make(work, zero(stage), max_grad_norm=float("inf"))
    train(engine, make_batch())
    close(copied(engine.named_weights()), expected.weights[0])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_learning_rate_is_the_callers(work, stage: int) -> None:
    engine = make(work, zero(stage))
    before = copied(engine.named_weights())
    train(engine, make_batch(), rate=0.0)
    assert same(before, copied(engine.named_weights()))


@pytest.mark.parametrize("options", [zero(1, **OFFLOADED), zero(3, **OFFLOADED)], ids=str)
def test_a_skipped_step_leaves_no_gradient_in_main_memory(work, options: dict) -> None:
    engine, other = make(work, options), make(work, options)
    spoiled = make_batch()
    spoiled.tokens["advantages"][20:] = np.nan
    assert train(engine, spoiled)[0]["skipped_updates"] == 1
    for each in (engine, other):
        assert train(each, make_batch(seed=1))[0]["skipped_updates"] == 0
    assert same(copied(engine.named_weights()), copied(other.named_weights()))
    assert same(copied(engine.optimizer_state()), copied(other.optimizer_state()))


@pytest.mark.parametrize("options", [zero(1), zero(3)], ids=str)
def test_buckets_hold_about_what_they_may(work, options: dict) -> None:
    engine = make(work, options)
    whole = copied(engine.named_weights())
    buckets = [copied(bucket) for bucket in engine.weight_buckets(8192)]
    assert len(buckets) > 3
    assert same({name: tensor for bucket in buckets for name, tensor in bucket.items()}, whole)
    assert all(len(bucket) == 1 or sum(t.nbytes for t in bucket.values()) <= 8192 for bucket in buckets)


@pytest.mark.parametrize("stage", range(4))
def test_half_precision_is_for_the_forward_pass_alone(work, expected, tmp_path: Path, stage: int) -> None:
    """Masters, moments and what is saved are float32, and a restored engine goes on bit for bit."""
    engine, other = (make(work, zero(stage), dtype="bfloat16") for _ in range(2))
    metrics, _ = train(engine, make_batch())
    assert metrics["loss"] == pytest.approx(expected.losses[0], rel=2e-2) and metrics["loss"] != expected.losses[0]
    state = copied(engine.optimizer_state())
    assert {tensor.dtype for tensor in [*state.values(), *engine.named_weights().values()]} == {torch.float32}
    # bfloat16 has 8 bits; these weights are not all of so few.
    assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in engine.named_weights().values())
    for name, gradient in ranks.gradients(state).items():
        wanted = expected.gradients[name]
        assert float((gradient - wanted).norm()) < 0.05 * float(wanted.norm()) + 1e-3, name
    engine.save(tmp_path)
    other.load(tmp_path)
    results = [train(each, make_batch(seed=1)) for each in (engine, other)]
    assert results[0][0] == results[1][0]
    assert same(copied(engine.named_weights()), copied(other.named_weights()))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_model_in_half_precision_keeps_its_angles(work, expected, stage: int) -> None:
    engine = make(work, zero(stage), dtype="bfloat16", frozen=True)
    assert {parameter.dtype for parameter in engine.hub_model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in engine.hub_model.buffers()} == {torch.float32}
    assert np.abs(logprobs(engine, make_batch()) - expected.logprobs[0]).max() < 0.1


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_without_a_moment_is_refused(work, tmp_path: Path, stage: int) -> None:
    from safetensors.torch import load_file, save_file

    engine = make(work, zero(stage))
    train(engine, make_batch())
    engine.save(tmp_path)
    state = load_file(tmp_path / "optimizer.safetensors")
    lost = "model.layers.1.self_attn.q_proj.bias.exp_avg_sq"
    save_file({name: tensor for name, tensor in state.items() if name != lost}, tmp_path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=lost):
        engine.load(tmp_path)


def test_its_configuration_reaches_deepspeed(work) -> None:
    options = {**zero(2, reduce_bucket_size=4321), "communication_data_type": "fp32", "prescale_gradients": False}
    config = make(work, options, max_grad_norm=0.25).model._config
    assert config.zero_config.stage == 2 and config.zero_config.reduce_bucket_size == 4321
    assert config.communication_data_type is torch.float32
    assert config.gradient_clipping == 0.25 and config.gradient_accumulation_steps == 1


def test_options_are_checked(work) -> None:
    with pytest.raises(EngineError, match="did you mean `zero_optimization`"):
        make(work, {"zero_optimisation": {}})


def test_nothing_is_compiled(work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("DeepSpeed compiles")

    monkeypatch.setattr(OpBuilder, "jit_load", refuse)
    train(make(work, zero(2, **OFFLOADED)), make_batch())
    import deepspeed.comm.comm as comm

    assert comm.cdb.shm_comm_op is None


@pytest.mark.parametrize("name", list(ranks.VARIANTS))
def test_two_ranks_are_the_reference_whatever_zero_does(two_ranks, work, expected, name: str) -> None:
    def kept(what: str) -> dict[str, torch.Tensor]:
        return torch.load(work / f"{name}.{what}.0.pt")

    if name.endswith("half"):
        wanted = expected.gradients
        for key, gradient in ranks.gradients(kept("state")).items():
            assert float((gradient - wanted[key]).norm()) < 0.05 * float(wanted[key].norm()) + 1e-3, key
    else:
        close(ranks.gradients(kept("state")), expected.gradients)
        close(kept("second"), expected.weights[1], 1e-5)
    assert same(kept("spoiled"), kept("second"))
    assert {tensor.dtype for tensor in kept("second").values()} == {torch.float32}
    engine = ranks.make(work / "qwen2", ranks.VARIANTS[name], dtype=ranks.DTYPES.get(name, "auto"))
    engine.load(work / f"{name}.two_ranks")
    assert same(copied(engine.named_weights()), kept("second"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", range(4))
def test_a_gpu_is_left_and_taken_back(work, stage: int) -> None:
    model = ranks.load_policy(ranks.ModelConfig(str(work / "qwen2")), torch.device("cuda", 0), 0, training=True)
    engine = deepspeed.DeepSpeedEngine(model, ranks.PolicyConfig("deepspeed"), **zero(stage))
    train(engine, make_batch())
    before, held = logprobs(engine, make_batch()), torch.cuda.memory_allocated()
    engine.offload()
    assert torch.cuda.memory_allocated() < held
    engine.onload()
    assert np.array_equal(logprobs(engine, make_batch()), before)


def test_the_bucket_of_gradients_is_no_larger_than_the_model_unless_the_recipe_says_so() -> None:
    made = deepspeed._settings(ranks.PolicyConfig(), {}, 3, False, parameters=1000)
    assert made["zero_optimization"] == {"reduce_bucket_size": 1000, "stage": 3}
    large = deepspeed._settings(ranks.PolicyConfig(), {}, 3, False, parameters=10**12)
    assert large["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    asked = {"zero_optimization": {"reduce_bucket_size": 7, "overlap_comm": True}}
    given = deepspeed._settings(ranks.PolicyConfig(), asked, 2, False, parameters=1000)["zero_optimization"]
    assert given == {"reduce_bucket_size": 7, "overlap_comm": True, "stage": 2}
