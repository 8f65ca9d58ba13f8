"""What must not change a gradient, for every algorithm; and what must change nothing at all.

A batch goes through the calls of the pipeline's step: prepare, advantages, loss weights, update. One rank runs in this
process; two ranks run every case once (`fsdp_ranks.py`).
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rollcli.algorithms import BUILTIN, surrogates
from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import PolicyGradient
from rollcli.data.batch import Batch
from rollcli.engines.objectives import LogProbs, Values

pytestmark = pytest.mark.usefixtures("one_rank")
SCRIPT = Path(__file__).with_name("fsdp_ranks.py")
spec = importlib.util.spec_from_file_location("fsdp_ranks", SCRIPT)
ranks = importlib.util.module_from_spec(spec)
sys.modules["fsdp_ranks"] = ranks
spec.loader.exec_module(ranks)
CASES, TEMPERATURE = ranks.CASES, ranks.TEMPERATURE
make_batch, make_engine, as_pipeline = ranks.make_batch, ranks.make_engine, ranks.as_pipeline

WHOLE = {"micro_batch_tokens": 100_000, "packing": False}
SPLITS = {
    "packed": {"micro_batch_tokens": 100_000},
    "packed in parts": {"micro_batch_tokens": 64},
    "padded in parts": {"micro_batch_tokens": 24, "packing": False},
    "one by one": {"micro_batch_tokens": 1},
}
POLICY_GRADIENTS = sorted(set(BUILTIN) - {"sft"})
GROUP_RELATIVE = [name for name in POLICY_GRADIENTS if CASES[name]().compares_group()]

Result = tuple[dict[str, float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    ranks.write_model(folder / "llama")
    ranks.write_critic(folder / "critic", folder / "llama")
    return folder


@pytest.fixture(scope="module")
def engines(work: Path) -> dict[tuple[str, bool], ranks.Watched]:
    """By layout, and whether it is a critic's: a learning rate of 0 leaves them as they are."""
    return {
        (name, critic): make_engine(work / "llama", critic=work / "critic" if critic else None, **options)
        for name, options in {"whole": WHOLE, **SPLITS}.items()
        for critic in (False, True)
    }


@pytest.fixture(scope="module")
def whole(engines) -> dict[str, Result]:
    """Every case in one padded micro-batch."""
    return {name: in_layout(engines, "whole", name, sampled(name)) for name in CASES}


@pytest.fixture(scope="module")
def two_ranks(work: Path) -> list[dict[str, Result]]:
    facts = ranks.run_two(work, "invariance")
    gradients = [torch.load(work / f"gradients.{rank}.pt") for rank in range(2)]
    return [{name: (facts[rank][name], gradients[rank][name]) for name in CASES} for rank in range(2)]


def sampled(name: str, order: np.ndarray | None = None) -> Batch:
    batch = make_batch()
    return as_pipeline(batch if order is None else batch.select(order), CASES[name]())[-1]


def in_layout(engines, layout: str, name: str, batch: Batch) -> Result:
    return ranks.gradient_of(engines[layout, name.startswith("critic")], batch, name)


def equal(got: Result, wanted: Result) -> None:
    """Gradients tensor by tensor, to 1e-5 of the tensor's own scale; metrics too."""
    assert got[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-5)
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        scale = float(gradient.abs().max())
        assert scale > 1e-5, f"{name} has no gradient to compare"
        assert float((got[1][name] - gradient).abs().max()) < 1e-5 * scale, name


# --- what must not change a gradient


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_packing_and_order_do_not_change_the_gradient(engines, whole, name: str) -> None:
    batch = sampled(name)
    for layout in SPLITS:
        equal(in_layout(engines, layout, name, batch), whole[name])
    order = np.random.default_rng(3).permutation(len(make_batch()))
    equal(in_layout(engines, "packed in parts", name, sampled(name, order)), whole[name])


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one(two_ranks, whole, name: str) -> None:
    for rank in range(2):
        equal(two_ranks[rank][name], whole[name])


def test_every_case_has_a_gradient_of_its_own(whole) -> None:
    """A case whose option did nothing would be no test of it."""
    found: dict[tuple, list[str]] = {}
    for name, (_, gradients) in whole.items():
        norms = tuple(round(float(gradient.norm()), 5) for gradient in gradients.values())
        found.setdefault(norms, []).append(name)
    # GRPO's own aggregation, and an estimator with another's gradient.
    assert [names for names in found.values() if len(names) > 1] == [
        ["grpo", "seq-mean-token-mean"],
        ["kl k2", "kl k3+"],
    ]


def test_all_modes_and_algorithms_are_cases() -> None:
    assert set(BUILTIN) <= set(CASES) and set(ranks.MODES) <= set(CASES)


# --- the first update


