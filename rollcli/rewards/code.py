"""Scores a program by running it against tests, confined: see `rollcli.sandbox`.

The answer is the last fenced block that is Python or has no label, the whole response when there is no fence at all.
Tests are of one of three kinds, told from what they look like:

    stdin     `{"input": …, "output": …}` each, or one `{"inputs": […], "outputs": […]}`; output is compared line by
              line, spaces at the ends of lines and of the text aside, and the program must end with 0
    asserts   Python texts, each a test; with `entry_point`, texts that define `check(candidate)`, as HumanEval's
    pytest    one Python text with functions `test_…`, which import from `solution`

A JSON text of any of these is read first. Answer and tests never share a process, so nothing that an answer prints,
patches or returns counts but the value itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollcli.errors import RewardError
from rollcli.rewards.base import RewardResult
from rollcli.sandbox.base import Checks, Limits, Outcome, Program
from rollcli.sandbox.session import run

_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_PYTEST = re.compile(r"^[ \t]*(?:async )?def test_?\w*\(", re.MULTILINE)
_CHECK = re.compile(r"^def check\(", re.MULTILINE)
_HINT = "check the task's `tests` column"


def code(
    response: str,
    tests: Any,
    entry_point: str | None = None,
    setup: str = "",
    preamble: str = "",
    grade: str = "rate",
    timeout_s: float = 4.0,
    total_s: float = 8.0,
    memory_mib: int = 1024,
) -> RewardResult:
    """Scores a response by the share of tests that its program passes.

    Args:
        response: decoded text, any text at all.
        tests: as this module describes.
        entry_point: name of the function under test, where tests are to see nothing else of the answer.
        setup: Python text that runs before the tests (MBPP's `test_setup_code`).
        preamble: Python text that goes before the answer, and before the tests (HumanEval's `prompt`).
        grade: `rate` for the share, `all` for 1 when every test passes and else 0.
        timeout_s: seconds by the clock and of CPU for each test.
        total_s: seconds for all of them; tests not reached by then fail.
        memory_mib: address space of the program.

    Returns:
        score; accuracy, 1 when all tests pass; metrics `timeout` (1 when any test ran into a limit) and `no_code`.

    Raises:
        RewardError: there are no tests, or they cannot be read: never a pass.
        SandboxUnavailable: nothing here can confine a program.
    """
    if grade not in ("rate", "all"):
        raise RewardError(f"reward `code`, grade: expected `rate` or `all`, got {grade!r}", hint="write grade: rate")
    cases = _read(tests)
    source = extract_code(response)
    if not source.strip():
        return RewardResult(0.0, {"timeout": 0.0, "no_code": 1.0}, 0.0)
    source = f"{preamble}\n{source}" if preamble else source
    limits = Limits(
        wall_s=timeout_s, total_s=total_s, cpu_s=max(1, round(timeout_s + 0.5)), memory_mib=memory_mib
    )  # fmt: skip
    early = grade == "all"
    if isinstance(cases[0], tuple):
        verdicts, outcomes = _by_output(source, cases, limits, early)
    else:
        checks = Checks(tuple(cases), setup, preamble, entry_point, stop_early=early)
        checks = _as_called(checks, tests)
        outcomes = run([Program(source, checks=checks)], limits)
        verdicts = list(outcomes[0].verdicts)
        verdicts += [False] * (len(cases) - len(verdicts))
    passed = all(verdicts)
    metrics = {"timeout": float(any(each.ended != "exit" for each in outcomes)), "no_code": 0.0}
    return RewardResult(float(passed) if early else sum(verdicts) / len(verdicts), metrics, float(passed))


def extract_code(response: str) -> str:
    """Returns the last fenced block that is Python or unlabelled, the last of any label, or the whole response."""
    blocks = [(label.lower(), text) for _, label, text in _FENCE.findall(response)]
    if not blocks:
        return response
    return next((text for label, text in reversed(blocks) if label in _PYTHON), blocks[-1][1])


def same_output(got: str, expected: str) -> bool:
    """Returns whether two texts are the same, spaces at the ends of lines and empty lines at the end aside."""
    return _lines(got) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _by_output(
    source: str, cases: Sequence[tuple[str, str]], limits: Limits, early: bool
) -> tuple[list[bool], list[Outcome]]:
    outcomes = run([Program(source, stdin) for stdin, _ in cases], limits, _wrong(cases) if early else None)
    verdicts = [_right(outcome, expected) for outcome, (_, expected) in zip(outcomes, cases)]
    return verdicts + [False] * (len(cases) - len(verdicts)), outcomes


def _wrong(cases: Sequence[tuple[str, str]]) -> Any:
    return lambda index, outcome: not _right(outcome, cases[index][1])


def _right(outcome: Outcome, expected: str) -> bool:
    return outcome.ended == "exit" and outcome.exit_code == 0 and same_output(outcome.stdout, expected)


def _as_called(checks: Checks, tests: Any) -> Checks:
    """Returns checks with HumanEval's call of `check`, or for pytest where the tests are a file of test functions."""
    texts = checks.tests
    if checks.entry_point:
        texts = tuple(f"{text}\ncheck({checks.entry_point})" if _CHECK.search(text) else text for text in texts)
    is_file = len(texts) == 1 and texts == checks.tests and bool(_PYTEST.search(texts[0]))
    return Checks(texts, checks.setup, checks.preamble, checks.entry_point, is_file, checks.stop_early)


def _read(tests: Any) -> list[Any]:
    """Returns tests as texts, or as (input, output). Raises RewardError for none, and for what is neither."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError:
            pass  # a test may begin with a bracket as well
    if isinstance(tests, str):
        tests = [tests]
    if isinstance(tests, dict) and isinstance(tests.get("inputs"), list) and isinstance(tests.get("outputs"), list):
        if len(tests["inputs"]) != len(tests["outputs"]):
            counts = f"{len(tests['inputs'])} inputs for {len(tests['outputs'])} outputs"
            raise RewardError(f"reward `code`, tests: {counts}", hint=_HINT)
        tests = [{"input": given, "output": wanted} for given, wanted in zip(tests["inputs"], tests["outputs"])]
    elif isinstance(tests, dict):
        tests = [tests]
    if not isinstance(tests, (list, tuple)) or not tests:
        what = "there are none" if not tests else f"expected a list, got {type(tests).__name__}"
        raise RewardError(f"reward `code`, tests: {what}", hint=_HINT)
    if all(isinstance(test, str) and test.strip() for test in tests):
        return list(tests)
    if all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in tests):
        return [(str(test["input"]), str(test["output"])) for test in tests]
    raise RewardError(f"reward `code`, tests: neither texts nor input and output: {str(tests)[:80]}", hint=_HINT)
