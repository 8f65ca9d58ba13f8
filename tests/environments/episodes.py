"""Plays whole episodes of environments that lead, against the doubles of an episode's surroundings."""

from __future__ import annotations

import asyncio
from typing import Any

from rollcli.config.schema import RewardConfig, TaskConfig
from rollcli.data.carriers import Task, Trajectory
from rollcli.engines.base import SamplingParams
from rollcli.rewards.base import RewardResult
from rollcli.rollout.conversation import EpisodeContext
from rollcli.rollout.episode import Episode
from rollcli.rollout.states import Census
from tests.rollout.doubles import Format

LIMIT_S = 60


async def success(config: TaskConfig, fields: dict) -> list[RewardResult]:
    """Scores what an environment says of its success."""
    return [RewardResult(float(fields.get("success", 0.0))) for _ in config.rewards]


def episode(environment: Any, generate: Any, task: Task, score: Any = success, **changes: Any) -> list[Trajectory]:
    """Plays an episode; returns its trajectories."""
    config = TaskConfig("t", None, [RewardConfig("success", weight=0.0)], environment)
    context = {
        "config": config, "format": Format(), "sampling": SamplingParams(max_tokens=200, temperature=0.7),
        "max_prompt_tokens": 1000, "max_context": 2000, "timeout_s": 30.0, "generate": generate, "score": score,
        "census": Census(), **changes,
    }  # fmt: skip

    async def main() -> list[Trajectory]:
        return await asyncio.wait_for(Episode(task, 0, EpisodeContext(**context)).run(), LIMIT_S)

    return asyncio.run(main())


def texts(trajectories: list[Trajectory]) -> list[str]:
    """Returns all tokens of each trajectory as the format's characters."""
    return ["".join(map(chr, each.tokens)) for each in trajectories]
