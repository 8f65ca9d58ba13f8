"""Finding runs: all of them, one by its id, the newest that can go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollcli.errors import RunNotFound
from rollcli.runs.directory import RunDirectory, runs_root
from rollcli.runs.status import Status, read_status
from rollcli.suggest import nearest

RESUMABLE = ("stopped", "failed", "lost")


@dataclass(frozen=True)
class RunEntry:
    """One run and where it stands."""

    directory: RunDirectory
    status: Status


def list_runs() -> list[RunEntry]:
    """Returns every run below the runs folder, newest first."""
    root = runs_root()
    paths = [path.parent for path in root.glob("*/status.json")] if root.is_dir() else []
    entries = [RunEntry(RunDirectory(path), read_status(path / "status.json")) for path in paths]
    return sorted(entries, key=lambda entry: entry.status.started, reverse=True)


def find_run(name: str | None = None) -> RunDirectory:
    """Returns the run called `name` (an id, the start of one, or a path), or the newest one that can be resumed.

    Raises:
        RunNotFound: with the nearest ids.
    """
    entries = list_runs()
    ids = [entry.directory.id for entry in entries]
    if name is None:
        for entry in entries:
            if entry.status.state in RESUMABLE:
                return entry.directory
        raise RunNotFound("there is no run to resume", hint=f"looked in `{runs_root()}`; start one with `roll train`")
    path = Path(name).expanduser()
    if (path / "status.json").is_file():
        return RunDirectory(path if path.name not in ("", "..") else path.resolve())
    if name in ids:
        return entries[ids.index(name)].directory
    starting = [run_id for run_id in ids if run_id.startswith(name)]
    if len(starting) == 1:
        return entries[ids.index(starting[0])].directory
    close = starting or nearest(name, ids, count=3, cutoff=0.4)
    meant = f"did you mean {', '.join(f'`{c}`' for c in close)}? " if close else ""
    raise RunNotFound(f"no run called `{name}`", hint=f"{meant}looked in `{runs_root()}`; see `roll runs ls`")
