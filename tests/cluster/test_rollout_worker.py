"""A replica around an engine made for the test: requests come and go as it steps, and its failure reaches callers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollcli.cluster.mailbox import Caller
from rollcli.cluster.payload import Packed
from rollcli.cluster.rollout_worker import RolloutWorker
from rollcli.cluster.weight_sender import BucketFacts
from rollcli.cluster.worker import WorkerSpec
from rollcli.engines.base import GenerateRequest, SamplingParams
from rollcli.errors import EngineError, WeightSyncError

LIMIT_S = 90
FACTS = BucketFacts({}, 0)
ENGINE = '''
import time
import numpy as np
from rollcli.engines.base import Completion
from rollcli.errors import WeightSyncError


class Engine:
    """One token per step of 5 ms without a pause; fails at a prompt that starts with 13; refuses one of 14; stays in
    the step of one of 15."""

    @classmethod
    def load(cls, config, *, device, seed, max_rows, parallel):
        return cls()

    def __init__(self):
        self.max_context, self.version, self.running, self.done, self.calls = 128, 0, {}, [], []

    @property
    def pending(self):
        return len(self.running) + len(self.done)

    def add(self, requests):
        for request in requests:
            if request.prompt[0] == 14:
                raise ValueError("refused")
            assert request.id not in self.running, "already in flight"
            self.running[request.id] = (request, [])

    def abort(self, ids):
        for id in ids:
            if id in self.running:
                self._end(id, "abort")

    def _end(self, id, reason):
        request, versions = self.running.pop(id)
        tokens = np.full(len(versions), request.prompt[0], np.int32)
        self.done.append(
            Completion(id, tokens, np.zeros(len(tokens), np.float32), np.array(versions, np.int32), reason)
        )

    def step(self):
        if any(request.prompt[0] == 13 for request, _ in self.running.values()):
            raise RuntimeError("the device is gone")
        if any(request.prompt[0] == 15 for request, _ in self.running.values()):
            time.sleep(1e6)
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            pass
        for id, (request, versions) in list(self.running.items()):
            versions.append(self.version)
            if len(versions) == request.sampling.max_tokens:
                self._end(id, "length")
        done, self.done = self.done, []
        return done

    def load_weights(self, weights, version):
        if not weights:
            raise WeightSyncError("weights missing: all; the old weights stay")
        self.version = version

    def stats(self):
        return {"model_s": 1.5}
'''


def request(first: int, tokens: int, id: str = "sums/0/0/0") -> GenerateRequest:
    return GenerateRequest(id, np.array([first], np.int32), 0, SamplingParams(max_tokens=tokens))


async def stage(replica: Any, weights: dict) -> None:
    """What a weight sync asks of a replica before the weights change."""
    await replica.begin_weights.remote()
    await replica.stage_bucket.remote({name: Packed(array, "float32") for name, array in weights.items()}, FACTS)


async def load(replica: Any, weights: dict, version: int) -> None:
    """What a weight sync asks of a replica."""
    await stage(replica, weights)
    await replica.commit_weights.remote(version)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


@pytest.fixture(scope="module")
def start(ray, values, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    (folder / "engine.py").write_text(ENGINE)
    mine = {**values, "rollout": {**values["rollout"], "engine": f"{folder / 'engine.py'}:Engine"}}

    def actor(rank: int) -> Any:
        spec = WorkerSpec("rollout", rank, 2, 1, mine, str(folder), str(folder))
        return ray.remote(RolloutWorker).options(max_concurrency=1000).remote(spec)

    actor.folder = folder
    return actor


@pytest.fixture(scope="module")
def replica(start):
    return start(0)


def test_answers_go_to_who_asked_and_facts_are_the_engines(replica):
    async def main() -> None:
        one, other = Caller(replica, "one", "rollout-0"), Caller(replica, "other", "rollout-0")
        first, second = await asyncio.gather(one.call(request(1, 3)), other.call(request(2, 5)))
        assert (first.tokens.tolist(), second.tokens.tolist()) == ([1] * 3, [2] * 5)
        assert await replica.context.remote() == 128 and await replica.model_seconds.remote() == 1.5

    run(main())


def test_a_request_that_comes_while_the_engine_steps_does_not_wait_for_its_end(replica):
    async def main() -> None:
        caller = Caller(replica, "me", "rollout-0")
        long = asyncio.create_task(caller.call(request(1, 2000)))
        for _ in range(3):
            assert (await caller.call(request(2, 2))).stop_reason == "length"
        assert not long.done()
        long.cancel()
        await replica.abort.remote("me", [0])

    run(main())


def test_abort_ends_and_the_same_request_may_come_again(replica):
    async def main() -> None:
        caller = Caller(replica, "again", "rollout-0")
        for _ in range(20):
            key, future = caller.start(request(1, 5000))
            await asyncio.sleep(0.004)
            caller.forget(key)
            assert future.cancelled()
            aborted = replica.abort.remote("again", [key])
            # The very same request, at once: an answer to the one before must not be taken for its own.
            answer = await caller.call(request(1, 2))
            assert (answer.stop_reason, len(answer.tokens)) == ("length", 2)
            await aborted

    run(main())


def test_weights_change_between_steps_and_tokens_know_their_version(replica):
    async def main() -> None:
        caller = Caller(replica, "versions", "rollout-0")
        await stage(replica, {"x": np.zeros(1, np.float32)})
        answer = asyncio.create_task(caller.call(request(1, 60)))
        await caller.call(request(2, 1))
        await replica.commit_weights.remote(7)
        versions = (await answer).versions
        assert versions[0] != 7 and versions[-1] == 7 and (np.diff(versions) != 0).sum() == 1
        with pytest.raises(WeightSyncError):
            await load(replica, {}, 8)
        assert (await caller.call(request(1, 1))).versions.tolist() == [7]

    run(main())


def test_what_the_engine_refuses_raises_for_those_who_sent_it(replica):
    async def main() -> None:
        caller = Caller(replica, "bad", "rollout-0")
        with pytest.raises(ValueError, match="refused"):
            await caller.call(request(14, 1))
        assert (await caller.call(request(1, 1))).stop_reason == "length"

    run(main())


def test_failing_step_raises_in_all_callers_now_and_later(start):
    replica = start(1)

    async def main() -> None:
        one, other = Caller(replica, "one", "rollout-1"), Caller(replica, "other", "rollout-1")
        waiting = [asyncio.create_task(one.call(request(1, 100000))) for _ in range(3)]
        waiting += [asyncio.create_task(other.call(request(13, 5)))]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        expected = "the engine of `rollout-1` failed: RuntimeError: the device is gone"
        assert [(type(result), str(result)) for result in results] == [(EngineError, expected)] * 4
        with pytest.raises(EngineError):
            await one.call(request(1, 1))
        with pytest.raises(EngineError):
            await load(replica, {"x": np.zeros(1, np.float32)}, 9)
        assert "the device is gone" in (Path(start.folder) / "rollout-1.log").read_text()

    run(main())


def test_an_engine_that_stays_in_a_step_is_stuck_for_ever_longer_and_its_worker_still_answers(start):
    replica = start(0)

    async def main() -> None:
        assert await replica.stuck_s.remote() == 0.0
        caller = Caller(replica, "me", "rollout-0")
        busy = asyncio.create_task(caller.call(request(1, 300)))
        await asyncio.sleep(0.3)
        # A step after the other, each of 5 ms: however long the answer takes, nothing is stuck.
        assert max([await replica.stuck_s.remote() for _ in range(20)]) < 0.2
        await busy
        assert await replica.stuck_s.remote() == 0.0
        stuck = asyncio.create_task(caller.call(request(15, 5)))
        await asyncio.sleep(0.5)
        first = await replica.stuck_s.remote()
        await asyncio.sleep(0.5)
        assert 0.1 < first < await replica.stuck_s.remote() - 0.4 and not stuck.done()
        stuck.cancel()

    run(main())
