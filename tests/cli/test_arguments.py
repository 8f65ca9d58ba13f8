"""Overrides from three places come together in one list."""

from rollcli.cli.arguments import overrides


def test_order():
    assert overrides(["a=1"], ["b=2"], seed=3, steps=None) == ["a=1", "b=2", "seed=3"]
    assert overrides(None) == []
