"""The endless, shuffled, mixed sequence of tasks a run draws from; its whole state is one integer per task.

Draw `n` of a task is a pure function of (seed, task name, n): no item is skipped or repeated within an epoch, and a
resume restores the counts in O(1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Task
from rollcli.data.sources.base import Items, Split
from rollcli.errors import CheckpointError

ROUNDING = 1e-9
"""Room for rounding where shares are compared."""


def derive_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed that depends on every part and on nothing else (not on the process or the platform)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


class TaskSequence:
    """All draws of one task of the recipe."""

    def __init__(self, config: TaskConfig, split: Split, seed: int) -> None:
        self.config = config
        self.name = config.name
        self.seed = derive_seed(seed, config.name)
        self.split = split
        # Endless sources are drawn with a seed of their own; data sets are shuffled here.
        self.items: Items = config.source.open(split, self.seed)

    def __getitem__(self, index: int) -> Task:
        """Returns draw `index`; a data set starts a new shuffled epoch when it is used up."""
        size = self.items.size
        row = index
        if size is not None:
            epoch, place = divmod(index, size)
            row = int(_permutation(self.seed, epoch, size)[place]) if self.split == "train" else place
        problem = self.items[row]
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return Task(
            name=self.name,
            index=index,
            messages=[*system, *problem.messages],
            payload=problem.payload,
            seed=derive_seed(self.seed, self.split, index),
            split=self.split,
        )


class TaskStream:
    """Mixes the sequences of all tasks: after any number of draws each task's share is exact to one item.

    With n tasks no count is further than 1 - 1/(2n-2) from its share (Tijdeman, "The chairman assignment problem",
    Discrete Mathematics 32, 1980); taking the task furthest behind its share would not keep within 1.
    """

    def __init__(self, tasks: Sequence[TaskConfig], seed: int, split: Split = "train") -> None:
        self.sequences = [TaskSequence(task, split, seed) for task in tasks]
        weights = np.array([task.weight for task in tasks], dtype=np.float64)
        self.shares = weights / weights.sum()
        self.counts = [0] * len(self.sequences)

    def draw(self) -> Task:
        """Returns the next task and moves the cursor: of the tasks behind their share, the one due first is next."""
        behind = self.shares * (sum(self.counts) + 1) - np.array(self.counts)
        slack = 1 / max(2 * len(self.counts) - 2, 1)
        due = np.where(behind >= slack - ROUNDING, (1 - slack - behind) / self.shares, np.inf)
        chosen = int(np.argmin(due))
        task = self.sequences[chosen][self.counts[chosen]]
        self.counts[chosen] += 1
        return task

    def state(self) -> dict[str, object]:
        """Returns the cursor: draws made and content fingerprint of each task."""
        return {
            sequence.name: {"drawn": count, "fingerprint": sequence.items.fingerprint}
            for sequence, count in zip(self.sequences, self.counts, strict=True)
        }

    def restore(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Moves the cursor to a saved one; a refused one leaves it where it is.

        Raises:
            CheckpointError: the tasks or their content are not those of the checkpoint.
        """
        hint = "restore the data, or start a new run from the weights with `model.path=RUN@STEP`"
        gone = sorted(state.keys() - {sequence.name for sequence in self.sequences})
        if gone:
            raise CheckpointError(f"the checkpoint has a task `{gone[0]}` that the recipe does not have", hint=hint)
        for sequence in self.sequences:
            saved = state.get(sequence.name)
            if saved is None or saved["fingerprint"] != sequence.items.fingerprint:
                was = saved["fingerprint"] if saved else "absent"
                raise CheckpointError(
                    f"task `{sequence.name}` has other data than the checkpoint: "
                    f"was {was}, is {sequence.items.fingerprint}",
                    hint=hint,
                )
        self.counts = [int(state[sequence.name]["drawn"]) for sequence in self.sequences]
