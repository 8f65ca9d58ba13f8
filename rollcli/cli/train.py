"""`roll train`: starts a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments, running
from rollcli.cli.output import Output
from rollcli.errors import RollError

if TYPE_CHECKING:
    from rollcli.config.load import LoadedRecipe

EXAMPLES = """\
roll train grpo-math
roll train grpo-math algorithm.clip_high=0.28 steps=200
roll train my.yaml --dry-run  # check everything, start nothing
roll train grpo-gsm8k --detach  # go on without this terminal"""

DETACHED = "ROLL_DETACHED_RUN"
"""Names, to a process that `--detach` started, the run directory made for it."""


def train(
    context: typer.Context,
    recipe: arguments.Recipe,
    overrides: arguments.Overrides = None,
    override: arguments.OverrideOptions = None,
    seed: arguments.Seed = None,
    steps: arguments.Steps = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan; write nothing", rich_help_panel="Run")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The run's id, instead of RECIPE-xxxx", rich_help_panel="Run"),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Delete an earlier run called NAME", rich_help_panel="Run")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Two steps of everything, tiny, on this machine", rich_help_panel="Run"),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; print the run's id", rich_help_panel="Run")
    ] = False,
    address: arguments.Address = None,
    grace: arguments.Grace = 120.0,
) -> None:
    """Start a run from a recipe.

    Recipe keys are given as key=value; `roll config explain` tells what there is.

    Raises:
        RollError: the recipe is wrong, something it names is missing, or the run failed.
    """
    from rollcli.config.load import load_recipe
    from rollcli.runs.directory import RunDirectory

    output: Output = context.obj
    loaded = load_recipe(recipe, arguments.overrides(overrides, override, seed=seed, steps=steps), smoke)
    loaded.name = recipe_name(loaded)
    if dry_run:
        show_dry_run(output, loaded, name)
        return
    from rollcli.pipelines.preflight import check

    check(loaded)
    adopted = os.environ.pop(DETACHED, None)
    directory = RunDirectory(Path(adopted)) if adopted else RunDirectory.create(loaded.name, name, clean)
    if detach:
        start_detached(output, directory)
        return
    running.run(output, loaded, directory, address=address, grace_s=grace)


def recipe_name(loaded: LoadedRecipe) -> str:
    """Returns the name a run is called after; a run's `config.yaml` stands for the recipe it came from."""
    from rollcli.runs.status import read_status

    status = loaded.path.parent / "status.json" if loaded.path else None
    if status is not None and loaded.name == "config" and status.is_file():
        return read_status(status).recipe or loaded.name
    return loaded.name


def start_detached(output: Output, directory) -> None:
    """Starts this command again in a session of its own, its output going to the run's log.

    Raises:
        RollError: it ended at once.
    """
    log = directory.path / "logs" / "detached.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [word for word in sys.argv[1:] if word != "--detach"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollcli.cli.app", *words],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, DETACHED: str(directory.path), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        code = 0
    if code:
        raise RollError(f"the detached run ended at once with code {code}", hint=f"its output is in `{log}`")
    output.document({"run": directory.id, "directory": directory.path, "log": log, "pid": process.pid})
    output.value(directory.id)
    output.data(directory.id)
    output.hint(
        f"watch it with `roll runs watch {directory.id}`, stop it with `kill {process.pid}`; its log is `{log}`"
    )


def show_dry_run(output: Output, loaded: LoadedRecipe, name: str | None) -> None:
    """Writes what a run would do: model, one prompt as the model sees it, rewards, and the plan with its arithmetic."""
    from rollcli.pipelines.preflight import dry_run
    from rollcli.runs.directory import runs_root

    found = dry_run(loaded)
    directory = str(runs_root() / (name or f"{loaded.name}-xxxx"))
    output.document({"recipe": loaded.name, "directory": directory, **vars(found)})
    output.value(directory)
    if output.as_json or output.quiet:
        return
    from rollcli.cli.devices import show_plan

    rewards = ", ".join(f"{reward} {score:g}" for reward, score in found.gold_rewards.items())
    output.facts(
        {
            "recipe": f"{loaded.name}  {loaded.recipe.description}".rstrip(),
            "model": "\n".join(f"{key} {value}" for key, value in found.model.items()),
            "prompt": f"{found.prompt_tokens} tokens\n{found.prompt_text}",
            "rewards": f"{rewards or 'none'}  (of the gold answer)",
            "directory": directory,
        }
    )
    output.data()
    show_plan(found.plan, output)
    for warning in found.warnings:
        output.warn(warning)
    output.hint("nothing was written; start it by leaving out `--dry-run`")
