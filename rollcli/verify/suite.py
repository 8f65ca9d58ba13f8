"""Asks a subject for every property and compares what it gives with what is right.

A subject is a module, or any object, with functions named like the calls; it need not have all of them. What it gives
may be numbers, lists, or arrays and tensors of any library that has `tolist`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rollcli.errors import NotFound, PluginError
from rollcli.suggest import did_you_mean
from rollcli.verify.properties import PROPERTIES, Property

Status = Literal["ok", "FAILED", "not offered"]
OWN = "rollcli.verify.subject"
"""The subject that answers for rollcli, and offers every call."""


@dataclass(frozen=True)
class Result:
    """What a subject gave for a property; `right` and `got` are None where there is no such value."""

    property: Property
    status: Status
    right: Any = None
    got: Any = None
    error: str | None = None


class Attempt:
    """Runs foreign code: whatever it raises is kept as `error`, one line, and goes no further."""

    error: str | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> bool:
        # A subject is another project's code: what it raises, `sys.exit` included, is its answer and no fault of ours.
        if not isinstance(raised, (Exception, SystemExit)):
            return False
        self.error = " ".join(f"{kind.__name__}: {raised}".split())
        return True


def load_subject(name: str) -> Any:
    """Returns the module that `name` means: a file `./theirs.py`, or an importable name.

    Raises:
        PluginError: it is not there, does not import, or offers none of the calls.
    """
    if name.endswith(".py") and not Path(name).is_file():
        raise PluginError(f"no file `{name}`", hint="give a file `./theirs.py` or the name of a module")
    with Attempt() as attempt:
        subject = _load_file(Path(name).resolve()) if name.endswith(".py") else importlib.import_module(name)
    if attempt.error is not None:
        raise PluginError(
            f"subject `{name}` does not import: {attempt.error}",
            hint="give a file `./theirs.py` or the name of a module in this environment",
        )
    if not any(callable(getattr(subject, each.call, None)) for each in PROPERTIES):
        raise PluginError(
            f"`{name}` offers none of the calls",
            hint="its functions are named like the calls: `roll verify --list` shows them",
        )
    return subject


def select(text: str | None) -> list[Property]:
    """Returns the properties whose name, section or call contains `text`; all without one.

    Raises:
        NotFound: there is none.
    """
    wanted = (text or "").casefold()
    found = [each for each in PROPERTIES if any(wanted in t.casefold() for t in (each.name, each.section, each.call))]
    if not found:
        sections = dict.fromkeys(each.section for each in PROPERTIES)
        meant = did_you_mean(text, [*sections, *(each.call for each in PROPERTIES)])
        raise NotFound(
            f"no property `{text}`" + (f" (did you mean `{meant}`?)" if meant else ""),
            hint=f"sections: {', '.join(sections)}",
        )
    return found


def run(properties: Iterable[Property], subject: Any, complete: bool = False) -> list[Result]:
    """Returns a result for each property, in order.

    Args:
        properties: what to ask for.
        subject: whom to ask.
        complete: a call that the subject lacks is a failure, not a thing it need not have.
    """
    return [_ask(each, subject, complete) for each in properties]


def equal(got: Any, right: Any, tolerance: float) -> bool:
    """Whether two answers have the same shape, and numbers that differ by no more than the tolerance."""
    if isinstance(right, list):
        return isinstance(got, list) and len(got) == len(right) and all(map(equal, got, right, [tolerance] * len(got)))
    if isinstance(got, list) or not math.isfinite(got):
        return False
    return abs(got - right) <= tolerance * max(1.0, abs(right))


def signature(call: str) -> str:
    """Returns a call with the names of its arguments and their defaults."""
    parameters = inspect.signature(_own(call)).parameters.values()
    return f"{call}({', '.join(str(each.replace(annotation=each.empty)) for each in parameters)})"


def meaning(call: str) -> str:
    """Returns what a call gives."""
    return inspect.getdoc(_own(call)) or ""


def _own(call: str) -> Any:
    return getattr(importlib.import_module(OWN), call)


def _ask(each: Property, subject: Any, complete: bool) -> Result:
    function = getattr(subject, each.call, None)
    if not callable(function):
        return Result(each, "FAILED" if complete else "not offered", error=f"`{each.call}` is not offered")
    right = each.expected
    with Attempt() as attempt:
        if each.right_inputs is not None:
            right = None
            right = _answer(function, each.right_inputs)
        got = _answer(function, each.inputs)
        holds = equal(got, right, each.tolerance)
        return Result(each, "ok" if holds else "FAILED", right, got)
    return Result(each, "FAILED", right, error=attempt.error)


def _answer(function: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Returns what a function gives as a number or nested lists of numbers.

    Raises:
        TypeError: it is anything else.
    """
    return _plain(function(**copy.deepcopy(inputs)))


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    if not isinstance(value, (int, float)):
        raise TypeError(f"expected numbers, got {type(value).__name__}")
    return int(value) if isinstance(value, bool) else value


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"rollcli_subject_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    # A subject may have neighbors that it imports.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
