"""The training engine against a slow reference, and everything that must not change a number.

One rank runs in this process; what needs two ranks is one run of two processes (`fsdp_ranks.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollcli.algorithms.base import Algorithm, TrainedTokens
from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.ppo import Ppo
from rollcli.algorithms.sft import Sft
from rollcli.config.schema import ModelConfig, ParallelConfig
from rollcli.data.batch import Batch
from rollcli.engines import fsdp
from rollcli.engines.models import load_critic, load_policy
from rollcli.engines.objectives import LogProbs, Values
from rollcli.errors import CheckpointError, EngineError

pytestmark = pytest.mark.usefixtures("one_rank")
SCRIPT = Path(__file__).with_name("fsdp_ranks.py")
spec = importlib.util.spec_from_file_location("fsdp_ranks", SCRIPT)
ranks = importlib.util.module_from_spec(spec)
sys.modules["fsdp_ranks"] = ranks
spec.loader.exec_module(ranks)
TEMPERATURE = ranks.TEMPERATURE
make_batch, make_engine, same = ranks.make_batch, ranks.make_engine, ranks.same
weighed, valued = ranks.weighed, ranks.valued


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    ranks.write_model(folder / "llama", attention_dropout=0.5)
    ranks.write_model(folder / "qwen2", "qwen2")
    ranks.write_critic(folder / "critic", folder / "llama")
    return folder


@pytest.fixture(scope="module")
def two_ranks(work: Path) -> list[dict]:
    """What two ranks found; a hang is a failure."""
    engine = make_engine(work / "llama")
    engine.train(make_batch(), Grpo())
    engine.save(work / "one_rank")
    return ranks.run_two(work, "fsdp")


def kept(work: Path, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(work / f"{name}.{rank}.pt")


def hub_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights_of(engine: fsdp.FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights().items()}


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def expected(work: Path) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradient of the slow reference."""
    result = {}
    for kind in ("llama", "qwen2"):
        model = hub_model(work / kind)
        loss = ranks.reference_grpo(model, make_batch())
        loss.backward()
        result[kind] = float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}
    return result


