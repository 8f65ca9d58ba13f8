"""One episode, from the opened chat to scored trajectories.

Whatever goes wrong in it — an environment that raises, a prompt that is too long, a reward that hangs — becomes a
trajectory with `error` set; only the death of a worker is the caller's business.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Awaitable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Message, Task, Trajectory
from rollcli.environments.base import Environment, Reply, StepResult
from rollcli.environments.blocking import perform
from rollcli.errors import EngineError, OutOfTokens, RewardError, WorkerDied
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure
from rollcli.rollout.border import EpisodeFailure, checked, environment_border
from rollcli.rollout.conversation import Conversation, EpisodeContext, Scores
from rollcli.rollout.recorder import TrajectoryRecorder
from rollcli.rollout.states import State
from rollcli.rollout.turn_scores import divided, earn, merged, score_turns

REWARD_FAILED = "reward_failed/"
"""Trajectory metrics that begin so count failed calls of a reward; a step shows their sum."""
CLOSE_LIMIT_S = 10.0


class Episode:
    """One sample of one task. Its random draws depend on the task's seed and the sample's number alone."""

    def __init__(self, task: Task, sample: int, context: EpisodeContext) -> None:
        self.task = task
        self.sample = sample
        self.context = context
        self.conversations: list[Conversation] = []
        self.state = State.WAITING
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Future[Reply]] = set()
        self._fault: WorkerDied | EngineError | None = None
        context.census.admit()

    async def run(self) -> list[Trajectory]:
        """Plays the episode within its time limit and returns its trajectories, or the one that tells why it failed.

        Raises:
            WorkerDied: a replica or a reward worker ended.
            EngineError: a replica's engine failed.
            RewardError: a reward with `on_error: fail` failed.
        """
        try:
            async with asyncio.timeout(self.context.timeout_s):
                trajectories = await self._play()
        except TimeoutError:
            trajectories = self._failed("timeout", f"episode took longer than {self.context.timeout_s:g} s")
        except EpisodeFailure as failure:
            trajectories = self._failed(failure.kind, failure.message)
        except BaseException:
            self._enter(State.ABORTED)
            raise
        self._enter(State.DONE if all(trajectory.usable for trajectory in trajectories) else State.FAILED)
        return trajectories

    async def _play(self) -> list[Trajectory]:
        """Opens the environment, has it played, closes it whatever happened, and scores."""
        with environment_border():
            # Each episode its own: a dataclass is constructed anew, any other class copied.
            given = self.context.config.environment
            environment: Environment = dataclasses.replace(given) if is_dataclass(given) else copy.deepcopy(given)
        try:
            leads = hasattr(environment, "play")
            results = await (self._be_led(environment) if leads else self._take_turns(environment))
        except BaseException:
            with suppress(EpisodeFailure):
                await self._close(environment)
            raise
        await self._close(environment)
        return await self._score(results)

    async def _take_turns(self, environment: Environment) -> dict[str, StepResult]:
        """Takes turns until the environment, the model's budget, or the context ends the episode."""
        conversation = self._begin("", True)
        conversation.open(await self._act(perform(environment, "reset", self.task)))
        while True:
            with environment_border():
                own = getattr(environment, "state_key", None)
                state_key = str(own()) if own is not None else None
            self._enter(State.GENERATING)
            reply = await conversation.turn(self._budget(""), state_key)
            result = checked(await self._act(perform(environment, "step", reply.text)))
            conversation.turn_rewards.append(result.reward)
            over = result.done or conversation.over or self._budget("") <= 0
            if over or not conversation.extend(result.messages):
                return {"": result}

    async def _be_led(self, environment: Environment) -> dict[str, StepResult]:
        """Lets the environment ask the model as it likes; what it returns is for each agent, at its last turn."""
        try:
            played = await self._act(perform(environment, "play", self.task, self._ask))
        except EpisodeFailure as failure:
            spent = failure.__cause__
            if not isinstance(spent, OutOfTokens):
                raise
            if isinstance(spent.__cause__, EpisodeFailure) and not any(each.responses for each in self.conversations):
                raise spent.__cause__ from None  # the very first prompt is too long
            played = StepResult(done=True)
        finally:
            for call in self._calls:
                call.cancel()
            if self._fault is not None:  # whatever the environment made of it
                raise self._fault
        trained = [each for each in self.conversations if each.trained and each.responses]
        agents = dict.fromkeys(conversation.agent for conversation in trained)
        if not agents:
            raise EpisodeFailure("environment", "`play` ended without a trained turn of the model")
        if not isinstance(played, Mapping):
            played = dict.fromkeys(agents, played)
        if missing := [agent for agent in agents if agent not in played]:
            raise EpisodeFailure("environment", f"`play` returned no result for agent `{missing[0]}`")
        results = {agent: checked(played[agent], "play") for agent in agents}
        for conversation in trained:
            turns = len(conversation.responses)
            conversation.turn_rewards = [0.0] * (turns - 1) + [results[conversation.agent].reward]
        return results

    async def _ask(
        self, messages: list[Message], agent: str = "", *, trained: bool = True, max_tokens: int | None = None,
        stop: tuple[str, ...] = (), tools: list[dict[str, Any]] | None = None,
    ) -> Reply:  # fmt: skip
        """The `Model` of an environment that leads; one that runs in a thread has an event loop of its own."""
        answer = self._answer(messages, agent, trained, max_tokens, stop, tools or [])
        if asyncio.get_running_loop() is not self._loop:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._kept(answer), self._loop))
        return await self._kept(answer)

    async def _kept(self, answer: Coroutine[Any, Any, Reply]) -> Reply:
        """Waits for an answer that ends with the episode, whoever else waits for it."""
        call = asyncio.ensure_future(answer)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await call

    async def _answer(
        self, messages: list[Message], agent: str, trained: bool, max_tokens: int | None, stop: tuple[str, ...],
        tools: list[dict[str, Any]],
    ) -> Reply:  # fmt: skip
        budget = self._budget(agent)
        if budget <= 0:
            raise OutOfTokens(f"agent `{agent}` has said all {self.context.sampling.max_tokens} tokens it may")
        conversation = self._goes_on(messages, (agent, trained, tools))
        if conversation is None:
            conversation = self._opened(messages, agent, trained, tools)
        elif not conversation.extend(messages[len(conversation.history) :]):
            raise OutOfTokens(f"the chat has no room left in the model's context of {self.context.max_context} tokens")
        self._enter(State.GENERATING)
        try:
            return await conversation.turn(min(budget, max_tokens or budget), stop=tuple(stop))
        except (WorkerDied, EngineError) as fault:
            self._fault = fault
            raise
        finally:
            self._enter(State.ACTING)

    def _opened(self, messages: list[Message], agent: str, trained: bool, tools: list[dict[str, Any]]) -> Conversation:
        conversation = self._begin(agent, trained, tools)
        try:
            conversation.open(list(messages))
        except EpisodeFailure as failure:
            if failure.kind != "prompt_too_long":
                raise
            raise OutOfTokens(failure.message) from failure
        return conversation

    def _goes_on(self, messages: list[Message], whose: tuple[str, bool, list[dict[str, Any]]]) -> Conversation | None:
        """Returns the chat that `messages` continue with something new, the longest where there are several."""
        for conversation in sorted(self.conversations, key=lambda each: -len(each.messages)):
            history = conversation.history
            fits = (conversation.agent, conversation.trained, conversation.tools) == whose and conversation.responses
            ready = fits and not conversation.busy and not conversation.over
            if ready and len(messages) > len(history) and messages[: len(history)] == history:
                return conversation
        return None

    def _begin(self, agent: str, trained: bool, tools: list[dict[str, Any]] | None = None) -> Conversation:
        number = sum(conversation.agent == agent for conversation in self.conversations)
        self.conversations.append(Conversation(self.task, self.sample, self.context, agent, number, trained, tools))
        return self.conversations[-1]

    def _budget(self, agent: str) -> int:
        """Returns how many tokens an agent may still say."""
        said = sum(each.recorder.sampled_length for each in self.conversations if each.agent == agent)
        return self.context.sampling.max_tokens - said

    async def _act(self, call: Awaitable[Any]) -> Any:
        """Waits for the environment; what it raises is this episode's failure."""
        self._enter(State.ACTING)
        with environment_border():
            return await call

    async def _close(self, environment: Environment) -> None:
        """Closes the environment within a time limit of its own: it may be why the episode's has passed."""
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._act(perform(environment, "close"))
        except TimeoutError:
            raise EpisodeFailure("environment", f"`close` took longer than {CLOSE_LIMIT_S:g} s") from None

    async def _score(self, results: Mapping[str, StepResult]) -> list[Trajectory]:
        """Adds rewards: an agent's last chat is scored, and all its chats share the scores, but not those by turn."""
        self._enter(State.SCORING)
        at_end, by_turn = divided(self.context.config)
        finished: list[Trajectory] = []
        for agent, result in results.items():
            chats = [each for each in self.conversations if each.agent == agent and each.trained and each.responses]
            common = {**self.task.payload, **result.fields}
            fields = {**common, **chats[-1].fields()}
            ends = await self.context.score(at_end, fields) if at_end.rewards else []
            for chat in chats:
                turns = await score_turns(self.context, by_turn, chat, common)
                trajectory = chat.trajectory()
                trajectory.metrics = dict(result.metrics)
                apply_scores(trajectory, self.context.config, merged(self.context.config, ends, turns))
                earn(trajectory, by_turn, turns)
                finished.append(trajectory)
        return finished

    def _failed(self, kind: str, message: str) -> list[Trajectory]:
        """Returns what was said before the failure, of the first chat, with the reason."""
        first = next(iter(self.conversations), None)
        recorder = first.recorder if first else TrajectoryRecorder(self.task, self.sample)
        trajectory = recorder.trajectory("error", "", "\n".join(first.responses) if first else "")
        trajectory.error, trajectory.error_kind = message, kind
        if first is not None:
            trajectory.agent, trajectory.chat = first.agent, first.chat()
        return [trajectory]

    def _enter(self, state: State) -> None:
        self.context.census.move(self.state, state)
        self.state = state


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
            trajectory.metrics[f"{REWARD_FAILED}{reward.title}"] = 1.0
            if reward.on_error == "fail":
                raise RewardError(score.message, hint="`on_error: drop`, `drop_group` or `zero` lets the run go on")
            if reward.on_error in ("drop", "drop_group"):
                trajectory.error, trajectory.error_kind = score.message, score.kind
                trajectory.spoils_group |= reward.on_error == "drop_group"
            score = RewardResult(0.0)
        trajectory.rewards[reward.title] = score.score
        # Two rewards may call a number the same; by label none takes another's place.
        trajectory.metrics |= {f"{reward.title}/{name}": value for name, value in score.metrics.items()}
        total += reward.weight * score.score
        if place == 0:
            trajectory.accuracy = score.score if score.accuracy is None else score.accuracy
    trajectory.reward = total
