"""`roll verify`: whether the numbers hold, of rollcli as it is installed, or of another project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcli.cli.output import Column, Output, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollcli.verify.properties import Property
    from rollcli.verify.suite import Result

EXAMPLES = """\
roll verify
roll verify --only advantages
roll verify --list --json           # every call, its inputs and what is right
roll verify ./theirs.py             # functions of the same names"""
CELL, NAME = 12, 44
"""Widths of a value and of a property's name in the table, which is 80 columns wide."""


def verify(
    context: typer.Context,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SUBJECT", help="./theirs.py or a module, to ask instead of rollcli"),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="TEXT", help="Properties with TEXT in name, section or call")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show calls, inputs and right values; run nothing")] = False,
) -> None:
    """Check that losses, advantages and updates are right.

    Each property is a statement about a number: what is right, and what this installation computes.

    Raises:
        NotFound: no property is called so.
        PluginError: the subject is not there, does not import, or offers nothing.
    """
    import time

    from rollcli.verify import suite

    output: Output = context.obj
    properties = suite.select(only)
    if list_:
        _list(output, properties)
        return
    began = time.monotonic()
    results = suite.run(properties, suite.load_subject(subject or suite.OWN), complete=subject is None)
    seconds = time.monotonic() - began
    counts = {status: sum(r.status == status for r in results) for status in ("ok", "FAILED", "not offered")}
    failed = [result for result in results if result.status == "FAILED"]
    output.document(
        {
            "subject": subject or "rollcli", "passed": not failed, "counts": counts, "seconds": round(seconds, 3),
            "properties": [{**_described(r.property), "right": r.right, "got": r.got, "error": r.error,
                            "status": r.status} for r in results],
        }
    )  # fmt: skip
    output.value("failed" if failed else "ok")
    columns = [Column("property"), Column("right", right=True), Column("theirs" if subject else "ours", right=True),
               Column("")]  # fmt: skip
    output.table(columns, [_row(result) for result in results])
    for result in failed:
        output.data()
        output.data(f"{output.paint('FAILED', 'error')} {result.property.name}")
        output.facts(_details(result))
    output.data()
    unasked = f", {counts['not offered']} not offered" if counts["not offered"] else ""
    output.data(f"{counts['ok']} ok, {counts['FAILED']} failed{unasked}, in {seconds:.1f} s")
    if failed:
        raise typer.Exit(1)


def _list(output: Output, properties: Sequence[Property]) -> None:
    from rollcli.verify import suite

    calls = dict.fromkeys(each.call for each in properties)
    output.document(
        {
            "note": "null among inputs stands for NaN; right null: equal to the same call with same_as in its inputs",
            "calls": {call: {"signature": suite.signature(call), "gives": suite.meaning(call)} for call in calls},
            "properties": [_described(each) for each in properties],
        }
    )
    for number, call in enumerate(calls):
        output.value(call)
        if number:
            output.data()
        output.data(output.paint(suite.signature(call), "literal"))
        output.data(f"  {suite.meaning(call).splitlines()[0]}")
        for each in properties:
            if each.call == call:
                output.data(f"\n  {each.name}")
                output.facts({"    with": _arguments(each.inputs), "    right": _right(each)})


def _described(each: Property) -> dict[str, Any]:
    """Returns a property as JSON holds it."""
    by_relation = each.right_inputs is not None
    return {
        "section": each.section, "name": each.name, "why": each.why, "call": each.call, "inputs": each.inputs,
        "right": None if by_relation else each.expected, "same_as": each.expected.inputs if by_relation else None,
        "tolerance": each.tolerance,
    }  # fmt: skip


def _row(result: Result) -> list[str]:
    name = cut(result.property.name, NAME)
    if result.status == "not offered":
        return [name, _cell(result.right), "not offered", "-"]
    return [name, _cell(result.right), "raised" if result.error else _cell(result.got), result.status]


def _details(result: Result) -> dict[str, str]:
    each = result.property
    got = result.error or _shown(result.got)
    right = _right(each) if result.right is None else _shown(result.right)
    return {"  why": each.why, "  input": f"{each.call}({_arguments(each.inputs)})", "  right": right, "  got": got}


def _right(each: Property) -> str:
    if each.right_inputs is None:
        return _shown(each.expected)
    return f"the same as with {_arguments(each.expected.inputs)}" if each.expected.inputs else "the same again"


def _arguments(inputs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in inputs.items())


def _cell(value: Any) -> str:
    """Returns a value in few characters: the first of many numbers, to three digits."""
    if value is None:
        return ""
    return cut(" ".join(f"{number + 0:.3g}" for number in _flat(value)), CELL)


def _flat(value: Any) -> list[float]:
    return [number for item in value for number in _flat(item)] if isinstance(value, list) else [value]


def _shown(value: Any) -> str:
    """Returns a value whole, numbers to seven digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value + 0:.7g}" if isinstance(value, float) else repr(value)
