import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyte
import pytest

from rollcli.monitor import follow
from rollcli.monitor.follow import Follower, should_be_live, watch
from rollcli.runs.directory import RunDirectory
from rollcli.runs.events import EventLog, JsonLines
from rollcli.runs.status import Status, write_json
from tests.monitor.events import event, run, sample, started, step

ROOT = Path(__file__).parents[2]


class Terminal:
    """A pseudo-terminal whose output goes to an emulator; `stream` is what a program would write to."""

    def __init__(self, columns=80, rows=24):
        self.screen = pyte.Screen(columns, rows)
        self.raw = b""
        self.heights = set()
        self._feed = pyte.ByteStream(self.screen)
        self.master, slave = os.openpty()
        self.stream = os.fdopen(slave, "w")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            self.raw += data
            # The emulator does not know the private modes Rich switches; what is drawn does not depend on them.
            self._feed.feed(data)

    def text(self):
        return "\n".join(line.rstrip() for line in self.screen.display)

    def close(self):
        self.stream.close()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Terminal()
    yield made
    made.close()


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "grpo-math-7f3a")
    made.path.mkdir()
    return made


def write_status(directory, state="running", pid=None):
    now = time.time()
    values = Status(state=state, pid=pid or os.getpid(), host=socket.gethostname(), started=now, heartbeat=now)
    write_json(directory.status, vars(values))


def emit(path, events):
    log = JsonLines(path)
    for one in events:
        log.write(one)
    log.close()


def test_lines_follow_a_file_that_grows(tmp_path, until):
    path, stream = tmp_path / "events.jsonl", io.StringIO()
    with Follower(path, live=False, stream=stream):
        log = EventLog(path)
        log.emit("run_started", run="r", algorithm="grpo", steps=2, attempt=1)
        until(lambda: stream.getvalue() == "run r  grpo  2 steps\n")
        log.emit("step", step=1, metrics={"reward": 0.5})
        until(lambda: stream.getvalue().endswith("step 1/2  reward 0.500\n"))
        with path.open("a") as torn:
            torn.write('{"type": "warning", "mess')
        log.emit("warning", message="never seen: its line is torn")
        log.emit("step", step=2, metrics={"reward": 0.75})
    assert stream.getvalue().splitlines() == [
        "run r  grpo  2 steps",
        "step 1/2  reward 0.500",
        "step 2/2  reward 0.750",
    ]


def test_close_drains_what_is_left(tmp_path):
    path, stream = tmp_path / "events.jsonl", io.StringIO()
    follower = Follower(path, live=False, stream=stream)
    with follower:
        emit(path, run(40))
    assert sum(line.startswith("step ") for line in stream.getvalue().splitlines()) == 40
    assert "\x1b" not in stream.getvalue() and stream.getvalue().endswith("\n")
    follower.close()


def test_lines_are_the_same_in_a_terminal(tmp_path, terminal, until):
    path = tmp_path / "events.jsonl"
    emit(path, run(2))
    with Follower(path, live=False, stream=terminal.stream):
        until(lambda: b"step   2/500" in terminal.raw)
    assert b"\x1b" not in terminal.raw


def test_heartbeat_when_a_step_is_long(tmp_path, until, monkeypatch):
    monkeypatch.setattr(follow, "HEARTBEAT_S", 0.3)
    path, stream = tmp_path / "events.jsonl", io.StringIO()
    emit(path, run(2))
    with Follower(path, live=False, stream=stream):
        until(lambda: stream.getvalue().count("...  step 3/500  rollout  371/512 samples") >= 2)


def test_frame_height_is_stable_and_the_last_frame_stays(tmp_path, terminal, until):
    path = tmp_path / "events.jsonl"
    tops = set()
    with Follower(path, live=True, stream=terminal.stream, color=False):
        log = JsonLines(path)
        until(lambda: "waiting for the first event" in terminal.text())
        for number, one in enumerate([*run(3), event("warning", message="careful")]):
            log.write(one)
            if number % 4 == 0:
                until(lambda: "waiting" not in terminal.text())
            tops |= {row for row, line in enumerate(terminal.screen.display) if line.startswith(("run  ", "ctrl-c"))}
        until(lambda: "warning: careful" in terminal.text())
        tops |= {row for row, line in enumerate(terminal.screen.display) if line.startswith(("run  ", "ctrl-c"))}
        log.write(event("run_finished", 1300.0, status="finished", reason="all steps done"))
    until(lambda: "now        finished: all steps done" in terminal.text())
    assert tops <= {0, 22}, "the frame moved"
    assert terminal.screen.display[0].startswith("run        grpo-math-7f3a")
    until(lambda: (terminal.screen.cursor.y, terminal.screen.cursor.x) == (23, 0))
    assert b"\x1b[?1049h" not in terminal.raw, "training leaves a scrollback, so no alternate screen"
    assert terminal.raw.count(b"\x1b[?25l") == terminal.raw.count(b"\x1b[?25h"), "the cursor is visible again"


