"""`roll eval`: measures a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments, complete
from rollcli.cli.output import Column, Output
from rollcli.errors import CheckpointError

if TYPE_CHECKING:
    from rollcli.pipelines.evaluate import EvaluationReport

EXAMPLES = """\
roll eval grpo-math-7f3a
roll eval grpo-math-7f3a@140 --samples 8  # pass@1 to pass@8
roll eval Qwen/Qwen3-0.6B --recipe grpo-gsm8k --temperature 0"""

COUNTS = ("problems", "samples", "failed")


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A run's id, run@step, a path, or a hub id with --recipe",
            autocompletion=complete.checkpoint,
        ),
    ],
    overrides: arguments.Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="Whose tasks to take for a model that no run made",
            autocompletion=complete.recipe,
        ),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only this task")] = None,
    problems: Annotated[int | None, typer.Option("--problems", metavar="N", min=1, help="Problems per task")] = None,
    samples: Annotated[int | None, typer.Option("--samples", metavar="N", min=1, help="Answers per problem")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", min=0, help="Sampling temperature; 0 is greedy")
    ] = None,
    address: arguments.Address = None,
) -> None:  # fmt: skip
    """Measure a checkpoint on held-out problems.

    Raises:
        RollError: the checkpoint is not there or cannot be evaluated.
    """
    check_checkpoint(checkpoint)
    from rollcli.pipelines.evaluate import evaluate as measure

    report = measure(
        checkpoint, recipe=recipe, overrides=overrides or [], task=task, problems=problems, samples=samples,
        temperature=temperature, address=address,
    )  # fmt: skip
    show_report(context.obj, report)


def check_checkpoint(checkpoint: str) -> None:
    """Refuses a RUN@STEP that lacks the run or whose step is no number; a path may hold an `@`.

    Raises:
        CheckpointError: it has another form.
    """
    run, at, step = checkpoint.partition("@")
    if at and not (run and step.isdecimal()) and not Path(checkpoint).exists():
        raise CheckpointError(
            f"`{checkpoint}` is not of the form RUN@STEP",
            hint=f"write the step after the `@`, for example `{run or 'RUN'}@100`, or the run alone for its newest",
        )


def show_report(output: Output, report: EvaluationReport) -> None:
    """Writes a row for each task; `-q` leaves the mean accuracy."""
    accuracies = [row["accuracy"] for row in report.tasks.values()]
    mean = sum(accuracies) / len(accuracies) if accuracies else float("nan")
    tasks = {
        name: {key: int(value) if key in COUNTS and value.is_integer() else value for key, value in row.items()}
        for name, row in report.tasks.items()
    }
    output.document(
        {"checkpoint": report.checkpoint, "accuracy": mean, "tasks": tasks, "samples_path": report.samples_path}
    )
    output.value(f"{mean:.4f}")
    passes = sorted({key for row in report.tasks.values() for key in row if key.startswith("pass@")}, key=_count)
    columns = [
        Column("task"),
        Column("accuracy", right=True),
        Column("95 % interval", right=True, drop=1),
        *(Column(name, right=True, drop=3) for name in passes),
        Column("length", right=True, drop=4),
        Column("truncated", right=True, drop=4),
        Column("failed", right=True, drop=5),
        Column("problems", right=True, drop=2),
        Column("samples", right=True, drop=6),
    ]
    output.table(columns, [_row(name, row, passes) for name, row in report.tasks.items()])
    output.note()
    output.note(f"samples kept in {report.samples_path}")


def _row(name: str, row: dict[str, float], passes: list[str]) -> list[str]:
    interval = f"{row['accuracy_low']:.3f} – {row['accuracy_high']:.3f}"
    return [
        name,
        f"{row['accuracy']:.3f}",
        interval,
        *(f"{row[key]:.3f}" if key in row else "-" for key in passes),
        f"{row['length']:.0f}",
        f"{row['truncated']:.1%}".replace("%", " %"),
        f"{row['failed']:g}",
        f"{row['problems']:g}",
        f"{row['samples']:g}",
    ]


def _count(key: str) -> int:
    return int(key.removeprefix("pass@"))
