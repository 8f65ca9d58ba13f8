"""GiGPO: the episode against its group, the turn against the turns from equal states."""

import numpy as np
import pytest

from rollcli.algorithms.gigpo import GiGpo
from rollcli.algorithms.kl import KlPenalty
from tests.algorithms.batches import advantages, batch_of


def test_by_hand() -> None:
    # Both start in state 1; then one is in state 2, one in 3. Rewards at the end: 1 and 0. Returns of the first turns
    # are 0.5 × 1 and 0, so ±0.25 without scale; a state met once says nothing.
    batch = batch_of([".00.1", ".0.1"], [1, 0], states=[-1, 1, 1, -1, 2, -1, 1, -1, 3])
    algorithm = GiGpo(kl=KlPenalty(), gamma=0.5, step_weight=2.0, scale="none")
    assert advantages(algorithm, batch).tolist() == [0, 1.0, 1.0, 0, 0.5, 0, -1.0, 0, -0.5]
    assert advantages(GiGpo(step_weight=0, scale="none"), batch).tolist() == [0, 0.5, 0.5, 0, 0.5, 0, -0.5, 0, -0.5]
    root = 0.5**0.5
    scaled = [0, 2 * root, 2 * root, 0, root, 0, -2 * root, 0, -root]
    assert advantages(GiGpo(gamma=0.5), batch).tolist() == pytest.approx(scaled)


def test_states_are_never_pooled_across_groups() -> None:
    layouts, states = [".0.1"] * 2, [-1, 1, -1, 2] * 2
    first, second = batch_of(layouts, [1, 0], states=states), batch_of(layouts, [7, 3], states=states)
    both = batch_of(layouts * 2, [1, 0, 7, 3], [0, 0, 1, 1], states=states * 2)
    apart = [advantages(GiGpo(scale="none"), batch) for batch in (first, second)]
    assert advantages(GiGpo(scale="none"), both).tolist() == np.concatenate(apart).tolist()


def test_environment_rewards_of_turns_are_returns_of_turns() -> None:
    # Turn rewards 1, 0 and 0, 1: equal episodes; a reward now is worth more than a discounted one.
    batch = batch_of(["0.1", "0.1"], [1, 1], states=[1, -1, 2, 1, -1, 2], turn_rewards=[1, 0, 0, 0, 0, 1])
    got = advantages(GiGpo(gamma=0.5, scale="none"), batch)
    assert got.tolist() == [0.25, 0, -0.5, -0.25, 0, 0.5]


def slow(batch, gamma: float, weight: float) -> list[float]:
    """Equation 8 with equations 3, 6 and 7, one turn at a time, without a standard deviation."""
    reward, group = batch.samples["reward"], batch.samples["group"]
    returns, states = {}, {}
    for row in range(len(batch)):
        own = range(batch.offsets[row], batch.offsets[row + 1])
        turns = sorted({int(batch.tokens["turns"][t]) for t in own if batch.tokens["loss_mask"][t]})
        for turn in turns:
            first = next(t for t in own if batch.tokens["turns"][t] == turn)
            states[row, turn] = (group[row], batch.tokens["states"][first])
            returns[row, turn] = gamma ** (len(turns) - 1 - turns.index(turn)) * reward[row]
    result = []
    for t in range(batch.offsets[-1]):
        row, turn = batch.rows[t], batch.tokens["turns"][t]
        if turn < 0:
            result.append(0.0)
            continue
        same = [returns[key] for key in returns if states[key] == states[row, turn]]
        episode = reward[row] - reward[group == group[row]].mean()
        result.append(episode + weight * (returns[row, turn] - np.mean(same)))
    return result


def test_against_a_slow_reference() -> None:
    random = np.random.default_rng(5)
    layouts = ["..0.11.2", "0.1", ".00.1.2.3", "0", ".0.1.2", "00.11"]
    batch = batch_of(layouts, random.normal(size=6), [0, 0, 0, 1, 1, 1])
    batch.tokens["states"] = np.where(batch.tokens["loss_mask"], batch.tokens["turns"] % 2 + 3, -1)
    algorithm = GiGpo(gamma=0.8, step_weight=0.7, scale="none")
    assert advantages(algorithm, batch).tolist() == pytest.approx(slow(batch, 0.8, 0.7), abs=1e-6)


def test_as_in_the_paper() -> None:
    algorithm = GiGpo()
    assert (algorithm.gamma, algorithm.step_weight, algorithm.kl.coefficient) == (0.95, 1.0, 0.01)


@pytest.mark.parametrize(
    ("options", "names"),
    [({"step_weight": -1}, ["step_weight"]), ({"gamma": 1.1}, ["gamma"]), ({"gamma": -0.1}, ["gamma"])],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in GiGpo(**options).problems()] == names
