"""`reward_model`: what a sequence classifier of the recipe's `reward_models` gives the conversation.

The classifier's chat template renders the chat and the response; its last token's logit is the score, as transformers'
`AutoModelForSequenceClassification` computes it. Logits know no bounds, so accuracy is their sigmoid: the probability,
by Bradley and Terry, that the response is preferred to one of reward 0 (InstructGPT, arXiv 2203.02155, equation 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rollcli.errors import RewardError
from rollcli.rewards.asking import AskingReward, Peers, Question
from rollcli.rewards.base import RewardResult


@dataclass
class RewardModel(AskingReward):
    """Options of the reward `reward_model`."""

    model: str
    """Name of one of the recipe's `reward_models`, a classifier."""
    output: int | None = None
    """Which of the classifier's labels is the score; null where it has only one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """What is made of the logit: nothing, its sigmoid, or its share of all labels' softmax."""

    kind: ClassVar[str] = "reward_model"

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.output is not None and self.output < 0:
            yield "output", f"must not be negative, is {self.output}"

    async def score(self, fields: Mapping[str, Any], peers: Peers) -> RewardResult:
        """Asks the classifier about the chat and the response."""
        answer = {"role": "assistant", "content": fields["response"]}
        return self.read(await peers.ask(self.model, Question([*fields["messages"], answer])))

    def read(self, logits: list[float]) -> RewardResult:
        """Returns the score that the recipe wants of the labels' logits.

        Raises:
            RewardError: the label is not there, or a logit is not finite.
        """
        if self.output is None and len(logits) != 1:
            raise RewardError(f"the classifier has {len(logits)} labels", hint="choose one with `args.output`")
        place = self.output or 0
        if place >= len(logits):
            raise RewardError(f"`output` is {place}, but the classifier has {len(logits)} labels, counted from 0")
        if not all(map(math.isfinite, logits)):
            raise RewardError("the classifier gives a number that is not finite")
        logit, highest = logits[place], max(logits)
        if self.activation == "softmax":
            share = math.exp(logit - highest) / sum(math.exp(each - highest) for each in logits)
            return RewardResult(share, accuracy=share)
        probability = 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
        return RewardResult(probability if self.activation == "sigmoid" else logit, accuracy=probability)

    @classmethod
    def check(cls) -> list[tuple[str, float | None, float | str]]:
        """Tries what is made of a classifier's numbers; what it gives an answer, only a real one can tell."""
        cases = [
            ("gold answer, by a classifier that is played", 1.0, cls("scripted"), [1.0]),
            ("empty answer, by a classifier that is played", 0.0, cls("scripted"), [0.0]),
            ("sigmoid of a logit", 0.5, cls("scripted", activation="sigmoid"), [0.0]),
            ("softmax of the second label", 0.75, cls("scripted", 1, "softmax"), [0.0, math.log(3)]),
            ("logit that is no number", None, cls("scripted"), [math.nan]),
            ("several labels and none chosen", None, cls("scripted"), [0.0, 1.0]),
        ]
        return [(case, expected, _read(reward, logits)) for case, expected, reward, logits in cases]


def _read(reward: RewardModel, logits: list[float]) -> float | str:
    try:
        return reward.read(logits).score
    except RewardError as error:
        return error.message
