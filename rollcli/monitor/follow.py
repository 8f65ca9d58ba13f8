"""Follows an `events.jsonl` that grows, and shows it: as a dashboard in a terminal, as plain lines elsewhere.

    with Follower(directory.events, live=should_be_live(sys.stderr)):
        train()

The view lives in a daemon thread, looks at the file at most four times a second, and never writes to it. If it fails,
the run goes on: one warning line, and from there plain lines instead of the dashboard.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.live import Live

from rollcli.monitor.dashboard import MOST_ROWS, Frame, render
from rollcli.monitor.keys import Keys
from rollcli.monitor.lines import HEARTBEAT_S, Lines
from rollcli.monitor.view import Event, RunView
from rollcli.runs.directory import RunDirectory
from rollcli.runs.events import Tail
from rollcli.runs.status import read_status

INTERVAL_S = 0.25
CLOSE_TIMEOUT_S = 5.0
logger = logging.getLogger(__name__)


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
            while not follower.ended.wait(INTERVAL_S * 2):
                status = read_status(directory.status)
                if not status.alive:
                    # Its last events may have been written since the last look.
                    follower.look()
                    if not follower.ended.wait(INTERVAL_S * 4):
                        reason = status.reason or "its process is gone"
                        follower.tell({"type": "run_finished", "status": status.state, "reason": reason})
                        return "lost" if status.state == "lost" else "ended"
        except KeyboardInterrupt:
            return "detached"
    return "ended"


class Follower:
    """Shows a run until closed; a context manager.

    Args:
        events: the run's `events.jsonl`; it need not exist yet.
        live: draw the dashboard; otherwise write lines. See `should_be_live`.
        color: True or False, None lets the terminal and `NO_COLOR` decide. Lines never have color.
        width: columns; None asks the terminal, at every frame.
        stream: where to write, by default stderr.
        watching: this is not the run's own process: the dashboard takes the alternate screen and the terminal's full
            height, and ctrl-c is described as detaching.

    Attributes:
        ended: set while the newest thing the run said is that it has ended.
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
    ) -> None:
        self.ended = threading.Event()
        self._tail = Tail(events)
        self._view = RunView()
        self._stream = stream or sys.stderr
        self._watching = watching
        self._told: SimpleQueue[Event] = SimpleQueue()
        self._closing = threading.Event()
        self._keys = Keys() if live else None
        self._display: Display | None = None
        self._make: Callable[[], Display] = lambda: (
            Dashboard(self._stream, color, width, watching, self._keys is not None and self._keys.active)
            if live
            else PlainLines(self._stream, watching)
        )
        self._wake = self._keys.wake if self._keys else self._closing_or_look_set
        self._look = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="monitor", daemon=True)
        if self._keys:
            # A run that ends without `close` must not leave the shell without echo.
            atexit.register(self._keys.restore)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
