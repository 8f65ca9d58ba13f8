"""Megatron's engine against `transformers` and against the engine `fsdp`, on one rank and on two.

One rank runs in this process; what needs two is one run of two processes (`megatron_ranks.py`).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

pytest.importorskip("megatron.core")

from rollcli.algorithms.ppo import Ppo
from rollcli.config.schema import LoraConfig, ModelConfig
from rollcli.engines import naming
from rollcli.engines.fsdp import FsdpEngine
from rollcli.engines.models import load_critic, load_policy
from rollcli.engines.objectives import LogProbs, Values
from rollcli.errors import CheckpointError, EngineError

pytestmark = pytest.mark.usefixtures("one_rank")


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


shared, ranks = _load("fsdp_ranks"), _load("megatron_ranks")
KINDS, make, make_batch, probe = ranks.KINDS, ranks.make, shared.make_batch, ranks.probe
SPREAD_KINDS = [(kind, spread) for kind in KINDS for spread in ranks.spreads_of(kind)]


class WatchedFsdp(FsdpEngine):
    """Keeps the gradient of the last update."""

    def clip(self) -> float:
        gradients = {name: self._whole(weight.grad).clone() for name, weight in self.model.named_parameters()}
        self.gradients = self.naming.to_hub(gradients)
        return super().clip()


def make_fsdp(folder: Path, critic: bool = False, **options) -> WatchedFsdp:
    model, device = ModelConfig(str(folder)), torch.device("cpu")
    loaded = load_critic(model, str(folder), device, 0) if critic else load_policy(model, device, 0, training=True)
    return WatchedFsdp(loaded, ranks.recipe(**options))


def grpo_update(engine: FsdpEngine) -> dict[str, float]:
    return ranks.Watched.train(engine, make_batch())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    ranks.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def updates(work: Path) -> dict[str, tuple]:
    """Metrics, gradients, weights and optimizer state of fsdp's first update; its checkpoints in `work`."""
    result = {}
    for kind in KINDS:
        engine = make_fsdp(work / kind)
        metrics = grpo_update(engine)
        engine.save(work / f"{kind}.fsdp")
        result[kind] = metrics, engine.gradients, clones(engine.named_weights()), clones(engine.optimizer_state())
    return result


@pytest.fixture(scope="module")
def two_ranks(work: Path, updates) -> list[dict]:
    """What two ranks found; they load what `updates` saved."""
    return ranks.run_two(work)


@pytest.fixture(scope="module")
def expected(work: Path) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Outputs at the probe's places and gradients, of `transformers`, one sequence at a time."""
    ids, _ = ranks.probe_rows()
    rows, columns = ranks.PLACES
    result = {}
    for kind in KINDS:
        model = hub_model(work / kind)
        packed = torch.cat([model(ids[1:, :6]).logits, model(ids[1:, 6:]).logits], 1)
        outputs = torch.cat([model(ids[:1]).logits, packed])[rows, columns]
        (outputs * ranks.directions()).sum().backward()
        gradients = naming.to_hub(model, {name: weight.grad for name, weight in model.named_parameters()})
        norm = torch.tensor(sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5)
        result[kind] = outputs.detach(), gradients | {"norm": norm}
    return result


def hub_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def clones(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def kept(work: Path, name: str, rank: int = 0):
    return torch.load(work / f"{name}.{rank}.pt")


def close(first: dict, second: dict, tolerance: float = 1e-5) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def close_updates(found: tuple, wanted: tuple) -> None:
    """Compares gradients, weights and optimizer state of a first update.

    Adam's first step is the gradient's sign, so weights are compared where the gradient is not rounding.
    """
    gradients, weights, state = found
    close(gradients, wanted[0])
    close(state, wanted[2])
    for name, weight in weights.items():
        sure = wanted[0][name].abs() > 1e-4
        torch.testing.assert_close(weight[sure], wanted[1][name][sure], rtol=0, atol=1e-4)


# --- logits and gradients are those of transformers


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_transformers(work, expected, kind: str) -> None:
    outputs, gradients = probe(make(work / kind))
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, expected[kind][0], rtol=0, atol=1e-5)
    close(gradients, expected[kind][1])


