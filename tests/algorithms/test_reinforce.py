"""REINFORCE: what follows each action, counted for an episode, a turn or a token."""

import math

import pytest

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.reinforce import Reinforce
from rollcli.algorithms.shaping import Shaping
from tests.algorithms.batches import advantages, batch_of, gradient, trained

# Two turns; the environment gives 1 and 2, a reward function 4 more at the end.
EPISODE = {"turn_rewards": [0, 0, 1, 9, 9, 2]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 7, 7, 0, 0, 7]),
        ({"gamma": 0.5}, [0, 7, 7, 0, 0, 7]),  # a trajectory's return is whole
        ({"returns_of": "turn"}, [0, 7, 7, 0, 0, 6]),
        ({"returns_of": "turn", "gamma": 0.5}, [0, 4, 4, 0, 0, 6]),
        ({"returns_of": "token"}, [0, 7, 7, 0, 0, 6]),
        ({"returns_of": "token", "gamma": 0.5}, [0, 2, 4, 0, 0, 6]),
        ({"returns_of": "token", "gamma": 0.0}, [0, 0, 1, 0, 0, 6]),
    ],
)
def test_returns_by_hand(options: dict, expected: list[float]) -> None:
    assert advantages(Reinforce(**options), batch_of([".00..1"], [7.0], **EPISODE)).tolist() == expected


@pytest.mark.parametrize(
    ("returns_of", "expected"),
    [("trajectory", [0, 6, 6, 0, 6]), ("turn", [0, 6, 6, 0, 6.5]), ("token", [0, 6, 6.25, 0, 6.5])],
)
def test_kl_comes_off_the_reward_that_follows(returns_of: str, expected: list[float]) -> None:
    batch = batch_of([".00.1"], [7.0], old_logprobs=[0, 0.25, -0.25, 0, 0.5], reference_logprobs=[0, 0, -0.5, 0, 0])
    algorithm = Reinforce(kl=KlPenalty(1.0, "k1", "reward"), returns_of=returns_of)
    assert advantages(algorithm, batch).tolist() == expected


def test_a_baseline_is_a_matter_of_shaping() -> None:
    batch = batch_of(["0"] * 4, [1, 3, 10, 30], [0, 0, 1, 1])
    assert advantages(Reinforce(shaping=Shaping(mean="group")), batch).tolist() == [-1, 1, -10, 10]
    assert advantages(Reinforce(shaping=Shaping(mean="batch")), batch).tolist() == [-10, -8, -1, 19]
    assert Reinforce(shaping=Shaping(mean="group")).compares_group() and not Reinforce().compares_group()


def test_running_baselines_go_on_after_a_restore() -> None:
    first, second = (Reinforce(shaping=Shaping(mean="running")) for _ in range(2))
    assert advantages(first, batch_of(["0"] * 2, [0, 4])).tolist() == [-2, 2]
    second.restore(first.state())
    for algorithm in (first, second):
        assert advantages(algorithm, batch_of(["0"] * 2, [2, 6])).tolist() == [-1, 3]  # mean of 0, 4, 2, 6


def test_the_loss_is_not_clipped() -> None:
    tokens = trained([0.0, 0.0], [-1.0, 1.0], advantages=[1.0, -2.0])
    assert gradient(Reinforce(), tokens) == pytest.approx([-math.e, 2 / math.e])


@pytest.mark.parametrize(("gamma", "names"), [(1.5, ["gamma"]), (-0.1, ["gamma"]), (0.0, []), (1.0, [])])
def test_options_that_make_no_sense(gamma: float, names: list[str]) -> None:
    assert [name for name, _ in Reinforce("token-mean", returns_of="token", gamma=gamma).problems()] == names


def test_a_discount_that_would_do_nothing_is_refused() -> None:
    assert [name for name, _ in Reinforce(gamma=0.5).problems()] == ["gamma"]
