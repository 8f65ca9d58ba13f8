"""A step's samples, for people and for replay: Parquet with everything, and a few for the live view."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task, Trajectory
from rollcli.data.images import referring, text_of
from rollcli.errors import ReplayError
from rollcli.pipelines.origin import Origin

SHOWN = 8
COLUMNS = {
    "step": "int64", "task": "string", "index": "int64", "sample": "int64", "agent": "string", "prompt": "string",
    "response": "string",
    "reward": "float64", "accuracy": "float64", "rewards": "string", "advantage": "float64",
    "response_tokens": "int64", "stop_reason": "string", "error": "string", "error_kind": "string",
    "tokens": "[int32]", "loss_mask": "[bool]", "logprobs": "[float32]", "versions": "[int32]",
    "turns": "[[int64]]", "turn_rewards": "[float64]", "state_keys": "[string]", "budget": "int64",
    "metrics": "string", "spoils_group": "bool", "greedy": "bool", "group": "int64", "rendered": "bool",
    "messages": "string", "row": "int64", "seed": "int64", "split": "string", "chat": "string",
}  # fmt: skip
"""Columns of a file of samples and their Arrow types; brackets are lists, one item per token or per turn.

`rewards`, `metrics`, `messages` and `chat` are JSON; of an image `messages` holds the path, or a digest and its size.
`chat` is the whole talk as people read it, each message the model sampled with the number of its `turn`. `group` is
equal within a group, `greedy` marks its baseline, which is no part of it. `rendered` says that `prompt` is what the
model saw, and not the question alone.
"""

_AS_THEY_ARE = (
    "sample", "agent", "reward", "accuracy", "stop_reason", "error", "error_kind", "tokens", "loss_mask", "logprobs",
    "versions",
    "turns", "turn_rewards", "state_keys", "budget", "spoils_group",
)  # fmt: skip
"""Columns that are a trajectory's own attributes."""
_PER_TOKEN = ("tokens", "loss_mask", "logprobs", "versions")


def write_rollouts(
    path: Path, step: int, groups: Sequence[Group], batch: Batch | None = None, origin: Origin | None = None
) -> None:
    """Writes one row per trajectory, failed ones included; a usable one's advantage is its tokens' mean.

    A group's greedy baseline follows it. `origin` makes the file one that can be replayed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    advantages = iter(_advantages(batch))
    rows = []
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            advantage = next(advantages, None) if trajectory.usable else None
            rows.append(_row(step, number, group.task, trajectory, advantage))
        rows += [_row(step, number, group.task, baseline, None, greedy=True) for baseline in group.greedy]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    # The types are given, not guessed: files of steps without an error or without a sample read as one data set too.
    schema = pa.schema(
        [(name, _arrow_type(kind)) for name, kind in COLUMNS.items()], metadata=origin and origin.metadata()
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), beside)
    beside.replace(path)


def _row(
    step: int, number: int, task: Task, trajectory: Trajectory, advantage: float | None, greedy: bool = False
) -> dict[str, Any]:
    return {
        **{name: getattr(trajectory, name) for name in _AS_THEY_ARE},
        "step": step,
        "task": task.name,
        "index": task.index,
        "prompt": trajectory.prompt_text or text_of(task.messages[-1]),
        "response": trajectory.response_text,
        "rewards": json.dumps(trajectory.rewards),
        "advantage": advantage,
        "response_tokens": trajectory.response_tokens,
        "metrics": json.dumps({name: float(value) for name, value in trajectory.metrics.items()}),
        "greedy": greedy,
        "group": number,
        "rendered": bool(trajectory.prompt_text),
        "messages": json.dumps(referring(task.messages)),
        "row": task.row,
        "seed": task.seed,
        "split": task.split,
        "chat": json.dumps(trajectory.chat),
    }


def read_rollouts(path: Path) -> list[Group]:
    """Returns the groups of a file as they were written; of a task all but its payload, which training never asks for.

    Raises:
        ReplayError: an earlier rollcli wrote the file, without all that training needs; or it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowInvalid) as error:
        raise ReplayError(f"rollouts in `{path}` cannot be read: {error}") from error
    missing = [name for name in COLUMNS if name not in (*table.column_names, "chat")]
    if missing:
        raise ReplayError(
            f"rollouts in `{path}` lack the columns {', '.join(missing)}",
            hint="an earlier rollcli recorded them; train the step again to replay it",
        )
    groups: dict[int, Group] = {}
    for row in _rows(table):
        group = groups.get(row["group"])
        if group is None:
            messages = json.loads(row["messages"])
            task = Task(row["task"], row["index"], messages, seed=row["seed"], split=row["split"], row=row["row"])
            group = groups[row["group"]] = Group(task, [])
        trajectory = _trajectory(group.task, row)
        (group.greedy if row["greedy"] else group.trajectories).append(trajectory)
    return list(groups.values())


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows, token columns as arrays; those are most of a file, and lists of numbers are slow."""
    arrays = {name: table[name].combine_chunks() for name in _PER_TOKEN}
    for number, row in enumerate(table.drop_columns(_PER_TOKEN).to_pylist()):
        tokens = {name: array[number].values.to_numpy(zero_copy_only=False) for name, array in arrays.items()}
        yield row | tokens


def _trajectory(task: Task, row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        task_id=task.id,
        **{name: row[name] for name in _AS_THEY_ARE if name != "turns"},
        turns=[(start, end) for start, end in row["turns"]],
        rewards=json.loads(row["rewards"]),
        metrics=json.loads(row["metrics"]),
        chat=json.loads(row.get("chat") or "[]"),
        prompt_text=row["prompt"] if row["rendered"] else "",
        response_text=row["response"],
    )


def read_origin(path: Path) -> Origin | None:
    """Returns what a file of rollouts says of its origin, or None where it does not.

    Raises:
        ReplayError: it is no Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return Origin.from_metadata(pq.read_schema(path).metadata)
    except (OSError, pa.ArrowInvalid) as error:
        raise ReplayError(f"rollouts in `{path}` cannot be read: {error}") from error


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
            **_texts(usable[place][1]),
            "reward": usable[place][1].reward,
            "advantage": advantages[place],
            "tokens": usable[place][1].response_tokens,
            "stop_reason": usable[place][1].stop_reason,
        }
        for place in picked
    ]


def _texts(trajectory: Trajectory) -> dict[str, str]:
    """Returns the ends of what a sample was asked and what it said; of several turns also what was said between."""
    chat, prompt, response = trajectory.chat, trajectory.prompt_text, trajectory.response_text
    first = next((place for place, message in enumerate(chat) if "turn" in message), 0)
    if len(trajectory.turns) > 1 and chat:
        prompt = "\n".join(message["content"] for message in chat[:first])
        response = "\n".join(f"{message['role']}: {message['content']}" for message in chat[first:])
    agent = {"agent": trajectory.agent} if trajectory.agent else {}
    return {**agent, "prompt": prompt[-2000:], "response": response[-4000:]}
