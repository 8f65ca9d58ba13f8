"""Did-you-mean, in one place: recipe names, run ids, plug-in names, configuration keys, enum values."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Returns at most `count` known words that look like `word`, best first.

    A word that another one starts with or contains counts as close even when the lengths differ (`sokoban` is
    meant by nobody who types `grpo`, but `math` may well mean `grpo-math`).
    """
    scored = []
    for candidate in known:
        score = SequenceMatcher(None, word.lower(), candidate.lower()).ratio()
        short, long = sorted((word.lower(), candidate.lower()), key=len)
        if len(short) > 1 and short in long:
            score = max(score, 0.75)
        if score >= cutoff:
            scored.append((-score, candidate))
    return [candidate for _, candidate in sorted(scored)[:count]]


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Returns the nearest known word, or None when nothing is close."""
    found = nearest(word, known)
    return found[0] if found else None
