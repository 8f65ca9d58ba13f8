"""What an environment is: reset, step, close. One instance plays one episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from rollcli.data.carriers import Message, Task


@dataclass
class StepResult:
    """What the environment answers to one turn of the model.

    Attributes:
        messages: what the model sees next; empty when the episode is over.
        done: True ends the episode.
        reward: reward of this turn, added to the episode's total.
        fields: what reward functions may ask for by name, beside the task's payload.
        metrics: numbers worth averaging.
    """

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's world. A class is a dataclass whose fields are the options a recipe may set.

    An exception raised in any method fails the episode, is recorded on its trajectory, and the run goes on. A method
    `state_key() -> str` is optional: the identity of the state that the next turn is taken in, for algorithms that
    compare turns from equal states; without it that is the text of the last observation. A class that says
    `blocking = True` has its methods called in threads, and may write them as plain functions.
    """

    async def reset(self, task: Task) -> list[Message]:
        """Returns the chat that opens the episode; everything random comes from `task.seed`."""

    async def step(self, response: str) -> StepResult:
        """Takes the model's turn as text."""

    async def close(self) -> None:
        """Releases what the episode holds."""
