"""Why workers ended: real ones, ended in every way that is told apart, and what is left in their logs."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rollcli.cluster import autopsy as module
from rollcli.cluster.autopsy import Autopsy, note_path
from rollcli.cluster.cluster import Cluster, worker_specs
from rollcli.cluster.placement import ResourcePool
from rollcli.cluster.worker import Worker
from rollcli.errors import WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LIMIT_S = 60


class Mortal(Worker):
    """Ends as it is told."""

    def die(self, how: str) -> None:
        print(f"asked to end: {how}", flush=True)
        match how:
            case "exit":
                sys.exit(3)
            case "vanish":
                os._exit(3)
            case "fault":
                ctypes.string_at(0)
            case "sigsegv":
                faulthandler._sigsegv()
            case "abort":
                os.abort()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def members(ray, values, logs) -> Cluster:
    cluster = Cluster(Mortal, worker_specs("mortal", 1, 1, values, None, str(logs)), ResourcePool({}))
    yield cluster
    cluster.kill()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def end(cluster: Cluster, how: str) -> WorkerDied:
    with pytest.raises(WorkerDied) as caught:
        run(cluster.all("die", how))
    assert caught.value.worker == "mortal-0"
    return caught.value


ENDS = {
    "exit": "ended with exit code 3",
    "fault": "crashed: Segmentation fault",
    "sigsegv": "crashed: Segmentation fault",
    "abort": "crashed: Aborted",
    "kill": "was killed (SIGKILL, by hand or by the system), or left without a word",
    "vanish": "was killed (SIGKILL, by hand or by the system), or left without a word",
}


@pytest.mark.parametrize("how", ENDS)
def test_cause_of_a_real_end_with_the_end_of_its_log(members, logs, how):
    autopsy = Autopsy(logs)
    cause = autopsy.cause("mortal-0", end(members, how))
    assert cause.startswith(f"{ENDS[how]} (its log ends: "), cause
    if how in ("exit", "kill", "vanish"):
        assert cause.endswith(f"asked to end: {how})")


def test_a_successor_is_not_said_to_have_ended_as_its_predecessor(members, logs):
    autopsy = Autopsy(logs)
    assert "Segmentation fault" in autopsy.cause("mortal-0", end(members, "sigsegv"))
    run(members.respawn(0, 1))
    # It writes into the same file.
    cause = autopsy.cause("mortal-0", end(members, "kill"))
    assert cause == f"{ENDS['kill']} (its log ends: asked to end: kill)"


def died(**facts: Any) -> WorkerDied:
    return WorkerDied("worker `w-0` died: its process …", worker="w-0", **facts)


def test_a_kill_for_memory_is_told_once(monkeypatch, tmp_path):
    events = tmp_path / "memory.events"
    monkeypatch.setattr(module, "MEMORY_EVENTS", events)
    events.write_text("low 0\nhigh 3\noom 4\noom_kill 2\n")
    autopsy = Autopsy(None)
    assert autopsy.cause("w-0", died()).startswith("was killed (SIGKILL")
    events.write_text("low 0\nhigh 3\noom 5\noom_kill 3\n")
    assert autopsy.cause("w-0", died()) == "was killed by the kernel: out of memory"
    assert autopsy.cause("w-0", died()).startswith("was killed (SIGKILL")
    events.write_text("oom_kill\n")
    assert autopsy.cause("w-0", died()).startswith("was killed (SIGKILL")


def test_one_that_was_ended_because_it_hung_is_told_so_once():
    autopsy = Autopsy(None)
    autopsy.hung("w-0", 300.0)
    assert autopsy.cause("w-1", died(exit_code=1)) == "ended with exit code 1"
    assert autopsy.cause("w-0", died()) == "did nothing for 300 s and was ended"
    assert autopsy.cause("w-0", died(exit_code=1)) == "ended with exit code 1"


def test_one_that_lives_and_is_silent():
    error = WorkerDied("worker `w-0` has not answered for 9 s: `t/3` blocks it", worker="w-0", silent=True)
    assert Autopsy(None).cause("w-0", error) == "has not answered for 9 s: `t/3` blocks it"


def test_a_note_names_the_culprit_once(tmp_path):
    autopsy = Autopsy(tmp_path)
    assert autopsy.culprit("w-0") is None
    note_path(tmp_path, "w-0").write_text("t/3/1\n")
    assert autopsy.cause("w-0", died(exit_code=70)) == "ended itself: an episode blocked it"
    assert autopsy.culprit("w-1") is None
    assert autopsy.culprit("w-0") == "t/3/1"
    assert autopsy.culprit("w-0") is None and list(tmp_path.iterdir()) == []
    note_path(tmp_path, "w-0").write_text("\n")
    assert not autopsy.culprit("w-0")


def test_the_last_lines_of_a_long_log_that_is_not_text(tmp_path):
    (tmp_path / "w-0.log").write_bytes(b"x\n" * 9000 + b"\xff one\n\n two \nthree\n")
    assert Autopsy(tmp_path).cause("w-0", died(exit_code=1)).endswith("(its log ends: \ufffd one ⏎ two ⏎ three)")
    assert Autopsy(tmp_path).cause("w-9", died(exit_code=1)) == "ended with exit code 1"
