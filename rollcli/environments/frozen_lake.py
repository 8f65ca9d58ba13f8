"""FrozenLake, played by gymnasium: cross the ice to the goal, around the holes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollcli.data.carriers import Task
from rollcli.data.games import frozen_lake
from rollcli.data.games.moves import MOVES
from rollcli.environments.grid import GridGame
from rollcli.environments.gym import import_gymnasium


@dataclass
class FrozenLake(GridGame):
    """gymnasium's `FrozenLake-v1` on the map of the task (source `frozen_lake`).

    How the player slips depends on the task's seed and the moves, so the episodes of a group slip alike.
    """

    def start(self, task: Task) -> None:
        """Makes gymnasium's environment.

        Raises:
            PluginError: `gymnasium` is not installed.
            DatasetNotFound: the payload's map is none.
        """
        self._rows = frozen_lake.parse(task.payload["map"])
        self._words = task.payload.get("words", "FHGP")
        self._game: Any = import_gymnasium().make(
            "FrozenLake-v1",
            desc=list(self._rows),
            is_slippery=task.payload.get("is_slippery", False),
            max_episode_steps=self.max_turns * self.moves_per_turn + 1,
        )
        self._at = int(self._game.reset(seed=task.seed)[0])

    def move(self, letter: str) -> tuple[float, str]:
        """Takes one step on the ice."""
        at, reward, is_over, _, _ = self._game.step(list(MOVES).index(letter))
        self._at = int(at)
        return 0.0, ("solved" if reward > 0 else "lost") if is_over else ""

    def render(self) -> str:
        """Returns the map with the player on it."""
        return frozen_lake.render(self._rows, self._at, self._words)

    async def close(self) -> None:
        """Closes gymnasium's environment."""
        if hasattr(self, "_game"):
            self._game.close()
