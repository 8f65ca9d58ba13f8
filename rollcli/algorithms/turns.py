"""Credit by turn: rewards at the tokens that earned them, returns of turns, and groups of equal states."""

from __future__ import annotations

import numpy as np

from rollcli.algorithms.advantages import group_normalized
from rollcli.data.batch import Batch


def token_rewards(batch: Batch, scores: np.ndarray) -> np.ndarray:
    """Returns the reward of each token, float64 `[T]`; those of a trajectory add up to its score `[B]`.

    An environment's reward of a turn stands at the turn's last token; the rest of the score (reward functions, shaping)
    stands at the trajectory's last trained token.
    """
    mask = batch.tokens["loss_mask"]
    rewards = np.where(mask, batch.tokens["turn_rewards"], 0.0)
    rest = scores - np.bincount(batch.rows, weights=rewards, minlength=len(batch))
    last = np.full(len(batch), -1)
    positions = np.flatnonzero(mask)
    last[batch.rows[positions]] = positions
    rewards[last[last >= 0]] += rest[last >= 0]
    return rewards


def turn_returns(batch: Batch, rewards: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns each turn's reward plus, discounted turn by turn, those of all later turns of its trajectory.

    Args:
        batch: B trajectories.
        rewards: `[T]`, reward of each token.
        gamma: discount from one turn to the next.

    Returns:
        Three columns over all S turns with a trained token: return float64 `[S]`, row int64 `[S]`, and turn `[S]`.
    """
    mask = batch.tokens["loss_mask"]
    keys = np.stack([batch.rows[mask], batch.tokens["turns"][mask]], axis=1)
    turns, places = np.unique(keys, axis=0, return_inverse=True)
    returns = np.bincount(places.ravel(), weights=rewards[mask], minlength=len(turns))
    for index in range(len(turns) - 2, -1, -1):
        if turns[index, 0] == turns[index + 1, 0]:
            returns[index] += gamma * returns[index + 1]
    return returns, turns[:, 0], turns[:, 1]


def at_tokens(batch: Batch, values: np.ndarray, rows: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Gives the trained tokens of each turn the turn's value: float64 `[T]` from columns `[S]` of `turn_returns`."""
    mask = batch.tokens["loss_mask"]
    table = np.zeros((len(batch), int(turns.max(initial=0)) + 1))
    table[rows, turns] = values
    result = np.zeros(len(mask), dtype=np.float64)
    result[mask] = table[batch.rows[mask], batch.tokens["turns"][mask]]
    return result


def state_advantages(
    batch: Batch, returns: np.ndarray, rows: np.ndarray, turns: np.ndarray, scale: str = "group"
) -> np.ndarray:
    """Returns each turn's return against those of the turns taken in the same state, float64 `[S]`.

    States are compared within a group only: the same observation in two tasks is two states (GiGPO, arXiv 2505.10978,
    eq. 7). A state met once, or not known, says nothing: 0.
    """
    first = np.full((len(batch), int(turns.max(initial=0)) + 1), -1)
    mask = batch.tokens["loss_mask"]
    first[batch.rows[mask], batch.tokens["turns"][mask]] = batch.tokens["states"][mask]
    keys = np.stack([batch.samples["group"][rows], first[rows, turns]], axis=1)
    unknown = keys[:, 1] < 0
    keys[unknown, 1] = -1 - np.flatnonzero(unknown)
    _, states = np.unique(keys, axis=0, return_inverse=True)
    return group_normalized(returns, states.ravel(), scale)
