"""Writes down a run as it goes: events, metrics, status, trackers. The pipelines say what happened and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollcli.runs.directory import RunDirectory
from rollcli.runs.events import EventLog, JsonLines
from rollcli.runs.status import StatusFile
from rollcli.trackers.base import Mirror

PROGRESS_EVERY_S = 0.5


class Recorder:
    """One run's records. `stage` is the current one, `times` the seconds of each since the step began.

    `overlapped` says that sampling goes on all step long, so that the stage `rollout` is only the wait for it.
    """

    def __init__(self, directory: RunDirectory, status: StatusFile, mirror: Mirror) -> None:
        self.directory = directory
        self.status = status
        self.mirror = mirror
        self.events = EventLog(directory.events)
        self._metrics = JsonLines(directory.metrics)
        self.times: dict[str, float] = {}
        self.stage: str | None = None
        self.overlapped = False
        self.step = 0
        self._step_started = time.monotonic()
        self._last_progress = 0.0

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Marks a stage of the step; its seconds add up under `time/<stage>_s`."""
        self.events.emit("stage_started", step=self.step, stage=stage)
        if stage == "checkpoint" and self.status.status.state == "running":
            self.status.update(state="checkpointing")
        outer, self.stage = self.stage, stage
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.stage = outer
            self.times[stage] = self.times.get(stage, 0.0) + seconds
            self.events.emit("stage", step=self.step, stage=stage, seconds=round(seconds, 4))
            if self.status.status.state == "checkpointing":
                self.status.update(state="running")

    def progress(self, done: int, total: int, states: dict[str, int], longest: int) -> None:
        """Says how far the current stage is, at most twice a second."""
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_EVERY_S:
            self._last_progress = now
            self.events.emit(
                "progress", step=self.step, stage=self.stage, done=done, total=total, states=states, longest=longest
            )

    def begin_step(self, step: int) -> None:
        """A step starts; it is recorded under `step`."""
        self.step = step
        self.times = {}
        self._step_started = time.monotonic()

    def end_step(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Writes a finished step's metrics, and a few of its samples for viewers."""
        seconds = time.monotonic() - self._step_started
        timed = {f"time/{stage}_s": round(spent, 4) for stage, spent in self.times.items()}
        record = {**metrics, **self._speeds(metrics, seconds), **timed, "time/step_s": round(seconds, 4)}
        self._metrics.write({"step": self.step, **record})
        for sample in samples:
            self.events.emit("sample", step=self.step, **sample)
        self.events.emit("step", step=self.step, metrics=record)
        self.status.update(step=self.step, reward=metrics.get("reward"), accuracy=metrics.get("accuracy"))
        self.mirror.log(self.step, record)

    def _speeds(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        speeds = {}
        for name, tokens, stage in (("rollout", "sampled_tokens", "rollout"), ("train", "trained_tokens", "update")):
            spent = seconds if self.overlapped and stage == "rollout" else self.times.get(stage)
            if metrics.get(tokens) and spent:
                speeds[f"speed/{name}_tokens_per_s"] = round(metrics[tokens] / spent, 1)
        if metrics.get("trained_tokens"):
            speeds["speed/tokens_per_s"] = round(metrics["trained_tokens"] / seconds, 1)
        return speeds

    def evaluation(self, step: int, tasks: dict[str, dict[str, float]], accuracy: float) -> None:
        """Writes an evaluation's result."""
        self.events.emit("evaluation", step=step, tasks=tasks, accuracy=accuracy)
        self.mirror.log(step, {f"evaluation/{name}/accuracy": facts["accuracy"] for name, facts in tasks.items()})

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """A checkpoint is whole."""
        self.events.emit("checkpoint", step=step, path=str(path), seconds=round(seconds, 3))
        self.status.update(checkpoint=step)

    def warning(self, message: str) -> None:
        """Something the user should know that does not end the run."""
        self.events.emit("warning", step=self.step, message=message)

    def close(self) -> None:
        """Flushes and closes everything."""
        self.status.close()
        self.mirror.close()
        self.events.close()
        self._metrics.close()
