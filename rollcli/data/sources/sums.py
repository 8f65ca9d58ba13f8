"""Sums with two ways to answer: the problems of the embedded recipes, with demonstrations for the warm start."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from rollcli.data.sources.reasoning_gym import ReasoningGymSource


def demonstrate(first: int, second: int, worked: bool) -> str:
    """Returns an answer to `first + second`: at once, or worked digit by digit from the right with carries."""
    if not worked:
        return f"#### {first + second}"
    steps = []
    carry = 0
    width = max(len(str(first)), len(str(second)))
    for a, b in zip(reversed(f"{first:0{width}}"), reversed(f"{second:0{width}}"), strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
    return "; ".join(steps) + f"; #### {first + second}"


@dataclass
class SumsSource(ReasoningGymSource):
    """Sums of two numbers of equally many digits, from `reasoning_gym`'s `basic_arithmetic`."""

    dataset: str = "basic_arithmetic"
    """Name of the data set, as `reasoning_gym` knows it."""
    options: dict[str, Any] = field(
        default_factory=lambda: {
            "min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3, "operators": ["+"],
            "allow_parentheses": False, "allow_negation": False,
        }
    )  # fmt: skip
    """Options of the data set."""
    prompt: str = "{expression}"
    """The problem's text."""
    worked_share: float = 0.33
    """Share of demonstrations that work the sum out instead of answering at once."""

    def payload(self, entry: dict[str, Any], index: int) -> dict[str, Any]:
        """Adds a demonstration; which of the two habits it shows depends on the index alone."""
        first, second = (int(term) for term in entry["metadata"]["expression"].split("+"))
        worked = random.Random(index).random() < self.worked_share
        return {**super().payload(entry, index), "response": demonstrate(first, second, worked)}
