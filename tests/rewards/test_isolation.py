"""Whatever a reward does to its process, it costs its own sample, in bounded time, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import IsolatedCaller, RewardFailure

PLUGINS = Path(__file__).with_name("plugins.py")
ROOT = Path(__file__).parents[2]


def named(function: str) -> str:
    return f"{PLUGINS}:{function}"


ECHO = named("echo")


@pytest.fixture(scope="module")
def caller():
    with IsolatedCaller(preload=()) as caller:
        yield caller


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def processes_of(caller: IsolatedCaller) -> list[int]:
    launcher = caller._launcher.pid
    return [launcher, *(int(p) for p in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())]


def test_results_come_back_in_order_with_their_details(caller):
    numbers = [str(n) for n in range(50)]
    results = caller.call_many([(ECHO, {"response": number}) for number in numbers], timeout_s=5)
    assert [result.score for result in results] == list(range(50))
    assert caller.call(named("detailed"), {"response": "abc"}, 5) == RewardResult(0.5, {"length": 3.0}, 1.0)


def test_built_in_by_name_and_module_by_path(caller):
    fields = {"response": r"\boxed{4}", "answer": "4", "prompt": "", "messages": []}
    for name in ("math", "rollcli.rewards.math:math"):
        assert caller.call(name, fields, 10).score == 1.0


@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        ("loop", "timeout", "exceeded its limit of 1 s"),
        ("leave", "reward", "exit code 3"),
        ("sys_exit", "reward", "exit code 4"),
        ("crash", "reward", "signal SIGSEGV"),
        ("gigabytes", "reward", "MemoryError"),
        ("raises", "reward", "raised ValueError: cannot read 1 (plugins.py:"),
        ("nothing", "reward", "expected one number, got None"),
        ("ecko", "reward", "did you mean `echo`"),
        ("not_a_function", "reward", "not a function"),
    ],
)
def test_one_bad_call_is_flagged_and_its_neighbors_score(caller, function, kind, told):
    requests = [(name, {"response": "1"}) for name in (ECHO, named(function), ECHO)]
    before = time.monotonic()
    first, bad, last = caller.call_many(requests, timeout_s=1)
    assert time.monotonic() - before < 30
    assert (first.score, last.score) == (1.0, 1.0)
    assert isinstance(bad, RewardFailure) and bad.kind == kind
    assert told in bad.message and function in bad.message


def test_unknown_reward_and_unsendable_fields(caller):
    failed, scored = caller.call_many([("maths", {"response": "1"}), (ECHO, {"response": "1"})], 5)
    assert "did you mean `math`" in failed.message and scored.score == 1.0
    failed, scored = caller.call_many([(ECHO, {"response": lambda: 0}), (ECHO, {"response": "1"})], 5)
    assert "cannot be sent" in failed.message and scored.score == 1.0


def test_missing_argument_is_told(caller):
    assert "asks for `response`" in caller.call(ECHO, {"respons": "1"}, 5).message


def test_three_samples_the_middle_one_unparsable(caller):
    responses = (r"\boxed{2}", r"\boxed{}", r"\boxed{3}")
    results = caller.call_many([("math", {"response": r, "answer": "2"}) for r in responses], 10)
    assert [result.score for result in results] == [1.0, 0.0, 0.0]


def test_import_that_hangs_is_not_waited_for_twice():
    slow = f"{Path(__file__).with_name('plugin_slow_import.py')}:score"
    with IsolatedCaller(preload=(), load_limit_s=2.0) as caller:
        before = time.monotonic()
        results = caller.call_many([(slow, {})] * 10 + [(ECHO, {"response": "1"})], 0.5)
        assert time.monotonic() - before < 15
    assert {result.kind for result in results[:10]} == {"timeout"} and results[10].score == 1.0


def test_large_fields_pass(caller):
    assert caller.call(named("detailed"), {"response": "x" * 20_000_000}, 30).metrics == {"length": 2e7}


def test_one_thread_each(caller):
    assert caller.call(named("environment"), {}, 5).score == 1.0


def test_memory_limit_is_the_callers_to_set():
    with IsolatedCaller(preload=(), memory_gib=16) as caller:
        assert caller.call(named("echo"), {"response": "1"}, 5).score == 1.0
    with IsolatedCaller(preload=(), memory_gib=0.01) as caller:
        assert isinstance(caller.call(named("detailed"), {"response": "x" * 50_000_000}, 10), RewardFailure)


def test_what_a_reward_prints_goes_to_the_log(tmp_path):
    log = tmp_path / "reward.log"
    with IsolatedCaller(preload=(), log=log) as caller:
        assert caller.call(named("talk"), {"response": "hello"}, 5).score == 1.0
    assert log.read_text() == "said hello\n"


def test_children_of_a_stopped_reward_go_with_it(caller, tmp_path):
    pid_file = tmp_path / "pid"
    assert caller.call(named("with_child"), {"pid_file": str(pid_file)}, 1).kind == "timeout"
    assert wait_until(lambda: not alive(int(pid_file.read_text())))


def test_calls_from_many_threads(caller):
    results: dict[int, list] = {}

    def score(n: int) -> None:
        results[n] = caller.call_many([(ECHO, {"response": str(n)})] * 20, 10)

    threads = [threading.Thread(target=score, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {n: {result.score for result in results[n]} for n in range(8)} == {n: {float(n)} for n in range(8)}


def test_worker_started_by_a_thread_outlives_it(caller):
    caller.call(named("leave"), {}, 5)
    thread = threading.Thread(target=caller.start)
    thread.start()
    thread.join()
    assert caller.call(ECHO, {"response": "1"}, 5).score == 1.0


def test_killed_launcher_is_replaced():
    with IsolatedCaller(preload=()) as caller:
        caller.start()
        launcher, worker = processes_of(caller)
        os.kill(launcher, signal.SIGKILL)
        assert wait_until(lambda: not alive(worker))
        results = caller.call_many([(ECHO, {"response": "1"})] * 3, 5)
    assert [result.score for result in results] == [1.0, 1.0, 1.0]


def test_close_in_the_middle_of_a_call():
    caller = IsolatedCaller(preload=())
    caller.start()
    pids, results = processes_of(caller), []
    requests = [(named("loop"), {}), (ECHO, {"response": "1"})]
    thread = threading.Thread(target=lambda: results.extend(caller.call_many(requests, 60)))
    thread.start()
    assert wait_until(lambda: bool(caller._loaded))
    before = time.monotonic()
    caller.close()
    assert time.monotonic() - before < 30
    thread.join(5)
    assert ["closed" in result.message for result in results] == [True, True]
    assert wait_until(lambda: not any(map(alive, pids)))
    caller.close()
    assert "closed" in caller.call(ECHO, {"response": "1"}, 5).message


def test_closed_or_broken_caller_says_so_at_start():
    caller = IsolatedCaller(preload=("json:no_such_function",))
    with pytest.raises(RewardError, match="launcher ended"):
        caller.start()
    assert "launcher ended" in caller.call(ECHO, {"response": "1"}, 5).message
    caller.close()
    with pytest.raises(RewardError, match="closed"):
        caller.start()


def test_log_that_cannot_be_written_is_told(tmp_path):
    with IsolatedCaller(preload=(), log=tmp_path / "no such folder" / "log") as caller:
        assert "no such folder" in caller.call(ECHO, {"response": "1"}, 5).message
        with pytest.raises(RewardError, match="does not start"):
            caller.start()


def test_nothing_survives_a_killed_parent():
    code = f"""
