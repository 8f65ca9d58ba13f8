"""Many trajectories as columns: flat values plus offsets, no padding. Ray moves the arrays without copying them.

Legend of shapes, used in comments everywhere: B trajectories, T tokens of all of them together, N trained tokens,
P prompts (groups), G answers to each.

A batch is sharded over data-parallel workers and gathered again here, by explicit indices, so filtering or reordering
can never separate a trajectory from its group (the paper's Transfer Protocol).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollcli.data.carriers import Group, Trajectory
from rollcli.data.images import Images, digest


@dataclass
class Batch:
    """Ragged columns.

    Attributes:
        offsets: int64 `[B + 1]`; trajectory i owns tokens `offsets[i]:offsets[i + 1]`.
        tokens: columns `[T]`, or `[T, V]`: `ids` int32, `loss_mask` bool, `rollout_logprobs` float32, `versions` int32,
            `turns` int32 (which of the model's turns a sampled token is in, else -1), `turn_rewards` float64 (the
            environment's reward at the last token of each turn, else 0), `states` int64 (equal where two turns were
            taken in equal states, else -1), and what the stages add: `old_logprobs`, `reference_logprobs`, `values`,
            `advantages`, `returns`, `loss_weights`. Only values on the loss mask mean anything.
        samples: columns `[B]`: `group` int64 (equal within a group), `sample`, `reward`, `accuracy`, `sampled` int64
            (tokens the model sampled), `budget` int64 (the most it might have), `truncated` bool, `greedy_reward`
            (NaN without one), and what `Algorithm.prepare` adds.
        images: what each trajectory's placeholder tokens stand for, or None for one without; None where none has any.
            Trajectories of a group that show the same share one object, which then travels once.
    """

    offsets: np.ndarray
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    images: list[Images | None] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each trajectory, int64 `[B]`."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> np.ndarray:
        """Trajectory each token belongs to, int64 `[T]`."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def trained_lengths(self) -> np.ndarray:
        """Trained tokens of each trajectory, int64 `[B]`."""
        return np.bincount(self.rows, weights=self.tokens["loss_mask"], minlength=len(self)).astype(np.int64)

    def group_means(self, name: str) -> np.ndarray:
        """Returns the mean of a sample column over each trajectory's group, float64 `[B]`."""
        _, places = np.unique(self.samples["group"], return_inverse=True)
        totals = np.bincount(places, weights=self.samples[name])
        return (totals / np.bincount(places))[places] if len(self) else np.zeros(0)

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> Batch:
        """Returns the usable trajectories of `groups`, in group order and sample order."""
        members = [(number, trajectory) for number, group in enumerate(groups) for trajectory in group.usable]
        trajectories = [trajectory for _, trajectory in members]
        # Of several players each is compared with the same one of the group's other episodes.
        numbers: dict[tuple[int, str], int] = {}
        groups_of = [numbers.setdefault((number, trajectory.agent), len(numbers)) for number, trajectory in members]
        baselines = [groups[number].greedy_reward(trajectory.agent) for number, trajectory in members]
        lengths = [len(trajectory.tokens) for trajectory in trajectories]

        def joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

        def column(name: str, dtype: type) -> np.ndarray:
            return joined([getattr(trajectory, name) for trajectory in trajectories], dtype)

        def sample(read: Callable[[Trajectory], Any], dtype: type) -> np.ndarray:
            return np.array([read(trajectory) for trajectory in trajectories], dtype=dtype)

        states: dict[str, int] = {}
        turns = [_turn_columns(trajectory, states) for trajectory in trajectories]

        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens={
                "ids": column("tokens", np.int32),
                "loss_mask": column("loss_mask", np.bool_),
                "rollout_logprobs": column("logprobs", np.float32),
                "versions": column("versions", np.int32),
                "turns": joined([turn[0] for turn in turns], np.int32),
                "turn_rewards": joined([turn[1] for turn in turns], np.float64),
                "states": joined([turn[2] for turn in turns], np.int64),
            },
            samples={
                "group": np.array(groups_of, dtype=np.int64),
                "sample": sample(lambda t: t.sample, np.int64),
                "reward": sample(lambda t: t.reward, np.float64),
                "accuracy": sample(lambda t: t.accuracy, np.float64),
                "sampled": sample(lambda t: t.response_tokens, np.int64),
                "budget": sample(lambda t: t.budget, np.int64),
                "truncated": sample(lambda t: t.stop_reason == "length", np.bool_),
                "greedy_reward": np.array(baselines, dtype=np.float64),
            },
            images=_shared_images(members),
        )

    @classmethod
    def from_sequences(
        cls, sequences: Sequence[tuple[np.ndarray, np.ndarray]], images: Sequence[Images | None] = ()
    ) -> Batch:
        """Returns a batch of `(token ids [T_i], loss mask [T_i])` pairs: demonstrations, and their images if any."""
        lengths = [len(ids) for ids, _ in sequences]
        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens={
                "ids": np.concatenate([ids for ids, _ in sequences]).astype(np.int32),
                "loss_mask": np.concatenate([mask for _, mask in sequences]).astype(np.bool_),
            },
            images=_or_none(images),
        )

    @classmethod
    def joined(cls, parts: Sequence[Batch]) -> Batch:
        """Returns the trajectories of all parts as one batch, with the columns that every part has."""
        lengths = np.concatenate([part.lengths for part in parts]) if parts else np.zeros(0, np.int64)

        def columns(name: str) -> dict[str, np.ndarray]:
            shared = set.intersection(*(set(getattr(part, name)) for part in parts)) if parts else set()
            return {key: np.concatenate([getattr(part, name)[key] for part in parts]) for key in sorted(shared)}

        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        images = [image for part in parts for image in (part.images or [None] * len(part))]
        return cls(offsets, columns("tokens"), columns("samples"), _or_none(images))

    def select(self, indices: np.ndarray) -> Batch:
        """Returns the trajectories at `indices`, in that order."""
        indices = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[indices]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        starts = np.repeat(self.offsets[:-1][indices] - offsets[:-1], lengths)
        positions = starts + np.arange(offsets[-1])
        return Batch(
            offsets,
            {name: values[positions] for name, values in self.tokens.items()},
            {name: values[indices] for name, values in self.samples.items()},
            None if self.images is None else _or_none([self.images[index] for index in indices]),
        )

    def shards(self, count: int) -> list[np.ndarray]:
        """Returns `count` index arrays that hold every trajectory once, balanced by tokens, each in batch order.

        Longest first to the lightest shard; ties go to the lower shard, so the answer depends on the lengths alone.
        """
        loads = np.zeros(count, dtype=np.int64)
        members: list[list[int]] = [[] for _ in range(count)]
        for index in np.argsort(-self.lengths, kind="stable"):
            lightest = int(np.argmin(loads))
            members[lightest].append(int(index))
            loads[lightest] += self.lengths[index]
        return [np.array(sorted(shard), dtype=np.int64) for shard in members]

    def gather(self, shards: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns token columns computed shard by shard as one column `[T]`, or `[T, V]`, in batch order."""
        column = np.zeros((int(self.offsets[-1]), *parts[0].shape[1:]), dtype=parts[0].dtype)
        for indices, part in zip(shards, parts, strict=True):
            lengths = self.lengths[indices]
            starts = np.concatenate([[0], np.cumsum(lengths)])
            for place, index in enumerate(indices):
                column[self.offsets[index] : self.offsets[index + 1]] = part[starts[place] : starts[place + 1]]
        return column

    def minibatches(self, count: int, seed: int) -> list[Batch]:
        """Returns `count` batches that hold every trajectory once: shuffled by `seed`, each with short and long ones.

        Trajectories are sorted by length and dealt out in strata of `count`, each stratum in random order, so sizes
        differ by at most one and no optimizer step sees only the short or only the long answers.
        """
        random = np.random.default_rng([seed, 0x6D696E69])
        order = np.argsort(self.lengths, kind="stable")
        members: list[list[int]] = [[] for _ in range(count)]
        for start in range(0, len(order), count):
            stratum = order[start : start + count]
            for slot, index in zip(random.permutation(count), stratum, strict=False):
                members[slot].append(int(index))
        return [self.select(np.array(sorted(indices))) for indices in members if indices]


def _turn_columns(trajectory: Trajectory, states: dict[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a trajectory's columns `turns`, `turn_rewards` and `states`; `states` numbers the keys met so far."""
    length = len(trajectory.tokens)
    turns, rewards, keys = np.full(length, -1, np.int32), np.zeros(length), np.full(length, -1, np.int64)
    for number, (start, end) in enumerate(trajectory.turns):
        turns[start:end] = number
        if number < len(trajectory.turn_rewards) and end > start:
            rewards[end - 1] = trajectory.turn_rewards[number]
        if number < len(trajectory.state_keys):
            keys[start:end] = states.setdefault(trajectory.state_keys[number], len(states))
    return turns, rewards, keys


def _or_none(images: Sequence[Images | None]) -> list[Images | None] | None:
    return list(images) if any(image is not None for image in images) else None


def _shared_images(members: Sequence[tuple[int, Trajectory]]) -> list[Images | None] | None:
    """Returns the images of `(group, trajectory)` pairs, equal ones of a group as one object."""
    known: dict[tuple[int, bytes], Images | None] = {}
    return _or_none([
        known.setdefault((number, digest(trajectory.images)), trajectory.images) for number, trajectory in members
    ])  # fmt: skip
