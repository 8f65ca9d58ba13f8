"""Every `roll` command of the README exists: its words parse as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from rollcli.cli.app import app

README = Path(__file__).resolve().parents[2] / "README.md"


def command_lines(text: str) -> list[str]:
    """Returns the lines of shell blocks that call `roll`, continuations joined, prompts and comments taken off."""
    found = []
    for block in re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||;|\|", line.removeprefix("$ ").partition(" #")[0]):
                words = part.partition(">")[0].strip()
                if words.startswith("roll ") or words == "roll":
                    found.append(words)
    return found


def parse(line: str) -> None:
    """Parses a command line as the application would, and runs nothing."""
    command, name, words, context = typer.main.get_command(app), "roll", shlex.split(line)[1:], None
    while hasattr(command, "commands"):
        context = command.make_context(name, words, parent=context)
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    try:
        command.make_context(name, words, parent=context)
    except typer.Exit as end:  # `--help`
        assert not end.exit_code


def test_the_readme_shows_how_to_start():
    assert any(line.startswith("roll train") for line in command_lines(README.read_text(encoding="utf-8")))


@pytest.mark.parametrize("line", command_lines(README.read_text(encoding="utf-8")))
def test_command(line):
    parse(line)


def test_a_wrong_command_would_be_found():
    (line,) = command_lines("```sh\n$ roll train x --stepz 3  # no\n```\n")
    with pytest.raises(Exception, match="stepz"):
        parse(line)


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
