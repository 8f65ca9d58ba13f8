"""How the tests are spread over processes."""

from __future__ import annotations

import pytest

import rollcli  # noqa: F401  # first of all: it hides what does not import beside a CPU build of torch

LONG = (
    "e2e/test_algorithms.py", "e2e/test_faults.py", "e2e/test_engines.py", "pipelines/test_launch.py", "e2e/",
    "pipelines/test_survival.py", "pipelines/test_replay.py", "cluster/",
)  # fmt: skip
"""What takes long, and so comes first: short files fill the end of one process while the other still runs."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """All tests run in two processes; named ones in this one, which starts sooner. `-n 0` and `-n 2` say so by hand."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Alone, they keep the order in which they were named.
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((rank for rank, part in enumerate(LONG) if part in item.nodeid), len(LONG)))
