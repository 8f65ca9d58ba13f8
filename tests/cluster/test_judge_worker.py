"""A judge of a tiny model in a real replica: it answers chats as its engine does, is replaced, and rewards go on."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from rollcli.cluster.judge_worker import JudgeWorker, reward_model
from rollcli.cluster.mailbox import Caller, Mailbox
from rollcli.cluster.reward_worker import RewardWorker, ScoreRequest
from rollcli.cluster.worker import WorkerSpec
from rollcli.config.load import load_recipe, rebuild
from rollcli.config.schema import RewardConfig
from rollcli.engines.base import Completion
from rollcli.errors import WorkerDied
from rollcli.rewards.asking import Question
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure

LIMIT_S = 120
CHAT = [{"role": "user", "content": "70 + 2"}]


@pytest.fixture(scope="module")
def judged(values) -> dict[str, Any]:
    """The embedded recipe with a judge, which a second reward asks."""
    model = {"name": "tiny", "model": {"path": "embedded:sums"}, "max_rows": 4}
    (task,) = values["tasks"]
    asking = {"name": "judge", "args": {"model": "tiny"}}
    return {**values, "reward_models": [model], "tasks": [{**task, "rewards": [*task["rewards"], asking]}]}


def spec(values: dict[str, Any], role: str) -> WorkerSpec:
    return WorkerSpec(role, 0, 1, 1, values, None, None)


def directly(question: Question) -> str:
    """What the engine gives, asked without any worker."""
    import torch

    from rollcli.engines.base import GenerateRequest, SamplingParams
    from rollcli.engines.models import load_chat_format
    from rollcli.engines.transformers import TransformersEngine

    recipe = load_recipe("grpo-math").recipe
    engine = TransformersEngine.load(
        recipe.model, device=torch.device("cpu"), seed=0, max_rows=4, parallel=recipe.rollout.parallel
    )
    chat = load_chat_format(recipe.model)
    sampling = SamplingParams(question.max_tokens, 0.0, stop_token_ids=chat.stop_token_ids)
    engine.add([GenerateRequest("1", chat.prompt(question.messages), 0, sampling)])
    done: list[Completion] = []
    while not done:
        done = engine.step()
    return chat.text(done[0].tokens)


def test_a_judge_answers_dies_and_is_succeeded(ray, judged, tmp_path):
    """One reward worker asks it beside a function; both results come in the order of the recipe's rewards."""
    template = tmp_path / "short.txt"
    template.write_text("{response}")
    asks = RewardConfig("judge", timeout_s=60.0, args={"model": "tiny", "template": str(template), "max_tokens": 24})
    math = RewardConfig("math", timeout_s=60.0)
    fields = {"messages": CHAT, "response": "70 + 2", "answer": "72"}
    judges = [ray.remote(JudgeWorker).options(max_concurrency=100).remote(spec(judged, "judge.tiny"))]
    rewards = ray.remote(RewardWorker).options(max_concurrency=100).remote(spec(judged, "reward"))

    async def main() -> None:
        judge, scorer = Caller(judges[0], "me", "judge.tiny-0"), Caller(rewards, "me", "reward-0")
        short = dataclasses.replace(Question(CHAT), max_tokens=24)
        answer, cut, long = await asyncio.gather(
            judge.call(short), judge.call(Question(CHAT, 1)), judge.call(Question(CHAT, 1000))
        )
        assert answer == directly(short)
        assert cut == RewardFailure("judge", "the judge's answer was cut at 1 tokens")
        assert long.kind == "judge" and "do not fit the judge's context of 256" in long.message
        await rewards.connect.remote({"judge.tiny": judges})
        verdict, right = await scorer.call(ScoreRequest([asks, math], fields))
        # It was never taught to judge: what it says, exactly, is no verdict.
        assert verdict.kind == "judge" and f"ends with {answer.strip()!r}" in verdict.message
        assert isinstance(right, RewardResult)
        ray.kill(judges[0])
        ended = await scorer.call(ScoreRequest([math, asks], fields))
        assert isinstance(ended, WorkerDied) and ended.worker == "judge.tiny-0"
        judges[0] = ray.remote(JudgeWorker).options(max_concurrency=100).remote(spec(judged, "judge.tiny"))
        await rewards.reconnect.remote("judge.tiny", 0, judges[0])
        right, verdict = await scorer.call(ScoreRequest([math, asks], fields))
        assert isinstance(right, RewardResult) and verdict.kind == "judge"

    try:
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    finally:
        for actor in (*judges, rewards):
            ray.kill(actor)


def test_a_judge_has_a_recipe_of_its_own(judged):
    recipe = rebuild({**judged, "reward_models": [{**judged["reward_models"][0], "replicas": 3}]})
    worker = JudgeWorker.__new__(JudgeWorker)
    worker.spec = spec(judged, "judge.tiny")
    taken = worker.take_recipe(recipe)
    assert (taken.model.path, taken.rollout.max_rows, taken.rollout.replicas) == ("embedded:sums", 4, 3)
    assert taken.rollout.sampling == recipe.rollout.sampling and reward_model(recipe, "judge.tiny").name == "tiny"


def test_what_ends_an_answer_decides_whether_it_counts():
    worker = JudgeWorker.__new__(JudgeWorker)
    worker.mailbox, worker._owners = Mailbox(), {str(number): ("me", number) for number in range(4)}
    worker.format = type("Format", (), {"text": staticmethod(lambda tokens: f"{len(tokens)} tokens")})

    def ended(number: int, reason: str, error: str | None = None) -> Completion:
        return Completion(str(number), [1, 2], [], [], reason, error)

    worker._deliver([ended(0, "stop"), ended(1, "length"), ended(2, "error", "no room"), ended(3, "abort")])
    results = dict(asyncio.run(worker.mailbox.collect("me")))
    assert results[0] == "2 tokens"
    assert [results[number].message for number in (1, 2, 3)] == [
        "the judge's answer was cut at 2 tokens", "no room", "ended by `abort`"
    ]  # fmt: skip
