"""`roll resume`: continues a run from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments, complete, running
from rollcli.cli.output import Output
from rollcli.errors import CheckpointError, RollError, RunNotFound

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
    from rollcli.config.load import load_recipe

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
    loaded = load_recipe(str(directory.config), arguments.overrides(overrides, steps=steps))
    loaded.name = entry.status.recipe or loaded.name
    start = start_step(directory, step)
    if start > loaded.recipe.steps:
        nothing_to_do(output, directory, f"the run is already at step {start}", start)
        return
    # A run stopped in its last evaluation has all its steps and still something to do.
    if start >= loaded.recipe.steps and entry.status.state == "finished":
        nothing_to_do(output, directory, f"all {loaded.recipe.steps} steps are done", start)
        return
    allowed = tuple(allow_change or ())
    if loaded.overrides:
        refuse_changes(loaded, allowed)
    if start == 0:
        output.warn(f"run `{directory.id}` has no checkpoint: it starts again at step 0")
    running.run(
        output, loaded, directory, resume=True, resume_step=step, allow_change=allowed,
        address=address, grace_s=grace,
    )  # fmt: skip


def refuse_changes(loaded: LoadedRecipe, allowed: tuple[str, ...]) -> None:
    """Refuses overrides that alter the run, before anything is shown or started.

    The pipeline compares once more, and alone judges `model.path`, which a run writes down in another form.

    Raises:
        ConfigError: with each change.
    """
    from rollcli.config.dump import to_values
    from rollcli.config.load import load_recipe
    from rollcli.runs.resume import check_unchanged

    before = load_recipe(str(loaded.path))
    old, new = (to_values(each.recipe, each.folder) for each in (before, loaded))
    check_unchanged(old, new, (*allowed, "model.path"))


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


def start_step(directory: RunDirectory, step: int | None) -> int:
    """Returns the step to go on from: `step`, or the newest checkpoint's, or 0 when there is none.

    Whether the files are whole is looked at when the run starts, which then falls back to an older one.

    Raises:
        CheckpointError: there is no checkpoint of that step.
    """
    from rollcli.runs.directory import list_checkpoints

    there = list_checkpoints(directory.checkpoints)
    if step is None:
        return there[-1] if there else 0
    if step not in there:
        known = ", ".join(str(each) for each in there) or "none"
        raise CheckpointError(f"run `{directory.id}` has no checkpoint of step {step}", hint=f"it has steps {known}")
    return step


def nothing_to_do(output: Output, directory: RunDirectory, reason: str, step: int) -> None:
    """Says that there is nothing to resume, and how to go on all the same."""
    output.document({"run": directory.id, "directory": directory.path, "step": step, "reason": reason})
    output.value(directory.path)
    output.note(f"nothing to resume: {reason} (`{directory.id}`)")
    output.hint(f"go further with `roll resume {directory.id} --steps {max(2 * step, 1)}`")
