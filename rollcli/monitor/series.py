"""One number over the whole run, in bounded memory, and the sparkline that shows it on a fixed scale.

A sparkline's scale starts at a fixed range and only ever grows, to the next of 1, 2, 5, 10, 20, 50 … times a power of
ten, and stands beside the line as a label. A scale fitted to the values at hand would make noise look like progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LEVELS = "▁▂▃▄▅▆▇"
MOST_POINTS = 1024


@dataclass
class Series:
    """Values by step. Beyond `MOST_POINTS` neighbors are averaged in pairs; first, last and extremes stay exact."""

    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None
    low: float = math.inf
    high: float = -math.inf
    _points: list[tuple[int, float]] = field(default_factory=list)
    _stride: int = 1
    _open: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Appends a value. A step at or before the last one replaces what followed it: the run was resumed there."""
        if self.last is not None and step <= self.last[0]:
            self._cut(step)
        self.first = self.first or (step, value)
        self.last = (step, value)
        self.low, self.high = min(self.low, value), max(self.high, value)
        self._open.append(value)
        if len(self._open) == self._stride:
            self._points.append((step, sum(self._open) / self._stride))
            self._open = []
        if len(self._points) > MOST_POINTS:
            self._thin()

    @property
    def change(self) -> float:
        """Difference between the last and the first value."""
        return self.last[1] - self.first[1] if self.first and self.last else 0.0

    def sparkline(self, width: int, scale: tuple[float, float]) -> str:
        """Draws the whole run in at most `width` characters, each the mean of an equal share of the values."""
        values = [value for _, value in self._points]
        if self._open:
            values.append(sum(self._open) / len(self._open))
        if len(values) > width:
            edges = [index * len(values) // width for index in range(width + 1)]
            values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
        low, high = scale
        return "".join(LEVELS[_level((value - low) / (high - low))] for value in values)

    def _cut(self, step: int) -> None:
        self._points = [point for point in self._points if point[0] < step]
        self._open = []
        if self.first is not None and self.first[0] >= step:
            self.first = None

    def _thin(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2])
        left = self._points[-1:] if len(self._points) % 2 else []
        self._points = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs]
        self._open = [value for _, value in left for _ in range(self._stride)] + self._open
        self._stride *= 2


def _level(share: float) -> int:
    return min(max(int(share * len(LEVELS)), 0), len(LEVELS) - 1)


def scale_of(series: Series, base: float) -> tuple[float, float]:
    """Returns the range of a sparkline: 0 to `base`, each end moved out to the next step that holds all values."""
    low = -_ceiling(-series.low, base) if series.low < 0 else 0.0
    return low, _ceiling(series.high, base)


def _ceiling(value: float, base: float) -> float:
    if not math.isfinite(value) or value <= base:
        return base
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))
