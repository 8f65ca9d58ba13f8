"""Roles without processes: they keep what they are asked, in one list for all, so that the order of a step is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollcli.config.load import load_recipe
from rollcli.data.batch import Batch
from rollcli.pipelines.recorder import Recorder
from rollcli.runs.directory import RunDirectory
from rollcli.runs.events import read_lines
from rollcli.runs.status import StatusFile
from tests.rollout.doubles import Environments, trajectory

SMALL = ("prompts_per_step=2", "group_size=4", "minibatches=2", "steps=3", "evaluation.problems_per_task=3")


class ClusterDouble:
    """Workers of one role. `during[method]` runs inside a call; `failing[method]` is raised from it."""

    def __init__(self, role: str, asked: list[str], count: int = 1) -> None:
        self.role, self.asked, self.count = role, asked, count
        self.during: dict[str, Callable[..., Any]] = {}
        self.failing: dict[str, Exception] = {}
        self.arguments: dict[str, list[tuple]] = {}
        self.killed = False

    def __len__(self) -> int:
        return self.count

    @property
    def data_ranks(self) -> int:
        return self.count

    def call(self, method: str, *arguments: Any) -> list[str]:
        return [f"{method} of {self.role}-{rank}" for rank in range(self.count)]

    async def gather(self, references: list) -> list:
        return references

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        self.asked.append(f"{self.role}.{method}")
        self.arguments.setdefault(method, []).append(arguments)
        if method in self.during:
            await self.during[method](*arguments)
        if method in self.failing:
            raise self.failing.pop(method)
        if method == "save":
            Path(arguments[0]).mkdir(exist_ok=True)
            (Path(arguments[0]) / "weights").write_text(self.role)
        return [1.0] * self.count

    async def each(self, method: str, arguments: list[tuple]) -> list[Any]:
        await self.all(method, arguments)
        # The same measures for every minibatch, and the column a pass makes.
        return [
            [
                ({"loss": 0.5, "tokens": 10.0, "learning_rate": 0.1}, np.full(int(part.offsets[-1]), -0.5, np.float32))
                for part in mine
            ]
            for mine, *_ in arguments
        ]

    async def first(self, method: str, *arguments: Any) -> Any:
        await self.all(method, *arguments)
        return Batch.from_sequences([(np.arange(4, dtype=np.int32), np.arange(4) > 1) for _ in arguments[0]])

    async def columns(self, method: str, batch: Batch, *arguments: Any) -> np.ndarray:
        await self.all(method, batch, *arguments)
        return np.full(int(batch.offsets[-1]), -0.5, np.float32)

    def kill(self) -> None:
        self.killed = True


class NoMirror:
    def log(self, step: int, metrics: dict) -> None: ...

    def close(self) -> None: ...


def half_right(order: Any) -> Any:
    return trajectory(order, float(order.sample % 2))


class Stage:
    """A pipeline's surroundings: recipe, roles, recorder, and what was asked of the roles."""

    def __init__(
        self, folder: Path, *overrides: str, play: Any = half_right, policies: int = 1, name: str = "grpo-math"
    ) -> None:
        self.recipe = load_recipe(name, [*(SMALL if name == "grpo-math" else ()), *overrides]).recipe
        self.asked: list[str] = []
        self.environments = Environments(play)
        self.policy = ClusterDouble("policy", self.asked, policies)
        self.rollout = ClusterDouble("rollout", self.asked, 2)
        needs = self.recipe.algorithm.needs()
        self.reference = ClusterDouble("reference", self.asked) if "reference" in needs else None
        self.critic = ClusterDouble("critic", self.asked) if "critic" in needs else None

        async def numbers() -> dict[str, float]:
            return {"memory/policy_gib": 1.0}

        async def sync(version: int) -> None:
            await self.rollout.all("load_weights", "weights of policy-0", version)

        async def turn() -> None: ...

        self.roles = SimpleNamespace(
            policy=self.policy, rollout=self.rollout, reference=self.reference, critic=self.critic,
            reference_model=self.reference, rewards={},
            environments=self.environments, memory=numbers, model_seconds=numbers, sync=sync,
            training_turn=turn, weights=SimpleNamespace(bytes=2**20), supervise=lambda supervisor: None,
        )  # fmt: skip
        folder.mkdir(exist_ok=True)
        self.directory = RunDirectory(folder)
        status = StatusFile(self.directory.status, recipe="r", steps=self.recipe.steps)
        status.update(state="running")
        self.recorder = Recorder(self.directory, status, NoMirror())

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_lines(self.directory.events) if event["type"] == kind]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.directory.checkpoints.glob("step_*"))


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))