# --- loss and gradient


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 100_000},
        {"micro_batch_tokens": 100_000, "packing": False},
        {"micro_batch_tokens": 64},
        {"micro_batch_tokens": 24, "packing": False},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 64, "recompute_activations": True},
    ],
    ids=str,
)
def test_loss_and_gradient_equal_the_reference_however_the_batch_is_split(work, expected, kind, options) -> None:
    engine = make_engine(work / kind, **options)
    metrics = engine.train(make_batch(), Grpo())
    loss, gradients = expected[kind]
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    close(engine.gradients, gradients)
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_order_of_the_samples_does_not_matter(work, expected, seed: int) -> None:
    engine = make_engine(work / "llama")
    order = np.random.default_rng(seed).permutation(10)
    metrics = engine.train(make_batch().select(order), Grpo())
    assert metrics["loss"] == pytest.approx(expected["llama"][0], abs=1e-5)
    close(engine.gradients, expected["llama"][1])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_two_ranks_have_the_same_loss_and_gradient(work, expected, two_ranks, kind: str) -> None:
    loss, gradients = expected[kind]
    for rank in range(2):
        assert two_ranks[rank][f"{kind}/metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        close(kept(work, f"{kind}.gradients", rank), gradients)
    assert two_ranks[0][f"{kind}/metrics"] == two_ranks[1][f"{kind}/metrics"]


def test_metrics_are_the_same_on_one_rank_and_on_two(work, two_ranks) -> None:
    batch = make_batch()
    metrics = make_engine(work / "llama").train(batch, Grpo())
    assert two_ranks[0]["llama/metrics"] == pytest.approx(metrics, rel=1e-4)
    assert metrics["tokens"] == batch.tokens["loss_mask"].sum()
    assert 0 < metrics["clip_share"] < 1 and 0 < metrics["entropy"] < np.log(61) and metrics["kl_old"] > 0


def test_ranks_with_unequal_work_end(two_ranks, work) -> None:
    model = hub_model(work / "llama")
    batch = make_batch((40, 4, 4, 4, 4))
    with torch.no_grad():
        slow = [row.numpy() for row in ranks.reference_logprobs(model, batch)]
    for rank, rows in enumerate([[0], [1, 2, 3, 4]]):
        mask = np.concatenate([batch.tokens["loss_mask"][batch.offsets[r] : batch.offsets[r + 1]] for r in rows])
        wanted = np.concatenate([np.append(0, slow[row]) for row in rows]) * mask
        assert two_ranks[rank]["uneven/logprobs"] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert two_ranks[0]["uneven/metrics"]["tokens"] == batch.tokens["loss_mask"].sum()


def test_a_rank_without_samples_takes_part(two_ranks, work, expected) -> None:
    assert two_ranks[1]["empty/metrics"]["loss"] == pytest.approx(expected["llama"][0], abs=1e-5)
    close(kept(work, "empty.gradients", 1), expected["llama"][1])
    assert two_ranks[0]["masked/metrics"] == two_ranks[1]["masked/metrics"]
    assert two_ranks[0]["masked/metrics"]["grad_norm"] > 0


def test_ten_samples_over_budgets_of_four_are_all_trained(work) -> None:
    engine = make_engine(work / "llama", micro_batch_tokens=20, packing=False)
    batch = make_batch((5,) * 10)
    assert engine.train(batch, Sft(), 1.0)["tokens"] == batch.tokens["loss_mask"].sum()
    model = hub_model(work / "llama")
    rows = ranks.reference_logprobs(model, batch, 1.0)
    mask = torch.tensor(batch.tokens["loss_mask"].reshape(10, 5)[:, 1:])
    weights = torch.tensor(batch.tokens["loss_weights"].reshape(10, 5)[:, 1:])
    (-(torch.stack(rows) * weights)[mask].sum()).backward()
    close(engine.gradients, {name: p.grad for name, p in model.named_parameters()})


# --- log-probabilities


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logprobs_padded_packed_and_in_one_row(work, kind: str) -> None:
    batch = make_batch()
    model = hub_model(work / kind)
    with torch.no_grad():
        rows = [torch.cat([torch.zeros(1), row]) for row in ranks.reference_logprobs(model, batch)]
    wanted = torch.cat(rows).numpy() * batch.tokens["loss_mask"]
    layouts = [
        make_engine(work / kind, frozen=True, packing=packing, micro_batch_tokens=tokens)
        for packing, tokens in [(False, 90), (True, 90), (True, 10_000)]
    ]
    row = make_engine(work / kind, frozen=True, micro_batch_tokens=10_000)
    row.one_row = True  # as flash attention has it
    for engine in [*layouts, row]:
        got = engine.logprobs(batch)
        assert got.dtype == np.float32 and np.abs(got - wanted).max() < 1e-5
        assert not got[~batch.tokens["loss_mask"]].any()


@pytest.mark.parametrize("one_row", [False, True])
def test_a_packed_neighbour_cannot_be_seen(work, one_row: bool) -> None:
    engine = make_engine(work / "llama", frozen=True, micro_batch_tokens=10_000)
    engine.one_row = one_row
    batch, changed = make_batch(), make_batch()
    other = changed.rows != 0
    changed.tokens["ids"][other] = (changed.tokens["ids"][other] + 17) % 50 + 3
    before, after = (engine.logprobs(each) for each in (batch, changed))
    assert np.abs(before[~other] - after[~other]).max() < 1e-6
    assert np.abs(before[other] - after[other]).max() > 0.1


def test_junk_after_the_end_changes_nothing(work) -> None:
    engine = make_engine(work / "llama", frozen=True)
    ids = [5, 6, 1, 7, 1, 0]
    mask = np.array([0, 1, 1, 0, 0, 0], bool)
    first = Batch(np.array([0, 6]), {"ids": np.array(ids, np.int32), "loss_mask": mask})
    second = Batch(np.array([0, 6]), {"ids": np.array([5, 6, 1, 9, 9, 9], np.int32), "loss_mask": mask})
    assert np.array_equal(engine.logprobs(first, 1.0), engine.logprobs(second, 1.0))


@pytest.mark.parametrize(("temperature", "value"), [(1, -0.4076), (0.5, -0.1429), (2, -0.6803)])
def test_temperature_divides_the_logits(work, temperature: float, value: float) -> None:
    engine = make_engine(work / "llama", frozen=True)

    class Fixed(torch.nn.Module):
        def reshard(self) -> None:
            """What FSDP gives every module."""

        def forward(self, input_ids, logits_to_keep, **_: object):
            logits = torch.tensor([2.0, 1.0, 0.0]).expand(1, len(logits_to_keep), 3)
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)

    engine.model = Fixed()
    batch = Batch(np.array([0, 2]), {"ids": np.zeros(2, np.int32), "loss_mask": np.array([False, True])})
    assert engine.logprobs(batch, temperature).tolist() == pytest.approx([0, value], abs=1e-4)


