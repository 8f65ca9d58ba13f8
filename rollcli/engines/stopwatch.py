"""Adds up the seconds spent inside `with` blocks, so that the model's own share of a stage is measured."""

from __future__ import annotations

import time


class Stopwatch:
    """Total seconds of all blocks so far. On a GPU that is the time to launch the work, not to finish it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started
