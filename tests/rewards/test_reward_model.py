"""What is made of a classifier's logits, against values by hand."""

from __future__ import annotations

import asyncio
import math

import pytest

from rollcli.config.build import Builder
from rollcli.errors import RewardError
from rollcli.rewards.base import RewardResult
from rollcli.rewards.reward_model import RewardModel


def test_the_chat_and_the_response_are_asked_about():
    class Played:
        async def ask(self, model, question):
            assert (model, question.messages) == ("rm", [{"role": "user", "content": "2?"}, said])
            return [0.0]

    said = {"role": "assistant", "content": "2"}
    fields = {"messages": [{"role": "user", "content": "2?"}], "response": "2", "answer": "2"}
    assert asyncio.run(RewardModel("rm").score(fields, Played())) == RewardResult(0.0, accuracy=0.5)


@pytest.mark.parametrize(
    ("options", "logits", "score", "accuracy"),
    [
        ({}, [-3.5], -3.5, 1 / (1 + math.exp(3.5))),
        ({}, [-1e4], -1e4, 0.0),
        ({"activation": "sigmoid"}, [math.log(3)], 0.75, 0.75),
        ({"output": 1}, [9.0, math.log(3)], math.log(3), 0.75),
        ({"output": 0, "activation": "softmax"}, [1000.0, 1000.0 + math.log(3)], 0.25, 0.25),
    ],
)
def test_scores(options, logits, score, accuracy):
    result = RewardModel("rm", **options).read(logits)
    assert (result.score, result.accuracy) == pytest.approx((score, accuracy))


@pytest.mark.parametrize(
    ("options", "logits", "what"),
    [({}, [1.0, 2.0], "has 2 labels"), ({"output": 2}, [1.0, 2.0], "counted from 0"), ({}, [math.nan], "not finite")],
)
def test_no_score(options, logits, what):
    with pytest.raises(RewardError, match=what):
        RewardModel("rm", **options).read(logits)


def test_a_label_below_the_first():
    builder = Builder({})
    builder.dataclass(RewardModel, {"model": "rm", "output": -1}, ())
    assert "must not be negative" in builder.found[0].message
