"""Scores how little a response repeats itself: the share of its runs of words that are new (arXiv 2502.03373, §4)."""

from __future__ import annotations

from rollcli.errors import RewardError


def repetition(response: str, ngram_words: int = 3) -> float:
    """Scores a response by distinct runs of `ngram_words` words / all such runs: 1 when none comes twice.

    A response shorter than one run scores 1, an empty one 0. Case does not count.

    Args:
        ngram_words: a column of the task where it has it; at least 1.

    Raises:
        RewardError: `ngram_words` is below 1.
    """
    if ngram_words < 1:
        raise RewardError(f"`ngram_words` is {ngram_words}, below 1", hint="3 is usual")
    words = response.lower().split()
    runs = max(0, len(words) - ngram_words + 1)
    if not runs:
        return float(bool(words))
    return len(set(zip(*(words[start : start + runs] for start in range(ngram_words))))) / runs
