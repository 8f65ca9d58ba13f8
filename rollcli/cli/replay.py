"""`roll replay`: trains on recorded rollouts under other settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments
from rollcli.cli.output import Column, Output

if TYPE_CHECKING:
    from rollcli.pipelines.replay import Replay, ReplayedStep

EXAMPLES = """\
roll replay grpo-math-7f3a --step 12  # the same numbers again
roll replay grpo-math-7f3a --step 11-13 algorithm=dapo
roll replay grpo-math-7f3a --step 12 algorithm.clip_high=0.4 --json"""


def replay(
    context: typer.Context,
    run: arguments.Run,
    step: Annotated[str, typer.Option("--step", metavar="N", help="Step to replay, or A-B", show_default=False)],
    overrides: arguments.Overrides = None,
    override: arguments.OverrideOptions = None,
    address: arguments.Address = None,
) -> None:
    """Train on a run's recorded rollouts, under other settings.

    Starts from the checkpoint before them, samples nothing and writes nothing into the run.

    Raises:
        RollError: the run or the step is not there, or its rollouts cannot be replayed so.
    """
    steps = step_range(step)
    from rollcli.pipelines.replay import replay as train_again

    output: Output = context.obj
    found = train_again(run, steps, arguments.overrides(overrides, override), address=address, tell=output.note)
    show(output, found)


def step_range(text: str) -> tuple[int, int]:
    """Returns first and last step of `N` or `A-B`.

    Raises:
        BadParameter: it has another form.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise typer.BadParameter(f"`{text}` is not a step; write 12, or 11-13", param_hint="--step")
    return first, last


def show(output: Output, found: Replay) -> None:
    """Writes each step's metrics as recorded and as replayed; `-q` leaves whether they are equal."""
    output.document({
        "run": found.run,
        "start": found.start,
        "equal": found.equal,
        "steps": [
            {"step": each.step, "recorded": each.recorded, "replayed": each.replayed, "differing": each.differing}
            for each in found.steps
        ],
    })  # fmt: skip
    output.value("equal" if found.equal else "different")
    output.note()
    columns = [Column("metric"), *(Column(name, right=True) for name in ("recorded", "replayed", "difference"))]
    for place, each in enumerate(found.steps):
        if place:
            output.data()
        output.data(output.paint(f"step {each.step}", "heading"))
        output.table(columns, rows(each))
    output.note()
    numbers = sum(len(each.recorded) for each in found.steps)
    differing = sum(len(each.differing) for each in found.steps)
    output.note(f"{differing} of {numbers} numbers differ" if differing else "every number equals the recorded one")


def rows(step: ReplayedStep) -> list[list[str]]:
    """Returns a row for each metric."""
    found = []
    for name, value in step.replayed.items():
        before = step.recorded.get(name)
        if name not in step.recorded:
            difference = "not recorded"
        elif value == before:
            difference = "equal"
        else:
            difference = "not finite" if before is None or value is None else f"{value - before:+.3g}"
        found.append([name, number(before), number(value), difference])
    return found


def number(value: float | None) -> str:
    """Returns a number in six digits, or `-`."""
    return "-" if value is None else f"{value:.6g}"
