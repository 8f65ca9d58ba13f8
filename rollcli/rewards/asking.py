"""Rewards that ask a model: a class in place of a function, made of its `args` once and called for every sample.

    @dataclass
    class Mine(AskingReward):
        model: str

        async def score(self, fields, peers):
            text = await peers.ask(self.model, Question([{"role": "user", "content": fields["response"]}], 16))
            return RewardResult(float("yes" in text))

It runs in the reward worker itself, many samples at once, so it must wait for nothing but what it awaits; what computes
is a function, which runs in the worker's child process that a time limit can end. For the same reason such a class has
a registered name, of rollcli's own or by an entry point `rollcli.rewards`: a worker imports no recipe's files.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rollcli.rewards.base import RewardResult


@dataclass(frozen=True)
class Question:
    """What is asked of a model.

    Attributes:
        messages: the chat; a judge answers it, a classifier scores it.
        max_tokens: most tokens of a judge's answer.
        temperature: of a judge; 0 is greedy.
        seed: of a judge's random draws.
    """

    messages: list[dict[str, Any]]
    max_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0


class Peers(Protocol):
    """The recipe's reward models, as a reward sees them."""

    async def ask(self, model: str, question: Question) -> Any:
        """Returns a judge's answer, or a classifier's list of numbers, one for each of its labels.

        Raises:
            RewardError: the model cannot take the question.
        """


class AskingReward(ABC):
    """Base of rewards that ask a model.

    Attributes:
        kind: by which a step counts samples it could not score.
        at_once: most samples that one reward worker has in flight with it; None is as many as the model takes.
    """

    kind: ClassVar[str] = "reward"
    at_once: int | None = None

    @abstractmethod
    async def score(self, fields: Mapping[str, Any], peers: Peers) -> RewardResult:
        """Returns the score of one sample.

        Raises:
            RewardError: there is none; the call may be made again.
            OSError: the model is not to be reached; the call may be made again, after a while.
        """

    def wants(self) -> Iterable[str]:
        """Returns the names of the fields without which no sample can be scored."""
        return ("messages", "response")

    @classmethod
    def check(cls) -> list[tuple[str, float | None, float | str]]:
        """Returns cases for `roll rewards check`: name, expected score (None for none) and score or why there is none.

        There is no model then; a class can only try what it makes of answers.
        """
        return []


def is_asking(target: Any) -> bool:
    """Whether what a reward's name stands for asks a model."""
    return inspect.isclass(target) and issubclass(target, AskingReward)
