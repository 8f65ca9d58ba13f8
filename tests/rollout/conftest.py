"""Progress is told of every episode here, not now and then."""

from __future__ import annotations

import pytest

from rollcli.rollout import groups


@pytest.fixture(autouse=True)
def told_of_every_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SHOW_EVERY_S", 0.0)
