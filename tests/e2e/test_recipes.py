"""Every recipe that ships runs: `--smoke`, two steps of everything it names, with a random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollcli.config.find import shipped
from tests.e2e.warm import run_here, warm_workers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with warm_workers() as address:
        yield address


@pytest.mark.parametrize("name", sorted(path.stem for path in shipped().glob("*.yaml")))
def test_two_small_steps_of_every_recipe(workspace, address, name):
    outcome = run_here(workspace.runs, name, name, smoke=True)
    assert (outcome.state, outcome.step) == ("finished", 2)
    rows = workspace.metrics(name)
    assert [row["step"] for row in rows] == [1, 2]
    if "reward" in rows[0]:
        assert all(row["failed"] == 0 for row in rows), "a random model's nonsense is scored, not an error"
        assert {facts["step"] for facts in workspace.events(name, "evaluation")} == {0, 1, 2}
