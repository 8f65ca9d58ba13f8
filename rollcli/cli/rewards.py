"""`roll rewards`: which rewards there are, and whether one keeps its contract."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcli.cli import complete
from rollcli.cli.help import RollCommand, RollGroup
from rollcli.cli.output import Column, Output
from rollcli.errors import PluginError

LS = "roll rewards ls\nroll rewards ls --json"
CHECK = """\
roll rewards check math
roll rewards check ./my_reward.py:score --answer 42"""

app = typer.Typer(cls=RollGroup, help="List rewards and check one.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls", cls=RollCommand, epilog=LS)
def ls(context: typer.Context) -> None:
    """List rewards by name."""
    from rollcli import registry

    output: Output = context.obj
    known = registry.names("rewards")
    targets = registry.builtin("rewards")
    rows = [[name, targets.get(name, "from an installed package")] for name in known]
    output.document([{"name": name, "target": target} for name, target in rows])
    for name in known:
        output.value(name)
    output.table([Column("reward"), Column("from", drop=1)], rows)


@app.command("check", cls=RollCommand, epilog=CHECK)
def check(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name, or ./file.py:function", autocompletion=complete.reward),
    ],
    answer: Annotated[
        str | None, typer.Option("--answer", metavar="TEXT", help="Gold answer of the example; its own if left out")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Limit per call (10)")] = 10,
) -> None:  # fmt: skip
    """Try a reward: the gold answer scores 1, an empty and a hostile one 0.

    Raises:
        PluginError: there is no such reward, or it does not import.
    """
    from rollcli import registry
    from rollcli.rewards.check import check as try_reward

    output: Output = context.obj
    if name.endswith(".py"):
        raise PluginError(f"`{name}` is a file, not a reward", hint=f"name the function: `{name}:score`")
    registry.resolve("rewards", name)
    fields = {"answer": answer} if answer is not None else None
    checks = try_reward(registry.absolute(name, None), fields, timeout)
    passed = all(each.passed for each in checks)
    output.document(
        {"reward": name, "passed": passed, "checks": [{**vars(each), "passed": each.passed} for each in checks]}
    )
    output.value("ok" if passed else "failed")
    columns = [Column("case"), Column("expected", right=True), Column("got", right=True), Column("")]
    rows = [[each.case, _score(each.expected), _score(each.got), "ok" if each.passed else "failed"] for each in checks]
    output.table(columns, rows)
    errors = dict.fromkeys(each.got for each in checks if isinstance(each.got, str) and not each.passed)
    for number, error in enumerate(errors):
        if not number:
            output.data()
        output.data(f"{output.paint('error:', 'error')} {error}")
    if not passed:
        if not errors:
            output.hint("a reward gives 1 for the gold answer and 0 for one that is wrong, whatever it contains")
        raise typer.Exit(1)


def _score(value: float | str | None) -> str:
    return f"{value:g}" if isinstance(value, float) else "no score"
