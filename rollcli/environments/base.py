"""What an environment is: reset, step, close. One instance plays one episode.

One that has to lead, with several players, several chats or an agent of its own, has `play` in place of reset and step.
"""

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


@dataclass(frozen=True)
class Reply:
    """What the model said.

    Attributes:
        text: special tokens left out.
        stop_reason: `stop`: the model ended its turn; `length`: it was cut.
        tokens: number of sampled tokens.
        prompt_tokens: number of tokens before them.
    """

    text: str
    stop_reason: str
    tokens: int
    prompt_tokens: int = 0


class Model(Protocol):
    """The model as an environment with `play` is given it. It may be asked from any thread, and at any one time for
    several answers at once."""

    async def __call__(
        self, messages: list[Message], agent: str = "", *, trained: bool = True, max_tokens: int | None = None,
        stop: tuple[str, ...] = (), tools: list[dict[str, Any]] | None = None,
    ) -> Reply:  # fmt: skip
        """Answers a chat.

        A chat that goes on from an earlier one of the same agent, the model's words in it unchanged and with the same
        tools, continues its tokens; any other begins a trajectory of its own. All trajectories of an agent share its
        reward.

        Args:
            messages: the whole chat, which the model is to answer.
            agent: whose turn it is. Trajectories are compared with those of the same agent in the group's other
                episodes.
            trained: False makes the chat no part of the update.
            max_tokens: most tokens of this answer; None is what is left of the recipe's budget, which each agent has.
            stop: texts that end this answer, which keeps them.
            tools: descriptions of functions as JSON schemas, which the chat template shows to the model.

        Raises:
            OutOfTokens: the agent's budget is spent, or the chat has no room in the context. Not caught, it ends the
                episode as cut.
            EpisodeError: the chat template refuses the chat, or has no place for tools.
        """


class Environment(Protocol):
    """One episode's world. A class is a dataclass whose fields are the options a recipe may set.

    An exception raised in any method fails the episode, is recorded on its trajectory, and the run goes on. A method
    `state_key() -> str` is optional: the identity of the state that the next turn is taken in, for algorithms that
    compare turns from equal states; without it that is the text of the last observation. A class that says
    `blocking = True` has its methods called in threads, and may write them as plain functions.

    A class with `play(task, model)` has neither `reset` nor `step`: it asks the `Model` as often as it likes, and
    returns one StepResult for all agents or, by name, one for each.
    """

    async def reset(self, task: Task) -> list[Message]:
        """Returns the chat that opens the episode; everything random comes from `task.seed`."""

    async def step(self, response: str) -> StepResult:
        """Takes the model's turn as text."""

    async def close(self) -> None:
        """Releases what the episode holds."""
