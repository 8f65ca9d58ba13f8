"""Credit by turn: where rewards stand, what follows a turn, and which states are compared."""

import numpy as np
import pytest

from rollcli.algorithms import turns
from tests.algorithms.batches import batch_of


def test_rewards_stand_at_the_tokens_that_earned_them() -> None:
    # Two turns worth 0.5 and 0.25; a reward function adds 1 at the end.
    batch = batch_of([".00.1", "..0."], turn_rewards=[0, 0, 0.5, 0, 0.25, 0, 0, 0, 0])
    assert turns.token_rewards(batch, np.array([1.75, -2.0])).tolist() == [0, 0, 0.5, 0, 1.25, 0, 0, -2, 0]


def test_rewards_of_a_trajectory_add_up_to_its_score() -> None:
    random = np.random.default_rng(0)
    batch = batch_of(["00.11.2", ".0.1", "....", "0"], turn_rewards=random.normal(size=16))
    scores = random.normal(size=4)
    got = turns.token_rewards(batch, scores)
    assert np.bincount(batch.rows, weights=got, minlength=4) == pytest.approx(np.where(np.arange(4) == 2, 0, scores))
    assert not got[~batch.tokens["loss_mask"]].any()


def test_the_reward_of_a_masked_turn_moves_to_the_last_trained_token() -> None:
    batch = batch_of(["00.1"], turn_rewards=[0, 0.5, 0, 0.25])
    batch.tokens["loss_mask"][3] = False
    assert turns.token_rewards(batch, np.array([1.0])).tolist() == [0, 1.0, 0, 0]


def test_returns_of_turns_by_hand() -> None:
    batch = batch_of(["00.1.2", ".0.1"])
    rewards = np.array([0, 1.0, 9, 2, 9, 4, 9, 8, 9, 16])
    returns, rows, numbers = turns.turn_returns(batch, rewards, 0.5)
    assert rows.tolist() == [0, 0, 0, 1, 1] and numbers.tolist() == [0, 1, 2, 0, 1]
    assert returns.tolist() == [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4, 8 + 0.5 * 16, 16]


def test_every_token_of_a_turn_has_its_value() -> None:
    batch = batch_of(["00.1", "..0"])
    _, rows, numbers = turns.turn_returns(batch, np.zeros(7), 1.0)
    assert turns.at_tokens(batch, np.array([3.0, 5, 7]), rows, numbers).tolist() == [3, 3, 0, 5, 0, 0, 7]


def relative(batch, rewards, scale="none") -> list[float]:
    returns, rows, numbers = turns.turn_returns(batch, np.asarray(rewards, dtype=float), 0.0)
    return turns.state_advantages(batch, returns, rows, numbers, scale).tolist()


def test_turns_from_equal_states_are_compared() -> None:
    # State 5 is met three times, once twice in one episode; state 6 once.
    batch = batch_of(["0.1", "0.1"], states=[5, -1, 5, 5, -1, 6])
    assert relative(batch, [1, 0, 2, 6, 0, 8]) == [-2, -1, 3, 0]
    deviation = (14 / 2) ** 0.5
    assert relative(batch, [1, 0, 2, 6, 0, 8], "group") == pytest.approx(
        [-2 / deviation, -1 / deviation, 3 / deviation, 0]
    )


def test_equal_states_of_two_groups_are_two_states() -> None:
    batch = batch_of(["0"] * 4, None, [0, 0, 1, 1], states=[5, 5, 5, 5])
    assert relative(batch, [0, 2, 10, 20]) == [-1, 1, -5, 5]
    moved = batch.select(np.array([2, 0, 3, 1]))
    assert relative(moved, [10, 0, 20, 2]) == [-5, -1, 5, 1]


def test_nothing_at_all() -> None:
    for batch in (batch_of([]), batch_of(["..", "."])):
        returns, rows, numbers = turns.turn_returns(batch, np.zeros(int(batch.offsets[-1])), 0.9)
        assert returns.shape == rows.shape == (0,)
        assert turns.state_advantages(batch, returns, rows, numbers).shape == (0,)
        assert not turns.at_tokens(batch, returns, rows, numbers).any()


def test_a_state_that_is_not_known_equals_no_other() -> None:
    batch = batch_of(["0", "0", "0", "0"], states=[-1, -1, 3, 3])
    assert relative(batch, [0, 2, 10, 20]) == [0, 0, -5, 5]