def test_dropout_is_off(work, tmp_path: Path) -> None:
    """A model saved with dropout, and one started from random weights whose architecture has dropout by default."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}  # fmt: skip
    llama = json.loads((work / "llama" / "config.json").read_text())
    assert llama["attention_dropout"] == 0.5
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "attention_dropout")
    llama = {name: llama[name] for name in names}
    saved = ModelConfig(str(work / "llama"))
    for config in (saved, ModelConfig("absent", initialize=gpt2), ModelConfig("absent", initialize=llama)):
        model = load_policy(config, torch.device("cpu"), 0, training=True)
        engine = ranks.Watched(model, make_engine(work / "llama", frozen=True).config)
        assert np.array_equal(engine.logprobs(make_batch(), 1.0), engine.logprobs(make_batch(), 1.0))
        assert np.abs(engine.logprobs(make_batch(), 1.0)).max() > 0


def test_a_sequence_never_trains_its_first_token(work) -> None:
    engine = make_engine(work / "llama", frozen=True)
    batch = Batch(np.array([0, 2]), {"ids": np.ones(2, np.int32), "loss_mask": np.array([True, True])})
    with pytest.raises(AssertionError, match="first token"):
        engine.logprobs(batch, 1.0)


# --- what must change nothing


class Recording(Grpo):
    """Keeps the ratios it saw."""

    def loss(self, tokens: TrainedTokens):
        self.ratios = (tokens.logprobs - tokens.old_logprobs).exp().detach()
        return super().loss(tokens)


def on_policy() -> Batch:
    batch = make_batch()
    del batch.tokens["old_logprobs"], batch.tokens["reference_logprobs"]
    return batch


def test_first_update_has_ratio_exactly_one(work) -> None:
    algorithm = Recording(kl=KlPenalty())
    metrics = make_engine(work / "llama", micro_batch_tokens=100_000).train(on_policy(), algorithm)
    assert algorithm.ratios.unique().tolist() == [1.0]
    assert metrics["kl_old"] == 0 and metrics["clip_share"] == 0


def test_masked_tokens_may_hold_anything(work) -> None:
    engines = [make_engine(work / "llama"), make_engine(work / "llama")]
    plain, spoiled = make_batch(), make_batch()
    off = ~spoiled.tokens["loss_mask"]
    for name in ("advantages", "old_logprobs", "reference_logprobs", "rollout_logprobs", "loss_weights"):
        spoiled.tokens[name][off] = np.nan
    metrics = [e.train(batch, Grpo()) for e, batch in zip(engines, (plain, spoiled), strict=True)]
    assert metrics[0] == metrics[1]
    assert same(weights_of(engines[0]), weights_of(engines[1]))


def test_a_minibatch_without_a_trained_token_leaves_everything(work) -> None:
    engine = make_engine(work / "llama", weight_decay=0.1)
    engine.train(make_batch(), Grpo())
    weights, moments = weights_of(engine), {n: t.clone() for n, t in engine.optimizer_state().items()}
    batch = make_batch()
    batch.tokens["loss_mask"][:] = False
    metrics = engine.train(weighed(batch, Grpo()), Grpo())
    assert metrics["skipped_updates"] == 1 and metrics["loss"] == 0 and metrics["tokens"] == 0
    nothing = engine.train(batch.select(np.array([], int)), Grpo())
    assert nothing["skipped_updates"] == 1
    assert same(weights, weights_of(engine)) and same(moments, engine.optimizer_state())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_skipped(work, value: float) -> None:
    engine, untouched = make_engine(work / "llama"), make_engine(work / "llama")
    batch = make_batch()
    batch.tokens["advantages"][np.flatnonzero(batch.tokens["loss_mask"])[3]] = value
    weights = weights_of(engine)
    metrics = engine.train(batch, Grpo())
    assert metrics["skipped_updates"] == 1 and same(weights, weights_of(engine))
    assert engine.train(make_batch(), Grpo())["skipped_updates"] == 0
    untouched.train(make_batch(), Grpo())
    assert same(weights_of(engine), weights_of(untouched))


def test_a_gradient_not_finite_on_one_rank_is_skipped_on_all(two_ranks) -> None:
    for facts in two_ranks:
        assert facts["infinite/metrics"]["skipped_updates"] == 1 and facts["infinite/unchanged"]


def test_equal_rewards_leave_the_weights(work) -> None:
    engine = make_engine(work / "llama")
    batch = on_policy()
    batch.samples["reward"][:] = 0.1
    weights = weights_of(engine)
    algorithm = Grpo(kl=KlPenalty())
    metrics = engine.train(weighed(batch, algorithm), algorithm)
    assert metrics["grad_norm"] == 0 and metrics["loss"] == 0 and same(weights, weights_of(engine))


def test_a_step_is_adamws_and_spares_vectors_from_decay(work, expected) -> None:
    engine = make_engine(work / "llama", weight_decay=0.1, max_grad_norm=0.01)
    before = weights_of(engine)
    metrics = engine.train(make_batch(), Grpo())
    assert metrics["learning_rate"] == 1e-2 and metrics["grad_norm"] > 0.01
    for name, weight in weights_of(engine).items():
        gradient = expected["llama"][1][name] * 0.01 / (metrics["grad_norm"] + 1e-6)
        decayed = before[name] * (1 - 1e-2 * (0.1 if weight.ndim > 1 else 0))
        wanted = decayed - 1e-2 * gradient / (gradient.abs() + 1e-8)
        # The first step's size is the sign of the gradient, so elements whose gradient is rounding are left out.
        sure = expected["llama"][1][name].abs() > 1e-4
        torch.testing.assert_close(weight[sure], wanted[sure], rtol=1e-4, atol=2e-5)


def test_the_learning_rate_is_the_callers(work) -> None:
    engine = make_engine(work / "llama", learning_rate=0.5)
    before = weights_of(engine)
    metrics, _ = engine.update(make_batch(), LogProbs(1.0, Grpo()), 0.0)
    assert metrics["learning_rate"] == 0 and metrics["grad_norm"] > 0 and same(before, weights_of(engine))
    metrics, _ = engine.update(make_batch(), LogProbs(1.0, Grpo()), 1e-3)
    assert metrics["learning_rate"] == 1e-3
    moved = max(float((weight - before[name]).abs().max()) for name, weight in weights_of(engine).items())
    assert 1e-4 < moved < 2e-3  # Adam moves a weight by about the rate


@pytest.mark.parametrize("packing", [False, True])
def test_an_update_returns_the_log_probabilities_before_it(work, packing: bool) -> None:
    engine, batch = make_engine(work / "llama", packing=packing), make_batch()
    before = engine.logprobs(batch)
    _, column = engine.update(batch, LogProbs(TEMPERATURE, Grpo()), 1e-2)
    assert column.dtype == np.float32 and np.abs(column - before).max() < 1e-6
    assert not column[~batch.tokens["loss_mask"]].any() and np.abs(engine.logprobs(batch) - before).max() > 1e-3


def test_an_algorithm_may_report_what_it_likes(work) -> None:
    class Odd(Algorithm):
        def loss(self, tokens: TrainedTokens):
            return -tokens.logprobs, {"one": torch.ones_like(tokens.logprobs), "lowest_max": tokens.logprobs.detach()}

    engine = make_engine(work / "llama", micro_batch_tokens=30)
    batch = on_policy()
    top = float(engine.logprobs(batch, 1.0)[batch.tokens["loss_mask"]].max())
    metrics = engine.train(batch, Odd(), 1.0)
    assert metrics["one"] == pytest.approx(1) and metrics["lowest_max"] == pytest.approx(top, abs=1e-5)


# --- checkpoints


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_restored_engine_goes_on_bit_for_bit(work, tmp_path: Path, kind: str) -> None:
    engine = make_engine(work / kind)
    for seed in range(2):
        engine.train(make_batch(seed=seed), Grpo())
    engine.save(tmp_path / "saved")
    other = make_engine(work / kind)
    other.train(make_batch(seed=7), Grpo())  # a state that must give way
    other.load(tmp_path / "saved")
    assert same(weights_of(engine), weights_of(other))
    assert same(engine.optimizer_state(), other.optimizer_state())
    metrics = [each.train(make_batch(seed=5), Grpo()) for each in (engine, other)]
    assert metrics[0] == metrics[1] and same(weights_of(engine), weights_of(other))


def test_a_checkpoint_before_the_first_step_restores(work, tmp_path: Path) -> None:
    engine, other = make_engine(work / "llama"), make_engine(work / "llama")
    engine.save(tmp_path)
    other.train(make_batch(), Grpo())
    other.load(tmp_path)
    assert other.optimizer_state() == {} and same(weights_of(engine), weights_of(other))
    for each in (engine, other):
        each.train(make_batch(seed=1), Grpo())
    assert same(weights_of(engine), weights_of(other))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_checkpoint_of_two_ranks_loads_on_one(work, two_ranks, kind: str) -> None:
    engine = make_engine(work / kind)
    engine.load(work / f"{kind}.saved")
    assert same(weights_of(engine), kept(work, f"{kind}.weights"))
    assert same(engine.optimizer_state(), kept(work, f"{kind}.state"))
    assert kept(work, f"{kind}.weights", 1) == {}
    assert {float(value) for name, value in engine.optimizer_state().items() if name.endswith(".step")} == {2}


def test_a_checkpoint_of_one_rank_loads_on_two(work, two_ranks) -> None:
    engine = make_engine(work / "llama")
    engine.load(work / "one_rank")
    assert same(weights_of(engine), kept(work, "loaded.weights"))
    assert same(engine.optimizer_state(), kept(work, "loaded.state"))
    assert kept(work, "loaded.state", 1) == {}


def test_a_disk_that_fails_rank_0_leaves_no_rank_waiting(two_ranks) -> None:
    assert [facts["full_disk"] for facts in two_ranks] == ["NotADirectoryError", "saved"]
    assert [facts["after_full_disk"] for facts in two_ranks] == [make_batch().tokens["loss_mask"].sum()] * 2


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_exported_model_loads_elsewhere_with_equal_logits(work, tmp_path: Path, kind: str) -> None:
    engine = make_engine(work / kind)
    engine.train(make_batch(), Grpo())
    engine.save(tmp_path)
    model = hub_model(tmp_path / "model")
    batch = make_batch()
    with torch.no_grad():
        rows = [torch.cat([torch.zeros(1), row]) for row in ranks.reference_logprobs(model, batch, 1.0)]
        ids = torch.arange(12)[None]
        assert torch.allclose(model(ids).logits, engine.model(ids).logits, atol=1e-6)
    assert np.abs(engine.logprobs(batch, 1.0) - torch.cat(rows).numpy() * batch.tokens["loss_mask"]).max() < 1e-5
    assert same(weights_of(engine), dict(model.named_parameters()))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (kind == "qwen2")


def test_a_frozen_engine_saves_and_loads_and_does_not_train(work, tmp_path: Path) -> None:
    engine = make_engine(work / "llama", frozen=True)
    engine.save(tmp_path)
    assert not (tmp_path / "optimizer.safetensors").exists()
    engine.load(tmp_path)
    with pytest.raises(AssertionError, match="frozen"):
        engine.train(make_batch(), Grpo())


def test_a_real_model(tmp_path: Path) -> None:
    root = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    if not (root / "stories260K").exists():
        pytest.skip(f"no test data `stories260K` in {root}")
    folder = root / "stories260K" / "hf"
    engine, model, batch = make_engine(folder), hub_model(folder), make_batch()
    with torch.no_grad():
        rows = [torch.cat([torch.zeros(1), row]) for row in ranks.reference_logprobs(model, batch)]
    for name in ("old_logprobs", "reference_logprobs"):  # near the policy, whose ratios would be astronomical else
        batch.tokens[name] = torch.cat(rows).numpy() + (batch.tokens[name] + np.float32(4.1)) / 2
    loss = ranks.reference_grpo(model, batch)
    loss.backward()
    assert engine.train(batch, Grpo())["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    close(engine.gradients, {name: p.grad for name, p in model.named_parameters()})
    engine.save(tmp_path)
    assert same(weights_of(engine), dict(hub_model(tmp_path / "model").named_parameters()))


def test_half_precision_is_for_the_forward_pass_alone(work, two_ranks, expected) -> None:
    """Masters, gradients and moments stay float32, and the loss is the full one to bfloat16's precision."""
    for engine in [make_engine(work / "llama", dtype="bfloat16")]:
        metrics = engine.train(make_batch(), Grpo())
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        assert {tensor.dtype for tensor in engine.optimizer_state().values()} == {torch.float32}
        assert {gradient.dtype for gradient in engine.gradients.values()} == {torch.float32}
    full = make_engine(work / "llama").train(make_batch(), Sft(), 1.0)["loss"]
    half = make_engine(work / "llama", dtype="bfloat16").train(make_batch(), Sft(), 1.0)["loss"]
    assert half == pytest.approx(full, rel=2e-2) and half != full
    assert two_ranks[0]["bfloat16/dtypes"] == ["torch.float32"]
    assert two_ranks[0]["bfloat16"]["loss"] == pytest.approx(metrics["loss"], rel=1e-2)


