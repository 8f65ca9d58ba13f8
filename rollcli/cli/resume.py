"""`roll resume`: continues a run from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments, complete, running
from rollcli.cli.output import Output
from rollcli.errors import RollError, RunNotFound

if TYPE_CHECKING:
    from rollcli.config.load import LoadedRecipe
    from rollcli.runs.directory import RunDirectory
    from rollcli.runs.listing import RunEntry

EXAMPLES = """\
roll resume  # the newest run that can go on
roll resume grpo-math-7f3a --steps 1000  # further than planned
roll resume grpo-math-7f3a --step 140  # from an earlier checkpoint"""


def resume(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A run's id; the newest that can go on if left out", autocompletion=complete.run
        ),
    ] = None,
    overrides: arguments.Overrides = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Checkpoint to start from; the newest", rich_help_panel="Run"),
    ] = None,
    steps: arguments.Steps = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change", metavar="KEY", help="Let this key differ from the run's", autocompletion=complete.key,
            rich_help_panel="Overrides",
        ),
    ] = None,
    address: arguments.Address = None,
    grace: arguments.Grace = 120.0,
) -> None:  # fmt: skip
    """Continue a run from its newest checkpoint.

    What was recorded after the checkpoint is moved to the new attempt's log folder.

    Raises:
        RollError: the run or its checkpoint is not there, the recipe has changed, or the run failed.
    """
    output: Output = context.obj
    if run is not None and "=" in run:
        run, overrides = None, [run, *(overrides or [])]
    entry = choose(output, run)
    if entry is None:
        return
    directory = entry.directory
    if entry.status.alive:
        hint = f"watch it with `roll runs watch {directory.id}`"
        raise RollError(f"run `{directory.id}` is still running (process {entry.status.pid})", hint)
    loaded = load_changed(directory, arguments.overrides(overrides, steps=steps), allow_change or [])
    loaded.name = entry.status.recipe or loaded.name
    start = start_step(output, directory, step)
    if start >= loaded.recipe.steps:
        nothing_to_do(output, directory, f"all {loaded.recipe.steps} steps are done", start)
        return
    running.run(output, loaded, directory, resume_step=start, address=address, grace_s=grace)


def choose(output: Output, name: str | None) -> RunEntry | None:
    """Returns the run called `name`, or the newest that can go on; None, and a word about it, when none can.

    Raises:
        RunNotFound: there is no run of that name.
    """
    from rollcli.runs.directory import runs_root
    from rollcli.runs.listing import RunEntry, find_run, list_runs
    from rollcli.runs.status import read_status

    try:
        directory = find_run(name)
    except RunNotFound:
        if name is not None:
            raise
        entries = list_runs()
        if not entries:
            output.document({"run": None, "reason": "no runs"})
            output.note(f"nothing to resume: there are no runs in `{runs_root()}`")
            output.hint("start one with `roll train RECIPE`")
            return None
        newest = entries[0]
        nothing_to_do(output, newest.directory, f"the newest run is {newest.status.state}", newest.status.step)
        return None
    return RunEntry(directory, read_status(directory.status))


def load_changed(directory: RunDirectory, overrides: list[str], allowed: list[str]) -> LoadedRecipe:
    """Returns the run's recipe with `overrides` on top.

    Raises:
        ConfigError: an override is wrong, or changes what the remaining steps compute.
    """
    from rollcli.config.dump import to_values
    from rollcli.config.load import load_recipe
    from rollcli.runs.resume import check_unchanged

    before = load_recipe(str(directory.config))
    after = load_recipe(str(directory.config), overrides)
    check_unchanged(to_values(before.recipe, before.folder), to_values(after.recipe, after.folder), tuple(allowed))
    return after


def start_step(output: Output, directory: RunDirectory, step: int | None) -> int:
    """Returns the step to go on from: `step`, or the newest whole checkpoint, or 0 when there is none.

    Raises:
        CheckpointError: there is no whole checkpoint of that step.
    """
    from rollcli.checkpoints.store import newest_whole

    found = newest_whole(directory.checkpoints, step)
    if found is None:
        output.warn(f"run `{directory.id}` has no whole checkpoint: it starts again at step 0")
        return 0
    for skipped in found[2]:
        output.warn(skipped)
    return found[0]


def nothing_to_do(output: Output, directory: RunDirectory, reason: str, step: int) -> None:
    """Says that there is nothing to resume, and how to go on all the same."""
    output.document({"run": directory.id, "directory": directory.path, "step": step, "reason": reason})
    output.value(directory.path)
    output.note(f"nothing to resume: {reason} (`{directory.id}`)")
    output.hint(f"go further with `roll resume {directory.id} --steps {max(2 * step, 1)}`")
