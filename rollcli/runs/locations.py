"""What a model's path may be: a folder, a hub id, `embedded:NAME`, a run or a step of one (`RUN@STEP`)."""

from __future__ import annotations

from pathlib import Path

from rollcli.errors import ModelNotFound, RunNotFound
from rollcli.runs.directory import list_checkpoints, step_name
from rollcli.runs.listing import find_run
from rollcli.suggest import did_you_mean

EMBEDDED = Path(__file__).resolve().parents[1] / "assets"


def resolve_model(path: str) -> str:
    """Returns the folder that `path` stands for, or `path` itself when it is a hub id.

    Raises:
        ModelNotFound: no such embedded model, run or step.
    """
    if path.startswith("embedded:"):
        name = path.removeprefix("embedded:")
        if (EMBEDDED / name / "config.json").is_file() or (EMBEDDED / name / "tokenizer.json").is_file():
            return str(EMBEDDED / name)
        known = sorted(folder.name for folder in EMBEDDED.iterdir() if folder.is_dir())
        meant = did_you_mean(name, known)
        raise ModelNotFound(
            f"no embedded model `{name}`" + (f" (did you mean `{meant}`?)" if meant else ""),
            hint=f"embedded models: {', '.join(known)}",
        )
    folder = Path(path)
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    if folder.is_dir():
        return str(folder)
    return _checkpoint(path) or path


def _checkpoint(path: str) -> str | None:
    """Returns the model folder of `RUN@STEP` or `RUN`, or None when `path` names no run."""
    name, at, step = path.partition("@")
    try:
        directory = find_run(name)
    except RunNotFound as error:
        if at:
            raise ModelNotFound(str(error), hint=error.hint) from error
        return None
    steps = list_checkpoints(directory.checkpoints)
    wanted = int(step) if step.isdigit() else (steps[-1] if steps and not at else None)
    if wanted not in steps:
        raise ModelNotFound(
            f"run `{directory.id}` has no whole checkpoint" + (f" of step {step}" if at else ""),
            hint=f"it has steps {', '.join(map(str, steps)) or 'none'}",
        )
    return str(directory.checkpoints / step_name(wanted) / "model")
