"""A problem with a verifiable answer: the environment whose first step ends the episode."""

from __future__ import annotations

from dataclasses import dataclass

from rollcli.data.carriers import Message, Task
from rollcli.environments.base import StepResult


@dataclass
class SingleTurn:
    """Shows the problem, takes one answer; the task's reward functions score it."""

    async def reset(self, task: Task) -> list[Message]:
        """Returns the problem."""
        return task.messages

    async def step(self, response: str) -> StepResult:
        """Ends the episode."""
        return StepResult(done=True)

    async def close(self) -> None:
        """Holds nothing."""
