"""Whole runs through the real entry point, in subprocesses, each with a runs folder of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROLL = Path(sys.executable).with_name("roll")
TIMED = ("time/", "speed/", "memory/")


class Workspace:
    """A folder with runs in it, and the `roll` command pointed at it."""

    SMALL = (
        "prompts_per_step=8", "group_size=8", "minibatches=2", "steps=6", "evaluation.problems_per_task=16",
        "checkpoints.every=2", "algorithm.dynamic_sampling=true",
    )  # fmt: skip
    """Six steps of the embedded recipe: every stage runs, in seconds."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.environment = {**os.environ, "ROLL_RUNS": str(self.runs), "NO_COLOR": "1"}
        self.environment.pop("RAY_ADDRESS", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `roll` in a process group of its own, as a terminal would."""
        return subprocess.Popen(
            [str(ROLL), *arguments], env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def roll(self, *arguments: str, code: int = 0, timeout_s: float = 300) -> str:
        """Runs `roll` to its end and returns what it wrote; its exit code must be `code`."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == code, output
        return output

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """Returns a run's metrics without what measures time, speed or memory."""
        lines = (self.runs / run / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMED)} for line in lines]

    def events(self, run: str, type: str) -> list[dict[str, Any]]:
        """Returns a run's events of one type; a torn last line does not count."""
        path = self.runs / run / "events.jsonl"
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [event for event in map(json.loads, whole) if event["type"] == type]

    def digests(self, run: str, step: int) -> dict[str, str]:
        """Returns the digest of every weight and optimizer file of a checkpoint."""
        folder = self.runs / run / "checkpoints" / f"step_{step:06d}"
        files = sorted(folder.rglob("*.safetensors"))
        return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty place for runs."""
    return Workspace(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, str]:
    """A finished run of six steps that nothing interrupted, mirrored by SwanLab, and what it wrote into a pipe."""
    workspace = Workspace(tmp_path_factory.mktemp("undisturbed"))
    mirror = "trackers=[{name: swanlab, mode: offline}]"
    output = workspace.roll("train", "grpo-math", *workspace.SMALL, mirror, "--name", "whole")
    return workspace, output
