"""Sokoban: push every box onto a target."""

from __future__ import annotations

from dataclasses import dataclass

from rollcli.data.carriers import Task
from rollcli.data.games import sokoban
from rollcli.environments.grid import GridGame


@dataclass
class Sokoban(GridGame):
    """The level of the task (source `sokoban`)."""

    box_reward: float = 0.0
    """Reward of a box pushed onto a target, and its loss for one pushed off."""

    def start(self, task: Task) -> None:
        """Sets the level up.

        Raises:
            DatasetNotFound: the payload's level is none.
        """
        self._level = sokoban.parse(task.payload["level"])
        self._words = task.payload.get("words", sokoban.STANDARD)

    def move(self, letter: str) -> tuple[float, str]:
        """Walks or pushes; what is blocked changes nothing."""
        before = len(self._level.boxes & self._level.targets)
        self._level = self._level.moved(letter)
        gained = len(self._level.boxes & self._level.targets) - before
        return self.box_reward * gained, "solved" if self._level.is_solved else ""

    def render(self) -> str:
        """Returns the position as text."""
        return self._level.render(self._words)
