"""A classifier's worker around a scorer made for the test: what waits is scored together, failures cost their own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollcli.cluster.classifier_worker import ClassifierWorker
from rollcli.cluster.mailbox import Mailbox
from rollcli.errors import ConfigError
from rollcli.rewards.asking import Question
from rollcli.rewards.isolation import RewardFailure


class Scorer:
    """Scores a conversation by its length; fails at one that starts with 13."""

    max_context = 5

    def __init__(self) -> None:
        self.passes: list[int] = []

    def tokens(self, messages: list[dict[str, Any]]) -> np.ndarray:
        if messages[0]["content"] is None:
            raise ConfigError("the chat template does not take the conversation")
        return np.array(messages[0]["content"], np.int32)

    def logits(self, rows: list[np.ndarray]) -> np.ndarray:
        self.passes.append(len(rows))
        if any(row[0] == 13 for row in rows):
            raise RuntimeError("out of memory")
        return np.array([[len(row)] for row in rows], np.float32)


def worker(max_rows: int = 2) -> ClassifierWorker:
    """The worker's own methods, without Ray and a model."""
    made = ClassifierWorker.__new__(ClassifierWorker)
    made.classifier, made.config, made.mailbox = Scorer(), SimpleNamespace(max_rows=max_rows), Mailbox()
    made._waiting, made._arrived, made._scorer, made._busy_since = {}, asyncio.Event(), None, None
    return made


def scored(made: ClassifierWorker, *contents: Any, dropped: tuple[int, ...] = ()) -> dict[int, Any]:
    async def main() -> dict[int, Any]:
        questions = [Question([{"role": "user", "content": content}]) for content in contents]
        await made.submit("me", list(enumerate(questions)))
        await made.abort("me", [*dropped, 99])
        found: dict[int, Any] = {}
        while len(found) < len(contents) - len(dropped):
            found |= dict(await made.collect("me"))
        made._scorer.cancel()
        return found

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_what_waits_is_scored_together_up_to_its_rows():
    made = worker(max_rows=2)
    assert scored(made, [1], [1, 2], [1, 2, 3], [4], [5]) == {0: [1.0], 1: [2.0], 2: [3.0], 3: [1.0], 4: [1.0]}
    assert made.classifier.passes == [2, 2, 1] and made.stuck_s() == 0


def test_one_that_is_too_long_is_told_and_never_cut():
    found = scored(worker(), [1] * 6, [1] * 5, None)
    assert found[1] == [5.0]
    assert found[0] == RewardFailure(
        "reward_model", "a conversation of 6 tokens is longer than the classifier's context of 5"
    )
    assert found[2].kind == "reward_model" and "does not take" in found[2].message


def test_a_pass_that_fails_costs_its_own_conversations():
    found = scored(worker(max_rows=2), [13], [1], [1, 2])
    assert found[2] == [2.0]
    assert [found[0].kind, found[1].kind] == ["reward_model"] * 2 and "out of memory" in found[0].message


def test_one_that_nobody_waits_for_is_not_scored():
    made = worker()
    assert scored(made, [1], [1, 2], dropped=(0,)) == {1: [2.0]} and made.classifier.passes == [1]