def test_a_checkpoint_after_a_forward_pass_alone_is_whole(work, tmp_path: Path) -> None:
    """A stop between the old policy's forward pass and its update saves what is trained, not what was gathered."""
    engine, batch = make_engine(work / "llama"), make_batch()
    engine.train(batch, Grpo(), 1.0)
    engine.save(tmp_path / "before")
    engine.logprobs(batch, 1.0)
    engine.save(tmp_path / "after")
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()


def test_a_checkpoint_without_a_moment_is_refused(work, tmp_path: Path) -> None:
    engine = make_engine(work / "llama")
    engine.train(make_batch(), Grpo(), 1.0)
    engine.save(tmp_path)
    state = load_file(tmp_path / "optimizer.safetensors")
    lost = next(name for name in state if name.endswith("exp_avg"))
    save_file({name: tensor for name, tensor in state.items() if name != lost}, tmp_path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=lost):
        engine.load(tmp_path)


# --- critics


def critic_of(folder: Path) -> transformers.PreTrainedModel:
    return load_critic(ModelConfig("absent"), str(folder), torch.device("cpu"), 0)


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"micro_batch_tokens": 10_000}], ids=str)
@pytest.mark.parametrize("one_row", [False, True])
def test_a_value_stands_at_the_token_it_precedes(work, options, one_row: bool) -> None:
    engine, batch = make_engine(work / "llama", critic=work / "critic", frozen=True, **options), make_batch()
    engine.one_row = one_row and options.get("packing", True)
    with torch.no_grad():
        rows = [torch.cat([torch.zeros(1), row]) for row in ranks.reference_values(critic_of(work / "critic"), batch)]
    values = engine.forward(batch, Values())
    assert values.dtype == np.float32 and values.shape == batch.tokens["ids"].shape
    assert np.abs(values - torch.cat(rows).numpy() * batch.tokens["loss_mask"]).max() < 1e-5
    assert np.abs(values).max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_untrained_critic_values_everything_at_0_and_learns(work, kind: str) -> None:
    engine, batch = make_engine(work / kind, critic=work / kind), valued(make_batch())
    assert not engine.forward(batch, Values()).any()
    losses = [engine.update(batch, Values(Ppo(value_clip=None)), 1e-2)[0]["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] and engine.forward(batch, Values()).any()


def test_gradient_of_a_critic_equals_the_reference(work) -> None:
    engine, batch = make_engine(work / "llama", critic=work / "critic"), valued(make_batch())
    values = engine.forward(batch, Values())
    metrics, column = engine.update(batch, Values(Ppo()), 1e-2)
    model = critic_of(work / "critic")
    loss = ranks.reference_value_loss(model, batch)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert 0 < metrics["value_clip_share"] < 1
    close(engine.gradients, {name: p.grad for name, p in model.named_parameters()})
    assert np.abs(column - values).max() < 1e-6  # those before the update


def test_a_restored_critic_goes_on_bit_for_bit(work, tmp_path: Path) -> None:
    first, second = valued(make_batch()), valued(make_batch(seed=1))
    engine, other = (make_engine(work / "llama", critic=work / "critic") for _ in range(2))
    engine.update(first, Values(Ppo()), 1e-2)
    other.update(second, Values(Ppo()), 1e-2)  # a state that must give way
    engine.save(tmp_path)
    other.load(tmp_path)
    states = [each.optimizer_state() for each in (engine, other)]
    assert len(states[0]) == 3 * len(weights_of(engine)) and same(*states)
    assert same(weights_of(engine), weights_of(other))
    assert same(weights_of(engine), dict(critic_of(tmp_path / "model").named_parameters()))
    results = [each.update(second, Values(Ppo()), 1e-2) for each in (engine, other)]
    assert results[0][0] == results[1][0] and np.array_equal(results[0][1], results[1][1])
    assert same(weights_of(engine), weights_of(other))


def test_a_critic_of_two_ranks_loads_on_one(work, two_ranks) -> None:
    engine = make_engine(work / "llama", critic=work / "critic")
    engine.load(work / "critic.saved")
    assert same(weights_of(engine), kept(work, "critic.weights"))
    assert same(engine.optimizer_state(), kept(work, "critic.state"))
    alone = make_engine(work / "llama", critic=work / "critic")
    alone.update(valued(make_batch()), Values(Ppo()), 1e-2)
    close(alone.optimizer_state(), kept(work, "critic.state"))


# --- options of the engine's own


def with_options(folder: Path, parallel: ParallelConfig | None = None, **options) -> fsdp.FsdpEngine:
    config = make_engine(folder, frozen=True).config
    config.parallel = parallel or config.parallel
    return ranks.Watched(
        load_policy(ModelConfig(str(folder)), torch.device("cpu"), 0, training=True), config, **options
    )


@pytest.mark.parametrize("options", [{"offload": True}, {"shard_size": 1}], ids=str)
def test_options_change_no_number(work, options) -> None:
    plain, other = with_options(work / "qwen2"), with_options(work / "qwen2", **options)
    for seed in range(2):
        batch = make_batch(seed=seed)
        assert plain.train(batch, Grpo()) == other.train(batch, Grpo())
        other.offload()  # on a CPU nothing moves
        other.onload()
    assert same(weights_of(plain), weights_of(other)) and same(plain.optimizer_state(), other.optimizer_state())


def test_compiled_blocks_compute_the_same(work, monkeypatch) -> None:
    """Traced, with the gradient, but not by the C++ compiler, which takes a quarter of a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = with_options(work / "llama", compile=True)
    compiled.config.micro_batch_tokens = 10_000
    metrics = compiled.train(make_batch(), Grpo())
    assert metrics == pytest.approx(make_engine(work / "llama").train(make_batch(), Grpo()), rel=1e-3, abs=1e-5)


def test_training_goes_on_after_a_move(work) -> None:
    """What offloading does on a GPU, to the device that is there."""
    plain, moved = with_options(work / "llama"), with_options(work / "llama")
    for seed in range(2):
        assert plain.train(make_batch(seed=seed), Grpo()) == moved.train(make_batch(seed=seed), Grpo())
        moved.move(torch.device("cpu"))
    assert same(weights_of(plain), weights_of(moved)) and same(plain.optimizer_state(), moved.optimizer_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloading_frees_the_gpu(work) -> None:
    model = load_policy(ModelConfig(str(work / "llama")), torch.device("cuda"), 0, training=True)
    engine = fsdp.FsdpEngine(model, make_engine(work / "llama", frozen=True).config)
    before = torch.cuda.memory_allocated()
    engine.offload()
    assert torch.cuda.memory_allocated() < before and not any(p.is_cuda for p in engine.model.parameters())
    engine.onload()
    assert all(p.is_cuda for p in engine.model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": "two"}, "`policy.engine_args.shard_size`: cannot be 'two'"),
        ({"shard_size": 0}, "`policy.engine_args.shard_size`"),
        ({"shard_size": True}, "`policy.engine_args.shard_size`"),
        ({"offload": "yes"}, "`policy.engine_args.offload`: cannot be 'yes'"),
        ({"compile": 1}, "`policy.engine_args.compile`"),
        ({"shard_size": 2}, "does not divide the 1 processes"),
        ({"parallel": ParallelConfig(tensor=4)}, "2 key and value heads"),
        ({"parallel": ParallelConfig(context=4)}, "`parallel.context` is 4"),
        ({"parallel": ParallelConfig(expert=2)}, "has no experts"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(work, options, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        with_options(work / "llama", **options)
