"""One Ray for all tests of this folder, with eight GPUs that exist in its books only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollcli.cluster.worker import WorkerSpec
from rollcli.config.dump import to_values
from rollcli.config.load import load_recipe


@pytest.fixture(scope="package")
def ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    ray.init("local", num_cpus=2, num_gpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="package")
def values() -> dict[str, Any]:
    """The embedded recipe, as workers get it."""
    loaded = load_recipe("grpo-math")
    return to_values(loaded.recipe, loaded.folder)


@pytest.fixture
def spec(values: dict[str, Any], tmp_path: Path) -> WorkerSpec:
    return WorkerSpec("policy", 0, 1, 1, values, None, str(tmp_path / "logs"))
