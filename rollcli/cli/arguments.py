"""Arguments and options that several commands share, with their completion."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcli.cli import complete

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe's name, or the path of one", autocompletion=complete.recipe, show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values laid over the recipe's", autocompletion=complete.override),
]
OverrideOptions = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--override", metavar="KEY=VALUE", help="The same as an option", autocompletion=complete.override,
        rich_help_panel="Overrides", hidden=True,  # for scripts; a key by itself is shorter
    ),
]  # fmt: skip
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Short for seed=N", rich_help_panel="Overrides")]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="N", help="Short for steps=N", rich_help_panel="Overrides")
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="A Ray cluster that is up; it stays up [env: RAY_ADDRESS]",
        envvar="RAY_ADDRESS", rich_help_panel="Run",
    ),
]  # fmt: skip
Grace = Annotated[
    float,
    typer.Option(
        "--grace", metavar="SECONDS", help="Time a SIGTERM leaves for the last checkpoint (120)", min=0,
        rich_help_panel="Run",
    ),
]  # fmt: skip
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's id, the start of one, or its directory", autocompletion=complete.run),
]


def overrides(positional: list[str] | None, options: list[str] | None = None, **shorthand: object) -> list[str]:
    """Returns every override in one list: positional ones, then `-o`, then shorthands such as `--seed`."""
    short = [f"{key}={value}" for key, value in shorthand.items() if value is not None]
    return [*(positional or []), *(options or []), *short]
