"""One chat of an episode, as it becomes a trajectory: opened once, sampled turn by turn, grown by what is observed.

Most episodes hold one. Where the environment plays by itself (`play`) there may be several: one for each player, and a
new one whenever an agent rewrites what was said before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Message, Task, Trajectory
from rollcli.data.images import identity, text_of
from rollcli.data.stream import derive_seed
from rollcli.data.templates import ChatFormat
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.environments.base import Reply
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure
from rollcli.rollout.border import EpisodeFailure, environment_border
from rollcli.rollout.recorder import TrajectoryRecorder
from rollcli.rollout.states import Census

Scores = list[RewardResult | RewardFailure]


@dataclass(frozen=True)
class EpisodeContext:
    """What an episode needs of its worker."""

    config: TaskConfig
    format: ChatFormat
    sampling: SamplingParams
    max_prompt_tokens: int
    max_context: int
    timeout_s: float
    generate: Callable[[GenerateRequest], Awaitable[Completion]]
    score: Callable[[TaskConfig, dict[str, Any]], Awaitable[Scores]]
    census: Census


class Conversation:
    """A chat, the tokens it is made of, and what its turns earned.

    Args:
        task: the episode's task.
        sample: the episode's number in its group.
        context: what the episode needs of its worker.
        agent: whose turns the model takes here; empty where there is only one.
        number: of this agent's conversations of this episode.
        trained: False for turns that are no part of an update: a simulated user, an opponent.
        tools: functions that the template tells the model of.

    Attributes:
        messages: the chat up to the model's last turn, which answers them.
        stop_reason: why the last turn ended.
        over: nothing can follow the last turn.
        busy: a turn is being sampled.
    """

    def __init__(
        self, task: Task, sample: int, context: EpisodeContext, agent: str = "", number: int = 0, trained: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.context = context
        self.agent = agent
        self.trained = trained
        self.tools = list(tools or [])
        with environment_border():
            self._format = context.format.with_tools(self.tools) if self.tools else context.format
        self.recorder = TrajectoryRecorder(task, sample)
        self.messages: list[Message] = []
        self.responses: list[str] = []
        self.state_keys: list[str] = []
        self.turn_rewards: list[float] = []
        self.stop_reason = ""
        self.over = False
        self.busy = False
        self._said_at: list[int] = []
        self._task = task
        # Of the only conversation of an episode nothing but the sample's number: its draws are what they always were.
        self._place: tuple[int | str, ...] = (sample,) if not agent and not number else (sample, agent, number)

    @property
    def history(self) -> list[Message]:
        """The chat with the model's last turn."""
        answered = bool(self._said_at) and self._said_at[-1] == len(self.messages)
        return [*self.messages, *([{"role": "assistant", "content": self.responses[-1]}] if answered else [])]

    def open(self, messages: list[Message]) -> None:
        """Begins with a chat that the model is to answer.

        Raises:
            EpisodeFailure: the template refuses it, or it is too long.
        """
        with environment_border():
            images = self._format.images(messages)
            ids = self._format.prompt(messages, images)
        room = self.context.max_context - self.context.sampling.max_tokens
        allowed = min(self.context.max_prompt_tokens, room)
        if len(ids) > allowed:
            raise EpisodeFailure("prompt_too_long", f"prompt has {len(ids)} tokens, {allowed} are allowed")
        self.messages = messages
        self.recorder.observe(ids, images)

    def extend(self, observed: list[Message]) -> bool:
        """Goes on with what the model sees next; False where the context has no room for it and an answer.

        Raises:
            EpisodeFailure: the template refuses it.
        """
        with environment_border():
            images, ended = self._format.images(observed), self.recorder.ends_with(self._format.stop_token_ids)
            ids = self._format.between(self.messages, observed, images, ended)
            messages = [*self.history, *observed]
        if self.recorder.length + len(ids) >= self.context.max_context:
            self.stop_reason, self.over = "length", True
            return False
        self.messages = messages
        self.recorder.observe(ids, images)
        return True

    async def turn(self, budget: int, state_key: str | None = None, stop: tuple[str, ...] = ()) -> Reply:
        """Samples one turn of at most `budget` tokens from everything so far.

        Args:
            budget: most tokens of the turn.
            state_key: identity of the state it is taken in; None is the last message's.
            stop: texts that end it, beside the recipe's.

        Raises:
            EpisodeFailure: the engine failed.
        """
        if state_key is None:
            with environment_border():
                state_key = identity(self.messages[-1])
        before = self.recorder.length
        self.busy = True
        completion = await self.context.generate(self._request(budget, stop))
        self.busy = False
        if completion.stop_reason == "error":
            raise EpisodeFailure("engine", completion.error or "the engine gave no reason")
        self.recorder.take(completion)
        text = self._format.text(completion.tokens)
        self.state_keys.append(state_key)
        self.responses.append(text)
        self._said_at.append(len(self.messages))
        self.stop_reason = completion.stop_reason or ""
        # A placeholder that was sampled stands for no image: nothing can go on from there.
        stray = len(completion.tokens) and completion.tokens[-1] in self._format.forbidden
        self.over = bool(self.stop_reason != "stop" or stray)
        return Reply(text, self.stop_reason, len(completion.tokens), before)

    def _request(self, budget: int, stop: tuple[str, ...]) -> GenerateRequest:
        turn, sampling, chat = len(self.recorder.turns), self.context.sampling, self._format
        place = (*self._place, turn)
        return GenerateRequest(
            id="/".join((self._task.id, *map(str, place))),
            prompt=self.recorder.tokens,
            seed=derive_seed(self._task.seed, *place),
            sampling=dataclasses.replace(
                sampling,
                max_tokens=budget,
                min_tokens=min(sampling.min_tokens, budget),
                stop=(*sampling.stop, *stop),
                stop_token_ids=(*chat.stop_token_ids, *chat.forbidden),
            ),
            images=self.recorder.images,
        )

    def fields(self, turn: int = -1) -> dict[str, Any]:
        """Returns what rewards may ask for of the chat itself, up to a turn.

        Raises:
            EpisodeFailure: a message has no text.
        """
        messages = self.messages[: self._said_at[turn]]
        return {"prompt": _prompt(messages), "response": self.responses[turn], "messages": messages}

    def chat(self) -> list[Message]:
        """Returns the chat as people read it: its texts, with the number of the `turn` where the model said them.

        Raises:
            EpisodeFailure: a message has no text.
        """
        turns = {place: number for number, place in enumerate(self._said_at)}
        with environment_border():
            return [
                {
                    **{key: message[key] for key in ("role", "tool_calls") if key in message},
                    "content": text_of(message),
                    **({"turn": turns[place]} if place in turns else {}),
                }
                for place, message in enumerate(self.history)
            ]

    def trajectory(self) -> Trajectory:
        """Returns the trajectory, not scored yet.

        Raises:
            EpisodeFailure: a message has no text.
        """
        trajectory = self.recorder.trajectory(self.stop_reason, _prompt(self.messages), "\n".join(self.responses))
        trajectory.agent = self.agent
        trajectory.chat = self.chat()
        trajectory.turn_rewards = self.turn_rewards
        trajectory.state_keys = self.state_keys
        trajectory.budget = self.context.sampling.max_tokens
        return trajectory


def _prompt(messages: Sequence[Message]) -> str:
    with environment_border():
        return "\n".join(text_of(message) for message in messages if message["role"] != "assistant")
