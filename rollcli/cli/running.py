"""What `train` and `resume` share: show where things are, run while events are shown, say how it ended."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rollcli.cli.output import Output, paint

if TYPE_CHECKING:
    from rollcli.config.load import LoadedRecipe
    from rollcli.pipelines.launch import Outcome
    from rollcli.runs.directory import RunDirectory


def show_map(output: Output, directory: RunDirectory) -> None:
    """Writes where the run's things are."""
    rows = {"run": str(directory.path), "log": str(log_file(directory)), "watch": f"roll runs watch {directory.id}"}
    for label, text in rows.items():
        style = "command" if label == "watch" else "path"
        output.note(f"{paint(f'{label:<10}', 'dim', output.colored_stderr)}{paint(text, style, output.colored_stderr)}")


def log_file(directory: RunDirectory) -> Path:
    """Returns the driver's log of the newest attempt."""
    return directory.logs / "driver.log"


def run(output: Output, loaded: LoadedRecipe, directory: RunDirectory, **options: Any) -> None:
    """Runs the pipeline to its end while its events are shown, says how it ended and exits with its code.

    Args:
        options: what `launch` takes: where to go on from, a Ray address, the time that SIGTERM leaves.
    """
    from rollcli.pipelines.launch import launch

    show_map(output, directory)
    attempts = directory.attempts()
    try:
        with follower(output, directory):
            outcome = launch(loaded, directory, **options)
    finally:
        # An error from before the attempt began has no log of its own.
        output.log = log_file(directory) if directory.attempts() > attempts else None
    show_outcome(output, directory, outcome)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def follower(output: Output, directory: RunDirectory):
    """Returns the view of a run's events: live on a terminal, plain lines elsewhere, none when quiet."""
    if output.quiet or output.as_json:
        return nullcontext()
    from rollcli.monitor.follow import Follower

    # A resume goes on in a file that holds the earlier attempts; their lines were shown when they happened.
    return Follower(directory.events, live=output.live, color=output.colored_stderr, since=time.time())


def show_outcome(output: Output, directory: RunDirectory, outcome: Outcome) -> None:
    """Writes how a run ended: accuracy before and after, the checkpoint, what to do next."""
    output.document({"run": directory.id, "directory": directory.path, **vars(outcome)})
    output.value(directory.path)
    facts = {"run": str(directory.path), outcome.state: f"step {outcome.step}"}
    if outcome.reason and outcome.state != "finished":
        facts[outcome.state] += f", {outcome.reason}"
    if outcome.end_accuracy is not None:
        facts["accuracy"] = change(outcome.start_accuracy, outcome.end_accuracy)
    facts["checkpoint"] = str(outcome.checkpoint or "none")
    output.note()
    output.facts(facts)
    if outcome.state == "finished" and outcome.hint is None:
        output.hint(f"measure it with `roll eval {directory.id}`, read it with `roll samples {directory.id}`")
    else:
        output.hint(outcome.hint or f"resume with: roll resume {directory.id}")


def change(start: float | None, end: float) -> str:
    """Returns `0.120 → 0.630 (+0.510)`, or the end alone."""
    return f"{end:.3f}" if start is None else f"{start:.3f} → {end:.3f} ({end - start:+.3f})"
