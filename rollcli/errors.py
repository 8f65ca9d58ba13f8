"""Every error a user can meet, as one tree.

    RollError
    ├── ConfigError        a recipe or an override is wrong; carries every located problem      (ValueError)
    ├── NotFound           a thing named by the user is not there                               (LookupError)
    │   ├── RecipeNotFound
    │   ├── RunNotFound
    │   ├── ModelNotFound
    │   └── DatasetNotFound
    ├── RunExists          the run directory is in use                                          (FileExistsError)
    ├── PluginError        a plug-in is unknown, does not import or has the wrong shape         (ImportError)
    ├── PlanError          the recipe does not fit the devices                                  (ValueError)
    ├── EngineError        a training or rollout engine failed                                  (RuntimeError)
    ├── WeightSyncError    trainer and rollout engine disagree about the weights                (RuntimeError)
    ├── WorkerDied         a worker process ended by itself                                     (RuntimeError)
    ├── RolloutError       the scheduler cannot produce a batch                                 (RuntimeError)
    ├── ReplayError        recorded rollouts cannot be trained on                               (ValueError)
    ├── EpisodeError       one episode failed; recorded on its trajectory                       (RuntimeError)
    │   ├── ImageError     an image of its chat cannot be shown to the model
    │   └── OutOfTokens    the model may say no more in it
    ├── RewardError        one reward failed; recorded on its trajectory                        (RuntimeError)
    ├── StorageError       the run directory cannot be written                                  (OSError)
    ├── CheckpointError    a checkpoint is missing, torn, or cannot be written                  (OSError)
    └── Interrupted        the user or the machine asked the run to stop                        (RuntimeError)

Each leaf also inherits the standard class one would catch for it, survives pickling between processes, and carries a
`hint`: the next command to type or setting to change.
"""

from __future__ import annotations

from dataclasses import dataclass


class RollError(Exception):
    """Base of all errors a user can act on: a message, and a hint that says what to do next."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Problem:
    """One located mistake in a recipe: `source:line:column: message`, with the line it stands on.

    `source` is a file's path, or `command line` for an override, whose `line` is then the override's number.
    """

    message: str
    source: str = ""
    line: int = 0
    column: int = 0
    snippet: str = ""
    length: int = 1
    suggestion: str | None = None

    @property
    def location(self) -> str:
        """`file:line:column`, or `command line, override N`."""
        if self.source == "command line":
            return f"command line, override {self.line}"
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def __str__(self) -> str:
        meant = f" (did you mean `{self.suggestion}`?)" if self.suggestion else ""
        return f"{self.location}: {self.message}{meant}" if self.source else f"{self.message}{meant}"


class ConfigError(RollError, ValueError):
    """A recipe does not validate; `problems` holds every mistake found, in order of place."""

    def __init__(self, problems: list[Problem] | str, hint: str | None = None) -> None:
        self.problems = [Problem(problems)] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems), hint)

    def __reduce__(self) -> tuple:
        return type(self), (self.problems, self.hint)


class NotFound(RollError, LookupError):
    """A thing the user named is not there."""


class RecipeNotFound(NotFound):
    """No recipe of that name or path."""


class RunNotFound(NotFound):
    """No run of that id."""


class ModelNotFound(NotFound):
    """No model at that path, or not reachable offline."""


class DatasetNotFound(NotFound):
    """No data set at that path, or a column of it is absent."""


class RunExists(RollError, FileExistsError):
    """The run directory is already in use."""


class PluginError(RollError, ImportError):
    """A plug-in is unknown, does not import, or does not have the shape its kind asks for."""


class PlanError(RollError, ValueError):
    """The recipe cannot be placed on the devices."""


class EngineError(RollError, RuntimeError):
    """A training or rollout engine failed."""


class WeightSyncError(RollError, RuntimeError):
    """Trainer and rollout engine disagree about names or shapes of the weights."""


class WorkerDied(RollError, RuntimeError):
    """A worker process ended, or no longer answers.

    Attributes:
        worker: its name, `role-rank`; empty where it is not known, or could not be started at all.
        exit_code: as far as it is known.
        silent: True when it is alive and does not answer.
    """

    def __init__(
        self, message: str, hint: str | None = None, *, worker: str = "", exit_code: int | None = None,
        silent: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message, hint)
        self.worker = worker
        self.exit_code = exit_code
        self.silent = silent


class RolloutError(RollError, RuntimeError):
    """The scheduler cannot produce a batch: too many failures, or no group worth keeping."""


class ReplayError(RollError, ValueError):
    """Recorded rollouts cannot be trained on: they are another model's, or lack what the algorithm needs."""


class EpisodeError(RollError, RuntimeError):
    """One episode failed in its environment; it is recorded on the trajectory and the run goes on."""


class ImageError(EpisodeError):
    """An image cannot be read, or the model has no place for it; its episode fails and the run goes on."""


class OutOfTokens(EpisodeError):
    """The model's budget of tokens, or its context, is spent: it cannot be asked again in this episode."""


class RewardError(RollError, RuntimeError):
    """One reward failed; it is recorded on the trajectory and the run goes on."""


class StorageError(RollError, OSError):
    """The run directory cannot be written: the disk is full, read-only, or not a folder."""


class CheckpointError(RollError, OSError):
    """A checkpoint is missing, torn, or cannot be written."""


class Interrupted(RollError, RuntimeError):
    """The run was asked to stop; `exit_code` follows the signal."""

    def __init__(self, message: str, hint: str | None = None, exit_code: int = 130) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple:
        return type(self), (self.message, self.hint, self.exit_code)