@pytest.mark.parametrize(("kind", "spread"), [*SPREAD_KINDS, ("llama", "sequence"), ("qwen3", "sequence")])
def test_two_ranks_have_the_logits_and_gradients_of_transformers(work, expected, two_ranks, kind, spread) -> None:
    for rank in range(2):
        outputs, gradients = kept(work, f"{kind}.{spread}.probe", rank)
        torch.testing.assert_close(outputs, expected[kind][0], rtol=0, atol=1e-5)
        if rank == 0:
            close(gradients, expected[kind][1])
        else:
            assert set(gradients) == {"norm"}
            torch.testing.assert_close(gradients["norm"], expected[kind][1]["norm"], rtol=1e-5, atol=0)


def test_recomputed_activations_change_nothing(work, expected) -> None:
    outputs, gradients = probe(make(work / "qwen3", recompute_activations=True))
    torch.testing.assert_close(outputs, expected["qwen3"][0], rtol=0, atol=1e-5)
    close(gradients, expected["qwen3"][1])


def test_no_place_has_no_output_and_a_gradient_of_zero(work) -> None:
    engine, nothing = make(work / "llama"), np.zeros(0, np.int64)
    outputs = engine.predict(*ranks.probe_rows(), nothing, nothing)
    assert outputs.shape == (0, 61)
    engine.backward(outputs.sum() * 0.0, last=True)
    assert engine.clip() == 0


def test_half_precision_is_for_the_forward_pass_alone(work, expected) -> None:
    engine = make(work / "llama", dtype="bfloat16")
    outputs, _ = probe(engine)
    assert 1e-4 < float((outputs - expected["llama"][0]).abs().max()) < 0.5
    assert {weight.dtype for weight in engine.parameters.values()} == {torch.bfloat16}
    assert engine.train(make_batch())["skipped_updates"] == 0
    assert {tensor.dtype for tensor in engine.optimizer_state().values()} == {torch.float32}
    assert {gradient.dtype for gradient in engine.gradients.values()} == {torch.float32}
    for name, weight in engine.parameters.items():
        assert torch.equal(weight, engine.masters[name].bfloat16())


# --- an update is that of fsdp


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_update_equals_fsdps(work, updates, kind: str) -> None:
    engine = make(work / kind)
    metrics = engine.train(make_batch())
    assert metrics == pytest.approx(updates[kind][0], rel=1e-4)
    close_updates((engine.gradients, engine.named_weights(), engine.optimizer_state()), updates[kind][1:])


@pytest.mark.parametrize(("kind", "spread"), SPREAD_KINDS)
def test_the_first_update_on_two_ranks_equals_fsdps(work, updates, two_ranks, kind: str, spread: str) -> None:
    for rank in range(2):
        assert two_ranks[rank][f"{kind}/{spread}"] == pytest.approx(updates[kind][0], rel=1e-4)
    close_updates(kept(work, f"{kind}.{spread}.update"), updates[kind][1:])
    assert kept(work, f"{kind}.{spread}.update", 1) == (None, None, None)


def test_ranks_of_a_copy_are_the_same_for_megatron_and_for_us(two_ranks) -> None:
    for groups in ("groups", "data groups"):
        assert two_ranks[0][groups] == two_ranks[1][groups] == [[0, 1], [0, 1]]


def test_moments_are_shared_among_the_copies(two_ranks) -> None:
    (first, whole), (second, _) = (facts["owned"] for facts in two_ranks)
    assert first + second == whole and 0.4 < first / whole < 0.6


