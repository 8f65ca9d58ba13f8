"""Sokoban levels, generated or Boxoban's, and games of the solver on them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollcli.config.schema import Problems, positive
from rollcli.data.games import sokoban
from rollcli.data.games.sokoban import Level
from rollcli.data.games.sokoban_solver import solve
from rollcli.data.sources.base import Split
from rollcli.data.sources.games import GameItems, GameSource, Trace

_read = lru_cache(maxsize=8)(sokoban.read_boxoban)


@dataclass
class SokobanSource(GameSource):
    """Levels from the generator, each solvable, or drawn from a file of Boxoban levels."""

    prompt: str = (
        "Push every box $ onto a target . (then *). You are @, on a target +; # is wall. "
        "Each turn, write one move: left, down, right or up.\n{state}"
    )
    """The opening message; `{state}` is the grid. Say in it what other `words` mean."""
    path: str | None = None
    """File of Boxoban levels to draw from; null generates them."""
    height: int = 6
    """Rows of a generated level, border included."""
    width: int = 6
    """Columns of a generated level, border included."""
    boxes: int = 1
    """Boxes of a generated level."""
    wall_share: float = 0.1
    """Probability that an inner cell of a generated level is a wall."""
    pulls: int = 10
    """Most pulls of the reverse play that makes a level: more are harder levels."""
    words: str = sokoban.STANDARD
    """Characters of wall, floor, target, box, box on a target, player, player on a target."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield from positive(self, "boxes", "pulls")
        for name in ("height", "width"):
            if not 3 <= getattr(self, name) <= 50:
                yield name, f"must be from 3 to 50, border included, is {getattr(self, name)}"
        inner = (self.height - 2) * (self.width - 2)
        if max(self.height, self.width) < 5 or inner < 2 * self.boxes + 1:
            room = f"{self.height} × {self.width} leaves {inner} cells inside the border"
            yield "boxes", f"{room}: too few to push {self.boxes} boxes onto as many targets"
        if not 0 <= self.wall_share <= 0.5:
            yield "wall_share", f"must be in [0, 0.5], is {self.wall_share}"
        if len(self.words) != 7 or len(set(self.words)) != 7 or "\n" in self.words:
            yield "words", f"must be seven different characters, is `{self.words}`"

    def open(self, split: Split, seed: int) -> GameItems:
        """Returns the levels of a split.

        Raises:
            DatasetNotFound: the level file is not there or broken, or no level fits the sizes.
        """
        self.level(random.Random(seed))
        return super().open(split, seed)

    def level(self, random: random.Random) -> Level:
        """Returns a level."""
        if self.path is not None:
            return random.choice(_read(self.path))
        return sokoban.generate(self.height, self.width, self.boxes, self.wall_share, self.pulls, random)

    def payload(self, level: Level) -> dict[str, Any]:
        """Returns the level as `level` and its characters."""
        return {"level": level.render(), "words": self.words}

    def show(self, level: Level) -> str:
        """Returns the level as text."""
        return level.render(self.words)

    def play(self, level: Level, random: random.Random) -> Trace:
        """Yields turns until the level is solved, or a random move has made it unsolvable."""
        plan = solve(level)
        for _ in range(self.demonstrated_turns):
            if not plan:
                return
            said = self.say(random, plan[0])
            yield level.render(self.words), said
            level = level.moved(said)
            plan = plan[1:] if said == plan[0] else solve(level)
