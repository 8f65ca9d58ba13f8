"""Draws a `RunView` as a frame of fixed height.

Every row is one `Text`, cut at the terminal's edge and never wrapped, so the frame cannot jump. Everything is said in
words, signs and digits; color only repeats it. Below `NARROW` columns sparklines and remarks are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from rollcli.monitor import words
from rollcli.monitor.series import scale_of
from rollcli.monitor.view import RunView

LABEL = 11
VALUE = 27
NARROW = 60
SMALLEST, MOST_ROWS = 12, 24
SAMPLE_ROWS = 3
SCALES = {"reward": 1.0, "accuracy": 1.0, "length": 100.0, "kl": 0.01, "entropy": 1.0, "loss": 1.0}
NO_DATA = "no data"
DOT = " · "


@dataclass(frozen=True)
class Frame:
    """What a frame depends on beside the run.

    Attributes:
        width: columns of the terminal.
        height: rows of the frame, at least `SMALLEST` wherever the terminal has them.
        now: time, in seconds since the epoch.
        watching: the viewer is not the run's own process; ctrl-c then only detaches.
        keys: the sample keys work here.
    """

    width: int = 100
    height: int = MOST_ROWS - 1
    now: float = 0.0
    watching: bool = False
    keys: bool = True


def render(view: RunView, frame: Frame) -> Group:
    """Returns the frame: exactly `frame.height` rows, none wider than `frame.width`."""
    return Group(*(cut(row, frame.width) for row in rows(view, frame)))


def rows(view: RunView, frame: Frame) -> list[Text]:
    """Returns the rows, uncut. A low terminal gives up, in this order: log, rules, seconds, memory, tasks, accuracy."""
    rule = Text("─" * frame.width, "dim")
    body: list[tuple[int, Text]] = [
        (0, _run(view)),
        (0, _step(view, frame)),
        (2, rule),
        *_numbers(view, frame),
        (2, rule),
        *zip((0, 3), _stages(view, frame)),
        (0, _now(view, frame)),
        (0, _speed(view)),
        (4, _memory(view)),
        (2, rule),
    ]
    log = [(1, row) for row in _log(view)]
    footer = _footer(view, frame)
    surplus = len(body) + len(log) + 1 + SAMPLE_ROWS - frame.height
    for rank in (1, 2, 3, 4, 5):
        for part in (log, body):
            while surplus > 0 and (found := [item for item in part if item[0] == rank]):
                part.remove(found[-1])
                surplus -= 1
    sample = _sample(view, frame, max(frame.height - len(body) - len(log) - 1, 1))
    upper = [*(row for _, row in body), *sample, *(row for _, row in log)]
    return [*upper[: frame.height - 1], footer]


def _numbers(view: RunView, frame: Frame) -> list[tuple[int, Text]]:
    """Rows of the learning curves, with the rank by which a low terminal gives them up."""
    if view.pipeline == "sft":
        return [(0, _metric("loss", view, frame)), (0, _metric("length", view, frame, _length_remarks))]
    tasks = view.by_task()
    return [
        (0, _metric("reward", view, frame, _evaluation_remarks)),
        (5, _metric("accuracy", view, frame)),
        *([(4, _tasks(tasks))] if len(tasks) > 1 else []),
        (0, _metric("length", view, frame, _length_remarks)),
        (0, _metric("kl", view, frame, _entropy_remarks)),
        (0, _staleness(view, frame)),
    ]


def cut(row: Text, width: int) -> Text:
    """Returns the row in one line of at most `width` columns, with `…` where something is missing."""
    row = row.copy()
    row.no_wrap = True
    row.truncate(width, overflow="ellipsis")
    return row


def _row(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((label.ljust(LABEL), "dim"), *parts)


def _joined(parts: list[str]) -> str:
    return DOT.join(words.clean(part) for part in parts if part)


def _run(view: RunView) -> Text:
    rest = _joined([view.algorithm, _devices(view.devices), " ".join(view.overrides)])
    return _row("run", (words.clean(view.run) or "waiting for the first event", "cyan"), DOT if rest else "", rest)


def _devices(devices: Any) -> str:
    if isinstance(devices, Mapping):
        return "  ".join(f"{role} {place}" for role, place in devices.items())
    return str(devices) if devices else ""


def _step(view: RunView, frame: Frame) -> Text:
    left = view.left_s(frame.now)
    parts = [
        f"{view.step}/{view.steps}" if view.steps else NO_DATA,
        f"{words.duration(view.elapsed_s(frame.now))} elapsed" if view.started is not None else "",
        f"{words.duration(left)} left" if left is not None else "",
        _checkpoint(view),
        f"attempt {view.attempt}" if view.attempt > 1 else "",
    ]
    if view.finished:
        parts.insert(1, str(view.finished.get("status") or "finished"))
    elif view.stopping:
        parts.insert(1, "stopping")
    return _row("step", _joined(parts))


def _checkpoint(view: RunView) -> str:
    if view.checkpoint is None:
        return "no checkpoint yet"
    ago = view.step - view.checkpoint
    return f"checkpoint step {view.checkpoint}" + (f" ({ago} ago)" if ago > 0 else "")


def _metric(name: str, view: RunView, frame: Frame, remarks: Callable[[RunView], list[str]] | None = None) -> Text:
    """One number's row: sparkline, its scale, the value, the change since the first step, remarks that fit whole."""
    series = view.series[name]
    row = _row(name)
    if series.last is None:
        return row.append(NO_DATA, "dim")
    if frame.width < NARROW:
        return row.append(_value(name, view))
    columns = min(max(12 + (frame.width - 80) * 2 // 5, 8), 40)
    scale = scale_of(series, SCALES[name])
    row.append(f"{series.sparkline(columns, scale).ljust(columns)}  {words.interval(scale):<7}  ")
    row.append(_value(name, view).ljust(VALUE))
    for remark in remarks(view) if remarks else []:
        if cell_len(row.plain) + 2 + cell_len(remark) <= frame.width:
            row.append(f"  {words.clean(remark)}", "dim")
    row.rstrip()
    return row


def _value(name: str, view: RunView) -> str:
    series = view.series[name]
    assert series.last is not None and series.first is not None
    value = series.last[1]
    if name == "kl":
        against = "reference" if "kl_reference" in view.metrics else "rollout policy"
        return f"{words.number(value, 4)} to {against}"
    text = f"{words.count(value)} tokens" if name == "length" else words.number(value)
    if series.first[0] == series.last[0]:
        return text
    since = f" since step {series.first[0]}" if name in ("reward", "loss") else ""
    return f"{text}  {words.signed(series.change, 0 if name == 'length' else 2)}{since}"


def _evaluation_remarks(view: RunView) -> list[str]:
    evaluation = view.evaluation or {}
    accuracy = evaluation.get("accuracy")
    if not isinstance(accuracy, (int, float)):
        return []
    return [f"eval {words.number(accuracy)} @{evaluation.get('step')}", *list(evaluation.get("tasks") or {})[:1]]


def _length_remarks(view: RunView) -> list[str]:
    metrics, remarks = view.metrics, []
    if "truncated" in metrics:
        remarks.append(f"truncated {words.percent(metrics['truncated'])}")
    if "length_max" in metrics:
        remarks.append(f"max {words.count(metrics['length_max'])}")
    return remarks


def _entropy_remarks(view: RunView) -> list[str]:
    entropy = view.series["entropy"].last
    return [] if entropy is None else [f"entropy {words.number(entropy[1])}"]


def _tasks(tasks: dict[str, float]) -> Text:
    return _row("tasks", "   ".join(f"{words.clean(name)} {words.number(value)}" for name, value in tasks.items()))


def _staleness(view: RunView, frame: Frame) -> Text:
    shares = view.staleness()
    if not shares:
        return _row("staleness", (NO_DATA, "dim"))
    parts = [f"{behind}: {words.percent(share)}" for behind, share in shares.items()]
    if frame.width >= NARROW:
        parts += [f"max {view.metrics['staleness_max']:.0f}"] if "staleness_max" in view.metrics else []
        parts += [f"{name} {words.count(view.metrics[name])}" for name in ("dropped", "failed") if name in view.metrics]
    return _row("staleness", "   ".join(parts))


def _stages(view: RunView, frame: Frame) -> tuple[Text, Text]:
    """Two rows: each stage's share of the last step, and under it its seconds. What does not fit becomes `other`."""
    times, whole = view.stage_seconds(), view.last_step_s()
    if not times or not whole:
        return _row("stage", (NO_DATA, "dim")), _row("")
    cells = _stage_cells(times, whole)
    while len(times) > 2 and sum(max(map(len, cell)) + 2 for cell in cells) > frame.width - LABEL - len("last step"):
        smallest = min((name for name in times if name != "other"), key=lambda name: times[name])
        merged = times.pop("other", 0.0) + times.pop(smallest)
        times["other"] = merged
        cells = _stage_cells(times, whole)
    columns = [max(map(len, cell)) + 2 for cell in cells]
    shares, lengths = ("".join(cell[row].ljust(width) for cell, width in zip(cells, columns)) for row in (0, 1))
    return _row("stage", shares, ("last step", "dim")), _row("", (lengths, "dim"), words.seconds(whole))


def _stage_cells(times: dict[str, float], whole: float) -> list[tuple[str, str]]:
    return [(f"{words.clean(name)} {100 * value / whole:.0f} %", words.seconds(value)) for name, value in times.items()]


def _now(view: RunView, frame: Frame) -> Text:
    if view.finished:
        return _row("now", _ended(view, "reason"))
    if view.started is None:
        return _row("now", (NO_DATA, "dim"))
    stage, progress = view.stage, view.progress
    parts = [words.duration(frame.now - (view.open_stages[stage] if stage else view.stepped or view.started))]
    if progress.total:
        other = f"{progress.stage} " if progress.stage != stage else ""
        longest = f", longest {words.count(progress.longest)} tokens" if progress.longest else ""
        parts.append(f"{other}{words.count(progress.done)}/{words.count(progress.total)} samples{longest}")
        parts.append("  ".join(f"{state} {held}" for state, held in progress.states.items() if held))
    return _row("now", (words.clean(view.doing), "bold"), f" {_joined(parts)}")


def _ended(view: RunView, detail: str) -> str:
    finished = view.finished or {}
    status = words.clean(finished.get("status") or "finished")
    return f"{status}: {words.clean(finished[detail])}" if finished.get(detail) else status


def _speed(view: RunView) -> Text:
    parts = [
        f"{role} {words.rate(view.metrics[key])} tok/s"
        for role in ("rollout", "train")
        if (key := f"speed/{role}_tokens_per_s") in view.metrics
    ]
    return _row("speed", _joined(parts) or NO_DATA)


def _memory(view: RunView) -> Text:
    parts = [
        f"{name.removeprefix('memory/').removesuffix('_gib')} {value:.1f}"
        for name, value in sorted(view.metrics.items(), key=lambda item: item[0] == "memory/total_gib")
        if name.startswith("memory/") and name.endswith("_gib")
    ]
    return _row("memory", f"{_joined(parts)} GiB" if parts else NO_DATA)


def _sample(view: RunView, frame: Frame, height: int) -> list[Text]:
    """The sample in exactly `height` rows: a head, the end of the prompt, the end of the response."""
    sample = view.sample()
    if sample is None:
        return [_row("sample", (NO_DATA, "dim")), *[Text()] * (height - 1)][:height]
    room = max(frame.width - LABEL, 10)
    lines = [_sample_head(view, sample)]
    if height > 2:
        lines.append(_row("  prompt", (_end(str(sample.get("prompt") or ""), room, 1)[0], "dim")))
    response = _end(str(sample.get("response") or ""), room, max(height - len(lines), 0))
    lines += [_row("  response" if index == 0 else "", line) for index, line in enumerate(response)]
    return (lines + [Text()] * height)[:height]


def _sample_head(view: RunView, sample: Mapping[str, Any]) -> Text:
    at = next(index for index, other in enumerate(view.samples) if other is sample) + 1
    place = f"{at}/{len(view.samples)}" + (f" {view.following}" if view.following else "")
    reward, advantage, tokens = (sample.get(name) for name in ("reward", "advantage", "tokens"))
    parts = [
        f"{sample.get('task') or ''} step {sample.get('step')}".strip(),
        str(sample.get("agent") or ""),
        place,
        f"reward {words.number(reward)}" if isinstance(reward, (int, float)) else "no reward",
        f"advantage {advantage:+.2f}" if isinstance(advantage, (int, float)) else "",
        f"{words.count(tokens)} tokens" if isinstance(tokens, (int, float)) else "",
        str(sample.get("stop_reason") or ""),
    ]
    return _row("sample", _joined(parts))


def _end(text: str, width: int, height: int) -> list[str]:
    """The last `height` lines of `width` columns, marked where something is missing: answers stand at the end."""
    if height <= 0:
        return []
    # Enough to fill the frame, and short enough to measure at every repaint.
    text = text.strip()[-width * height - 1 :]
    lines = _wrapped(words.clean(text), width)
    while len(lines) > height:
        # A wide character can leave a cell empty at each line's end, so more may have to go than was counted.
        text = text[max(len(text) - width * height + 1, 1) :]
        lines = _wrapped("…" + words.clean(text), width)
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    lines, line, used = [], [], 0
    for character in text:
        cells = cell_len(character)
        if used + cells > width:
            lines.append("".join(line))
            line, used = [], 0
        line.append(character)
        used += cells
    return [*lines, "".join(line)]


def _log(view: RunView) -> list[Text]:
    """Three rows, the newest warning last."""
    found = [words.clean(message) + (f" ({times} times)" if times > 1 else "") for message, times in view.warnings]
    lines = [_row("", ("warning: ", "yellow"), line) for line in found] or [_row("", ("no warnings", "dim"))]
    lines += [Text()] * (3 - len(lines))
    lines[0] = Text.assemble(("log".ljust(LABEL), "dim"), lines[0][LABEL:])
    return lines


def _footer(view: RunView, frame: Frame) -> Text:
    if view.finished:
        return Text(_ended(view, "hint" if frame.watching else ""), "bold")
    keys = "n/p next, previous sample   b/w best, worst   " if frame.keys else ""
    if view.stopping and frame.watching:
        return Text(f"the run is stopping after this step   {keys}ctrl-c detach", "yellow")
    if view.stopping:
        return Text("stopping after this step — press ctrl-c again to kill", "yellow")
    return Text(keys + ("ctrl-c detach, the run goes on" if frame.watching else "ctrl-c stop after this step"), "dim")
