"""One episode, from the opened chat to a scored trajectory.

Whatever goes wrong in it — an environment that raises, a prompt that is too long, a reward that hangs — becomes a
trajectory with `error` set; only the death of a worker is the caller's business.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Message, Task, Trajectory
from rollcli.data.stream import derive_seed
from rollcli.data.templates import ChatFormat
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.environments.base import Environment, StepResult
from rollcli.errors import EpisodeError, RewardError, WorkerDied
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure
from rollcli.rollout.recorder import TrajectoryRecorder
from rollcli.rollout.states import Census, State

Scores = list[RewardResult | RewardFailure]


@dataclass(frozen=True)
class EpisodeContext:
    """What an episode needs of its worker."""

    config: TaskConfig
    format: ChatFormat
    sampling: SamplingParams
    max_prompt_tokens: int
    timeout_s: float
    generate: Callable[[GenerateRequest], Awaitable[Completion]]
    score: Callable[[TaskConfig, dict[str, Any]], Awaitable[Scores]]
    census: Census


class Episode:
    """One sample of one task. Its random draws depend on the task's seed and the sample's number alone."""

    def __init__(self, task: Task, sample: int, context: EpisodeContext) -> None:
        self.task = task
        self.sample = sample
        self.context = context
        self.recorder = TrajectoryRecorder(task, sample)
        self.state = State.WAITING
        self.responses: list[str] = []
        self.turn_rewards: list[float] = []
        context.census.admit()

    async def run(self) -> Trajectory:
        """Plays the episode within its time limit and returns its trajectory; raises only `WorkerDied`."""
        try:
            async with asyncio.timeout(self.context.timeout_s):
                trajectory = await self._play()
        except TimeoutError:
            trajectory = self._failed("timeout", f"episode took longer than {self.context.timeout_s:g} s")
        except (WorkerDied, asyncio.CancelledError):
            self._enter(State.ABORTED)
            raise
        except _Failure as failure:
            trajectory = self._failed(failure.kind, failure.message)
        self._enter(State.DONE if trajectory.usable else State.FAILED)
        return trajectory

    async def _play(self) -> Trajectory:
        """Takes turns until the environment, the model's budget, or the context ends the episode."""
        environment: Environment = dataclasses.replace(self.context.config.environment)
        try:
            messages = await self._act(environment.reset(self.task))
            self.recorder.observe(self._prompt(messages))
            while True:
                completion = await self._generate()
                response = self.context.format.text(completion.tokens)
                self.responses.append(response)
                result: StepResult = await self._act(environment.step(response))
                self.turn_rewards.append(result.reward)
                budget_left = self.recorder.sampled_length < self.context.sampling.max_tokens
                if result.done or completion.stop_reason != "stop" or not budget_left:
                    break
                self.recorder.observe(self.context.format.between(messages, result.messages))
                messages = [*messages, {"role": "assistant", "content": response}, *result.messages]
        finally:
            await environment.close()
        return await self._score(completion.stop_reason or "", messages, result)

    async def _act(self, call: Awaitable[Any]) -> Any:
        """Waits for the environment; what it raises is this episode's failure."""
        self._enter(State.ACTING)
        try:
            return await call
        except (TimeoutError, asyncio.CancelledError):
            raise
        # The border of an environment call: user code may raise anything, and a bad rollout is data.
        except Exception as error:
            raise _Failure("environment", f"{type(error).__name__}: {error}") from error

    def _prompt(self, messages: list[Message]) -> np.ndarray:
        ids = self.context.format.prompt(messages)
        if len(ids) > self.context.max_prompt_tokens:
            raise _Failure(
                "prompt_too_long", f"prompt has {len(ids)} tokens, {self.context.max_prompt_tokens} are allowed"
            )
        return ids

    async def _generate(self) -> Completion:
        """Samples one turn from everything so far."""
        self._enter(State.GENERATING)
        turn = len(self.recorder.turns)
        budget = self.context.sampling.max_tokens - self.recorder.sampled_length
        request = GenerateRequest(
            id=f"{self.task.id}/{self.sample}/{turn}",
            prompt=self.recorder.tokens,
            seed=derive_seed(self.task.seed, self.sample, turn),
            sampling=dataclasses.replace(
                self.context.sampling, max_tokens=budget, stop_token_ids=self.context.format.stop_token_ids
            ),
        )
        completion = await self.context.generate(request)
        if completion.stop_reason == "error":
            raise _Failure("engine", completion.error or "the engine gave no reason")
        self.recorder.take(completion)
        return completion

    async def _score(self, stop_reason: str, messages: list[Message], last: StepResult) -> Trajectory:
        """Adds rewards; the first reward function decides accuracy."""
        self._enter(State.SCORING)
        prompt = "\n".join(message["content"] for message in messages if message["role"] != "assistant")
        trajectory = self.recorder.trajectory(stop_reason, prompt, "\n".join(self.responses))
        trajectory.turn_rewards = self.turn_rewards
        trajectory.metrics = dict(last.metrics)
        fields = {
            **self.task.payload, **last.fields,
            "prompt": prompt, "response": self.responses[-1], "messages": messages,
        }  # fmt: skip
        scores = await self.context.score(self.context.config, fields)
        apply_scores(trajectory, self.context.config, scores)
        return trajectory

    def _failed(self, kind: str, message: str) -> Trajectory:
        trajectory = self.recorder.trajectory("error", "", "\n".join(self.responses))
        trajectory.error, trajectory.error_kind = message, kind
        return trajectory

    def _enter(self, state: State) -> None:
        self.context.census.move(self.state, state)
        self.state = state


class _Failure(EpisodeError):
    """Why an episode failed; `kind` is the word it is counted under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def apply_scores(trajectory: Trajectory, config: TaskConfig, scores: Scores) -> None:
    """Writes a task's scores onto a trajectory: by component, the weighted total, and accuracy.

    A failed reward follows the recipe: `drop` fails the trajectory, `zero` scores 0, `fail` raises.

    Raises:
        RewardError: a reward with `on_error: fail` failed.
    """
    total = float(sum(trajectory.turn_rewards))
    for place, (reward, score) in enumerate(zip(config.rewards, scores, strict=True)):
        if isinstance(score, RewardFailure):
            trajectory.metrics[f"reward_failed/{reward.name}"] = 1.0
            if reward.on_error == "fail":
                raise RewardError(score.message, hint="`on_error: drop` or `zero` lets the run go on")
            if reward.on_error == "drop":
                trajectory.error, trajectory.error_kind = score.message, score.kind
            score = RewardResult(0.0)
        trajectory.rewards[reward.name] = score.score
        trajectory.metrics |= score.metrics
        total += reward.weight * score.score
        if place == 0:
            trajectory.accuracy = score.score if score.accuracy is None else score.accuracy
    trajectory.reward = total
