"""Endless procedural problems from the `reasoning-gym` package, with train and test disjoint by content."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollcli.data.sources.base import Problem, Split, check_template, unit_hash
from rollcli.errors import DatasetNotFound
from rollcli.suggest import did_you_mean

_ENDLESS = 2**62
_PREPARED = {"acre": 4_999, "gsm_symbolic": 999_983, "list_functions": 999_983, "word_ladder": 19_997}
"""Data sets that prepare or bound all their items at once, and how many they are asked for: they start over after so
many problems. The numbers are primes, so that the reserved draws of successive indices reach every item."""
_SEEDS = 2**31
"""Seeds the package takes in every data set; some of them add the item's number and must stay below 2**32."""
_DRAWS = 64
"""Draws reserved for one index: the chance that none of them falls into the wanted split is below 1e-2 at worst."""

_GLOBAL_RANDOM = threading.Lock()


@dataclass
class ReasoningGymSource:
    """Problems of one `reasoning-gym` data set.

    Whether a problem is held out is decided by a hash of its text, so no problem is ever in both splits, whatever the
    seeds; problem `n` of a split is the first of its reserved draws that belongs to the split.
    """

    dataset: str
    """Name of the data set, as `reasoning_gym` knows it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the data set."""
    prompt: str = "{question}"
    """The problem's text; `{question}`, `{answer}` and the item's metadata may stand in it."""
    held_out_share: float = 0.1
    """Share of all problems that belong to the test split."""

    def problems(self) -> Any:
        """Yields what makes no sense."""
        if not 0 < self.held_out_share < 1:
            yield "held_out_share", f"must be between 0 and 1, is {self.held_out_share}"

    def open(self, split: Split, seed: int) -> ReasoningGymItems:
        """Returns the endless problems of a split."""
        return ReasoningGymItems(self, split, seed)

    def payload(self, entry: dict[str, Any], index: int) -> dict[str, Any]:
        """Returns what rewards may ask for; a source that also demonstrates adds `response`."""
        scored = {"dataset": self.dataset, "options": self.options, "entry": entry}
        return {"answer": str(entry["answer"]), "question": entry["question"], **scored}


class ReasoningGymItems:
    """Problem `n` is a pure function of (options, split, seed, n)."""

    size = None

    def __init__(self, source: ReasoningGymSource, split: Split, seed: int) -> None:
        self.source = source
        self.split = split
        self.count = _PREPARED.get(source.dataset, _ENDLESS)
        self.entries = create(source.dataset, source.options, seed=seed % _SEEDS, size=self.count)
        identity = json.dumps([source.dataset, source.options, source.prompt, source.held_out_share], sort_keys=True)
        self.fingerprint = "reasoning_gym:" + hashlib.sha256(identity.encode()).hexdigest()[:12]
        check_template(source.prompt, _columns(self._entry(0)), "prompt")

    def __getitem__(self, index: int) -> Problem:
        for draw in range(_DRAWS * 16):
            entry = self._entry((index * _DRAWS + draw % _DRAWS + (draw // _DRAWS) * 2**40) % self.count)
            text = self.source.prompt.format(**_columns(entry))
            if (unit_hash(text) < self.source.held_out_share) == (self.split == "test"):
                return Problem([{"role": "user", "content": text}], self.source.payload(entry, index))
        raise DatasetNotFound(
            f"`{self.source.dataset}` has no {self.split} problem near index {index}",
            hint="it has too few different problems; widen its options or change `held_out_share`",
        )

    def _entry(self, number: int) -> dict[str, Any]:
        """Returns the package's item; a few data sets draw from global generators, which are set for them."""
        with _GLOBAL_RANDOM:
            states = random.getstate(), np.random.get_state()
            random.seed(number)
            np.random.seed(number % 2**32)
            try:
                return self.entries[number]
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])


def create(name: str, options: Mapping[str, Any], **fixed: Any) -> Any:
    """Returns a data set of the package.

    Args:
        name: as `reasoning_gym` knows it.
        options: those of a recipe; the `datasets` of `composite` are blocks of `name`, `weight` and `config`.
        fixed: options that are no recipe's: `seed` and `size`.

    Raises:
        DatasetNotFound: there is none of that name, or it does not take these options.
    """
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        meant = did_you_mean(name, DATASETS)
        raise DatasetNotFound(
            f"`reasoning_gym` has no data set `{name}`" + (f" (did you mean `{meant}`?)" if meant else ""),
            hint=f"it has {len(DATASETS)}; see its gallery",
        )
    try:
        if name == "composite":
            parts = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in options.get("datasets", ())]
            options = {**options, "datasets": parts}
        return reasoning_gym.create_dataset(name, **options, **fixed)
    except (TypeError, ValueError, AssertionError) as error:
        raise DatasetNotFound(f"`{name}` does not take these options: {error}", hint=f"given: {options}") from error


def _columns(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry.get("metadata", {}), "question": entry["question"], "answer": entry["answer"]}
