"""Follows an `events.jsonl` that grows, and shows it: as a dashboard in a terminal, as plain lines elsewhere.

    with Follower(directory.events, live=should_be_live(sys.stderr)):
        train()

The view lives in a daemon thread that never writes to the file. It looks ten times a second, so that an answer to
ctrl-c comes at once, and draws at most four times a second. If it fails, the run goes on: one warning line, and from
there plain lines instead of the dashboard.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rollcli.monitor import words
from rollcli.monitor.dashboard import MOST_ROWS, Frame, cut, rows
from rollcli.monitor.keys import Keys
from rollcli.monitor.lines import HEARTBEAT_S, Lines
from rollcli.monitor.view import Event, RunView
from rollcli.runs.directory import RunDirectory
from rollcli.runs.events import Tail
from rollcli.runs.status import read_status

LOOK_S = 0.1
FRAME_S = 0.25
STATUS_S = 0.5
CLOSE_TIMEOUT_S = 5.0
logger = logging.getLogger(__name__)
# Without a handler of its own, Python would write the traceback across the terminal.
logger.addHandler(logging.NullHandler())


def should_be_live(stream: TextIO) -> bool:
    """Whether a dashboard may be drawn on `stream`.

    Rich's own answer is not asked: with `FORCE_COLOR` set it takes a pipe for a terminal and writes cursor codes.
    """
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("ROLL_NO_PROGRESS")


def watch(
    directory: RunDirectory,
    *,
    live: bool,
    color: bool | None = None,
    width: int | None = None,
    stream: TextIO | None = None,
) -> Literal["ended", "lost", "detached"]:
    """Shows a run, from its beginning, until it ends or the viewer goes.

    Returns:
        `ended` when the run did, `lost` when its process is gone without having said so, `detached` on ctrl-c; the run
        then goes on.
    """
    with Follower(directory.events, live=live, color=color, width=width, stream=stream, watching=True) as follower:
        try:
            # An end that a resume follows is none, so the status decides; it also knows a process that was killed.
            while (status := read_status(directory.status)).alive:
                time.sleep(STATUS_S)
        except KeyboardInterrupt:
            return "detached"
        reason = status.reason or "its process is gone"
        follower.close(unless_ended={"type": "run_finished", "status": status.state, "reason": reason})
    return "lost" if status.state == "lost" else "ended"


class Follower:
    """Shows a run until closed; a context manager.

    Args:
        events: the run's `events.jsonl`; it need not exist yet.
        live: draw the dashboard; otherwise write lines. See `should_be_live`.
        color: True or False, None lets the terminal and `NO_COLOR` decide. Lines never have color.
        width: columns; None asks the terminal, at every frame.
        stream: where to write, by default stderr.
        since: lines are written for events from this time on (seconds since the epoch); earlier ones only count.
        watching: this is not the run's own process: the dashboard takes the alternate screen and the terminal's full
            height, and ctrl-c is described as detaching.
    """

    def __init__(
        self,
        events: Path,
        *,
        live: bool,
        color: bool | None = None,
        width: int | None = None,
        stream: TextIO | None = None,
        watching: bool = False,
        since: float = 0.0,
    ) -> None:
        self._since = since
        self._restarts = 0
        self._events = events
        self._tail = Tail(events)
        self._view = RunView()
        self._pending: deque[Event] = deque()
        self._unless_ended: Event | None = None
        self._drawn = 0.0
        self._stream = stream or sys.stderr
        self._watching = watching
        self._closing = threading.Event()
        self._keys = Keys(sys.stdin if live else None)
        # A process that ends without `close` must not leave the shell without an echo.
        atexit.register(self._keys.restore)
        self._display: _Display | None = (
            _LiveDisplay(self._stream, color, width, watching, self._keys.active)
            if live
            else _LineDisplay(self._stream, watching)
        )
        self._thread = threading.Thread(target=self._follow, name="monitor", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, unless_ended: Event | None = None) -> None:
        """Shows what is left in the file and ends the view; the last frame stays. May be called more than once.

        Args:
            unless_ended: event to show last, if the file does not say that the run has ended.
        """
        if not self._closing.is_set():
            self._unless_ended = unless_ended
            self._closing.set()
            self._keys.wake()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        # Where the thread hangs, in a terminal that takes no output, at least input is given back.
        self._keys.restore()
        atexit.unregister(self._keys.restore)

    def _follow(self) -> None:
        while not self._closing.is_set():
            self._guarded(self._look)
            for key in self._keys.wait(LOOK_S):
                self._view.select(key)
                self._drawn = 0.0
        # The last look comes after the last event.
        self._guarded(self._look)
        if self._unless_ended is not None and not self._view.finished:
            self._pending.append(self._unless_ended)
            self._guarded(self._look)
        self._guarded(self._finish)
        self._keys.restore()

    def _look(self) -> None:
        self._pending.extend(self._tail.new())
        if self._tail.restarts != self._restarts:
            self._restarts = self._tail.restarts
            self._view = RunView()
        while self._pending:
            event = self._pending.popleft()
            self._view.apply(event)
            if self._display is not None and event.get("time", self._since) >= self._since:
                self._display.take(event, self._view)
            if event.get("type") == "stopping":
                self._drawn = 0.0
        now = time.time()
        if self._display is not None and (now - self._drawn >= FRAME_S or self._closing.is_set()):
            self._drawn = now
            self._display.refresh(self._view, now)

    def _finish(self) -> None:
        if self._display is not None:
            self._display.close()

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        # A view may fail in any way a terminal, a stream or an unforeseen event can make it; training must not notice.
        except Exception as error:
            logger.warning("the view failed", exc_info=error)
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        """From the dashboard to lines; from lines to nothing."""
        failed, self._display = self._display, None
        with suppress(Exception):  # What is broken may well break again while it is taken down.
            if failed is not None:
                failed.close()
            self._stream.write(
                f"warning: the view failed ({type(error).__name__}: {words.clean(error)}); "
                f"the run goes on, see {self._events}\n"
            )
            self._stream.flush()
            if isinstance(failed, _LiveDisplay):
                self._display = _LineDisplay(self._stream, self._watching)


class _Display(Protocol):
    def take(self, event: Event, view: RunView) -> None:
        """Shows one event, already in `view`."""

    def refresh(self, view: RunView, now: float) -> None:
        """Shows what changes with time."""

    def close(self) -> None:
        """Leaves the terminal as a reader expects to find it."""


class _LineDisplay:
    def __init__(self, stream: TextIO, watching: bool) -> None:
        self._stream = stream
        self._lines = Lines(watching)
        self._written = time.time()

    def take(self, event: Event, view: RunView) -> None:
        for line in self._lines.of(event, view):
            self._write(line, time.time())

    def refresh(self, view: RunView, now: float) -> None:
        if now - self._written >= HEARTBEAT_S and (line := self._lines.heartbeat(view, now)):
            self._write(line, now)

    def close(self) -> None:
        self._stream.flush()

    def _write(self, line: str, now: float) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
        self._written = now


class _LiveDisplay:
    def __init__(self, stream: TextIO, color: bool | None, width: int | None, watching: bool, keys: bool) -> None:
        # A terminal was seen by `should_be_live`; Rich is not asked again.
        self._console = Console(
            file=stream,
            width=width,
            force_terminal=True,
            color_system=None if color is False else "auto",
            no_color=False if color else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._watching, self._keys = watching, keys
        self._live: Live | None = None
        self._rows: list[Text] = []
        self._frame = Frame()

    def take(self, event: Event, view: RunView) -> None:
        """The next refresh shows it."""

    def refresh(self, view: RunView, now: float) -> None:
        size = self._console.size
        height = size.height if self._watching else min(MOST_ROWS, size.height) - 1
        self._frame = Frame(size.width, max(height, 1), now, self._watching, self._keys)
        drawn = rows(view, self._frame)
        if drawn == self._rows:
            return
        self._rows = drawn
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                screen=self._watching,
                # What a library prints appears above the frame, not across it; a pipe keeps what is written to it.
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
                redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
                vertical_overflow="crop",
            )
            self._live.start()
        self._live.update(Group(*(cut(row, size.width) for row in drawn)), refresh=True)

    def close(self) -> None:
        if self._live is None:
            return
        self._live.stop()
        if self._watching:
            # The alternate screen is gone, and with it the last frame.
            self._console.print(Group(*(cut(row, self._frame.width) for row in self._rows)))
