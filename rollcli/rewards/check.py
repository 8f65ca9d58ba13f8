"""Tries a reward against its contract: the gold answer scores 1, an empty and a hostile one 0, and nothing breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcli.rewards.isolation import IsolatedCaller, RewardFailure

EXAMPLE = {"prompt": "What is 70 + 2?", "answer": "72", "messages": [{"role": "user", "content": "What is 70 + 2?"}]}

EXAMPLES: dict[str, dict[str, Any]] = {
    "code": {
        **EXAMPLE,
        "answer": "```python\nprint(int(input()) + 2)\n```",
        "tests": [{"input": "70", "output": "72"}, {"input": "-2", "output": "0"}],
    },
}
"""Samples of rewards that ask for more than `answer`, by name."""


def example(name: str) -> dict[str, Any]:
    """Returns the fields of a sample that the reward `name` can be tried with."""
    return EXAMPLES.get(name, EXAMPLE)


@dataclass(frozen=True)
class Check:
    """One case: what the reward should give, and what it gave: a score, or why there is none."""

    case: str
    expected: float
    got: float | str

    @property
    def passed(self) -> bool:
        """True when the reward gave what it should."""
        return self.got == self.expected


def check(name: str, fields: Mapping[str, Any] | None = None, timeout_s: float = 10.0) -> list[Check]:
    """Calls the reward `name` in its own process with the answer of one sample, and with answers that are none.

    Args:
        fields: those of one sample, of which `answer` is the gold one; `response` is filled in here. None for
            those of `example`.
        timeout_s: limit of each call, in seconds.
    """
    fields = example(name) if fields is None else fields
    cases = [
        ("gold answer", str(fields.get("answer", "")), 1.0),
        ("empty answer", "", 0.0),
        ("answer that is code", r"\boxed{__import__('os').system('touch hostile')}", 0.0),
        ("answer that never ends", r"\boxed{9**9**9**9}", 0.0),
    ]
    with IsolatedCaller() as caller:
        results = caller.call_many([(name, {**fields, "response": response}) for _, response, _ in cases], timeout_s)
    return [
        Check(case, expected, result.message if isinstance(result, RewardFailure) else result.score)
        for (case, _, expected), result in zip(cases, results)
    ]