def test_clipping_and_the_learning_rate_are_fsdps(work) -> None:
    engine, other = make(work / "llama", max_grad_norm=0.01), make_fsdp(work / "llama", max_grad_norm=0.01)
    objective = LogProbs(1.0, ranks.Grpo())
    for rate in (0.0, 1e-3):
        assert engine.update(make_batch(), objective, rate)[0] == pytest.approx(
            other.update(make_batch(), objective, rate)[0], rel=1e-4
        )
    weights, wanted = engine.named_weights(), other.named_weights()
    moved = max(float((weight - wanted[name]).abs().max()) for name, weight in weights.items())
    assert moved < 1e-3
    close(engine.optimizer_state(), other.optimizer_state(), tolerance=1e-6)


def test_experts_may_be_on_ranks_with_other_rows(work, updates, two_ranks) -> None:
    close(kept(work, "uneven"), updates["mixtral"][1])


def test_a_minibatch_without_a_trained_token_leaves_the_weights(work) -> None:
    engine, batch = make(work / "qwen3_moe"), make_batch()
    before = engine.named_weights()
    batch.tokens["loss_mask"][:] = False
    assert engine.train(shared.weighed(batch, ranks.Grpo()))["skipped_updates"] == 1
    assert shared.same(before, engine.named_weights()) and engine.optimizer_state() == {}


# --- checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_loads_elsewhere_with_equal_logits(work, tmp_path: Path, kind: str) -> None:
    engine = make(work / kind)
    engine.train(make_batch())
    engine.save(tmp_path)
    ids, _ = ranks.probe_rows()
    with torch.no_grad():
        wanted = hub_model(tmp_path / "model")(ids[:1]).logits[0]
        outputs = engine.predict(ids[:1], torch.arange(15)[None], np.zeros(15, np.int64), np.arange(15))
    torch.testing.assert_close(outputs, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "spread"), SPREAD_KINDS)
def test_what_two_ranks_saved_goes_on_in_fsdp_and_on_one(work, two_ranks, kind: str, spread: str) -> None:
    _, weights, state = kept(work, f"{kind}.{spread}.update")
    for engine in (make_fsdp(work / kind), make(work / kind)):
        grpo_update(engine)  # a state that must give way
        engine.load(work / f"{kind}.{spread}.saved")
        assert shared.same(engine.named_weights(), weights) and shared.same(engine.optimizer_state(), state)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_what_fsdp_saved_goes_on_here(work, updates, two_ranks, kind: str) -> None:
    engine, other = make(work / kind), make_fsdp(work / kind)
    for each in (engine, other):
        each.load(work / f"{kind}.fsdp")
    assert shared.same(engine.named_weights(), updates[kind][2])
    assert shared.same(engine.optimizer_state(), updates[kind][3])
    loaded = kept(work, f"{kind}.loaded")
    assert shared.same(loaded[0], updates[kind][2]) and shared.same(loaded[1], updates[kind][3])
    assert engine.train(make_batch(seed=3)) == pytest.approx(
        other.update(make_batch(seed=3), LogProbs(shared.TEMPERATURE, ranks.Grpo()), 1e-2)[0], rel=1e-3
    )


def test_a_restored_engine_goes_on_bit_for_bit(work, tmp_path: Path) -> None:
    engine, other = make(work / "qwen2"), make(work / "qwen2")
    engine.train(make_batch())
    engine.save(tmp_path)
    other.train(make_batch(seed=1))
    other.load(tmp_path)
    metrics = [each.train(make_batch(seed=2)) for each in (engine, other)]
    assert metrics[0] == metrics[1] and shared.same(engine.named_weights(), other.named_weights())


def test_a_checkpoint_before_the_first_step_restores(work, tmp_path: Path) -> None:
    engine, other = make(work / "llama"), make(work / "llama")
    engine.save(tmp_path)
    other.train(make_batch())
    other.load(tmp_path)
    assert other.optimizer_state() == {} and shared.same(engine.named_weights(), other.named_weights())


