"""`events.jsonl`: what happened, one JSON object per line; training writes it, every viewer reads it.

    type            fields beside `time` (seconds since the epoch)
    run_started     run, recipe, pipeline, algorithm, steps, attempt, overrides, devices, logs
    stage_started   step, stage
    stage           step, stage, seconds
    progress        step, stage, done, total, states (episodes by state), longest (tokens)
    step            step, metrics
    sample          step, task, prompt, response, reward, advantage, tokens, stop_reason
    evaluation      step, tasks: {name: {accuracy, accuracy_low, accuracy_high, length, …}}, accuracy
    checkpoint      step, path, seconds
    warning         message
    stopping        signal, step
    run_finished    status, reason, exit_code, steps, hint

A line is written whole and flushed at once; a reader ignores a torn last line.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _end_torn_line(path)
        # Half a surrogate pair, which a text may hold and UTF-8 may not, becomes the JSON escape it came from.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record and flushes it."""
        self._file.write(json.dumps(finite(record), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class EventLog(JsonLines):
    """Writes events."""

    def emit(self, type: str, **fields: Any) -> None:
        """Appends one event."""
        self.write({"time": round(time.time(), 3), "type": type, **fields})


def finite(value: Any) -> Any:
    """Returns `value` with NaN and infinities as null, which JSON readers other than Python's require."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns every whole record of a file of JSON lines; a missing file has none."""
    return list(Tail(path).new()) if path.exists() else []


class Tail:
    """Reads what was appended since the last look; only whole lines count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        """How often the file was found to be another one, and read anew."""
        self._position = 0
        self._file_id: int | None = None

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the records appended since the last call. A file that a resume cut is read anew."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._file_id or facts.st_size < self._position:
                    self.restarts += self._file_id is not None
                    self._file_id, self._position = facts.st_ino, 0
                file.seek(self._position)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _end_torn_line(path: Path) -> None:
    """Cuts a last line that a kill left half written, so that the next record starts on a line of its own."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
