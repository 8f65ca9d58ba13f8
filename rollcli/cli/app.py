"""`roll`: the application, put together from its commands. Commands import what they need when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcli import __version__
from rollcli.cli import (
    config,
    devices,
    doctor,
    evaluate,
    recipes,
    replay,
    resume,
    rewards,
    runs,
    samples,
    train,
    verify,
)
from rollcli.cli.help import RollCommand, RootGroup
from rollcli.cli.output import Output

EVERYWHERE = """\
  -q, -v  less or more: -qq nothing, -vv library logs     --json  one document
  --color auto|always|never     --no-progress [env: ROLL_NO_PROGRESS]     --help"""

app = typer.Typer(
    name="roll",
    cls=RootGroup,
    epilog=EVERYWHERE,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Version; with -v, of the packages too")] = False,
) -> None:
    """Reinforcement learning post-training for language models."""
    output: Output = context.obj
    if version:
        show_version(output)
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command")


def show_version(output: Output) -> None:
    """Prints rollcli's version and Python's; with -v, packages and commit."""
    import platform

    from rollcli.runs.manifest import package_versions

    facts = {"rollcli": __version__, "python": platform.python_version()}
    if output.verbose or output.as_json:
        facts |= {"commit": _commit() or "none", **package_versions()}
    output.document(facts)
    output.value(__version__)
    if output.verbose:
        output.facts(facts)
    else:
        output.data(f"rollcli {__version__} (Python {facts['python']})")


def _commit() -> str | None:
    """Returns the commit of rollcli's own checkout, or None when it is installed as a package."""
    import subprocess
    from pathlib import Path

    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


_RUN, _INSPECT = "Run", "Inspect"

app.command("train", cls=RollCommand, rich_help_panel=_RUN, epilog=train.EXAMPLES)(train.train)
app.command("resume", cls=RollCommand, rich_help_panel=_RUN, epilog=resume.EXAMPLES)(resume.resume)
app.command("eval", cls=RollCommand, rich_help_panel=_RUN, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.add_typer(runs.app, name="runs", rich_help_panel=_INSPECT)
app.command("samples", cls=RollCommand, rich_help_panel=_INSPECT, epilog=samples.EXAMPLES)(samples.samples)
app.command("replay", cls=RollCommand, rich_help_panel=_INSPECT, epilog=replay.EXAMPLES)(replay.replay)
app.add_typer(devices.app, name="devices", rich_help_panel=_INSPECT)
app.command("verify", cls=RollCommand, rich_help_panel=_INSPECT, epilog=verify.EXAMPLES)(verify.verify)
app.command("doctor", cls=RollCommand, rich_help_panel=_INSPECT, epilog=doctor.EXAMPLES)(doctor.doctor)
app.add_typer(recipes.app, name="recipes", rich_help_panel=_INSPECT)
app.add_typer(config.app, name="config", rich_help_panel=_INSPECT)
app.add_typer(rewards.app, name="rewards", rich_help_panel=_INSPECT)


def main() -> None:
    """Entry point of the console script."""
    typer.main.get_command(app)()


if __name__ == "__main__":
    main()
