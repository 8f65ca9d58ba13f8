"""What a failed remote call means: the worker's own error, or that its process ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ray

from rollcli.errors import RollError, WorkerDied

EXIT_CODE = re.compile(r"exit code (\d+)")


def understood(error: BaseException, workers: Mapping[str, Any]) -> BaseException:
    """Returns the error to show for one that a remote call to one of `workers`, actors by name, raised."""
    cause = getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else None
    if isinstance(cause, RollError):
        # As it was raised in the worker it reads better than Ray's wrapping of it.
        return cause
    return death(error, workers) if isinstance(error, ray.exceptions.RayActorError) else error


def death(error: ray.exceptions.RayActorError, workers: Mapping[str, Any]) -> WorkerDied:
    """Returns who died, and why as far as it is known."""
    # A call whose argument comes from another worker fails when that one dies; who that is, is not known here.
    name = next((name for name, actor in workers.items() if actor._actor_id.hex() == error.actor_id), "of another role")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "creation task" in lines[0]:
        return WorkerDied(
            f"worker `{name}` did not start: {lines[-1].removeprefix('rollcli.errors.')}",
            hint=f"see `logs/latest/{name}.log` in the run's directory",
        )
    code = EXIT_CODE.search(str(error))
    return WorkerDied(
        f"worker `{name}` died: its process was killed, crashed, or ran out of memory",
        hint=f"see `logs/latest/{name}.log` in the run's directory; then go on with `roll resume`",
        worker=name,
        exit_code=int(code[1]) if code else None,
    )
