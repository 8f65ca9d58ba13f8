"""Maps of FrozenLake, each with a way to the goal, and games of the best policy on them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from rollcli.config.schema import Problems
from rollcli.data.games import frozen_lake
from rollcli.data.games.moves import MOVES
from rollcli.data.sources.games import GameSource, Trace


@dataclass
class FrozenLakeSource(GameSource):
    """Maps as gymnasium's `generate_random_map` draws them, from a seed of their own."""

    prompt: str = (
        "Cross the frozen lake from P to G. F is ice, H a hole that ends the game. "
        "Each turn, write one move: left, down, right or up.\n{state}"
    )
    """The opening message; `{state}` is the grid. Say in it what other `words` mean."""
    size: int = 4
    """Rows and columns of a map."""
    frozen_share: float = 0.8
    """Probability that a field is ice."""
    is_slippery: bool = False
    """A third of the moves each go where they should, or to either side of it."""
    words: str = "FHGP"
    """Characters of ice, hole, goal and player."""

    def problems(self) -> Problems:
        yield from super().problems()
        if not 2 <= self.size <= 32:
            yield "size", f"must be from 2 to 32, is {self.size}"
        if not 0.3 <= self.frozen_share < 1:
            yield "frozen_share", f"must be in [0.3, 1): maps with a way are rare below, is {self.frozen_share}"
        if len(self.words) != 4 or len(set(self.words)) != 4 or self.words.split() != [self.words]:
            yield "words", f"must be four different characters, none a space, is `{self.words}`"

    def level(self, random: random.Random) -> tuple[str, ...]:
        """Returns a map."""
        return frozen_lake.generate(self.size, self.frozen_share, random.getrandbits(32))

    def payload(self, level: tuple[str, ...]) -> dict[str, Any]:
        """Returns the map as `map`, whether it is slippery, and its characters."""
        return {"map": "\n".join(level), "is_slippery": self.is_slippery, "words": self.words}

    def show(self, level: tuple[str, ...]) -> str:
        """Returns the map with the player at its start."""
        return frozen_lake.render(level, "".join(level).index("S"), self.words)

    def play(self, level: tuple[str, ...], random: random.Random) -> Trace:
        """Yields turns until the game is over."""
        fields = "".join(level)
        at = fields.index("S")
        best = frozen_lake.policy(level, self.is_slippery)
        for _ in range(self.demonstrated_turns):
            said = self.say(random, best[at])
            yield frozen_lake.render(level, at, self.words), said
            slip = random.choice((-1, 0, 1)) if self.is_slippery else 0
            at = frozen_lake.neighbor(level, at, (list(MOVES).index(said) + slip) % 4)
            if fields[at] in "GH":
                return
