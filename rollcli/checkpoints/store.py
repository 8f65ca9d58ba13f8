"""Checkpoints on disk: written beside, verified, then renamed; a torn one never counts and never harms its predecessor.

checkpoints/step_000140/
  model/                 configuration, weights, tokenizer, as `transformers` loads them
  optimizer.safetensors  moments and step of every parameter
  state.json             step, task cursor, counters
  complete               size and digest of every file; its presence is what makes the checkpoint whole
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollcli.errors import CheckpointError
from rollcli.runs.directory import COMPLETE, list_checkpoints, step_name


def newest_whole(folder: Path, step: int | None = None) -> tuple[int, Path, list[str]] | None:
    """Returns the newest checkpoint whose files are all as they were written, or that of `step`.

    Returns:
        Step, path, and a message for each newer checkpoint that was passed over; None when there is none.

    Raises:
        CheckpointError: `step` was asked for and is not whole.
    """
    skipped: list[str] = []
    torn = (
        [path.name for path in sorted(folder.glob("step_*")) if not (path / COMPLETE).is_file()]
        if folder.is_dir()
        else []
    )
    skipped += [f"checkpoint `{name}` was never finished; passed over" for name in torn if not name.endswith(".tmp")]
    wanted = [step] if step is not None else list(reversed(list_checkpoints(folder)))
    for candidate in wanted:
        path = folder / step_name(candidate)
        fault = fault_of(path)
        if fault is None:
            return candidate, path, skipped
        skipped.append(f"checkpoint of step {candidate} is damaged ({fault}); passed over")
    if step is not None:
        whole = ", ".join(map(str, list_checkpoints(folder))) or "none"
        raise CheckpointError(f"no whole checkpoint of step {step}: {skipped[-1]}", hint=f"whole ones: {whole}")
    return None


def fault_of(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint's files, or None."""
    try:
        written = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return "not finished"
    for name, facts in written.items():
        file = path / name
        if not file.is_file():
            return f"`{name}` is missing"
        if file.stat().st_size != facts["bytes"] or _digest(file) != facts["sha256"]:
            return f"`{name}` has changed"
    return None


@contextmanager
def writing(folder: Path, step: int, state: dict[str, Any]) -> Iterator[Path]:
    """Gives a folder to write a checkpoint into; when the block ends it becomes the checkpoint of `step`.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left and no other checkpoint is touched.
    """
    beside = folder / f"{step_name(step)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        yield beside
        (beside / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        _finish(beside, folder / step_name(step))
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        reason = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise CheckpointError(
            f"checkpoint of step {step} cannot be written to `{folder}`: {reason}",
            hint="make room or point `$ROLL_RUNS` elsewhere; earlier checkpoints are untouched",
        ) from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _finish(beside: Path, target: Path) -> None:
    files = sorted(path for path in beside.rglob("*") if path.is_file())
    facts = {str(f.relative_to(beside)): {"bytes": f.stat().st_size, "sha256": _digest(f)} for f in files}
    for file in files:
        _flush(file)
    (beside / COMPLETE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    _flush(beside / COMPLETE)
    if target.exists():
        # A run that went back before this step writes it again; the old one gives way only now.
        old = target.with_name(target.name + ".old")
        target.rename(old)
        beside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        beside.rename(target)


def read_state(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's `state.json`."""
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def prune(folder: Path, keep_last: int, keep_every: int) -> list[str]:
    """Deletes checkpoints beyond the newest `keep_last`, sparing multiples of `keep_every`.

    Returns a warning for each that cannot be deleted; a file held open elsewhere must not end a run.
    """
    warnings = []
    for step in list_checkpoints(folder)[:-keep_last]:
        if keep_every and step % keep_every == 0:
            continue
        path = folder / step_name(step)
        try:
            # Without its marker a half-deleted checkpoint cannot be mistaken for a whole one.
            (path / COMPLETE).unlink()
            shutil.rmtree(path)
        except OSError as error:
            warnings.append(f"old checkpoint `{path}` cannot be deleted: {error.strerror}")
    return warnings


def free_bytes(folder: Path) -> int:
    """Returns the free space where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
