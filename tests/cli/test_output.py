"""The sink: streams, color, tables, values as JSON."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollcli.cli.output import Column, Output, cells, cut, hint_line, paint, plain, table_lines, wants_color


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


COLUMNS = [Column("run"), Column("step", right=True), Column("reward", right=True, drop=1), Column("age", drop=2)]
ROWS = [["sums-7f3a", "142/500", "0.551", "3 h"], ["math-19c0", "9/10", "0.5", "12 d"]]


def test_a_table_is_aligned():
    assert table_lines(COLUMNS, ROWS, None) == [
        "run           step  reward  age",
        "sums-7f3a  142/500   0.551  3 h",
        "math-19c0     9/10     0.5  12 d",
    ]


def test_a_narrow_terminal_loses_columns_then_ends():
    assert table_lines(COLUMNS, ROWS, 28)[0] == "run           step  reward"
    assert table_lines(COLUMNS, ROWS, 20)[1] == "sums-7f3a  142/500"
    assert table_lines(COLUMNS, ROWS, 10)[1] == "sums-7f3a…"


def test_wide_characters_count_double():
    assert cells("数学") == 4 and cells("e\u0301") == 1
    assert cut("数学数学", 5) == "数学…"
    assert table_lines([Column("a"), Column("b")], [["数学", "x"], ["math", "y"]], None)[1:] == ["数学  x", "math  y"]


@pytest.mark.parametrize(
    ("environment", "choice", "pipe", "terminal"),
    [
        ({}, "auto", False, True),
        ({"NO_COLOR": "1"}, "auto", False, False),
        ({"NO_COLOR": ""}, "auto", False, True),
        ({"FORCE_COLOR": "1"}, "auto", True, True),
        ({"CLICOLOR_FORCE": "0"}, "auto", False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "auto", False, False),
        ({"TERM": "dumb"}, "auto", False, False),
        ({"NO_COLOR": "1"}, "always", True, True),
        ({"FORCE_COLOR": "1"}, "never", False, False),
    ],
)
def test_color(monkeypatch, environment, choice, pipe, terminal):
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_color(io.StringIO(), choice) is pipe
    assert wants_color(Terminal(), choice) is terminal


def test_the_live_view_needs_a_terminal_and_no_verbosity(monkeypatch):
    monkeypatch.delenv("ROLL_NO_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not Output().live, "FORCE_COLOR does not make a pipe a terminal"
    monkeypatch.setattr("sys.stderr", Terminal())
    assert Output().live
    assert not any(o.live for o in (Output(verbose=1), Output(quiet=1), Output(as_json=True), Output(progress=False)))
    monkeypatch.setenv("ROLL_NO_PROGRESS", "1")
    assert not Output().live


@pytest.mark.parametrize(
    ("output", "out", "err"),
    [
        (Output(), "data\n", "note\nwarning: w\nerror\n"),
        (Output(quiet=1), "value\n", "warning: w\nerror\n"),
        (Output(quiet=2), "", "error\n"),
        (Output(as_json=True), "{}\n", "warning: w\nerror\n"),
    ],
)
def test_what_each_level_lets_through(capsys, output, out, err):
    output.data("data")
    output.value("value")
    output.document({})
    output.note("note")
    output.warn("w")
    output.error("error")
    assert capsys.readouterr() == (out, err)


def test_facts_are_aligned(capsys):
    Output().facts({"run": "x", "prompt": "one\n\ntwo"})
    assert capsys.readouterr().out == "run     x\nprompt  one\n\n        two\n"


def test_json_values():
    @dataclass
    class Point:
        x: float
        path: Path

    found = plain({1: Point(float("nan"), Path("a/b")), "t": (1, {2})})
    assert json.loads(json.dumps(found)) == {"1": {"x": None, "path": "a/b"}, "t": [1, [2]]}


def test_paint():
    assert paint("x", "ok", True) == "\x1b[32mx\x1b[0m" and paint("x", "ok", False) == "x"


def test_hints_break_between_words_on_a_terminal_only(monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    monkeypatch.setattr("sys.stderr", Terminal())
    assert hint_line("go on with `roll resume x`", False) == "hint: go on with\n`roll resume x`"
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert hint_line("go on with `roll resume x`", False) == "hint: go on with `roll resume x`"


def test_a_long_cell_does_not_pad_the_others_in_a_pipe():
    _, long, short = table_lines([Column("a"), Column("b")], [["x" * 500, "1"], ["y", "2"]], None)
    assert long == "x" * 500 + "  1" and short == "y" + " " * 121 + "2"
