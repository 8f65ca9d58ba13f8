"""Scores the letter of a multiple-choice answer: 1 when it is the right one, else 0."""

from __future__ import annotations

import re

from rollcli.errors import RewardError
from rollcli.rewards.answers import stated_answer
from rollcli.rewards.base import RewardResult

# `B`, `(B)`, `**B**`, `B.`, `B) some text`, `option B`; not the article in `A dog`.
_LETTER = re.compile(
    r"(?:(?:option|choice)\s)?[\s*($\[]{0,4}([a-z])(?:[\s*)$\]]{0,4}$|[*\])]{0,4}[.):,](?!\w))", re.IGNORECASE
)


def choice(response: str, answer: str) -> RewardResult:
    r"""Scores a response 1 when the letter it chooses is the right one, else 0.

    The letter is read where the response states its answer (`<answer>`, `\boxed{}`, `#### `, "answer is"), else from
    a response, or the last line of one, that is nothing but a letter with perhaps its text: `B`, `(B)`, `B. a bank`.

    Args:
        response: decoded text, any text at all.
        answer: the right letter, in either case, with or without parentheses.

    Returns:
        score and accuracy, 0 or 1, and the metric `choice_unparsable`, 1 when no letter could be read.

    Raises:
        RewardError: the right answer is not one letter.
    """
    gold = str(answer).strip().strip("().").upper()
    if len(gold) != 1 or not gold.isalpha():
        raise RewardError(f"right answer {str(answer)[:40]!r} is not a letter", hint="check the task's answer column")
    chosen = chosen_letter(response)
    right = float(chosen == gold)
    return RewardResult(right, {"choice_unparsable": float(chosen is None)}, right)


def chosen_letter(response: str) -> str | None:
    """Returns the letter a response chooses, in upper case; None when it chooses none."""
    stated = stated_answer(response)
    if stated is None:
        stated = response.strip().rpartition("\n")[2]
    found = _LETTER.match(stated.strip()[:200].rstrip(". "))
    return found[1].upper() if found else None
