"""What sources of generated games share: levels by seed, train and test apart, and noisy demonstrations by turns."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollcli.config.schema import Problems, in_unit_interval, positive
from rollcli.data.carriers import Message
from rollcli.data.sources.base import Problem, Split, unit_hash
from rollcli.errors import DatasetNotFound

_DRAWS = 1024
"""Levels tried for one problem; a share of 1 % held out leaves a chance of 3e-5 that none is."""

Trace = Iterator[tuple[str, str]]
"""Turns of a played game: what the player sees, and what it says."""


@dataclass
class GameSource:
    """Endless levels. Which split a level belongs to is decided by a hash of it, so none is ever in both."""

    prompt: str = "{state}"
    """The opening message; `{state}` is the grid."""
    held_out_share: float = 0.1
    """Share of all levels that belong to the test split."""
    demonstrate: bool = False
    """Each problem is a turn of a played game, with the turns before it as its chat, for supervised fine-tuning."""
    expert_share: float = 0.8
    """Share of demonstrated turns that the solver takes; the rest are random, and so lead off its way."""
    demonstrated_turns: int = 20
    """Most turns of a demonstrated game."""
    whole_games: bool = False
    """Each demonstration ends with its game's last turn, and not with any: for `loss_on: turns`."""

    def problems(self) -> Problems:
        if not 0 < self.held_out_share < 1:
            yield "held_out_share", f"must be between 0 and 1, is {self.held_out_share}"
        yield from in_unit_interval(self, "expert_share")
        yield from positive(self, "demonstrated_turns")
        if "{state}" not in self.prompt:
            yield "prompt", "must show the game: write `{state}` where the grid stands"

    def open(self, split: Split, seed: int) -> GameItems:
        """Returns the endless levels of a split."""
        return GameItems(self, split, seed)

    def level(self, random: random.Random) -> Any:
        """Returns a level."""
        raise NotImplementedError

    def payload(self, level: Any) -> dict[str, Any]:
        """Returns what the environment needs; `success` says 0 until an episode says otherwise."""
        raise NotImplementedError

    def show(self, level: Any) -> str:
        """Returns a level's grid as the player first sees it."""
        raise NotImplementedError

    def play(self, level: Any, random: random.Random) -> Trace:
        """Yields the turns of a demonstrated game."""
        raise NotImplementedError

    def say(self, random: random.Random, best: str) -> str:
        """Returns the move of a demonstrated turn: the solver's, or a random one."""
        return best if random.random() < self.expert_share else random.choice("LDRU")


class GameItems:
    """Problem `n` is a pure function of (options, split, seed, n)."""

    size = None

    def __init__(self, source: GameSource, split: Split, seed: int) -> None:
        self.source = source
        self.split = split
        self.seed = seed
        self.fingerprint = f"{type(source).__name__}:" + hashlib.sha256(repr(source).encode()).hexdigest()[:12]

    def __getitem__(self, index: int) -> Problem:
        """Returns a level, or a turn of a demonstrated game on it.

        Raises:
            DatasetNotFound: none of the levels drawn belongs to the split.
        """
        for draw in range(_DRAWS):
            rng = random.Random(f"{self.seed}/{index}/{draw}")
            level = self.source.level(rng)
            text = self.source.show(level)
            if (unit_hash(text) < self.source.held_out_share) == (self.split == "test"):
                return self._problem(level, text, rng)
        raise DatasetNotFound(
            f"{_DRAWS} levels were drawn, and none belongs to the {self.split} split",
            hint="there are too few different ones: make them larger, or change `held_out_share`",
        )

    def _problem(self, level: Any, text: str, rng: random.Random) -> Problem:
        opening = self.source.prompt.replace("{state}", text)
        payload = {"success": 0.0, **self.source.payload(level)}
        if not self.source.demonstrate:
            return Problem([{"role": "user", "content": opening}], payload)
        turns = list(self.source.play(level, rng))
        turn = len(turns) - 1 if self.source.whole_games else rng.randrange(len(turns))
        chat: list[Message] = []
        for number, (seen, said) in enumerate(turns[: turn + 1]):
            chat += [{"role": "user", "content": seen if number else opening}, {"role": "assistant", "content": said}]
        return Problem(chat[:-1], {**payload, "response": turns[turn][1]})
