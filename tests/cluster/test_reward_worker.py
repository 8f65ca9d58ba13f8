"""A reward worker: order of samples and of a task's rewards, failures as data, one bad call costs its own sample."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollcli.cluster.mailbox import Caller, Mailbox
from rollcli.cluster.reward_worker import RewardWorker, ScoreRequest
from rollcli.cluster.worker import WorkerSpec
from rollcli.config.schema import RewardConfig
from rollcli.errors import WorkerDied
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure

LIMIT_S = 90
REWARDS = """
def length(response):
    if response == "loop":
        while True:
            pass
    return {"nan": float("nan"), "none": None, "two": [1, 2]}.get(response, len(response))

def first(response):
    return ord(response[0])

def flaky(response, path):
    with open(path, "a") as file:
        file.write(".")
        if file.tell() <= int(response):
            raise OSError("the judge is busy")
    return 1.0

def slow(path):
    with open(path, "a") as file:
        file.write(".")
    while True:
        pass
"""


@pytest.fixture(scope="module")
def worker(ray, values, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "r.py").write_text(REWARDS)
    spec = WorkerSpec("reward", 0, 1, 1, values, str(folder), str(folder))
    return ray.remote(RewardWorker).options(max_concurrency=1000).remote(spec)


def score(response: str, *names: str) -> ScoreRequest:
    rewards = [RewardConfig(f"./r.py:{name}", timeout_s=1.0) for name in names or ("length", "first")]
    return ScoreRequest(rewards, {"response": response})


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def test_every_sample_gets_its_scores_in_the_order_of_its_rewards(worker):
    async def main() -> None:
        caller = Caller(worker, "me", "reward-0")
        texts = [chr(97 + n % 26) * (n + 1) for n in range(60)]
        results = await asyncio.gather(*(caller.call(score(text)) for text in texts))
        assert [[r.score for r in result] for result in results] == [[len(t), ord(t[0])] for t in texts]
        assert (await caller.call(score("ab", "first", "length")))[0].score == 97

    run(main())


def test_failures_are_results_and_cost_their_own_sample(worker):
    async def main() -> None:
        caller = Caller(worker, "me", "reward-0")
        texts = ["a", "loop", "nan", "b", "none", "two", "cc"]
        results = await asyncio.gather(*(caller.call(score(text, "length")) for text in texts))
        kinds = [r.kind if isinstance(r, RewardFailure) else r.score for (r,) in results]
        assert kinds == [1, "timeout", "reward", 1, "reward", "reward", 2]

    run(main())


@pytest.mark.parametrize(
    ("failures", "retries", "calls", "scored"), [(2, 2, 3, True), (2, 1, 2, False), (0, 5, 1, True)]
)
def test_a_failed_call_is_made_again_as_often_as_the_recipe_says(worker, tmp_path, failures, retries, calls, scored):
    async def main() -> None:
        path = tmp_path / "calls"
        reward = RewardConfig("./r.py:flaky", timeout_s=5.0, retries=retries)
        fields = {"response": str(failures), "path": str(path)}
        (result,) = await Caller(worker, "me", "reward-0").call(ScoreRequest([reward], fields))
        assert path.stat().st_size == calls
        if scored:
            assert result == RewardResult(1.0)
        else:
            assert result.kind == "reward" and "the judge is busy" in result.message

    run(main())


def test_a_call_that_takes_too_long_is_not_made_again(worker, tmp_path):
    async def main() -> None:
        reward = RewardConfig("./r.py:slow", timeout_s=0.3, retries=9)
        request = ScoreRequest([reward], {"path": str(tmp_path / "calls")})
        (result,) = await Caller(worker, "me", "reward-0").call(request)
        assert result.kind == "timeout" and (tmp_path / "calls").stat().st_size == 1

    run(main())


def test_a_reward_whose_file_is_not_there_fails_its_samples_and_nobody_waits(worker):
    async def main() -> None:
        caller = Caller(worker, "me", "reward-0")
        gone = ScoreRequest([RewardConfig("./gone.py:f")], {"response": "a"})
        failed, scored = await asyncio.gather(caller.call(gone), caller.call(score("a", "length")))
        assert failed[0].kind == "reward" and "gone.py" in failed[0].message
        assert scored == [RewardResult(1.0)]

    run(main())


def test_math_in_an_actor_is_right_and_ends_hostile_answers(worker):
    async def main() -> None:
        caller = Caller(worker, "me", "reward-0")
        hostile = ["9**9**9**9", "2^{" + "9" * 100_000 + "}", "(" * 1000, "__import__('os')._exit(0)"]
        texts = [r"\boxed{x+x}", *(rf"\boxed{{{text}}}" for text in hostile), r"\boxed{2x}"]
        reward = RewardConfig("math")
        requests = [ScoreRequest([reward], {"response": text, "answer": "2x"}) for text in texts]
        results = await asyncio.gather(*(caller.call(request) for request in requests))
        assert [each.score for (each,) in results] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]

    run(main())


def test_arguments_come_before_columns(worker):
    async def main() -> None:
        reward = RewardConfig("length", args={"min_words": 4})
        fields = {"response": "two words", "min_words": 2}
        assert await Caller(worker, "me", "reward-0").call(ScoreRequest([reward], fields)) == [RewardResult(0.5)]

    run(main())


def test_death_raises_in_callers_and_its_processes_go_with_it(ray, worker):
    async def main() -> None:
        caller = Caller(worker, "me", "reward-0")
        waiting = asyncio.create_task(caller.call(score("loop", "length")))
        await asyncio.sleep(0.2)
        ray.kill(worker)
        with pytest.raises(WorkerDied, match="`reward-0` died"):
            await waiting

    run(main())


class Judging:
    """Stands for models: answers at once, or when it is let."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.found: Any = RewardResult(0.5)

    def asks(self, reward: RewardConfig) -> bool:
        return reward.name == "judge"

    async def score(self, reward: RewardConfig, fields: dict[str, Any]) -> Any:
        if fields["response"] == "wait":
            await self.let.wait()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def bare() -> RewardWorker:
    """The worker's own methods, without Ray and a child process; a function scores the length of its name."""
    worker = RewardWorker.__new__(RewardWorker)
    worker.mailbox, worker._scorer, worker._waiting, worker._arrived = Mailbox(), None, {}, asyncio.Event()
    worker.asker, worker._parts, worker._asking = Judging(), {}, {}
    worker._score = lambda requests: [[float(len(r.name)) for r in request.rewards] for request in requests]
    return worker


