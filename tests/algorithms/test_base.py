"""What an algorithm is by default, and what holds for every one of them."""

import subprocess
import sys

import numpy as np
import pytest

from rollcli import registry
from rollcli.algorithms import BUILTIN
from rollcli.algorithms.base import Algorithm
from rollcli.config.schema import FORWARD_PASSES
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task
from tests.algorithms.batches import REWARDED, advantages, batch_of, made

COMPARING = [name for name in REWARDED if registry.resolve("algorithms", name).group_relative]


def test_defaults() -> None:
    batch = Batch.from_sequences([(np.arange(4), np.array([False, True, True, True]))])
    algorithm = Algorithm()
    assert algorithm.needs() == frozenset() and algorithm.keep_group(Group(Task("t", 0, []), []))
    assert not algorithm.compares_group() and not algorithm.old_from_rollout
    assert algorithm.loss_weights(batch).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    algorithm.prepare(batch)
    algorithm.observe({"kl_reference": 1.0}, 8)
    assert algorithm.state() == {}
    algorithm.restore({})
    for method in (algorithm.advantages, algorithm.returns, algorithm.loss, algorithm.value_loss):
        with pytest.raises(NotImplementedError):
            method(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BUILTIN)
def test_every_name_resolves_and_its_defaults_make_sense(name: str) -> None:
    algorithm = made(name)
    assert isinstance(algorithm, Algorithm) and list(getattr(algorithm, "problems", list)()) == []
    assert algorithm.needs() <= FORWARD_PASSES and algorithm.demonstrations == (name == "sft")


def test_which_algorithms_compare_answers() -> None:
    assert set(REWARDED) - set(COMPARING) == {"ppo", "raft_pp", "reinforce", "reinforce_pp", "remax", "topr"}
    assert [name for name in BUILTIN if made(name).greedy_baseline] == ["remax"]


def test_a_recipe_is_checked_without_torch() -> None:
    modules = ", ".join(target.partition(":")[0] for target in BUILTIN.values())
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", COMPARING)
def test_constant_rewards_give_advantages_of_exactly_zero(name: str, value: float) -> None:
    for dtype in (np.float64, np.float32):
        batch = batch_of([".0" + "0" * (index % 3) for index in range(16)], [value] * 16, [0] * 8 + [1] * 8)
        batch.samples["reward"] = batch.samples["reward"].astype(dtype)
        got = advantages(made(name), batch)
        assert got.dtype == np.float32 and got.tolist() == [0.0] * len(got)


def agents() -> Batch:
    """Three groups of two to four episodes of several turns, unlike each other in every column."""
    random = np.random.default_rng(7)
    layouts = ["..00.1.22", ".0.1", "...000", ".00.11.2", "0.1", ".0000", "..0", ".0.1.2", "..0.111"]
    groups = [4, 4, 4, 9, 9, 9, 9, 2, 2]
    count, length = len(layouts), sum(map(len, layouts))
    batch = batch_of(layouts, random.normal(size=count), groups)
    mask = batch.tokens["loss_mask"]
    for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "values", "turn_rewards"):
        batch.tokens[name] = random.normal(size=length).astype(batch.tokens[name].dtype)
    batch.tokens["states"] = np.where(mask, np.maximum(batch.tokens["turns"], 0) % 2, -1)
    batch.samples["accuracy"] = random.random(count)
    batch.samples["greedy_reward"] = np.array([0.5, 0.5, 0.5, -1, -1, -1, -1, 0.25, 0.25])
    batch.samples["budget"] = random.integers(4, 9, size=count)
    return batch


def computed(name: str, batch: Batch) -> dict[str, np.ndarray]:
    """Returns all columns that an algorithm computes in a step."""
    algorithm = made(name)
    batch = batch.select(np.arange(len(batch)))
    algorithm.prepare(batch)
    columns = {"advantages": algorithm.advantages(batch), "loss_weights": algorithm.loss_weights(batch)}
    if "critic" in algorithm.needs():
        columns["returns"] = algorithm.returns(batch)
    for column in columns.values():
        assert column.dtype == np.float32 and np.isfinite(column).all()
        assert not column[~batch.tokens["loss_mask"]].any()
    return columns


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("name", REWARDED)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_masked_positions_may_hold_anything(name: str, junk: float) -> None:
    batch, dirty = agents(), agents()
    off = ~batch.tokens["loss_mask"]
    for column in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "values", "turn_rewards"):
        dirty.tokens[column][off] = junk
    for column in ("ids", "versions", "states"):
        dirty.tokens[column][off] = 1
    clean, found = computed(name, batch), computed(name, dirty)
    assert clean["advantages"].any() and clean["loss_weights"].any()
    for column, values in clean.items():
        assert np.array_equal(values, found[column]), column


@pytest.mark.parametrize("name", REWARDED)
def test_order_of_trajectories_does_not_matter(name: str) -> None:
    batch = agents()
    batch.tokens |= computed(name, batch)
    order = np.random.default_rng(3).permutation(len(batch))
    moved = batch.select(order)
    for column, values in computed(name, moved).items():
        assert values == pytest.approx(moved.tokens[column], abs=1e-5), column


@pytest.mark.parametrize("name", COMPARING)
def test_equal_texts_of_two_problems_are_two_groups(name: str) -> None:
    """Rewards 1 and 0 in one, 5 and 5 in the other: the second learns nothing."""
    got = advantages(made(name), batch_of([".0"] * 4, [1, 0, 5, 5], [0, 0, 1, 1]))[1::2]
    assert got[0] > 0 > got[1] and got[2:].tolist() == [0, 0]


@pytest.mark.parametrize("name", REWARDED)
def test_a_step_without_a_trajectory_or_a_trained_token(name: str) -> None:
    for batch in (batch_of([]), batch_of(["...", ".."], [1, 0])):
        for column in computed(name, batch).values():
            assert not column.any() and len(column) == batch.offsets[-1]
