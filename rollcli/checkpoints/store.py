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
    _put_back(folder)
    written = [int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdigit()]
    skipped: list[str] = []
    for candidate in [step] if step is not None else sorted(written, reverse=True):
        path = folder / step_name(candidate)
        fault = fault_of(path)
        if fault is None:
            return candidate, path, skipped
        skipped.append(f"checkpoint of step {candidate} is {fault}; passed over")
    if step is not None:
        others = ", ".join(str(other) for other in list_checkpoints(folder) if other != step) or "none"
        raise CheckpointError(f"checkpoint of step {step} is {fault_of(path)}", hint=f"there are: {others}")
    return None


def _put_back(folder: Path) -> None:
    """Undoes an exchange that was cut off between its two renames: the old checkpoint takes its place again."""
    for old in folder.glob("step_*.old"):
        if old.with_suffix("").exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(old.with_suffix(""))


def fault_of(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint, as in "it is …", or None."""
    if not path.is_dir():
        return "not there"
    try:
        written = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        sizes = {name: (facts["bytes"], facts["sha256"]) for name, facts in written.items()}
    except FileNotFoundError:
        return "unfinished"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"damaged (`{COMPLETE}` cannot be read)"
    if "state.json" not in sizes:
        return f"damaged (`{COMPLETE}` does not list `state.json`)"
    for name, (size, digest) in sizes.items():
        file = path / name
        if not file.is_file():
            return f"damaged (`{name}` is missing)"
        if file.stat().st_size != size or _digest(file) != digest:
            return f"damaged (`{name}` has changed)"
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
        _put_back(folder)
        # A run has one writer: whatever else lies beside was left by one that was killed.
        for torn in folder.glob("step_*.tmp"):
            shutil.rmtree(torn, ignore_errors=True)
        beside.mkdir()
        yield beside
        (beside / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        _finish(beside, folder / step_name(step))
    # Whatever ends the writing, nothing of it may stay. Writers in another language or process report a full disk as an
    # error of their own kind, in the system's words.
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))
        if not full and not isinstance(error, OSError):
            raise
        reason = "no space left" if full else str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"checkpoint of step {step} cannot be written to `{folder}`: {reason}",
            hint="make room or point `$ROLL_RUNS` elsewhere; earlier checkpoints are untouched",
        ) from error


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
    _flush(target.parent)


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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
