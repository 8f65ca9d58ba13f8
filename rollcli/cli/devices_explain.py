"""`roll devices explain`: what a plan predicted beside what the run measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments
from rollcli.cli.output import Column, Output, table_lines

if TYPE_CHECKING:
    from rollcli.devices.explain import Comparison, Lengths
    from rollcli.runs.directory import RunDirectory

EXPLAIN = """\
roll devices explain grpo-math-7f3a
roll devices explain grpo-math-7f3a --calibrate constants.yaml"""


def explain(
    context: typer.Context,
    run: arguments.Run,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="NxCHIP", help="What it ran on; without, this machine")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="FILE", help="Fit the time model's constants; write them")
    ] = None,
    constants: Annotated[
        Path | None, typer.Option("--constants", metavar="FILE", help="Constants of an earlier --calibrate")
    ] = None,
) -> None:
    """Show memory and times as predicted and as measured, stage by stage.

    Raises:
        RunNotFound: there is no such run.
        PlanError: it has no finished step, or its model cannot be planned with.
    """
    from rollcli.config.load import load_recipe
    from rollcli.config.schema import RlRecipe
    from rollcli.devices import explain as module
    from rollcli.devices.constants import CPU, read_constants, write_constants
    from rollcli.devices.facts import model_facts
    from rollcli.devices.hardware import parse_gpus, this_machine
    from rollcli.devices.plan import plan
    from rollcli.errors import PlanError
    from rollcli.runs.events import read_lines
    from rollcli.runs.listing import find_run

    output: Output = context.obj
    directory = find_run(run)
    recipe = load_recipe(str(directory.config)).recipe
    if not isinstance(recipe, RlRecipe):
        raise PlanError(f"run `{directory.id}` samples nothing: only runs that do are explained")
    facts, hardware = model_facts(recipe.model), parse_gpus(gpus) if gpus else this_machine()
    layout, metrics = plan(recipe, hardware, facts), read_lines(directory.metrics)
    used = read_constants(constants, CPU if hardware.kind == "cpu" else None)
    asked = (recipe, facts, hardware, layout.layout, _lengths(directory), metrics)
    found = module.stages(*asked, used)
    compared = [*module.memory(module.estimate(layout), metrics), *(each for each, _ in found)]
    fitted = module.calibrated(*asked, used) if calibrate is not None else None
    output.document({
        "run": directory.id,
        "compared": [{**vars(each), "ratio": each.ratio} for each in compared],
        "constants": vars(fitted) if fitted else None,
    })  # fmt: skip
    for line in _table(compared):
        output.data(line)
    if fitted is not None:
        write_constants(calibrate, fitted)
        output.data("")
        for line in _table([each for each, _ in module.stages(*asked, fitted)]):
            output.data(line)
        output.note(f"constants written to {calibrate}; the second table predicts with them")


def _table(compared: list[Comparison]) -> list[str]:
    columns = [Column(""), Column("predicted", right=True), Column("measured", right=True), Column("ratio", right=True)]
    rows = [[each.name, f"{each.predicted:,.3f}", f"{each.measured:,.3f}", f"{each.ratio:.2f}"] for each in compared]
    return list(table_lines(columns, rows, 80))


def _lengths(directory: RunDirectory) -> Lengths:
    """Returns what the recorded samples of a run were like.

    Raises:
        PlanError: none is recorded.
    """
    import numpy as np
    import pyarrow.parquet as pq

    from rollcli.devices.explain import Lengths
    from rollcli.devices.lengths import measured
    from rollcli.errors import PlanError

    said: list[int] = []
    prompts: list[int] = []
    observed: list[int] = []
    turns: list[int] = []
    for path in sorted(directory.rollouts.glob("*.parquet")):
        for spans in pq.read_table(path, columns=["turns"])["turns"].to_pylist():
            if spans:
                said += [end - start for start, end in spans]
                prompts.append(spans[0][0])
                observed += [later[0] - earlier[1] for earlier, later in zip(spans, spans[1:], strict=False)]
                turns.append(len(spans))
    if not said:
        raise PlanError(f"run `{directory.id}` has recorded no sample", hint="it has not finished a step")
    return Lengths(
        prompt_tokens=float(np.mean(prompts)),
        answers=measured(said),
        turns=float(np.mean(turns)),
        observation_tokens=float(np.mean(observed)) if observed else 0.0,
    )
