"""Limits are tight by default, and a missing sandbox is an engine's error."""

from rollcli.errors import EngineError
from rollcli.sandbox.base import Limits, SandboxUnavailable


def test_defaults_allow_no_other_process():
    assert Limits().processes == 1


def test_unavailable_is_an_engine_error():
    assert issubclass(SandboxUnavailable, EngineError)
