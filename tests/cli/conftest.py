"""A working directory with recipes and runs, and `roll` called in this process as a pipe would see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

GOOD = """\
description: Sums of three digits
model:
  path: embedded:tiny
tasks:
  - name: sums
    source: sums
    rewards:
      - name: math
steps: 10
seed: 3
algorithm: grpo
"""
BAD = GOOD.replace("steps: 10", "steps: many").replace("seed: 3", "group_sise: 8")


@dataclass
class Result:
    """What a call of `roll` left."""

    code: int
    out: str
    err: str


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working directory with two recipes; no variable of the caller's changes the output."""
    for name in (
        "NO_COLOR",
        "FORCE_COLOR",
        "CLICOLOR_FORCE",
        "ROLL_RUNS",
        "ROLL_DEBUG",
        "ROLL_NO_PROGRESS",
        "RAY_ADDRESS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollcli.config.find.shipped", lambda: tmp_path / "shipped")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sums.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    return tmp_path


@pytest.fixture
def roll(workplace):
    """Calls `roll` in this process, through the same door as the console script."""
    from rollcli.cli.app import app

    def call(*words: str) -> Result:
        result = CliRunner().invoke(app, list(words), prog_name="roll")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def roll_process(workplace):
    """Calls `roll` as a process of its own, with pipes."""

    def call(*words: str, **environment: str) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "rollcli.cli.app", *words],
            capture_output=True, text=True, cwd=workplace, env={**os.environ, **environment}, timeout=60,
        )  # fmt: skip
        return Result(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def make_run(workplace):
    """Makes a run directory as training leaves it."""

    def make(name: str = "sums-7f3a", steps: tuple[int, ...] = (), **status: Any) -> Path:
        path = workplace / "runs" / name
        path.mkdir(parents=True)
        values = {
            "state": "stopped", "recipe": "sums", "step": 142, "steps": 500, "reward": 0.551, "started": 1700000000.0,
            **status,
        }  # fmt: skip
        (path / "status.json").write_text(json.dumps(values))
        (path / "config.yaml").write_text(GOOD)
        for step in steps:
            folder = path / "checkpoints" / f"step_{step:06d}"
            folder.mkdir(parents=True)
            (folder / "complete").write_text("{}")
        return path

    return make


@pytest.fixture
def module(monkeypatch):
    """Puts a module in the place of one that is heavy."""

    def put(name: str, **attributes: Any) -> None:
        double = types.ModuleType(name)
        vars(double).update(attributes)
        monkeypatch.setitem(sys.modules, name, double)

    return put


@pytest.fixture
def commands():
    """Every command by its words, `roll` itself included."""

    def walk(command: Any, words: tuple[str, ...]) -> Any:
        yield words, command
        for name, each in getattr(command, "commands", {}).items():
            yield from walk(each, (*words, name))

    from rollcli.cli.app import app

    return dict(walk(typer.main.get_command(app), ("roll",)))
