"""`roll train`, with the pipeline replaced by a double."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollcli.errors import ModelNotFound


@pytest.fixture
def launched(module):
    """Records what would have been launched."""
    calls = []

    def launch(loaded, directory, **options):
        calls.append(SimpleNamespace(loaded=loaded, directory=directory, options=options))
        directory.new_attempt()
        return SimpleNamespace(
            state="finished", step=loaded.recipe.steps, checkpoint=directory.checkpoints / "step_000010",
            start_accuracy=0.1, end_accuracy=0.5, exit_code=0, reason="all steps done", hint=None,
        )  # fmt: skip

    module("rollcli.pipelines.launch", launch=launch)
    module("rollcli.pipelines.preflight", check=lambda loaded: None, dry_run=lambda loaded: DRY)
    return calls


DRY = SimpleNamespace(
    model={"path": "tiny"}, batch=["64 prompts × 8 samples = 512"], prompt_text="<user>1+1", prompt_tokens=7,
    gold_rewards={"math": 1.0}, plan={"layout": "colocated"}, warnings=["odd"],
)  # fmt: skip


def test_overrides_from_everywhere(roll, launched):
    result = roll("train", "sums", "group_size=4", "-o", "prompts_per_step=2", "--seed", "9", "--steps", "5", "-q")
    assert result.code == 0, result.err
    (call,) = launched
    recipe = call.loaded.recipe
    assert (recipe.group_size, recipe.prompts_per_step, recipe.seed, recipe.steps) == (4, 2, 9, 5)
    assert call.options == {"address": None, "grace_s": 120.0}
    assert result.out == f"runs/{call.directory.id}\n" and call.directory.id.startswith("sums-")


def test_options_reach_the_launch(roll, launched):
    roll("train", "sums", "--address", "host:6379", "--grace", "5", "--name", "mine", "-qq")
    assert launched[0].options == {"address": "host:6379", "grace_s": 5.0}
    assert launched[0].directory.path == Path("runs/mine")


def test_map_and_outcome(roll, launched):
    result = roll("train", "sums", "--name", "mine")
    assert result.err.startswith("run       runs/mine\nlog       runs/mine/logs/latest/driver.log\n")
    assert "accuracy    0.100 → 0.500 (+0.400)\n" in result.out
    assert "`roll eval mine`" in result.err and "`roll samples mine`" in result.err


def test_json(roll, launched):
    result = roll("train", "sums", "--name", "mine", "--json")
    assert result.err == ""
    found = json.loads(result.out)
    assert found["run"] == "mine" and found["state"] == "finished" and found["end_accuracy"] == 0.5


def test_a_directory_in_use_gives_three_ways_out(roll, launched, make_run):
    make_run("mine")
    result = roll("train", "sums", "--name", "mine")
    assert result.code == 1 and launched == []
    assert result.err == (
        "error: run directory `runs/mine` is already in use\n\n"
        "hint: continue it with `roll resume mine`, choose `--name OTHER`, or delete it with `--clean`\n"
    )
    assert roll("train", "sums", "--name", "mine", "--clean", "-qq").code == 0


def test_an_unknown_recipe_names_the_near_ones_and_the_folders(roll, launched):
    result = roll("train", "sum")
    assert result.code == 1
    assert result.err.startswith("error: no recipe called `sum`\n\nhint: did you mean `sums`? searched recipes, ")


def test_nothing_is_made_when_something_is_missing(roll, module, workplace):
    def check(loaded):
        raise ModelNotFound("no model at `x`", hint="y")

    module("rollcli.pipelines.preflight", check=check)
    assert roll("train", "sums").code == 1
    assert not (workplace / "runs").exists()


def test_a_wrong_type_in_an_override_is_located(roll, launched):
    result = roll("train", "sums", "group_size=4", "steps=ten")
    assert result.code == 1
    assert result.err.startswith("command line, override 2: `steps`: expected a whole number, found `ten`\n")


def test_a_runs_own_config_is_a_recipe(roll, launched, make_run):
    path = make_run("old")
    roll("train", str(path / "config.yaml"), "-qq")
    assert launched[0].loaded.name == "sums"


def test_dry_run_writes_nothing(roll, launched, module, workplace):
    module("rollcli.cli.devices", show_plan=lambda plan, output: output.data(f"plan {plan['layout']}"))
    result = roll("train", "sums", "--dry-run")
    assert result.code == 0 and launched == [] and not (workplace / "runs").exists()
    assert result.out == (
        "recipe     sums  Sums of three digits\n"
        "model      path tiny\n"
        "prompt     7 tokens\n"
        "           <user>1+1\n"
        "rewards    math 1  (of the gold answer)\n"
        "directory  runs/sums-xxxx\n"
        "\n"
        "plan colocated\n"
    )
    assert result.err.startswith("warning: odd\n")
    assert json.loads(roll("train", "sums", "--dry-run", "--json").out)["gold_rewards"] == {"math": 1.0}


def test_detached(roll, launched, monkeypatch):
    started = {}

    class Process:
        pid = 4711

        def __init__(self, command, **options):
            started.update(command=command, **options)

        def wait(self, timeout):
            import subprocess

            raise subprocess.TimeoutExpired("roll", timeout)

    monkeypatch.setattr("subprocess.Popen", Process)
    monkeypatch.setattr("sys.argv", ["roll", "train", "sums", "--detach"])
    result = roll("train", "sums", "--detach")
    assert result.code == 0 and launched == []
    run = result.out.strip()
    assert run.startswith("sums-") and Path("runs", run, "logs", "detached.log").exists()
    assert started["command"][1:] == ["-m", "rollcli.cli.app", "train", "sums"] and started["start_new_session"]
    assert started["env"]["ROLL_DETACHED_RUN"] == str(Path("runs", run))


def test_a_detached_process_takes_the_directory_made_for_it(roll, launched, monkeypatch, make_run):
    monkeypatch.setenv("ROLL_DETACHED_RUN", str(make_run("mine")))
    assert roll("train", "sums", "-qq").code == 0
    assert launched[0].directory.id == "mine" and "ROLL_DETACHED_RUN" not in os.environ


def test_a_detached_run_that_ends_at_once_is_an_error(roll, launched, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: SimpleNamespace(pid=1, wait=lambda timeout: 1))
    result = roll("train", "sums", "--detach")
    assert result.code == 1 and "ended at once with code 1" in result.err and "detached.log" in result.err


def test_events_are_followed(roll, module, launched):
    def launch(loaded, directory, **options):
        with directory.events.open("a") as file:
            event = {"time": time.time(), "type": "warning", "message": "mind this"}
            file.write(json.dumps(event) + "\n")
        return SimpleNamespace(
            state="finished", step=1, checkpoint=None, start_accuracy=None, end_accuracy=None, exit_code=0, reason="",
            hint=None,
        )  # fmt: skip

    module("rollcli.pipelines.launch", launch=launch)
    assert "mind this" in roll("train", "sums").err
    assert "mind this" not in roll("train", "sums", "-q").err
