"""Where a model's configuration is found: in the recipe, on this machine, on the hub, or in a catalogue of shapes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rollcli.config.schema import ModelConfig
from rollcli.errors import PlanError
from rollcli.runs.locations import resolve_model
from rollcli.suggest import nearest

BUILT_IN = Path(__file__).with_name("models.yaml")

Fetch = Callable[[str, str | None], Path | None]
"""Gets a hub id's `config.json`, of a revision, from the hub; None where that cannot be asked or has none."""


@cache
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Returns the shapes known here, by hub id, as their `config.json` says them."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(BUILT_IN.read_text(encoding="utf-8"), loader)


class Shapes(NamedTuple):
    """A model's configuration, what messages call it, and in words where it comes from."""

    values: Mapping[str, Any]
    source: str
    origin: str


def model_shapes(model: ModelConfig, fetch: Fetch | None = None) -> Shapes:
    """Returns a model's configuration.

    The recipe's `initialize` block comes first, then what is on this machine, then the catalogue (whose ids are not
    asked for on the network), then `fetch`.

    Raises:
        ModelNotFound: no such embedded model, run or step.
        PlanError: no configuration to be had, or one that cannot be read.
    """
    if model.initialize is not None:
        return Shapes(dict(model.initialize), "`model.initialize`", "`model.initialize`")
    path = find_config(model.path, model.revision)
    known = catalogue().get(model.path) if model.revision in (None, "main") else None
    if path is None and known is not None:
        return Shapes(known, f"the shapes of `{model.path}`", "the catalogue of shapes (devices/models.yaml)")
    origin = "its `config.json`"
    if path is None and fetch is not None:
        path, origin = fetch(model.path, model.revision), "its `config.json` on the hub"
    if path is None:
        close = nearest(model.path, catalogue(), cutoff=0.7)
        meant = f"; the catalogue has `{close[0]}`" if close else ""
        raise PlanError(
            f"`model.path`: the shapes of `{model.path}` are not known here: it is no folder, `{_hub_cache()}` has no "
            f"`config.json` of it, and the catalogue has it not",
            hint=f"fetch it with `hf download {model.path} config.json`, or set `model.path=` to a local folder{meant}",
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"`model.path`: `{path}` cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"`model.path`: `{path}` does not hold a model's configuration")
    return Shapes(values, f"`{path}`", origin)


def find_config(name: str, revision: str | None = None) -> Path | None:
    """Returns the `config.json` of a model: folder, checkpoint, `embedded:NAME`, `RUN@STEP`, or a hub id in the cache;
    None if it is none of these.

    Raises:
        ModelNotFound: no such embedded model, run or step.
        PlanError: a folder without one.
    """
    folder = Path(resolve_model(name)).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if folder.is_dir():
        raise PlanError(
            f"`model.path`: there is no `config.json` in `{folder}`", hint="give a folder in the hub's layout"
        )
    repository = _hub_cache() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision or ""
    config = repository / "snapshots" / commit / "config.json"
    return config if commit and config.is_file() else None


def _hub_cache() -> Path:
    """Folder of the hub's cache, as `huggingface_hub` finds it."""
    home = os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub")).expanduser()
