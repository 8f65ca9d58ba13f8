"""What a tracker is, and how a run mirrors its metrics into several without ever depending on one.

Each tracker lives in a daemon thread of its own, its lane. A lane receives steps through a queue, so a slow network
delays no step, and a tracker that hangs at the end cannot keep the run from exiting.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from rollcli import registry
from rollcli.config.schema import TrackerConfig
from rollcli.errors import RollError

Warn = Callable[[str], None]
BUFFERED_STEPS = 1000
CLOSE_TIMEOUT_S = 30.0


class Tracker(Protocol):
    """One mirror of the metrics. A plug-in is called with its `TrackerConfig` and a function that warns the user.

    All calls come from one thread, `start` first and `close` last; none may prompt or write to the terminal.
    """

    def start(
        self, run_id: str, config: Mapping[str, Any], folder: Path, attempt: int, resume_step: int | None
    ) -> None:
        """Opens the mirror of one attempt of a run; what it raises stops the run before training.

        Args:
            run_id: the run's name; attempts of one run share it.
            config: every value of the recipe.
            folder: where this tracker may put files; it exists.
            attempt: 1 for the first start of the run.
            resume_step: step the attempt continues from, None for the first one.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Mirrors the metrics of one step; `step` is the run's own step, all values are finite."""
        ...

    def close(self) -> None:
        """Sends what is left and closes."""
        ...


class Mirror:
    """The trackers of one run.

    A tracker that does not start is a misconfiguration and stops the run before training. One that fails later costs
    one warning: its steps are kept, up to `BUFFERED_STEPS`, and sent again with the next step.
    """

    def __init__(self, configs: Sequence[TrackerConfig], warn: Warn, recipe_folder: Path | None = None) -> None:
        self._warn = warn
        self._warnings: SimpleQueue[str] = SimpleQueue()
        self._lanes = [
            _Lane(config.name, registry.resolve("trackers", config.name, recipe_folder)(config, self._warnings.put))
            for config in configs
        ]

    def start(
        self, run_id: str, config: Mapping[str, Any], folder: Path, attempt: int = 1, resume_step: int | None = None
    ) -> None:
        """Opens every tracker, each with a folder of its own below `folder`.

        Raises:
            RollError: a tracker did not start; those that did are closed again.
        """
        for lane in self._lanes:
            error = lane.start(run_id, config, folder / lane.name.rpartition(":")[2], attempt, resume_step)
            if error is None:
                continue
            self.close()
            if isinstance(error, RollError):
                raise error
            raise RollError(
                f"tracker `{lane.name}` did not start: {_reason(error)}",
                hint="correct `trackers:` in the recipe, or train without: `trackers=[]`",
            ) from error
        self._deliver()

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Mirrors the metrics of one step; returns at once. Values that are missing or not finite are left out."""
        kept = {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
        for lane in self._lanes:
            lane.log(step, kept)
        self._deliver()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Sends what is left and closes every tracker; gives up on one that takes longer than `timeout_s`."""
        for lane in self._lanes:
            if not lane.close(timeout_s):
                self._warnings.put(f"tracker `{lane.name}` did not close within {timeout_s:.0f} s, left behind")
        for lane in self._lanes:
            self._warn_about(lane)
        self._lanes = []
        self._deliver()

    def _deliver(self) -> None:
        """Passes warnings on in the caller's thread: the event log behind `warn` has one writer."""
        for lane in self._lanes:
            self._warn_about(lane)
        while not self._warnings.empty():
            self._warn(self._warnings.get())

    def _warn_about(self, lane: _Lane) -> None:
        if lane.error is not None and not lane.warned:
            lane.warned = True
            self._warn(
                f"tracker `{lane.name}` failed: {_reason(lane.error)}; training goes on, "
                "metrics.jsonl has every step, the mirror is tried again"
            )


class _Lane:
    """One tracker, and the thread all its calls run in."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.error: Exception | None = None
        self.warned = False
        self._tracker = tracker
        self._steps: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._started = threading.Event()
        self._opened = False
        self._thread: threading.Thread | None = None

    def start(self, *arguments: Any) -> Exception | None:
        """Opens the tracker and returns when it is open, or what kept it from opening."""
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._opened:
            return None
        self._thread = None
        # A library that calls `sys.exit` ends its thread and leaves no error.
        error, self.error = self.error or RuntimeError("it ended its own thread"), None
        return error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._steps.put((step, metrics))

    def close(self, timeout_s: float) -> bool:
        """Returns whether the tracker is closed."""
        if self._thread is None:
            return True
        self._steps.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, run_id: str, config: Mapping[str, Any], folder: Path, *rest: Any) -> None:
        def open_tracker() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            self._tracker.start(run_id, config, folder, *rest)

        try:
            self._opened = self._guard(open_tracker)
        finally:
            self._started.set()
        if not self._opened:
            return
        waiting: deque[tuple[int, dict[str, float]]] = deque(maxlen=BUFFERED_STEPS)
        while (item := self._steps.get()) is not None:
            waiting.append(item)
            self._guard(lambda: self._send(waiting))
        self._guard(lambda: self._send(waiting))
        self._guard(self._tracker.close)

    def _send(self, waiting: deque[tuple[int, dict[str, float]]]) -> None:
        while waiting:
            self._tracker.log(*waiting[0])
            waiting.popleft()

    def _guard(self, call: Callable[[], None]) -> bool:
        """Returns whether the call went well; otherwise what it raised is in `error`."""
        try:
            call()
        # A tracker is foreign code and only a mirror: nothing it raises may end a run that is training. What keeps it
        # from starting is raised again, as the user's mistake, by `Mirror.start`.
        except Exception as error:
            self.error = error
            return False
        return True


def _reason(error: Exception) -> str:
    """One line that says what was raised."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
