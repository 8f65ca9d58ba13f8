"""One episode, from the opened chat to a scored trajectory.

Whatever goes wrong in it — an environment that raises, a prompt that is too long, a reward that hangs — becomes a
trajectory with `error` set; only the death of a worker is the caller's business.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Message, Task, Trajectory
from rollcli.data.images import Images, identity, text_of
from rollcli.data.stream import derive_seed
from rollcli.data.templates import ChatFormat
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.environments.base import Environment, StepResult
from rollcli.environments.blocking import perform
from rollcli.errors import EpisodeError, ImageError, RewardError
from rollcli.rewards.base import RewardResult, to_result
from rollcli.rewards.isolation import RewardFailure
from rollcli.rollout.recorder import TrajectoryRecorder
from rollcli.rollout.states import Census, State

REWARD_FAILED = "reward_failed/"
"""Trajectory metrics that begin so count failed calls of a reward; a step shows their sum."""
Scores = list[RewardResult | RewardFailure]
CLOSE_LIMIT_S = 10.0


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


class Episode:
    """One sample of one task. Its random draws depend on the task's seed and the sample's number alone."""

    def __init__(self, task: Task, sample: int, context: EpisodeContext) -> None:
        self.task = task
        self.sample = sample
        self.context = context
        self.recorder = TrajectoryRecorder(task, sample)
        self.state = State.WAITING
        self.responses: list[str] = []
        self.state_keys: list[str] = []
        self.turn_rewards: list[float] = []
        context.census.admit()

    async def run(self) -> Trajectory:
        """Plays the episode within its time limit and returns its trajectory.

        Raises:
            WorkerDied: a replica or a reward worker ended.
            EngineError: a replica's engine failed.
            RewardError: a reward with `on_error: fail` failed.
        """
        try:
            async with asyncio.timeout(self.context.timeout_s):
                trajectory = await self._play()
        except TimeoutError:
            trajectory = self._failed("timeout", f"episode took longer than {self.context.timeout_s:g} s")
        except _Failure as failure:
            trajectory = self._failed(failure.kind, failure.message)
        except BaseException:
            self._enter(State.ABORTED)
            raise
        self._enter(State.DONE if trajectory.usable else State.FAILED)
        return trajectory

    async def _play(self) -> Trajectory:
        """Opens the environment, takes turns, closes it whatever happened, and scores."""
        with _environment_border():
            # Each episode its own: a dataclass is constructed anew, any other class copied.
            given = self.context.config.environment
            environment: Environment = dataclasses.replace(given) if is_dataclass(given) else copy.deepcopy(given)
        try:
            stop_reason, messages, last = await self._take_turns(environment)
        except BaseException:
            with suppress(_Failure):
                await self._close(environment)
            raise
        await self._close(environment)
        return await self._score(stop_reason, messages, last)

    async def _take_turns(self, environment: Environment) -> tuple[str, list[Message], StepResult]:
        """Takes turns until the environment, the model's budget, or the context ends the episode."""
        messages = await self._act(perform(environment, "reset", self.task))
        self.recorder.observe(*self._prompt(messages))
        while True:
            self.state_keys.append(self._state_key(environment, messages))
            completion = await self._generate()
            response = self.context.format.text(completion.tokens)
            self.responses.append(response)
            result = _checked(await self._act(perform(environment, "step", response)))
            self.turn_rewards.append(result.reward)
            budget_left = self.recorder.sampled_length < self.context.sampling.max_tokens
            # A placeholder that was sampled stands for no image: nothing can go on from there.
            stray = len(completion.tokens) and completion.tokens[-1] in self.context.format.forbidden
            if result.done or completion.stop_reason != "stop" or not budget_left or stray:
                return completion.stop_reason or "", messages, result
            with _environment_border():
                images = self.context.format.images(result.messages)
                observed = self.context.format.between(messages, result.messages, images)
                messages = [*messages, {"role": "assistant", "content": response}, *result.messages]
            if self.recorder.length + len(observed) >= self.context.max_context:
                return "length", messages, result
            self.recorder.observe(observed, images)

    def _state_key(self, environment: Environment, messages: list[Message]) -> str:
        """Returns the identity of the state the next turn is taken in: the environment's word, or what it last said."""
        with _environment_border():
            own = getattr(environment, "state_key", None)
            return str(own()) if own is not None else identity(messages[-1])

    async def _act(self, call: Awaitable[Any]) -> Any:
        """Waits for the environment; what it raises is this episode's failure."""
        self._enter(State.ACTING)
        with _environment_border():
            return await call

    async def _close(self, environment: Environment) -> None:
        """Closes the environment within a time limit of its own: it may be why the episode's has passed."""
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._act(perform(environment, "close"))
        except TimeoutError:
            raise _Failure("environment", f"`close` took longer than {CLOSE_LIMIT_S:g} s") from None

    def _prompt(self, messages: list[Message]) -> tuple[np.ndarray, Images | None]:
        with _environment_border():
            images = self.context.format.images(messages)
            ids = self.context.format.prompt(messages, images)
        if len(ids) > self.context.max_prompt_tokens:
            raise _Failure(
                "prompt_too_long", f"prompt has {len(ids)} tokens, {self.context.max_prompt_tokens} are allowed"
            )
        return ids, images

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
                self.context.sampling,
                max_tokens=budget,
                stop_token_ids=(*self.context.format.stop_token_ids, *self.context.format.forbidden),
            ),
            images=self.recorder.images,
        )
        completion = await self.context.generate(request)
        if completion.stop_reason == "error":
            raise _Failure("engine", completion.error or "the engine gave no reason")
        self.recorder.take(completion)
        return completion

    async def _score(self, stop_reason: str, messages: list[Message], last: StepResult) -> Trajectory:
        """Adds rewards; the first reward function decides accuracy."""
        self._enter(State.SCORING)
        with _environment_border():
            prompt = "\n".join(text_of(message) for message in messages if message["role"] != "assistant")
        trajectory = self.recorder.trajectory(stop_reason, prompt, "\n".join(self.responses))
        trajectory.turn_rewards = self.turn_rewards
        trajectory.state_keys = self.state_keys
        trajectory.budget = self.context.sampling.max_tokens
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