def test_hostile_events_do_not_move_the_frame(tmp_path, terminal, until):
    path, bad = tmp_path / "events.jsonl", "\x1b[2J\x1b[H[bold]x\r\n\x07" * 50
    with Follower(path, live=True, stream=terminal.stream, color=False):
        emit(path, [started(run=bad), sample(1, 1.0, response=bad + "the end"), event("warning", message=bad)])
        until(lambda: "the end" in terminal.text())
    assert terminal.screen.display[0].startswith("run        ␛[2J␛[H[bold]x⏎␇␛[2J")
    assert b"\x1b[2J" not in terminal.raw.replace(b"\x1b[2J\x1b[H\x1b[?", b"")


@pytest.mark.parametrize("color", [True, False])
def test_color_can_be_on_and_off(tmp_path, terminal, until, monkeypatch, color):
    monkeypatch.delenv("NO_COLOR", raising=False)
    emit(tmp_path / "events.jsonl", run(2))
    with Follower(tmp_path / "events.jsonl", live=True, stream=terminal.stream, color=color, width=80):
        until(lambda: "step 2" in terminal.text())
    assert (b"\x1b[36m" in terminal.raw) is color


def test_frames_are_few_however_many_events_there_are(tmp_path, terminal, until, monkeypatch):
    path, drawn, original = tmp_path / "events.jsonl", [], follow.rows
    monkeypatch.setattr(follow, "rows", lambda *arguments: drawn.append(time.monotonic()) or original(*arguments))
    with Follower(path, live=True, stream=terminal.stream):
        log, number = JsonLines(path), 0
        while len(drawn) < 6:
            number += 1
            log.write(step(number, 1000.0 + number))
            time.sleep(0.002)
        seen = list(drawn)
    assert min(b - a for a, b in zip(seen, seen[1:])) > 0.2


def test_stopping_is_shown_at_once(tmp_path, terminal, until):
    path = tmp_path / "events.jsonl"
    emit(path, run(2))
    with Follower(path, live=True, stream=terminal.stream):
        until(lambda: "step 2" in terminal.text())
        emit(path, [event("stopping", time.time(), signal="SIGINT", step=3)])
        until(lambda: "stopping after this step" in terminal.text(), seconds=2)


def test_crash_of_the_dashboard_is_one_warning_and_lines_go_on(tmp_path, terminal, until, monkeypatch, caplog):
    def crash(*_):
        raise KeyError("no such row")

    monkeypatch.setattr(follow, "rows", crash)
    path = tmp_path / "events.jsonl"
    with Follower(path, live=True, stream=terminal.stream):
        until(lambda: b"warning: the view failed (KeyError: 'no such row'); the run goes on" in terminal.raw)
        emit(path, run(2))
        until(lambda: b"step   2/500  reward" in terminal.raw)
    assert terminal.raw.count(b"the view failed") == 1
    assert len(caplog.records) == 1 and caplog.records[0].exc_info


def test_crash_of_the_lines_ends_in_silence(tmp_path):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    path = tmp_path / "events.jsonl"
    emit(path, [started()])
    with Follower(path, live=False, stream=Broken()):
        emit(path, [step(1, 1055), event("run_finished", 1060, status="finished")])


def test_body_that_raises_is_not_swallowed(tmp_path):
    with pytest.raises(ZeroDivisionError), Follower(tmp_path / "events.jsonl", live=False, stream=io.StringIO()):
        _ = 1 / 0


