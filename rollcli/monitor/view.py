"""Folds events into what is known about a run right now.

Pure: no clock, no file, no terminal. Events after a resume may repeat steps; the newer ones count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollcli.monitor.series import Series

SERIES = ("reward", "accuracy", "length", "kl", "entropy", "loss")
STAGES = ("sync", "rollout", "logprobs", "advantages", "update", "evaluate", "checkpoint")
MOST_SAMPLES = 256
Event = Mapping[str, Any]


@dataclass
class Progress:
    """How far a stage is."""

    stage: str = ""
    done: int = 0
    total: int = 0
    longest: int = 0
    states: dict[str, int] = field(default_factory=dict)


@dataclass
class RunView:
    """What the events so far say about a run."""

    run: str = ""
    recipe: str = ""
    pipeline: str = ""
    algorithm: str = ""
    devices: Any = None
    overrides: list[str] = field(default_factory=list)
    attempt: int = 0
    steps: int = 0
    step: int = 0

    started: float | None = None
    updated: float = 0.0
    earlier_s: float = 0.0
    stepped: float | None = None
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    series: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in SERIES})
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    checkpoint: int | None = None
    open_stages: dict[str, float] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    samples: list[Event] = field(default_factory=list)
    warnings: list[tuple[str, int]] = field(default_factory=list)
    stopping: dict[str, Any] | None = None
    finished: dict[str, Any] | None = None

    selected: int = 0
    following: str = ""

    def apply(self, event: Event) -> None:
        """Takes one event in; one of a type or a shape that is not known is passed over."""
        fold = getattr(self, f"_on_{event.get('type')}", None)
        try:
            if fold is not None:
                fold(event)
            self.updated = max(self.updated, float(event.get("time") or 0.0))
        except (TypeError, ValueError, AttributeError, KeyError):
            return  # Another version of rollcli may have written the file.

    @property
    def stage(self) -> str:
        """The stage begun last and not ended; in asynchronous runs several are open at once."""
        return next(reversed(self.open_stages), "")

    @property
    def doing(self) -> str:
        """The current stage in words, also where there is none."""
        return self.stage or ("starting" if self.stepped is None else "between stages")

    def elapsed_s(self, now: float) -> float:
        """Time the run has been worked on, all attempts together, without the pauses between them."""
        if self.started is None:
            return 0.0
        end = self.updated if self.finished else max(now, self.updated)
        return self.earlier_s + end - self.started

    def step_s(self) -> float | None:
        """Mean wall-clock time of the recent steps, with the evaluations and checkpoints between them."""
        return sum(self.step_times) / len(self.step_times) if self.step_times else None

    def left_s(self, now: float) -> float | None:
        """Time left by the recent steps, None while there is nothing to go by."""
        mean = self.step_s()
        if mean is None or self.finished or self.stepped is None:
            return None
        remaining = max(self.steps - self.step, 0)
        return remaining * mean - min(max(now - self.stepped, 0.0), mean * min(remaining, 1))

    def step_left_s(self, now: float) -> float | None:
        """Time left in the current step by the recent ones."""
        mean = self.step_s()
        return None if mean is None or self.stepped is None else max(mean - (now - self.stepped), 0.0)

    def staleness(self) -> dict[int, float]:
        """Share of the last step's samples by policy versions behind."""
        found = {}
        for name, value in self.metrics.items():
            kind, _, behind = name.partition("/")
            if kind == "staleness" and behind.isdigit():
                found[int(behind)] = value
        return dict(sorted(found.items()))

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage of the last step, in the order of the step; `idle` is what no stage accounts for."""
        named = {
            name.removeprefix("time/").removesuffix("_s"): value
            for name, value in self.metrics.items()
            if name.startswith("time/")
            and name.endswith("_s")
            and name != "time/step_s"
            # The model's own share of a stage is part of that stage's time.
            and not name.endswith("_model_s")
        }
        order = {name: index for index, name in enumerate(STAGES)}
        stages = dict(sorted(named.items(), key=lambda item: order.get(item[0], len(order))))
        idle = self.metrics.get("time/step_s", 0.0) - sum(stages.values())
        return stages | ({"idle": idle} if stages and idle > 0 else {})

    def last_step_s(self) -> float | None:
        """Seconds of the last step."""
        return self.metrics.get("time/step_s") or sum(self.stage_seconds().values()) or None

    def by_task(self) -> dict[str, float]:
        """Accuracy of each task in the last step, or reward where a task reports no accuracy."""
        found: dict[str, float] = {}
        for kind in ("reward", "accuracy"):
            for name, value in self.metrics.items():
                if name.startswith(f"{kind}/"):
                    found[name.removeprefix(f"{kind}/")] = value
        return found

    def sample(self) -> Event | None:
        """The sample to show, out of the newest step that has any."""
        if not self.samples:
            return None
        scored = [sample for sample in self.samples if _number(sample.get("reward")) is not None]
        if self.following and scored:
            pick = max if self.following == "best" else min
            return pick(scored, key=lambda sample: sample["reward"])
        return self.samples[self.selected % len(self.samples)]

    def select(self, key: str) -> None:
        """Moves to another sample: `n` next, `p` previous, `b` best, `w` worst, the latter two in later steps too."""
        if key in "bw":
            self.following = {"b": "best", "w": "worst"}[key]
            return
        sample = self.sample()
        at = next((index for index, other in enumerate(self.samples) if other is sample), 0)
        self.following = ""
        self.selected = (at + {"n": 1, "p": -1}[key]) % max(len(self.samples), 1)

    def _on_run_started(self, event: Event) -> None:
        attempt, time = int(event.get("attempt") or 1), float(event["time"])
        if attempt <= self.attempt:
            # The file was cut by a resume, or replaced, and is read from its start again.
            vars(self).update(vars(RunView(selected=self.selected, following=self.following)))
        elif self.started is not None:
            self.earlier_s += self.updated - self.started
        for name in ("run", "recipe", "pipeline", "algorithm"):
            setattr(self, name, str(event.get(name) or ""))
        self.devices, self.attempt = event.get("devices"), attempt
        self.overrides = [str(override) for override in event.get("overrides") or []]
        self.steps = int(event.get("steps") or 0)
        self.started, self.stepped = time, None
        self.finished = self.stopping = None
        self.open_stages, self.progress = {}, Progress()

    def _on_stage_started(self, event: Event) -> None:
        name = str(event.get("stage") or "")
        self.open_stages.pop(name, None)
        self.open_stages[name] = float(event.get("time") or 0.0)
        if self.progress.stage == name:
            self.progress = Progress()

    def _on_stage(self, event: Event) -> None:
        name = str(event.get("stage") or "")
        self.open_stages.pop(name, None)
        if self.progress.stage == name:
            self.progress = Progress()

    def _on_progress(self, event: Event) -> None:
        self.progress = Progress(
            stage=str(event.get("stage") or ""),
            done=int(event.get("done") or 0),
            total=int(event.get("total") or 0),
            longest=int(event.get("longest") or 0),
            states={str(name): int(held) for name, held in (event.get("states") or {}).items()},
        )

    def _on_step(self, event: Event) -> None:
        found = {name: _number(value) for name, value in event["metrics"].items()}
        self.step, time = int(event["step"]), float(event["time"])
        self.metrics = {name: value for name, value in found.items() if value is not None}
        kl = self.metrics.get("kl_reference", self.metrics.get("kl_old"))
        for name, value in (self.metrics | ({} if kl is None else {"kl": kl})).items():
            if name in self.series:
                self.series[name].add(self.step, value)
        # The first step of an attempt has the start-up before it, so only its own time says something about the next.
        interval = self.metrics.get("time/step_s", 0.0) if self.stepped is None else time - self.stepped
        if interval > 0:
            self.step_times.append(interval)
        self.stepped = time

    def _on_sample(self, event: Event) -> None:
        if self.samples and self.samples[0].get("step") != event.get("step"):
            self.samples = []
        if len(self.samples) < MOST_SAMPLES:
            self.samples.append(event)

    def _on_evaluation(self, event: Event) -> None:
        self.evaluation = dict(event)

    def _on_checkpoint(self, event: Event) -> None:
        self.checkpoint = int(event.get("step") or 0)

    def _on_warning(self, event: Event) -> None:
        message = str(event.get("message") or "")
        times = 1
        for known, before in self.warnings:
            if known == message:
                times = before + 1
        others = [pair for pair in self.warnings if pair[0] != message]
        self.warnings = [*others, (message, times)][-3:]

    def _on_stopping(self, event: Event) -> None:
        self.stopping = dict(event)

    def _on_run_finished(self, event: Event) -> None:
        self.finished, self.open_stages = dict(event), {}


def _number(value: Any) -> float | None:
    """The value as a float, None where it is missing or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
