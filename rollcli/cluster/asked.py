"""How a reward worker asks models: whom, how many questions at once, how long, and how often again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollcli import registry
from rollcli.cluster.mailbox import Caller
from rollcli.config.schema import RewardConfig, RewardModelConfig
from rollcli.errors import PluginError, RewardError
from rollcli.rewards.asking import AskingReward, Question, is_asking
from rollcli.rewards.base import RewardResult, to_result
from rollcli.rewards.isolation import RewardFailure

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 8.0
"""Before a call is made again of a model that was not to be reached, doubled each time."""


class AskedModels:
    """The workers of a recipe's reward models; the `Peers` of a reward.

    Args:
        configs: the recipe's `reward_models`.
        client: name by which the workers know who asks.
        shared: reward workers that ask beside this one.
    """

    def __init__(self, configs: Sequence[RewardModelConfig], client: str, shared: int) -> None:
        self._configs = {config.name: config for config in configs}
        self._client, self._shared = client, shared
        self._callers: dict[str, list[Caller]] = {}

    def connect(self, models: Mapping[str, Sequence[Any]]) -> None:
        """Takes the actors of every reward model, by role."""
        self._callers = {
            role: [Caller(actor, self._client, f"{role}-{rank}") for rank, actor in enumerate(actors)]
            for role, actors in models.items()
        }

    def reconnect(self, role: str, rank: int, actor: Any) -> None:
        """Takes the actor that took another's place; a worker that is new itself is told of all by `connect`."""
        if role in self._callers:
            self._callers[role][rank] = Caller(actor, self._client, f"{role}-{rank}")

    def rows(self, name: str) -> int:
        """Returns how many questions this worker may have in flight with a model: its share of what runs at once."""
        config = self._configs.get(name)
        return 1 if config is None else max(1, config.replicas * config.max_rows // self._shared)

    async def ask(self, model: str, question: Question) -> Any:
        """Returns the answer of the copy that is least busy.

        Raises:
            RewardError: there is no such model, or it cannot take the question.
            WorkerDied: the copy ended.
            EngineError: its engine failed.
        """
        callers = self._callers.get(self._configs[model].role) if model in self._configs else None
        if not callers:
            raise RewardError(f"there is no reward model `{model}`", hint="name it among the recipe's `reward_models`")
        caller = min(callers, key=lambda each: each.in_flight)
        key, future = caller.start(question)
        try:
            answer = await future
        except asyncio.CancelledError:
            caller.actor.abort.remote(caller.client, [key])
            raise
        finally:
            caller.forget(key)
        if isinstance(answer, RewardFailure):
            raise RewardError(answer.message)
        return answer


class Asker:
    """Scores samples by rewards that ask, each made once of its `args`; used from one event loop."""

    def __init__(self, models: AskedModels) -> None:
        self.models = models
        self._known: dict[str, bool] = {}
        self._made: dict[str, tuple[AskingReward, asyncio.Semaphore]] = {}

    def asks(self, reward: RewardConfig) -> bool:
        """Whether a reward asks a model; one of a file of the recipe's own never does, and is not imported here."""
        if ":" in reward.name:
            return False
        if reward.name not in self._known:
            try:
                self._known[reward.name] = is_asking(registry.resolve("rewards", reward.name))
            except PluginError:  # which the child process tells as this reward's failure
                self._known[reward.name] = False
        return self._known[reward.name]

    async def score(self, reward: RewardConfig, fields: Mapping[str, Any]) -> RewardResult | RewardFailure:
        """Returns a sample's score, or why there is none after as many tries as the recipe allows.

        Raises:
            WorkerDied, EngineError: a reward model's worker ended, or its engine failed.
        """
        asking, room = self._making(reward)
        async with room:
            for attempt in range(reward.retries + 1):
                try:
                    # What waits for its turn has not begun: the limit is of the answer.
                    async with asyncio.timeout(reward.timeout_s):
                        result = await asking.score(fields, self.models)
                    return to_result(result, reward.title)
                except TimeoutError:
                    why = f"has not answered within {reward.timeout_s:g} s"
                    failure = RewardFailure("timeout", f"reward `{reward.title}`: the model {why}")
                except RewardError as error:
                    told = f"{error.message}; {error.hint}" if error.hint else error.message
                    failure = RewardFailure(asking.kind, f"reward `{reward.title}`: {told}")
                except OSError as error:
                    failure = RewardFailure(asking.kind, f"reward `{reward.title}`: {error}")
                    if attempt < reward.retries:
                        await asyncio.sleep(min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S))
        return failure

    def _making(self, reward: RewardConfig) -> tuple[AskingReward, asyncio.Semaphore]:
        at = f"{reward.name} {json.dumps(reward.args, sort_keys=True, default=str)}"
        if at not in self._made:
            asking = registry.resolve("rewards", reward.name)(**reward.args)
            rows = asking.at_once or self.models.rows(str(reward.args.get("model")))
            self._made[at] = asking, asyncio.Semaphore(rows)
        return self._made[at]