@pytest.mark.parametrize(
    "tty, environment, live",
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "ROLL_NO_PROGRESS": "1"}, False),
        (False, {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_should_be_live(monkeypatch, tty, environment, live):
    for name in ("TERM", "ROLL_NO_PROGRESS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: tty
    assert should_be_live(stream) is live


def test_watch_of_a_finished_run(directory):
    write_status(directory, state="finished")
    emit(directory.events, [*run(2), event("run_finished", 1200, status="finished", hint="roll eval x")])
    stream = io.StringIO()
    assert watch(directory, live=False, stream=stream) == "ended"
    assert stream.getvalue().endswith("finished  step 2/500  3m 20s\nhint: roll eval x\n")


def test_watch_of_a_running_run_ends_with_it(directory, until):
    write_status(directory)
    emit(directory.events, run(2))
    stream, found = io.StringIO(), []
    thread = threading.Thread(target=lambda: found.append(watch(directory, live=False, stream=stream)))
    thread.start()
    until(lambda: "step   2/500" in stream.getvalue())
    assert thread.is_alive()
    emit(directory.events, [event("run_finished", 1200, status="stopped"), started(1300, attempt=2)])
    until(lambda: "attempt 2" in stream.getvalue())
    assert thread.is_alive(), "an end that a resume follows is none"
    emit(directory.events, [event("run_finished", 1400, status="finished")])
    write_status(directory, state="finished")
    thread.join(10)
    assert found == ["ended"]


def test_watch_says_when_the_process_is_gone(directory):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_status(directory, pid=ended.pid)
    emit(directory.events, run(2))
    stream = io.StringIO()
    assert watch(directory, live=False, stream=stream) == "lost"
    assert stream.getvalue().splitlines()[-1] == "lost  step 2/500  2m 20s  its process is gone"


def test_watch_takes_the_alternate_screen_and_leaves_the_last_frame(directory, terminal, until):
    write_status(directory, state="finished")
    emit(directory.events, [*run(2), event("run_finished", 1200, status="finished", reason="done")])
    assert watch(directory, live=True, stream=terminal.stream, color=False) == "ended"
    until(lambda: b"\x1b[?1049l" in terminal.raw and terminal.raw.endswith(b"\n"))
    after = terminal.raw.partition(b"\x1b[?1049l")[2].decode()
    assert "now        finished: done" in after and "grpo-math-7f3a" in after


SCRIPT = """
import os, sys, time
from pathlib import Path
from rollcli.monitor.follow import Follower, watch
from rollcli.runs.directory import RunDirectory
path = Path(sys.argv[1])
sys.stdout.write("ready\\n")
try:
    if sys.argv[2] == "watch":
        sys.stdout.write(watch(RunDirectory(path.parent), live=True) + "\\n")
    else:
        with Follower(path, live=True):
            time.sleep(30)
except KeyboardInterrupt:
    sys.stdout.write("interrupted\\n")
sys.stdout.write("echo on\\n" if __import__("termios").tcgetattr(0)[3] & __import__("termios").ECHO else "echo off\\n")
"""


def in_a_terminal_of_its_own(path, mode):
    """Starts the script as a shell would: the pseudo-terminal is its controlling terminal, and it is in front."""
    import pty

    pid, master = pty.fork()
    if pid == 0:
        # Whoever runs the tests in the background ignores SIGINT, and a child would inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(ROOT)
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-c", SCRIPT, str(path), mode], environment)
    screen = pyte.Screen(80, 24)
    feed, seen = pyte.ByteStream(screen), []

    def read():
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:
                return
            seen.append(data)
            feed.feed(data)

    threading.Thread(target=read, daemon=True).start()
    return pid, master, lambda: "\n".join(screen.display), lambda: b"".join(seen)


@pytest.mark.parametrize("mode, word", [("train", b"interrupted"), ("watch", b"detached")])
def test_keys_choose_the_sample_and_ctrl_c_stays_a_signal(directory, until, mode, word):
    write_status(directory)
    emit(directory.events, run(2))
    pid, master, text, raw = in_a_terminal_of_its_own(directory.events, mode)
    try:
        until(lambda: "1/3 · reward 0.500" in text(), seconds=20)
        for key, shown in ((b"b", "2/3 best · reward 1.000"), (b"w", "3/3 worst · reward 0.000"), (b"n", "1/3 · ")):
            os.write(master, key)
            until(lambda shown=shown: shown in text())
        os.write(master, b"\x03")
        until(lambda: b"echo on" in raw() and word in raw())
        assert b"\x1b[?25h" in raw()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(master)
