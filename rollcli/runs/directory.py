"""The run directory: where everything a run leaves is found, and who may write into it.

runs/<recipe>-<4 hex>/
  config.yaml  manifest.json  status.json  events.jsonl  metrics.jsonl
  rollouts/step_000142.parquet    evals/step_000140.json    checkpoints/step_000140/
  logs/attempt_1/driver.log …     logs/latest
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollcli.errors import RollError, RunExists, StorageError
from rollcli.runs.status import read_status


def runs_root() -> Path:
    """Folder that holds the runs: `$ROLL_RUNS`, or `runs/` in the working directory."""
    return Path(os.environ.get("ROLL_RUNS", "runs"))


COMPLETE = "complete"
"""Marker file without which a checkpoint does not count."""


def list_checkpoints(folder: Path) -> list[int]:
    """Returns the steps of all whole checkpoints, newest last."""
    steps = []
    for path in folder.glob("step_*") if folder.is_dir() else []:
        number = path.name.removeprefix("step_")
        if number.isdigit() and (path / COMPLETE).is_file():
            steps.append(int(number))
    return sorted(steps)


def step_name(step: int) -> str:
    """Name of a step's files: sorted by name is sorted by step."""
    return f"step_{step:06d}"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def id(self) -> str:
        """The run's name: the directory's own."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The recipe with every value, loadable as a recipe."""
        return self.path / "config.yaml"

    @property
    def manifest(self) -> Path:
        """What produced the run."""
        return self.path / "manifest.json"

    @property
    def status(self) -> Path:
        """Where the run stands."""
        return self.path / "status.json"

    @property
    def events(self) -> Path:
        """The seam every viewer reads."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Samples of each step, Parquet."""
        return self.path / "rollouts"

    @property
    def evals(self) -> Path:
        """One file per evaluation."""
        return self.path / "evals"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Log folder of the newest attempt."""
        return self.path / "logs" / "latest"

    def attempts(self) -> int:
        """Number of times the run was started."""
        return len(list((self.path / "logs").glob("attempt_*")))

    def new_attempt(self) -> Path:
        """Makes the log folder of the next attempt, points `latest` at it, and returns it."""
        folder = self.path / "logs" / f"attempt_{self.attempts() + 1}"
        folder.mkdir(parents=True)
        latest = self.path / "logs" / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
        return folder

    @classmethod
    def create(cls, recipe: str, name: str | None = None, clean: bool = False) -> RunDirectory:
        """Makes the directory of a new run.

        Args:
            recipe: name the run is called after.
            name: name to use instead of `<recipe>-<4 hex>`.
            clean: delete what an earlier run of that name left.

        Raises:
            RunExists: the directory is in use; the message gives three ways out.
            RollError: `name` is not the name of a folder.
        """
        if name and (name != Path(name).name or name == ".."):
            raise RollError(f"`{name}` is not a name for a run", hint="runs live in `$ROLL_RUNS`; give a plain name")
        for candidate in [name] if name else _fresh_names(recipe):
            path = runs_root() / candidate
            if clean and name:
                _clean(path)
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if name is None:
                    continue
                if not path.is_dir() or any(path.iterdir()):
                    raise RunExists(
                        f"run directory `{path}` is already in use",
                        hint=f"continue it with `roll resume {candidate}`, choose `--name OTHER`, "
                        "or delete it with `--clean`",
                    ) from None
            except OSError as error:
                raise unwritable(path, error) from error
            return cls(path)
        raise RunExists(f"no free name for recipe `{recipe}` in `{runs_root()}`", hint="give one with `--name`")


def unwritable(path: Path, error: OSError) -> StorageError:
    """Returns what to tell of a run directory that cannot be written."""
    return StorageError(
        f"run directory `{path}` cannot be written: {error.strerror or error}",
        hint="make room, or point `$ROLL_RUNS` to a folder that can be written",
    )


def _clean(path: Path) -> None:
    """Deletes what an earlier run left; refuses to touch a living run, or a folder that no run made."""
    marks = ("status.json", "manifest.json", "logs/latest")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not any((path / mark).exists() for mark in marks):
        raise RunExists(f"`{path}` is not a run's directory and is left as it is", hint="choose `--name OTHER`")
    status = read_status(path / "status.json")
    if status.alive:
        raise RunExists(
            f"run `{path.name}` is still running (process {status.pid}) and is left as it is",
            hint="stop it first, or choose `--name OTHER`",
        )
    shutil.rmtree(path)


def _fresh_names(recipe: str) -> Iterator[str]:
    for _ in range(64):
        yield f"{recipe}-{secrets.token_hex(2)}"
