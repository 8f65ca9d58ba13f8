"""`roll resume`, with the pipeline replaced by a double."""

from __future__ import annotations

import json
import os
import socket
import time
from types import SimpleNamespace

import pytest


@pytest.fixture
def launched(module):
    calls = []

    def launch(loaded, directory, **options):
        calls.append(SimpleNamespace(loaded=loaded, directory=directory, options=options))
        return SimpleNamespace(
            state="finished", step=10, checkpoint=None, start_accuracy=None, end_accuracy=None, exit_code=0,
            reason="", hint=None,
        )  # fmt: skip

    module("rollcli.pipelines.launch", launch=launch)
    return calls


def test_the_newest_that_can_go_on(roll, launched, make_run):
    make_run("old", (5,), started=1.0)
    make_run("new", (5,), started=2.0, state="failed")
    make_run("done", (10,), started=3.0, state="finished")
    assert roll("resume", "-q").out.endswith("runs/new\n")
    (call,) = launched
    assert call.directory.id == "new" and call.loaded.name == "sums"
    assert call.options == {
        "resume": True, "resume_step": None, "allow_change": (), "address": None, "grace_s": 120.0,
    }  # fmt: skip


def test_overrides_without_a_run(roll, launched, make_run):
    make_run("only", (5,))
    roll("resume", "steps=20", "-qq")
    assert launched[0].directory.id == "only" and launched[0].loaded.recipe.steps == 20


def test_options(roll, launched, make_run):
    make_run("only", (3, 5))
    roll("resume", "only", "--step", "3", "--steps", "40", "--allow-change", "seed", "seed=4", "-qq")
    (call,) = launched
    assert call.options["resume_step"] == 3 and call.options["allow_change"] == ("seed",)
    assert (call.loaded.recipe.steps, call.loaded.recipe.seed) == (40, 4)


def test_nothing_to_resume_is_no_error(roll, launched, make_run):
    result = roll("resume")
    assert result.code == 0
    assert result.err == "nothing to resume: there are no runs in `runs`\n\nhint: start one with `roll train RECIPE`\n"
    make_run("done", (10,), state="finished", step=10)
    result = roll("resume")
    assert result.code == 0 and launched == []
    assert result.err == (
        "nothing to resume: the newest run is finished (`done`)\n\n"
        "hint: go further with `roll resume done --steps 20`\n"
    )
    assert json.loads(roll("resume", "--json").out)["run"] == "done"


def test_a_finished_run_goes_further(roll, launched, make_run):
    make_run("done", (10,), state="finished", step=10)
    result = roll("resume", "done")
    assert result.code == 0 and "nothing to resume: all 10 steps are done (`done`)" in result.err and launched == []
    roll("resume", "done", "--steps", "20", "-qq")
    assert launched[0].loaded.recipe.steps == 20


def test_no_checkpoint_yet(roll, launched, make_run):
    make_run("young")
    result = roll("resume", "young")
    assert result.err.startswith("warning: run `young` has no checkpoint: it starts again at step 0\n")
    assert len(launched) == 1


def test_a_step_without_a_checkpoint(roll, launched, make_run):
    make_run("only", (3, 5))
    result = roll("resume", "only", "--step", "4")
    assert result.code == 1 and launched == []
    assert result.err == "error: run `only` has no checkpoint of step 4\n\nhint: it has steps 3, 5\n"


def test_an_unknown_run(roll, launched, make_run):
    make_run("sums-7f3a")
    result = roll("resume", "sums-7f3b")
    assert result.code == 1
    assert result.err == (
        "error: no run called `sums-7f3b`\n\nhint: did you mean `sums-7f3a`? looked in `runs`; see `roll runs ls`\n"
    )


def test_a_run_that_still_runs(roll, launched, make_run):
    alive = {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": time.time()}
    make_run("busy", (5,), state="running", **alive)
    result = roll("resume", "busy")
    assert result.code == 1 and launched == []
    assert "run `busy` is still running" in result.err and "roll runs watch busy" in result.err


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_fewer_steps_than_are_done(roll, launched, make_run, state):
    make_run("two", (16,), state=state, step=16)
    result = roll("resume", "two", "--steps", "2")
    assert result.code == 0 and launched == []
    assert result.err == (
        "nothing to resume: the run is already at step 16 (`two`)\n\n"
        "hint: go further with `roll resume two --steps 32`\n"
    )


def test_a_change_is_refused_before_anything_is_shown(roll, launched, make_run):
    make_run("two", (5,))
    result = roll("resume", "two", "group_size=4")
    assert result.code == 1 and launched == [] and result.out == ""
    assert result.err.startswith("error: the recipe has changed since the checkpoint: `group_size` was 8, is 4\n")
    assert roll("resume", "two", "group_size=4", "--allow-change", "group_size", "-qq").code == 0
