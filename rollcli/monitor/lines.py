"""Plain lines for pipes and CI: one for each step and each thing worth knowing, every one complete in itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollcli.monitor import words
from rollcli.monitor.view import Event, RunView

HEARTBEAT_S = 60.0


class Lines:
    """Writes events as lines.

    Columns are aligned by the widest value seen so far, so the first line needs no padding and no later line is cut. A
    number that was there before and is missing now is written `-`.
    """

    def __init__(self, watching: bool = False) -> None:
        self._watching = watching
        self._widths: dict[str, int] = {}

    def of(self, event: Event, view: RunView) -> Iterator[str]:
        """Yields the lines of an event that `view` has already taken in, without line ends."""
        write = getattr(self, f"_{event.get('type')}", None)
        if write is not None:
            yield from (line.rstrip() for line in write(event, view))

    def heartbeat(self, view: RunView, now: float) -> str | None:
        """Returns the line that says a long step is alive: its stage, and how far that is."""
        if view.finished:
            return None
        if view.started is None:
            return "...  starting"
        stage, progress = view.stage, view.progress
        parts = [f"step {view.step + 1}/{view.steps}", words.clean(view.doing)]
        if progress.total:
            other = f"{words.clean(progress.stage)} " if progress.stage != stage else ""
            parts.append(f"{other}{words.count(progress.done)}/{words.count(progress.total)} samples")
        since = view.open_stages[stage] if stage else view.stepped or view.started
        return "  ".join(["...", *parts, words.duration(now - since)])

    def _run_started(self, event: Event, view: RunView) -> Iterator[str]:
        again = f"attempt {view.attempt}" if view.attempt > 1 else ""
        parts = [f"run {view.run}", view.algorithm, f"{view.steps} steps", again, *view.overrides]
        yield "  ".join(words.clean(part) for part in parts if part)

    def _step(self, event: Event, view: RunView) -> Iterator[str]:
        metrics = view.metrics
        kl = metrics.get("kl_reference", metrics.get("kl_old"))
        whole, speed = view.last_step_s(), metrics.get("speed/rollout_tokens_per_s")
        if speed is None:
            speed = metrics.get("speed/train_tokens_per_s")
        stale = metrics.get("staleness_max")
        columns = [
            ("reward", "reward {}", _text(metrics.get("reward"), words.number)),
            ("loss", "loss {}", _text(metrics.get("loss") if "reward" not in metrics else None, words.number)),
            ("kl", "kl {}", _text(kl, lambda value: words.number(value, 4))),
            ("len", "len {}", _text(metrics.get("length"), lambda value: f"{value:.0f}")),
            ("time", "{}", _text(whole, words.seconds)),
            ("speed", "{}", _text(speed, lambda value: f"{words.rate(value)} tok/s")),
            ("staleness", "staleness {}", _text(stale, lambda value: f"≤{value:.0f}")),
            *((name, f"{name} {{}}", _text(metrics.get(name) or None, words.count)) for name in ("failed", "dropped")),
        ]
        cells = [f"step {view.step:{len(str(view.steps))}d}/{view.steps}"]
        for name, form, text in columns:
            if text is None and name not in self._widths:
                continue
            width = self._widths[name] = max(self._widths.get(name, 0), len(text or "-"))
            cells.append(form.format((text or "-").rjust(width)))
        yield "  ".join(cells)

    def _evaluation(self, event: Event, view: RunView) -> Iterator[str]:
        tasks = event.get("tasks") or {}
        for name, values in tasks.items():
            yield f"eval step {event.get('step')}  {words.clean(name)}  {_accuracy(values)}"
        if len(tasks) != 1 and event.get("accuracy") is not None:
            yield f"eval step {event.get('step')}  all tasks  accuracy {event['accuracy']:.3f}"

    def _checkpoint(self, event: Event, view: RunView) -> Iterator[str]:
        parts = [f"checkpoint step {event.get('step')}", words.clean(event.get("path") or "")]
        if event.get("seconds") is not None:
            parts.append(words.seconds(event["seconds"]))
        yield "  ".join(part for part in parts if part)

    def _warning(self, event: Event, view: RunView) -> Iterator[str]:
        # The same warning a thousand times is one line here; how often it came is in the dashboard and the file.
        if (words_of := str(event.get("message") or "")) and dict(view.warnings).get(words_of, 1) == 1:
            yield f"warning: {words.clean(words_of)}"

    def _stopping(self, event: Event, view: RunView) -> Iterator[str]:
        left = view.step_left_s(float(event.get("time") or 0.0))
        about = f" (about {words.duration(left)})" if left is not None else ""
        again = "" if self._watching else ". press ctrl-c again to kill"
        yield f"stopping: will checkpoint at step {event.get('step')}{about}{again}"

    def _run_finished(self, event: Event, view: RunView) -> Iterator[str]:
        parts = [str(event.get("status") or "finished"), f"step {view.step}/{view.steps}"]
        parts += [words.duration(view.elapsed_s(view.updated)), str(event.get("reason") or "")]
        yield "  ".join(words.clean(part) for part in parts if part)
        if self._watching and event.get("hint"):
            yield f"hint: {words.clean(event['hint'])}"


def _text(value: float | None, form: Any) -> str | None:
    return None if value is None else form(value)


def _accuracy(values: Any) -> str:
    accuracy, low, high = (values.get(name) for name in ("accuracy", "accuracy_low", "accuracy_high"))
    parts = ["accuracy -" if accuracy is None else f"accuracy {accuracy:.3f}"]
    if low is not None and high is not None:
        parts[0] += f" ({low:.2f}–{high:.2f})"
    if values.get("length") is not None:
        parts.append(f"len {values['length']:.0f}")
    return "  ".join(parts)
