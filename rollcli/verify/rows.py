"""From a subject's plain rows to rollcli's carriers, as rollout would leave them, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollcli.algorithms.policy_gradient import PolicyGradient
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task, Trajectory

Rows = list[list[float]]
TASK = Task("verify", 0, [])


def make_batch(
    mask: Rows,
    rewards: list[float] | None = None,
    groups: list[int] | None = None,
    *,
    ids: list[list[int]] | None = None,
    budget: int = 0,
    truncated: list[int] | None = None,
) -> Batch:
    """Returns rows as rollout leaves them; without `groups` all are of one."""
    count = len(mask)
    made = trajectories(mask, rewards or [0.0] * count, [0.0] * count, ids)
    for trajectory, cut in zip(made, truncated or [0] * count):
        trajectory.budget, trajectory.stop_reason = budget, "length" if cut else "stop"
    batch = Batch.from_groups([Group(TASK, made)])
    batch.samples["group"] = np.array(groups or [0] * count, dtype=np.int64)
    return batch


def trajectories(
    mask: Rows, rewards: list[float], accuracies: list[float], ids: list[list[int]] | None = None
) -> list[Trajectory]:
    """Returns one trajectory for each row, of a single turn."""
    made = []
    for number, flags in enumerate(mask):
        trained = np.array(flags, dtype=bool)
        tokens = np.array(ids[number] if ids else [0] * len(flags), dtype=np.int32)
        made.append(
            Trajectory(
                TASK.id, number, tokens, trained, np.zeros(len(flags), np.float32), np.zeros(len(flags), np.int32),
                turns=[(0, len(flags))], reward=rewards[number], accuracy=accuracies[number],
            )
        )  # fmt: skip
    return made


def rewarded(rewards: Rows, mask: Rows) -> Batch:
    """Returns rows whose tokens earn rewards of their own."""
    totals = [sum(reward for reward, flag in zip(*row) if flag) for row in zip(rewards, mask)]
    batch = make_batch(mask, totals)
    batch.tokens["turn_rewards"] = np.concatenate(rewards)
    return batch


def advantaged(rows: list[list[int]], mask: Rows, advantages: Any) -> Batch:
    """Returns rows of token ids with advantages, of rows or of tokens."""
    batch = make_batch(mask, ids=rows)
    of_tokens = isinstance(advantages[0], list)
    values = np.concatenate(advantages) if of_tokens else np.array(advantages)[batch.rows]
    batch.tokens["advantages"] = values.astype(np.float32)
    return batch


def advantages_of(algorithm: PolicyGradient, batch: Batch) -> np.ndarray:
    """Returns what an algorithm makes of a batch's rewards, `[T]`, as a step would."""
    algorithm.prepare(batch)
    return algorithm.advantages(batch)


def rows_of(batch: Batch, column: np.ndarray) -> Rows:
    """Returns a token column `[T]` row by row."""
    return [part.tolist() for part in np.split(column.astype(np.float64), batch.offsets[1:-1])]
