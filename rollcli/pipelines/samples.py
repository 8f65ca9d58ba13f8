"""A step's samples, for people and for replay: Parquet with everything, and a few for the live view."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollcli.data.batch import Batch
from rollcli.data.carriers import Group

SHOWN = 8
COLUMNS = {
    "step": "int64", "task": "string", "index": "int64", "sample": "int64", "prompt": "string", "response": "string",
    "reward": "float64", "accuracy": "float64", "rewards": "string", "advantage": "float64",
    "response_tokens": "int64", "stop_reason": "string", "error": "string", "error_kind": "string",
    "tokens": "[int32]", "loss_mask": "[bool]", "logprobs": "[float32]", "versions": "[int32]",
}  # fmt: skip
"""Columns of a file of samples and their Arrow types; `rewards` is JSON, brackets are lists, one item per token."""


def write_rollouts(path: Path, step: int, groups: Sequence[Group], batch: Batch | None = None) -> None:
    """Writes one row per trajectory, failed ones included; a usable one's advantage is its tokens' mean."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    advantages = iter(_advantages(batch))
    rows = []
    for group in groups:
        for trajectory in group.trajectories:
            rows.append({
                "step": step,
                "task": group.task.name,
                "index": group.task.index,
                "sample": trajectory.sample,
                "prompt": trajectory.prompt_text or group.task.messages[-1]["content"],
                "response": trajectory.response_text,
                "reward": trajectory.reward,
                "accuracy": trajectory.accuracy,
                "rewards": json.dumps(trajectory.rewards),
                "advantage": next(advantages, None) if trajectory.usable else None,
                "response_tokens": trajectory.response_tokens,
                "stop_reason": trajectory.stop_reason,
                "error": trajectory.error,
                "error_kind": trajectory.error_kind,
                "tokens": trajectory.tokens,
                "loss_mask": trajectory.loss_mask,
                "logprobs": trajectory.logprobs,
                "versions": trajectory.versions,
            })  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    # The types are given, not guessed: files of steps without an error or without a sample read as one data set too.
    schema = pa.schema([(name, _arrow_type(kind)) for name, kind in COLUMNS.items()])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), beside)
    beside.replace(path)


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    return pa.list_(_arrow_type(kind[1:-1])) if kind.startswith("[") else pa.type_for_alias(kind)


def _advantages(batch: Batch | None) -> list[float]:
    if batch is None or "advantages" not in batch.tokens:
        return []
    counts = np.bincount(batch.rows, weights=batch.tokens["loss_mask"], minlength=len(batch))
    totals = np.bincount(batch.rows, weights=batch.tokens["advantages"], minlength=len(batch))
    return (totals / np.maximum(counts, 1)).tolist()


def viewer_samples(groups: Sequence[Group], batch: Batch) -> list[dict[str, Any]]:
    """Returns a few samples of a step, from the best and the worst to those between, as events carry them."""
    usable = [(group, trajectory) for group in groups for trajectory in group.usable]
    advantages = _advantages(batch)
    order = sorted(range(len(usable)), key=lambda place: usable[place][1].reward)
    picked = [order[place] for place in np.unique(np.linspace(0, len(order) - 1, SHOWN).astype(int))] if order else []
    return [
        {
            "task": usable[place][0].id,
            "prompt": usable[place][1].prompt_text[-2000:],
            "response": usable[place][1].response_text[-4000:],
            "reward": usable[place][1].reward,
            "advantage": advantages[place],
            "tokens": usable[place][1].response_tokens,
            "stop_reason": usable[place][1].stop_reason,
        }
        for place in picked
    ]
