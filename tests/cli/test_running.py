"""What surrounds a run: the map before it, the outcome after it, its log in an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import typer

from rollcli.cli import running
from rollcli.cli.output import Output
from rollcli.errors import EngineError
from rollcli.runs.directory import RunDirectory


def outcome(**values):
    base = {
        "state": "finished", "step": 10, "checkpoint": "runs/x/checkpoints/step_000010", "start_accuracy": 0.12,
        "end_accuracy": 0.63, "exit_code": 0, "reason": "all steps done", "hint": None,
    }  # fmt: skip
    return SimpleNamespace(**{**base, **values})


@pytest.fixture
def directory(make_run):
    return RunDirectory(make_run("x"))


def test_map(directory, capsys, workplace):
    running.show_map(Output(), directory)
    assert capsys.readouterr().err == (
        f"run       {directory.path}\nlog       {directory.path}/logs/latest/driver.log\nwatch     roll runs watch x\n"
    )


def test_finished(directory, capsys):
    running.show_outcome(Output(), directory, outcome())
    out, err = capsys.readouterr()
    assert out == (
        f"run         {directory.path}\n"
        "finished    step 10\n"
        "accuracy    0.120 → 0.630 (+0.510)\n"
        "checkpoint  runs/x/checkpoints/step_000010\n"
    )
    assert err == "\n\nhint: measure it with `roll eval x`, read it with `roll samples x`\n"


def test_stopped(directory, capsys):
    running.show_outcome(
        Output(), directory,
        outcome(state="stopped", end_accuracy=None, checkpoint=None, reason="stopped by SIGINT"),
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert "stopped     step 10, stopped by SIGINT\n" in out and "checkpoint  none\n" in out
    assert err.endswith("hint: resume with: roll resume x\n")


@pytest.mark.parametrize("code", [0, 1, 130, 143])
def test_the_code_is_the_outcomes(directory, module, code):
    module("rollcli.pipelines.launch", launch=lambda loaded, where, **options: outcome(exit_code=code))
    output = Output(quiet=2)
    if code == 0:
        running.run(output, None, directory)
    else:
        with pytest.raises(typer.Exit) as raised:
            running.run(output, None, directory)
        assert raised.value.exit_code == code


@pytest.mark.parametrize("began", [True, False])
def test_only_an_attempt_that_began_has_a_log(directory, module, began):
    def launch(loaded, where, **options):
        if began:
            where.new_attempt()
        raise EngineError("broken")

    module("rollcli.pipelines.launch", launch=launch)
    output = Output(quiet=2)
    with pytest.raises(EngineError):
        running.run(output, None, directory)
    assert output.log == (directory.logs / "driver.log" if began else None)
