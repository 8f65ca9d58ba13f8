"""The two confined processes of a checked answer: `serve_answer` runs it, `run_checks` puts the tests to it."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from rollcli.sandbox.remote import Peer

PYTEST_FILE = "test_answer.py"
_PYTEST = ["-s", "--noconftest", "-p", "no:cacheprovider", "-p", "no:terminal", "--import-mode=importlib"]


def serve_answer(source: str, channel: Any) -> None:
    """Runs an answer's code as the module `solution`, then does what the tests ask of it. Raises what it raises."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(source, "answer.py", "exec"), module.__dict__)
    peer = Peer(channel, serves_all=True)
    peer.serve({name: _described(value, peer) for name, value in module.__dict__.items() if name != "__builtins__"})


def run_checks(
    checks: dict[str, Any], skip: int, channel: Any, folder: str, tell: Callable[[bool | None, str], None]
) -> None:
    """Runs the tests from number `skip` on, and tells the verdict of each as it comes.

    Args:
        checks: the fields of `base.Checks`.
        channel: socket to the answer.
        folder: where pytest finds its file.
        tell: takes a verdict, and why it is not a pass; None when pytest is through.
    """
    peer = Peer(channel, serves_all=False)
    space: dict[str, Any] = {"__name__": "tests"}
    names = _Names(peer, checks["entry_point"])
    failure = _failure(lambda: _prepare(names, space, checks))
    if failure is not None:
        for _ in checks["tests"][skip:]:
            tell(False, failure)
        return
    if checks["pytest"]:
        _run_pytest(names, folder, tell)
        return
    for test in checks["tests"][skip:]:
        failure = _failure(partial(names.execute, test, space))
        tell(failure is None, failure or "")
        if failure is not None and (checks["stop_early"] or failure.startswith("EOFError")):
            return  # an answer whose process ended is started again for the tests that are left


def _prepare(names: _Names, space: dict[str, Any], checks: dict[str, Any]) -> None:
    names.wait()
    if checks["preamble"]:
        exec(compile(checks["preamble"], "preamble", "exec"), space)
    if checks["entry_point"]:
        space.pop(checks["entry_point"], None)
    names.execute(checks["setup"], space)


def _failure(run: Callable[[], None]) -> str | None:
    try:
        run()
    except Exception as error:
        # A test fails by raising, whatever it raises; an answer or a setup that raises fails every test.
        return _told(error)
    return None


class _Names:
    """The answer's names, as far as tests may see them."""

    def __init__(self, peer: Peer, entry_point: str | None) -> None:
        self._peer, self._entry_point = peer, entry_point
        self._described: dict[str, Any] = {}

    def wait(self) -> None:
        """Waits until the answer's code has run. Raises EOFError when it failed."""
        self._described = self._peer.ready()

    def find(self, name: str) -> Any:
        """Returns what a name stands for. Raises AttributeError when tests are not to have it from the answer."""
        kind, content = self._described.get(name, (None, None)) if isinstance(name, str) else (None, None)
        if kind == "module":
            # Only ever the real one: an answer could bring a `math` whose `isclose` is always true.
            if content in sys.stdlib_module_names:
                return importlib.import_module(content)
        elif kind == "exception":
            if not hasattr(builtins, name):
                known = self._peer.exceptions
                base = next((getattr(builtins, each) for each in content if hasattr(builtins, each)), Exception)
                return known.setdefault(name, type(name, (base,), {}))
        elif kind and (name == self._entry_point or (self._entry_point is None and self._free(name))):
            return self._peer.decode(content)
        raise AttributeError(f"the answer has no `{name}` for its tests")

    def all(self) -> list[str]:
        """Returns the names of the answer that `from solution import *` takes."""
        return [name for name, (kind, _) in self._described.items() if kind == "value" and self._free(name)]

    def execute(self, text: str, space: dict[str, Any]) -> None:
        """Runs a text in `space`, after giving that the answer's names which the text uses. Raises what it does."""
        tree = ast.parse(text)
        for node in ast.walk(tree):
            is_name = isinstance(node, ast.Name) and node.id not in space
            if is_name and (node.id == self._entry_point or not hasattr(builtins, node.id)):
                try:
                    space[node.id] = self.find(node.id)
                except AttributeError:
                    continue  # the test defines it itself, or fails on it
        exec(compile(tree, "tests", "exec"), space)

    @staticmethod
    def _free(name: str) -> bool:
        return not hasattr(builtins, name) and name not in sys.stdlib_module_names and not name.startswith("__")


def _described(value: Any, peer: Peer) -> tuple[str, Any]:
    """Returns what kind of thing a name of the answer stands for, as `_Names` reads it."""
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, type) and issubclass(value, Exception):
        return "exception", [kind.__name__ for kind in value.__mro__[1:]]
    return "value", peer.encode(value)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _run_pytest(names: _Names, folder: str, tell: Callable[[bool | None, str], None]) -> None:
    import pytest

    module = types.ModuleType("solution")
    module.__getattr__ = names.find
    module.__all__ = names.all()
    sys.modules["solution"] = module

    class Recorder:
        """Tells the verdict of each test as pytest reports it."""

        def pytest_runtest_logreport(self, report: Any) -> None:
            """A test passes when its call does; it fails in whatever phase it fails."""
            if report.when == "call" or report.failed:
                tell(report.passed, "" if report.passed else report.longreprtext[-500:])

        def pytest_collectreport(self, report: Any) -> None:
            """A file that cannot be collected is one failed test."""
            if report.failed:
                tell(False, str(report.longrepr)[-500:])

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ended = pytest.main([*_PYTEST, "--rootdir", folder, os.path.join(folder, PYTEST_FILE)], plugins=[Recorder()])
    if ended in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        tell(None, "")