def test_a_frozen_engine_saves_and_loads(work, tmp_path: Path) -> None:
    engine = make(work / "llama", frozen=True)
    engine.save(tmp_path)
    assert not (tmp_path / "optimizer.safetensors").exists()
    engine.load(tmp_path)
    assert engine.forward(make_batch(), LogProbs(1.0)).any()


@pytest.mark.parametrize(("change", "match"), [("lost", "has no tensor"), ("cut", "is of shape")])
def test_a_checkpoint_that_does_not_fit_is_refused(work, tmp_path: Path, change: str, match: str) -> None:
    engine = make(work / "llama")
    engine.save(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.k_proj.weight"
    tensors = {key: tensor for key, tensor in tensors.items() if key != name or change != "lost"}
    if change == "cut":
        tensors[name] = tensors[name][:8].clone()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=match) as raised:
        engine.load(tmp_path)
    assert name in str(raised.value)


# --- critics


def test_a_critic_equals_fsdps(work, two_ranks) -> None:
    batch = shared.valued(make_batch())
    other = make_fsdp(work / "critic", critic=True)
    metrics, column = other.update(batch, Values(Ppo()), 1e-2)
    engine = make(work / "critic", critic=True)
    alone = engine.update(batch, Values(Ppo()), 1e-2), engine.gradients, engine.named_weights()
    for (found, values), gradients, weights in (alone, kept(work, "critic")):
        assert found == pytest.approx(metrics, rel=1e-4)
        assert np.abs(np.asarray(values) - column).max() < 1e-5 < np.abs(column).max()
        close(gradients, other.gradients)
        assert weights.keys() == other.named_weights().keys()


# --- what is refused


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parallel": {"tensor": 4}}, r"4, which does not divide 2 key and value heads \(2 = 0 × 4 \+ 2\)"),
        ({"parallel": {"expert": 2}}, "has no experts"),
        ({"parallel": {"pipeline": 2}}, r"parallel\.pipeline` is 2: the engine `megatron` does not do that"),
        ({"parallel": {"context": 2}}, r"parallel\.context` is 2: the engine `megatron` does not do that"),
        ({"lora": LoraConfig(rank=8)}, "trains all weights"),
        ({"args": {"sequence_paralel": True}}, "did you mean `sequence_parallel`"),
        ({"args": {"num_layers": 3}}, r"engine_args\.num_layers`: the engine `megatron` decides this"),
        ({"args": {"sequence_parallel": "yes"}}, "cannot be 'yes'"),
        ({"args": {"recompute_granularity": "most"}}, "Megatron refuses"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_made(work, options, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        make(work / "llama", **options)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("GPT2", {"n_embd": 8, "n_head": 2, "n_layer": 1}, "does not know the architecture `gpt2`"),
        ("Llama", {"attention_bias": True}, "have biases"),
        ("Llama", {"hidden_act": "gelu"}, "activation is `gelu`"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "sliding_attention"),
        ("Qwen3Moe", {"mlp_only_layers": [0], "num_experts": 4}, "some of its layers are dense"),
    ],
)
def test_an_architecture_that_is_not_known_is_refused(work, name: str, options: dict, match: str) -> None:
    sizes = {} if name == "GPT2" else ranks.SIZES
    model = getattr(transformers, f"{name}Config")(**sizes, **options)
    with pytest.raises(EngineError, match=match) as raised:
        ranks.Watched(transformers.AutoModelForCausalLM.from_config(model), ranks.recipe())
    assert "llama, mistral, mixtral, qwen2, qwen3, qwen3_moe" in raised.value.hint


def test_a_moved_engine_goes_on(work) -> None:
    engine = make(work / "llama", dtype="bfloat16")
    engine.train(make_batch())
    before = engine.named_weights()
    engine.move(torch.device("cpu"))
    assert shared.same(before, engine.named_weights())
    assert engine.train(make_batch())["skipped_updates"] == 0
