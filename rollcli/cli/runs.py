"""`roll runs`: list runs, look into one, watch one, compare two."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcli.cli import arguments
from rollcli.cli.help import RollCommand, RollGroup
from rollcli.cli.output import Column, Output, cells, cut
from rollcli.cli.samples import number

if TYPE_CHECKING:
    from rollcli.runs.directory import RunDirectory
    from rollcli.runs.listing import RunEntry

LS = """\
roll runs ls
roll runs ls --status running
roll runs ls --all --json"""
SHOW = """\
roll runs show grpo-math-7f3a
roll runs show grpo-math-7f3a --json"""
WATCH = """\
roll runs watch grpo-math-7f3a
roll runs watch grpo-math-7f3a --no-progress  # plain lines
roll runs watch grpo-math-7f3a --json  # events, one a line"""
DIFF = """\
roll runs diff grpo-math-7f3a grpo-math-19c0
roll runs diff grpo-math-7f3a grpo-math-19c0 --json"""

LOOK_S = 0.2
STATES = ("starting", "running", "checkpointing", "stopping", "stopped", "finished", "failed", "lost")
_STYLES = {"finished": "ok", "running": "ok", "failed": "error", "lost": "error", "stopped": "warning"}

app = typer.Typer(
    cls=RollGroup, help="List, show, watch and compare runs.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("ls", cls=RollCommand, epilog=LS)
def ls(
    context: typer.Context,
    status: Annotated[
        str | None,
        typer.Option(
            "--status", metavar="STATE", help=f"Only runs that are {', '.join(STATES[:-1])} or {STATES[-1]}",
            autocompletion=lambda: list(STATES),
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", min=1, help="How many to show (20)")] = 20,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Show every run")] = False,
) -> None:  # fmt: skip
    """List runs, newest first."""
    from rollcli.runs.directory import runs_root
    from rollcli.runs.listing import list_runs

    output: Output = context.obj
    if status is not None and status not in STATES:
        raise typer.BadParameter(f"`{status}` is none of {', '.join(STATES)}", param_hint="--status")
    found = [entry for entry in list_runs() if status in (None, entry.status.state)]
    chosen = found if everything else found[:count]
    output.document([{"run": e.directory.id, "directory": e.directory.path, **vars(e.status)} for e in chosen])
    for entry in chosen:
        output.value(entry.directory.id)
    columns = [
        Column("run"), Column("recipe", drop=3), Column("status"), Column("step", right=True),
        Column("reward", right=True, drop=1), Column("age", right=True, drop=2), Column("devices", drop=4),
    ]  # fmt: skip
    output.table(columns, [_row(entry) for entry in chosen])
    if not found:
        output.note(f"no runs in `{runs_root()}`")
    elif len(chosen) < len(found):
        output.note(f"{len(found) - len(chosen)} older runs are not shown; see them with `--all`")


def _row(entry: RunEntry) -> list[str]:
    status = entry.status
    step = f"{status.step}/{status.steps}" if status.steps else str(status.step)
    return [
        entry.directory.id, status.recipe, status.state, step, number(status.reward), age(status.started),
        devices(entry.directory),
    ]  # fmt: skip


def devices(directory: RunDirectory) -> str:
    """Returns the devices that the run began on, from its first event, or `-`."""
    try:
        with directory.events.open(encoding="utf-8") as file:
            return str(json.loads(file.readline()).get("devices") or "-")
    except (OSError, json.JSONDecodeError):
        return "-"


def age(started: float, now: float | None = None) -> str:
    """Returns how long ago, in one unit: `42 s`, `5 min`, `3 h`, `12 d`."""
    if not started:
        return "-"
    seconds = max((time.time() if now is None else now) - started, 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def duration(seconds: float) -> str:
    """Returns a length of time in two units: `54 s`, `3 min 20 s`, `2 h 11 min`."""
    whole = round(seconds)
    for size, unit, small, lesser in ((3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {lesser}"
    return f"{whole} s"


@app.command("show", cls=RollCommand, epilog=SHOW)
def show(context: typer.Context, run: arguments.Run) -> None:
    """Show where a run stands, what it measured and what produced it.

    Raises:
        RunNotFound: there is no such run.
    """
    from rollcli.runs.directory import list_checkpoints
    from rollcli.runs.events import read_lines
    from rollcli.runs.listing import find_run
    from rollcli.runs.status import read_status

    output: Output = context.obj
    directory = find_run(run)
    status, manifest = read_status(directory.status), _read(directory.manifest)
    metrics = read_lines(directory.metrics)
    events = read_lines(directory.events)
    evaluations = [event for event in events if event.get("type") == "evaluation"]
    checkpoints = list_checkpoints(directory.checkpoints)
    estimates = estimated(manifest, metrics)
    attempts = len(manifest.get("attempts", []))
    output.document(
        {
            "run": directory.id, "directory": directory.path, "status": vars(status), "manifest": manifest,
            "checkpoints": checkpoints, "evaluations": evaluations, "metrics": metrics[-1] if metrics else None,
            "estimates": estimates,
        }
    )  # fmt: skip
    output.value(directory.path)
    facts = {
        "run": str(directory.path),
        "recipe": status.recipe,
        "status": ", ".join(
            filter(None, [output.paint(status.state, _STYLES.get(status.state, "dim")), status.reason])
        ),
        "step": f"{status.step}/{status.steps}",
        "started": f"{manifest.get('started', '-')}, {attempts} attempt{'s' * (attempts != 1)}",
    }
    facts |= _measured(metrics, evaluations)
    facts["checkpoints"] = ", ".join(str(step) for step in checkpoints) or "none"
    facts |= _produced(manifest)
    output.facts(facts)
    if estimates:
        output.data()
        columns = [Column("estimate"), *(Column(name, right=True) for name in ("estimated", "measured", "ratio"))]
        output.table(
            columns, [[e["name"], number(e["estimated"]), number(e["measured"]), number(e["ratio"])] for e in estimates]
        )
    warnings = [event["message"] for event in events if event.get("type") == "warning"]
    for message in warnings[-3:]:
        output.warn(message)


def _measured(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, str]:
    facts = {}
    if metrics:
        rewards = [row["reward"] for row in metrics if isinstance(row.get("reward"), (int, float))]
        if rewards:
            facts["reward"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
        seconds = [row["time/step_s"] for row in metrics if isinstance(row.get("time/step_s"), (int, float))]
        if seconds:
            facts["time"] = (
                f"{duration(sum(seconds))} in {len(seconds)} steps, {sum(seconds) / len(seconds):.1f} s each"
            )
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        facts["accuracy"] = f"{number(first.get('accuracy'))} at step {first.get('step')}"
        if last is not first:
            facts["accuracy"] += f", {number(last.get('accuracy'))} at step {last.get('step')}"
    return facts


def _produced(manifest: dict[str, Any]) -> dict[str, str]:
    git = manifest.get("git") or {}
    facts = {"rollcli": f"{manifest.get('rollcli', '-')} (Python {manifest.get('python', '-')})"}
    if git:
        facts["commit"] = f"{git['commit'][:12]}{' with uncommitted changes' if git.get('diff') else ''}"
    if manifest.get("overrides"):
        facts["overrides"] = " ".join(manifest["overrides"])
    return facts


def estimated(manifest: dict[str, Any], metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what the plan estimated beside what the run measured: `estimate` of the manifest, by name of the metric.

    Memory is compared with the largest value, anything else with the mean.
    """
    found = []
    for name, value in (manifest.get("estimate") or {}).items():
        values = [row[name] for row in metrics if isinstance(row.get(name), (int, float))]
        if values and isinstance(value, (int, float)):
            measured = max(values) if name.startswith("memory/") else sum(values) / len(values)
            ratio = measured / value if value else None
            found.append({"name": name, "estimated": value, "measured": measured, "ratio": ratio})
    return found


@app.command("watch", cls=RollCommand, epilog=WATCH)
def watch(context: typer.Context, run: arguments.Run) -> None:
    """Watch a run from any terminal; Ctrl-C only looks away.

    Raises:
        RunNotFound: there is no such run.
    """
    from rollcli.runs.listing import find_run

    output: Output = context.obj
    directory = find_run(run)
    if output.as_json:
        with suppress(KeyboardInterrupt):
            for event in stream(directory):
                output.record(event)
        return
    from rollcli.monitor.follow import watch as follow

    if follow(directory, live=output.live, color=output.colored_stderr) == "detached":
        output.note(f"no longer watching; run `{directory.id}` goes on")


def stream(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yields a run's events, from its beginning, until it ends."""
    from rollcli.runs.events import Tail
    from rollcli.runs.status import read_status

    tail = Tail(directory.events)
    newest, restarts = 0.0, 0
    while True:
        # The status first: what is written between the two looks belongs to a run that still runs.
        alive = read_status(directory.status).alive
        found = list(tail.new())
        if tail.restarts > restarts:
            # A resume cut the file, which is read anew: what was there before has been told.
            restarts, found = tail.restarts, [event for event in found if event.get("time", 0.0) > newest]
        for event in found:
            newest = max(newest, event.get("time", 0.0))
            yield event
        if not alive:
            return
        time.sleep(LOOK_S)


@app.command("diff", cls=RollCommand, epilog=DIFF)
def diff(
    context: typer.Context,
    first: arguments.Run,
    second: arguments.Run,
) -> None:
    """Show only what differs between two runs: recipe, code, packages, result.

    Raises:
        RunNotFound: one of them is not there.
    """
    from rollcli.runs.listing import find_run

    output: Output = context.obj
    a, b = find_run(first), find_run(second)
    found = differences(a, b)
    output.document({"runs": [a.id, b.id], "differences": [{"key": k, "first": x, "second": y} for k, x, y in found]})
    if not found:
        output.data("no differences")
        return
    rows = [[key, _short(x), _short(y)] for key, x, y in found]
    if output.width:
        keys = max(cells(row[0]) for row in [["key"], *rows])
        room = max((output.width - keys - 4) // 2, 12)
        rows = [[key, *(cut(value, room) for value in values)] for key, *values in rows]
    output.table([Column("key"), Column(a.id), Column(b.id)], rows)


SAME_FOR_NOBODY = ("attempts", "command", "started", "config_digest", "recipe_file", "estimate", "overrides")
"""Parts of a manifest that differ between any two runs, or that other lines say better."""


def differences(a: RunDirectory, b: RunDirectory) -> list[tuple[str, Any, Any]]:
    """Returns `(key, value of a, value of b)` of everything that differs."""
    import yaml

    from rollcli.runs.resume import flat_differences
    from rollcli.runs.status import read_status

    recipes = [yaml.safe_load(run.config.read_text(encoding="utf-8")) if run.config.is_file() else {} for run in (a, b)]
    manifests = [
        {key: value for key, value in _read(run.manifest).items() if key not in SAME_FOR_NOBODY} for run in (a, b)
    ]
    for manifest in manifests:
        manifest["git"] = {**(manifest.get("git") or {})}
        if "diff" in manifest["git"]:
            manifest["git"]["diff"] = f"{len(manifest['git']['diff'].splitlines())} lines"
    results = [
        {
            name: value
            for name, value in vars(read_status(run.status)).items()
            if name in ("state", "step", "reward", "accuracy")
        }
        for run in (a, b)
    ]
    return [
        *flat_differences(*recipes),
        *flat_differences(*manifests, "manifest"),
        *flat_differences(*results, "result"),
    ]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("\n", " ")


def _read(path) -> dict[str, Any]:
    """Returns a JSON file's object; a missing or torn one is empty."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
