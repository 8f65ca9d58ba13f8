import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from rollcli.runs import status as module
from rollcli.runs.status import RUNNING, StatusFile, read_status, write_json


@pytest.fixture
def file(tmp_path):
    return tmp_path / "status.json"


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def ended():
    """The id of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_of_this_process_is_alive(file):
    written = StatusFile(file, recipe="r", steps=10)
    assert read_status(file) == written.status
    assert read_status(file).alive and read_status(file).pid == os.getpid()
    written.update(state="finished", step=10, accuracy=0.5)
    found = read_status(file)
    assert (found.state, found.step, found.accuracy, found.alive) == ("finished", 10, 0.5, False)


@pytest.mark.parametrize("state", RUNNING)
def test_a_run_whose_process_is_gone_is_lost(file, ended, state):
    StatusFile(file).update(state=state, pid=ended)
    assert read_status(file).state == "lost" and not read_status(file).alive


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_ended_stays_as_it_ended(file, ended, state):
    StatusFile(file).update(state=state, pid=ended)
    assert read_status(file).state == state


def test_a_killed_run_that_nobody_has_collected_is_lost(file):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    StatusFile(file).update(state="running", pid=process.pid)
    assert read_status(file).state == "running"
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_status(file).state == "lost"
    process.wait()


def test_a_process_id_that_was_given_to_another_process(file):
    StatusFile(file).update(state="running")
    change(file, heartbeat=time.time() - 30 * 24 * 3600)
    # This process started long after that heartbeat: it cannot be the run's.
    assert read_status(file).state == "lost"


@pytest.mark.parametrize("pid", [0, -1])
def test_no_process_has_such_an_id(file, pid):
    StatusFile(file).update(state="running", pid=pid)
    assert read_status(file).state == "lost"


@pytest.mark.parametrize(("silent_s", "state"), [(10, "running"), (120, "lost")])
def test_on_another_host_the_heartbeat_decides(file, ended, silent_s, state):
    StatusFile(file).update(state="running", pid=ended)
    change(file, host=socket.gethostname() + "-other", heartbeat=time.time() - silent_s)
    assert read_status(file).state == state


@pytest.mark.parametrize("text", [None, "", "{", "null", "[]", b"\xff"])
def test_what_is_no_status_is_a_lost_run(file, text):
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_status(file).state == "lost" and read_status(file).reason


def test_fields_of_another_version_are_passed_over(file):
    StatusFile(file).update(state="stopped")
    change(file, mood="good")
    assert read_status(file).state == "stopped"


def test_heartbeats_go_on_while_the_run_is_busy_and_end_with_it(file, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    written = StatusFile(file)
    first = read_status(file).heartbeat
    deadline = time.monotonic() + 30
    while read_status(file).heartbeat <= first:
        assert time.monotonic() < deadline
    written.update(state="finished")
    written.close()
    assert not written._thread.is_alive()
    assert read_status(file).state == "finished"


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": "é", "b": "half \ud83d"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": "é", "b": "half \ud83d"}
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text(encoding="utf-8"))["a"] == "é"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
