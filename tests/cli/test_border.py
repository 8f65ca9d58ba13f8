"""Errors: their form on a terminal, in a pipe and as JSON; exit codes; where tracebacks go."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollcli.cli import border
from rollcli.cli.output import Output
from rollcli.errors import ConfigError, Interrupted, Problem, RunNotFound

TERMINAL = """\
error: `steps`: expected a whole number, found `many`
  --> bad.yaml:9:1
   |
 9 | steps: many
   | ^^^^^

error: unknown key `group_sise`
   --> bad.yaml:10:1
    |
 10 | group_sise: 8
    | ^^^^^^^^^^ did you mean `group_size`?

error: unknown key `stepz`
 --> command line, override 1
  |
  | stepz=3
  | ^^^^^^^ did you mean `steps`?

error: 3 problems

hint: run `roll config explain steps` to see what it means
"""
PIPE = """\
bad.yaml:9:1: `steps`: expected a whole number, found `many`
bad.yaml:10:1: unknown key `group_sise` (did you mean `group_size`?)
command line, override 1: unknown key `stepz` (did you mean `steps`?)

error: 3 problems

hint: run `roll config explain steps` to see what it means
"""


def test_problems_on_a_terminal(roll, monkeypatch):
    monkeypatch.setattr(border, "is_terminal", lambda stream: True)
    result = roll("config", "validate", "bad.yaml", "stepz=3")
    assert result.code == 1 and result.out == ""
    assert result.err == TERMINAL


def test_problems_in_a_pipe(roll):
    result = roll("config", "validate", "bad.yaml", "stepz=3")
    assert result.code == 1 and result.err == PIPE


def test_problems_as_json(roll):
    result = roll("config", "validate", "bad.yaml", "--json")
    assert result.code == 1 and result.out == ""
    error = json.loads(result.err)["error"]
    assert {"type", "message", "hint", "location"} <= set(error)
    assert error["type"] == "ConfigError" and error["location"] == "bad.yaml:9:1"
    assert [p["suggestion"] for p in error["problems"]] == [None, "group_size"]


def test_a_plain_error_in_every_form(capsys):
    error = RunNotFound("no run called `x`", hint="see `roll runs ls`")
    border.show_error(error, Output(color="never"))
    assert capsys.readouterr().err == "error: no run called `x`\n\nhint: see `roll runs ls`\n"
    border.show_error(error, Output(color="always"))
    assert capsys.readouterr().err == (
        "\x1b[31merror:\x1b[0m no run called `x`\n\n\x1b[36mhint:\x1b[0m see \x1b[36m`roll runs ls`\x1b[0m\n"
    )
    border.show_error(error, Output(as_json=True))
    assert json.loads(capsys.readouterr().err)["error"] == {
        "type": "RunNotFound", "message": "no run called `x`", "hint": "see `roll runs ls`", "location": None,
    }  # fmt: skip


def test_the_log_ends_the_message(capsys):
    border.show_error(RunNotFound("gone"), Output(log=Path("runs/x/logs/latest/driver.log"), color="never"))
    assert capsys.readouterr().err == "error: gone\n\nlog: runs/x/logs/latest/driver.log\n"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigError("bad"), 1),
        (Interrupted("stopped", exit_code=143), 143),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division by zero"), 3),
    ],
)
def test_exit_codes(raised, code, capsys):
    def call():
        raise raised

    assert border.run(call, Output(), Output()) == code


def test_a_bug_leaves_its_traceback_in_a_file(capsys):
    def call():
        token = "secret"
        raise KeyError(f"{len(token)}")

    assert border.run(call, Output(color="never"), Output()) == 3
    err = capsys.readouterr().err
    assert err.startswith("error: KeyError: '6'\n\nhint: this is a bug in rollcli") and "Traceback" not in err
    text = Path(re.search(r"`([^`]+\.log)`", err)[1]).read_text()
    assert "KeyError" in text and "raise KeyError" in text and "= 'secret'" not in text


def test_a_bug_of_a_run_goes_to_its_log(tmp_path, capsys):
    log = tmp_path / "driver.log"
    border.show_bug(ValueError("odd"), Output(log=log))
    assert str(log) in capsys.readouterr().err and "ValueError: odd" in log.read_text()


@pytest.mark.parametrize("asked", ["-v", "ROLL_DEBUG"])
def test_tracebacks_show_on_demand(roll, monkeypatch, asked):
    if asked == "ROLL_DEBUG":
        monkeypatch.setenv("ROLL_DEBUG", "1")
    result = roll("runs", "show", "nothing", *(["-v"] if asked == "-v" else []))
    assert "Traceback" in result.err and "no run called `nothing`" in result.err


def test_a_mark_stands_under_an_indented_word():
    problem = Problem("bad", "x.yaml", 12, 3, "  clp: 0.2", 3, "clip")
    assert border.located(problem, False).splitlines()[-2:] == [
        " 12 |   clp: 0.2",
        "    |   ^^^ did you mean `clip`?",
    ]


def test_a_problem_without_a_place():
    assert border.located(Problem("nowhere"), False) == "error: nowhere"


def test_codes_and_streams_of_a_process(roll_process):
    assert roll_process("config", "validate", "sums").code == 0
    bad = roll_process("config", "validate", "bad.yaml")
    assert (bad.code, bad.out) == (1, "") and bad.err.startswith("bad.yaml:9:1: ")
    assert roll_process("trian").code == 2


def test_a_reader_that_leaves_early_is_no_error(workplace):
    import subprocess
    import sys

    command = f"{sys.executable} -m rollcli.cli.app config explain | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "ls", "-n", "0"], "invalid value for `-n` / `--count`: must be at least 1"),
        (["runs", "ls", "-n", "x"], "invalid value for `-n` / `--count`: must be a whole number"),
        (["eval", "x", "--temperature", "y"], "invalid value for `--temperature`: must be a number"),
        (["eval", "x", "--temperature", "-1"], "invalid value for `--temperature`: must be at least 0"),
        (["runs", "ls", "--color", "foo"],
         "invalid value for `--color`: `foo` is not one of `auto`, `always`, `never`"),
    ],
)  # fmt: skip
def test_values_that_an_option_refuses(roll, words, message):
    result = roll(*words)
    assert result.code == 2 and result.err.startswith(f"error: {message}\n\nhint: ")
