"""Going back to a checkpoint: cut off what came after it, and refuse a recipe that has changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcli.errors import ConfigError
from rollcli.runs.directory import RunDirectory
from rollcli.runs.events import read_lines

MAY_CHANGE = ("steps", "description", "checkpoints", "trackers", "evaluation", "placement")
"""Keys whose change does not alter what the remaining steps compute (or is exactly what the user asks for)."""


_STEP_FILE = re.compile(r"step_(\d+)")
UNRECORDED = -1
"""Cutting after this step removes everything: the run starts over."""


def cut_after(directory: RunDirectory, step: int, attempt: Path) -> int:
    """Removes what the run recorded and saved after `step`, keeping it in the attempt's log folder.

    Later checkpoints go too: they belong to a course that is left, and the newest of them would be resumed next.

    Returns the number of metric lines removed.
    """
    removed = 0
    for path in (directory.events, directory.metrics):
        records = read_lines(path)
        kept, dropped = [], []
        for record in records:
            late = (record.get("step") or 0) > step or record.get("type") == "run_finished"
            (dropped if late else kept).append(record)
        if path == directory.metrics:
            removed = len(dropped)
        if dropped:
            _write(attempt / f"cut_{path.name}", dropped)
            _write(path, kept)
    for folder in (directory.rollouts, directory.evals, directory.checkpoints):
        for path in folder.glob("step_*") if folder.is_dir() else []:
            number = _STEP_FILE.match(path.name)
            if number and int(number[1]) > step:
                path.replace(attempt / f"cut_{folder.name}_{path.name}")
    return removed


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    beside = path.with_name(path.name + ".tmp")
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    beside.replace(path)


def check_unchanged(old: Mapping[str, Any], new: Mapping[str, Any], allowed: tuple[str, ...] = ()) -> None:
    """Refuses a resume whose recipe differs from the run's in more than `MAY_CHANGE` and `allowed`.

    Raises:
        ConfigError: with each difference.
    """
    changed = [
        (key, before, after)
        for key, before, after in flat_differences(old, new)
        if not any(key == free or key.startswith((f"{free}.", f"{free}[")) for free in (*MAY_CHANGE, *allowed))
    ]
    if changed:
        told = "; ".join(f"`{key}` was {json.dumps(before)}, is {json.dumps(after)}" for key, before, after in changed)
        raise ConfigError(
            f"the recipe has changed since the checkpoint: {told}",
            hint=f"undo the change, allow it with `--allow-change {changed[0][0]}`, or start a new run with "
            "`model.path=RUN@STEP`",
        )


def flat_differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Returns `(dotted key, old value, new value)` of every leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for name in dict.fromkeys([*old, *new]):
            found += flat_differences(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new)) for d in flat_differences(a, b, f"{key}[{i}]")]
    return [] if old == new else [(key, old, new)]