class _Failure(Exception):
    """Why an episode failed; `kind` is the word it is counted under. It never leaves this module."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@contextmanager
def _environment_border() -> Iterator[None]:
    """Makes whatever user code raises the failure of its episode: a bad rollout is data."""
    try:
        yield
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise
        raise _Failure("environment", "CancelledError: the environment cancelled itself") from None
    except _Failure:
        raise
    except ImageError as error:
        raise _Failure("image", error.message) from error
    except (EpisodeError, RewardError) as error:
        raise _Failure("environment", error.message) from error
    # An environment may raise anything, and its results may be anything.
    except (Exception, SystemExit) as error:
        raise _Failure("environment", f"{type(error).__name__}: {error}") from error


def _checked(result: Any) -> StepResult:
    """Returns what a step gave back with plain finite numbers, and fields that can be sent to a reward worker."""
    with _environment_border():
        if not isinstance(result, StepResult):
            raise EpisodeError(f"`step` returned {type(result).__name__}, not a StepResult")
        numbers = to_result(RewardResult(result.reward, result.metrics), "of a step")
        pickle.dumps(result.fields)
        return dataclasses.replace(result, reward=numbers.score, metrics=numbers.metrics)


def apply_scores(trajectory: Trajectory, config: TaskConfig, scores: Scores) -> None:
    """Writes a task's scores onto a trajectory: by component, the weighted total, and accuracy.

    A failed reward follows the recipe: `drop` fails the trajectory, `drop_group` its group, `zero` scores 0, `fail`
    raises.

    Raises:
        RewardError: a reward with `on_error: fail` failed.
    """
    total = float(sum(trajectory.turn_rewards))
    for place, (reward, score) in enumerate(zip(config.rewards, scores, strict=True)):
        if isinstance(score, RewardFailure):
            trajectory.metrics[f"{REWARD_FAILED}{reward.name}"] = 1.0
            if reward.on_error == "fail":
                raise RewardError(score.message, hint="`on_error: drop`, `drop_group` or `zero` lets the run go on")
            if reward.on_error in ("drop", "drop_group"):
                trajectory.error, trajectory.error_kind = score.message, score.kind
                trajectory.spoils_group |= reward.on_error == "drop_group"
            score = RewardResult(0.0)
        trajectory.rewards[reward.name] = score.score
        trajectory.metrics |= score.metrics
        total += reward.weight * score.score
        if place == 0:
            trajectory.accuracy = score.score if score.accuracy is None else score.accuracy
    trajectory.reward = total