@dataclass
class Ratio(PolicyGradient):
    """Records how far any ratio is from 1."""

    def surrogate(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = surrogates.ratio(tokens.logprobs, tokens.old_logprobs)
        return -ratio * tokens.advantages, {"apart_max": (ratio.detach() - 1).abs()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [*SPLITS.values(), {"recompute_activations": True}], ids=str)
def test_the_first_update_has_ratio_exactly_one_and_a_later_one_has_not(work, dtype: str, options) -> None:
    engine = make_engine(work / "llama", dtype=dtype, **options)
    batch = make_batch()
    batch.tokens["old_logprobs"] = engine.logprobs(batch)
    first, second = (engine.train(minibatch, Ratio()) for minibatch in as_pipeline(batch, Ratio()))
    assert first["apart_max"] == 0 and first["kl_old"] == 0
    assert second["apart_max"] > 0.01 and second["kl_old"] > 0


# TOPR's ratio is against the policy that sampled, whose numbers are other than the trainer's.
@pytest.mark.parametrize("name", [name for name in POLICY_GRADIENTS if name != "topr"])
def test_the_first_update_clips_nothing(engines, name: str) -> None:
    algorithm = CASES[name]()
    first, _ = as_pipeline(make_batch(), algorithm)
    metrics, _ = engines["packed in parts", False].update(first, LogProbs(TEMPERATURE, algorithm), 0.0)
    assert metrics["kl_old"] == 0 and metrics.get("clip_share", 0) == 0


# --- what must change nothing at all


def spoil(batch: Batch) -> Batch:
    """Puts NaN wherever no token is trained."""
    for column in batch.tokens.values():
        if column.dtype.kind == "f":
            column[~batch.tokens["loss_mask"]] = np.nan
    return batch


@pytest.mark.parametrize("name", CASES)
def test_what_masked_tokens_hold_does_not_matter(engines, name: str) -> None:
    """Neither before the step's own calculations, nor at the engine."""
    dirty = spoil(as_pipeline(spoil(make_batch()), CASES[name]())[-1])
    metrics, gradients = in_layout(engines, "packed in parts", name, dirty)
    wanted = in_layout(engines, "packed in parts", name, sampled(name))
    assert metrics == wanted[0] and ranks.same(gradients, wanted[1])


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_groups_of_equal_rewards_leave_every_weight(work, name: str) -> None:
    """Four groups of eight, whose rewards are 0.1, 0.3, 0.7 and 1.0: means and spreads of such are not exact."""
    batch = make_batch(tuple(5 + number % 7 for number in range(32)))
    batch.samples["group"] = np.repeat(np.arange(4), 8)
    batch.samples["reward"] = np.array([0.1, 0.3, 0.7, 1.0])[batch.samples["group"]]
    batch.samples["budget"] = np.full(32, 100)  # no length is penalized
    batch.samples["sampled"] = batch.trained_lengths
    mask = batch.tokens["loss_mask"]
    batch.tokens["turns"], batch.tokens["states"] = np.where(mask, 0, -1), np.where(mask, 0, -1)
    # Part of the reward came from the environment, so that the rest is a difference.
    batch.tokens["turn_rewards"] = np.where(batch.tokens["turn_rewards"] > 0, 0.1, 0.0)
    algorithm = CASES[name]()
    algorithm.kl = KlPenalty()
    engine = make_engine(work / "llama")
    before = {weight: tensor.clone() for weight, tensor in engine.named_weights().items()}
    for minibatch in as_pipeline(batch, algorithm, epochs=1):
        metrics = engine.train(minibatch, algorithm)
        assert metrics["tokens"] > 0 and metrics["loss"] == 0 and metrics["grad_norm"] == 0
        assert metrics["skipped_updates"] == 0
    assert ranks.same(before, engine.named_weights())


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_a_trained_token_leaves_every_weight(work, engines, name: str) -> None:
    algorithm, batch = CASES[name](), make_batch()
    batch.tokens["loss_mask"][:] = False
    critic = name.startswith("critic")
    engine = engines["packed in parts", critic]
    before = {weight: tensor.clone() for weight, tensor in engine.named_weights().items()}
    if not algorithm.demonstrations:
        assert as_pipeline(batch, algorithm) == []
        assert not algorithm.advantages(batch).any()
    batch.tokens["loss_weights"] = algorithm.loss_weights(batch)
    metrics, column = engine.update(batch, Values(algorithm) if critic else LogProbs(TEMPERATURE, algorithm), 0.1)
    assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0 and metrics["skipped_updates"] == 1
    assert not batch.tokens["loss_weights"].any() and not column.any()
    assert ranks.same(before, engine.named_weights())


@pytest.mark.parametrize("critic", [False, True])
def test_a_row_is_scored_as_if_alone(engines, critic: bool) -> None:
    """Whatever stands left and right of it in a packed row."""
    batch = make_batch()
    objective = Values() if critic else LogProbs(TEMPERATURE)
    together = engines["packed", critic].forward(batch, objective)
    assert np.abs(together).max() > 0.1
    for row in range(len(batch)):
        alone = engines["whole", critic].forward(batch.select(np.array([row])), objective)
        assert np.abs(alone - together[batch.offsets[row] : batch.offsets[row + 1]]).max() < 1e-5