import sys, threading
from rollcli.rewards.isolation import IsolatedCaller
caller = IsolatedCaller(preload=())
caller.start()
threading.Thread(target=caller.call, args=({named("loop")!r}, {{}}, 600)).start()
while not caller._loaded: pass
launcher = caller._launcher.pid
print(launcher, open(f"/proc/{{launcher}}/task/{{launcher}}/children").read(), flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(alive, pids)))


def test_from_a_ray_actor():
    ray = pytest.importorskip("ray")
    assert not ray.is_initialized(), "an earlier test left its Ray running"
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote
        class Scorer:
            def __init__(self) -> None:
                self.caller = IsolatedCaller(preload=())

            def score(self, requests):
                before = time.monotonic()
                results = self.caller.call_many(requests, 1.0)
                return [getattr(result, "score", None) for result in results], time.monotonic() - before

        scorer = Scorer.remote()
        good = (ECHO, {"response": "1"})
        assert ray.get(scorer.score.remote([good]), timeout=60)[0] == [1.0]
        scores, seconds = ray.get(scorer.score.remote([good, (named("loop"), {}), good]), timeout=60)
        assert scores == [1.0, None, 1.0] and seconds < 3
        assert ray.get(scorer.score.remote([good]), timeout=60)[0] == [1.0]
    finally:
        ray.shutdown()
