"""`manifest.json`: what produced the run, in enough detail to produce it again.

Environment variables are written by allow-list only, so no token or key can end up here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollcli import __version__
from rollcli.runs.status import write_json

PACKAGES = (
    "torch",
    "transformers",
    "ray",
    "datasets",
    "vllm",
    "deepspeed",
    "numpy",
    "omegaconf",
    "math-verify",
    "reasoning-gym",
)
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "RAY_ADDRESS", "ROLL_RUNS", "ROLL_RECIPES")


def digest(values: Any) -> str:
    """Returns a digest of plain values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def package_versions() -> dict[str, str]:
    """Returns the version of every package of `PACKAGES` that is installed, without importing it."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def build_manifest(
    values: Mapping[str, Any], recipe_file: Path | None, overrides: list[str], estimate: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the manifest of a run about to start; `estimate` is what the plan predicts, by name of the metric."""
    return {
        "rollcli": __version__,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config_digest": digest(values),
        "recipe_file": str(recipe_file) if recipe_file else None,
        "recipe_digest": hashlib.sha256(recipe_file.read_bytes()).hexdigest()[:16] if recipe_file else None,
        "overrides": overrides,
        "seed": values.get("seed"),
        "git": _git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": package_versions(),
        "estimate": dict(estimate),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "attempts": [],
    }


def add_attempt(path: Path, **facts: Any) -> None:
    """Adds a start of the run to its manifest."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["attempts"].append({"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts})
    write_json(path, manifest)


def end_attempt(path: Path, **facts: Any) -> None:
    """Writes how the newest attempt ended."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["attempts"][-1] |= {"ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}
    write_json(path, manifest)


def _git_state() -> dict[str, Any] | None:
    """Returns commit and uncommitted diff (at most 64 KiB) of the working directory, or None outside a checkout."""
    try:
        commit, diff = (
            subprocess.run(["git", *command], capture_output=True, timeout=5, check=True).stdout
            for command in (("rev-parse", "HEAD"), ("diff", "HEAD"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.decode().strip(), "diff": diff[: 64 * 1024].decode(errors="replace")}
