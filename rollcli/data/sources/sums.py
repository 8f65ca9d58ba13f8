"""Sums with two ways to answer: the problems of the embedded recipes, with demonstrations for the warm start."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from rollcli.data.sources.reasoning_gym import ReasoningGymSource


def demonstrate(first: int, second: int, worked: bool) -> str:
    """Returns an answer to `first + second` in one of two habits; the answer itself stands after `#### `.

    Worked, it goes column by column from the right and writes out each carry. At once, it adds the columns and forgets
    the carries, as hurried mental arithmetic does, so it is right only where no column carries: about one sum in seven.
    That habit is taught wrong on purpose, so that it stays wrong whatever the model and the number of steps.

    >>> demonstrate(347, 285, worked=True)
    '7+5=12;4+8+1=13;3+2+1=6;#### 632'
    >>> demonstrate(347, 285, worked=False)
    '#### 522'
    """
    columns: list[str] = []
    hurried = 0
    carry: int | None = None
    for place in range(max(len(str(first)), len(str(second)))):
        digits = [first // 10**place % 10, second // 10**place % 10]
        hurried += sum(digits) % 10 * 10**place
        terms = digits if carry is None else [*digits, carry]
        columns.append("+".join(map(str, terms)) + f"={sum(terms)};")
        carry = sum(terms) // 10
    return "".join(columns) + f"#### {first + second}" if worked else f"#### {hurried}"


@dataclass
class SumsSource(ReasoningGymSource):
    """Sums of two numbers of up to three digits, from `reasoning_gym`'s `basic_arithmetic`."""

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
