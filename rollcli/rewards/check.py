"""Tries a reward against its contract: the gold answer scores 1, an empty and a hostile one 0, and nothing breaks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcli import registry
from rollcli.errors import RewardError
from rollcli.rewards.asking import is_asking
from rollcli.rewards.isolation import IsolatedCaller, RewardFailure

EXAMPLE = {"prompt": "What is 70 + 2?", "answer": "72", "messages": [{"role": "user", "content": "What is 70 + 2?"}]}
"""Fields of a sample for a reward that has none of its own in `EXAMPLES`; the response to score is added."""

_IFEVAL = {
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:title", "detectable_format:json_format"],
    "kwargs": [{}, {}, {}],
    "gold": '["<<Sums>>"]',
}
_FORM = "<think>7 + 0 and 0 + 2</think>\n<answer>72</answer>"
EXAMPLES: dict[str, dict[str, Any]] = {
    "code": {
        "answer": "```python\nprint(int(input()) + 2)\n```",
        "tests": [{"input": "70", "output": "72"}, {"input": "-2", "output": "0"}],
    },
    "choice": {"answer": "B", "gold": "The answer is (B)."},
    "format": {"gold": _FORM},
    "ifeval": _IFEVAL,
    "ifeval_loose": _IFEVAL,
    "length": {"max_words": 10},
    "qa": {"answer": ["Lawyer", "attorney at law"], "gold": "The answer is: a lawyer."},
    "qa_f1": {"answer": ["Lawyer", "attorney at law"], "gold": "The answer is: a lawyer."},
    "reasoning_gym": {
        "answer": "x**2 + 3*x + 2",
        "dataset": "polynomial_multiplication",
        "entry": {"question": "Multiply x + 1 and x + 2.", "answer": "x**2 + 3*x + 2", "metadata": {}},
        "gold": "<answer>2 + 3*x + x**2</answer>",
    },
    "success": {"success": 1.0},
}
"""Fields of a sample that differ from `EXAMPLE`, by registered name; `gold` is a response that scores 1."""

_CODE = ("answer that is code", r"\boxed{__import__('os').system('touch hostile')}", 0.0)
_ENDLESS = ("answer that never ends", r"\boxed{9**9**9**9}", 0.0)
_LOOP = ("answer that loops", "no, wait, " * 100_000, 0.0)
_NESTED = ("answer that nests", "<think>[<<*{(" * 50_000, 0.0)
HOSTILE: dict[str, list[tuple[str, str, float]]] = {
    # Any text has a length and repeats itself or not: what is hostile to these two is its size alone.
    "length": [_LOOP],
    "repetition": [_LOOP],
    "math": [_CODE, _ENDLESS],
}
"""Cases (name, response, expected score) beyond gold and empty, by registered name."""
DEAF = frozenset({"success"})
"""Rewards that look at nothing a response says, of which only the gold case can be told."""


@dataclass(frozen=True)
class Check:
    """One case: what the reward should give (None for no score), and what it gave: a score, or why there is none."""

    case: str
    expected: float | None
    got: float | str

    @property
    def passed(self) -> bool:
        """True when the reward gave what it should, to a thousandth: a share may come as near to 0 as it likes."""
        if self.expected is None:
            return isinstance(self.got, str)
        return not isinstance(self.got, str) and math.isclose(self.got, self.expected, abs_tol=1e-3)


def check(name: str, fields: Mapping[str, Any] | None = None, timeout_s: float = 10.0) -> list[Check]:
    """Calls the reward `name` in its own process with the answer of one sample, and with answers that are none.

    Args:
        fields: those of one sample, in place of the reward's own example; `answer` is then the gold response too.
        timeout_s: limit of each call, in seconds.

    A reward that asks a model is tried without one, by what it makes of answers: it says itself how.

    Raises:
        PluginError: there is no such reward, or it does not import.
        RewardError: it asks a model, and says nothing of how to be tried.
    """
    target = registry.resolve("rewards", name)
    if is_asking(target):
        cases = [Check(*case) for case in target.check()]
        if not cases:
            raise RewardError(f"reward `{name}` asks a model, and has no `check` of its own", hint="try it in a run")
        return cases
    example = {**EXAMPLE, **EXAMPLES.get(name, {}), **(fields or {})}
    gold = str(example.get("answer", ""))
    if not fields or "answer" not in fields:
        gold = example.pop("gold", gold)
    example.pop("gold", None)
    hostile = HOSTILE.get(name, [_CODE, _ENDLESS, *([_LOOP, _NESTED] if name in EXAMPLES else [])])
    cases = [("gold answer", gold, 1.0), *([] if name in DEAF else [("empty answer", "", 0.0), *hostile])]
    with IsolatedCaller() as caller:
        results = caller.call_many([(name, {**example, "response": response}) for _, response, _ in cases], timeout_s)
    return [
        Check(case, expected, result.message if isinstance(result, RewardFailure) else result.score)
        for (case, _, expected), result in zip(cases, results)
    ]
