"""The endless, shuffled, mixed sequence of tasks a run draws from; its whole state is one integer per task.

Draw `n` of a task is a pure function of (seed, task name, n), and of the pass rates so far where its sampler uses them
(data/samplers.py). With the uniform sampler no item is skipped or repeated within an epoch, and a resume restores the
counts in O(1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rollcli.config.schema import TaskConfig
from rollcli.data import samplers
from rollcli.data.carriers import Task
from rollcli.data.sources.base import Items, Split
from rollcli.errors import CheckpointError, ConfigError

ROUNDING = 1e-9
"""Room for rounding where shares are compared."""


def derive_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed that depends on every part and on nothing else (not on the process or the platform)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class TaskSequence:
    """All draws of one task of the recipe.

    Raises:
        ConfigError: its sampler goes by pass rates, and its problems never come twice.
    """

    def __init__(self, config: TaskConfig, split: Split, seed: int) -> None:
        self.config = config
        self.name = config.name
        self.seed = derive_seed(seed, config.name)
        self.split = split
        # Endless sources are drawn with a seed of their own; data sets are shuffled here.
        self.items: Items = config.source.open(split, self.seed)
        self.pass_rates: samplers.PassRates | None = None
        self._wanted: tuple[Any, np.ndarray] = (None, np.zeros(0))
        if split == "train" and self.items.size is not None:
            self.pass_rates = samplers.PassRates(self.items.size)
        elif split == "train" and config.sampler != "uniform":
            raise ConfigError(
                f"task `{self.name}` has `sampler: {config.sampler}`, which goes by the pass rate of each problem, but "
                "its source makes new problems without end: none comes twice",
                hint="use `sampler: uniform`, or a source of a fixed size",
            )

    def __getitem__(self, index: int) -> Task:
        """Returns draw `index` of the uniform sampler."""
        return self.task(index, self.row(index))

    def row(self, index: int, progress: float | None = None) -> int:
        """Returns which item draw `index` is; the task's own sampler decides when told how far the run is."""
        size = self.items.size
        if size is None:
            return index
        if self.split != "train":
            return index % size
        if self.config.sampler == "uniform" or progress is None:
            return samplers.shuffled(self.seed, index, size)
        at = (self.pass_rates.learned, progress)
        if self._wanted[0] != at:
            # For all draws of a step: over a large data set the sum takes longer than a draw.
            self._wanted = at, samplers.weights(self.config.sampler, self.pass_rates.rates, progress).cumsum()
        return samplers.weighted(self.seed, index, self._wanted[1])

    def task(self, index: int, row: int) -> Task:
        """Returns the task of draw `index`, which is item `row`."""
        problem = self.items[row]
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return Task(
            name=self.name,
            index=index,
            messages=[*system, *problem.messages],
            payload=problem.payload,
            seed=derive_seed(self.seed, self.split, index),
            split=self.split,
            row=row,
        )


class TaskStream:
    """Mixes the sequences of all tasks: after any number of draws each task's share is exact to one item.

    With n tasks no count is further than 1 - 1/(2n-2) from its share (Tijdeman, "The chairman assignment problem",
    Discrete Mathematics 32, 1980); taking the task furthest behind its share would not keep within 1.
    """

    def __init__(self, tasks: Sequence[TaskConfig], seed: int, split: Split = "train") -> None:
        # A task of weight 0 is only evaluated.
        tasks = [task for task in tasks if task.weight > 0]
        self.sequences = [TaskSequence(task, split, seed) for task in tasks]
        weights = np.array([task.weight for task in tasks], dtype=np.float64)
        self.shares = weights / weights.sum()
        self.counts = [0] * len(self.sequences)

    def draw(self, progress: float = 0.0) -> Task:
        """Returns the next task and moves the cursor: of the tasks behind their share, the one due first is next.

        `progress` is the share of the run that is done, which a curriculum follows.
        """
        behind = self.shares * (sum(self.counts) + 1) - np.array(self.counts)
        slack = 1 / max(2 * len(self.counts) - 2, 1)
        due = np.where(behind >= slack - ROUNDING, (1 - slack - behind) / self.shares, np.inf)
        chosen = int(np.argmin(due))
        sequence, index = self.sequences[chosen], self.counts[chosen]
        self.counts[chosen] += 1
        return sequence.task(index, sequence.row(index, progress))

    def task(self, name: str, index: int, row: int) -> Task:
        """Returns a task that was drawn before."""
        return next(sequence for sequence in self.sequences if sequence.name == name).task(index, row)

    def learn(self, outcomes: Iterable[tuple[Task, float]]) -> None:
        """Takes in the mean accuracy of groups; the order matters, to a rounding error."""
        rates = {sequence.name: sequence.pass_rates for sequence in self.sequences}
        for task, accuracy in outcomes:
            if rates[task.name] is not None:
                rates[task.name].record(task.row, accuracy)

    def state(self) -> dict[str, Any]:
        """Returns the cursor: draws made, content fingerprint and pass rates of each task."""
        return {
            sequence.name: {
                "drawn": count,
                "fingerprint": sequence.items.fingerprint,
                "pass_rates": sequence.pass_rates.state() if sequence.pass_rates is not None else None,
            }
            for sequence, count in zip(self.sequences, self.counts, strict=True)
        }

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
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
        for sequence in self.sequences:
            if sequence.pass_rates is not None:
                sequence.pass_rates.restore(state[sequence.name]["pass_rates"])
