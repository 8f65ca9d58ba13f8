"""Groups made by hand, with tokens, versions and scores as a test needs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollcli.data.carriers import Group, Task, Trajectory


def trajectory(sample: int, prompt: int, versions: list[int], **values: Any) -> Trajectory:
    """Returns an episode of `prompt` tokens and one sampled token of each given policy version."""
    count = prompt + len(versions)
    return Trajectory(
        task_id="",
        sample=sample,
        tokens=np.arange(count, dtype=np.int32),
        loss_mask=np.arange(count) >= prompt,
        logprobs=np.where(np.arange(count) >= prompt, -0.5, 0.0).astype(np.float32),
        versions=np.array([-1] * prompt + versions, dtype=np.int32),
        **values,
    )


def group(name: str, index: int, *members: Trajectory) -> Group:
    """Returns a group of problem `index` of a task."""
    task = Task(name, index, [{"role": "user", "content": f"question {index}"}])
    for member in members:
        member.task_id = task.id
    return Group(task, list(members))


def failed(name: str, index: int, sample: int) -> Trajectory:
    """Returns an episode that timed out."""
    return Trajectory.failed(Task(name, index, []), sample, "timeout", "took too long")