def plain(response: str, *names: str) -> ScoreRequest:
    return ScoreRequest([RewardConfig(name) for name in names], {"response": response})


def test_a_sample_nobody_waits_for_is_not_scored() -> None:
    """Two samples wait, one is dropped before the scorer looks."""

    async def main() -> list[int]:
        worker = bare()
        await worker.submit("me", [(1, plain("", "f")), (2, plain("", "f")), (3, plain("wait", "judge"))])
        await worker.abort("me", [1, 3, 7])
        done = await worker.collect("me")
        worker._scorer.cancel()
        await asyncio.sleep(0)
        assert not worker._asking and not worker._parts
        return [key for key, _ in done]

    assert run(main()) == [2]


def test_functions_and_models_score_side_by_side_in_the_order_of_the_rewards() -> None:
    async def main() -> None:
        worker = bare()
        await worker.submit("me", [(1, plain("wait", "four", "judge", "f")), (2, plain("", "judge"))])
        assert await worker.collect("me") == [(2, [RewardResult(0.5)])]  # the first waits and holds up nobody
        await worker.submit("me", [(3, plain("", "f"))])
        assert await worker.collect("me") == [(3, [1.0])]
        worker.asker.let.set()
        assert await worker.collect("me") == [(1, [4.0, RewardResult(0.5), 1.0])]
        worker._scorer.cancel()

    run(main())


def test_the_end_of_a_model_is_the_samples_and_a_bug_the_rewards() -> None:
    async def main() -> None:
        worker = bare()
        for found in (WorkerDied("gone", worker="judge.j-0"), KeyError("x")):
            worker.asker.found = found
            await worker.submit("me", [(1, plain("", "f", "judge"))])
            ((_, result),) = await worker.collect("me")
            if isinstance(found, WorkerDied):
                assert result is found
            else:
                assert result[0] == 1.0 and result[1] == RewardFailure("reward", "reward `judge` raised KeyError: 'x'")
        worker._scorer.cancel()

    run(main())
