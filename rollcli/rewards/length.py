"""Scores how long a response is, in words: 1 within bounds, less the farther outside, 0 when empty."""

from __future__ import annotations

from rollcli.errors import RewardError


def length(response: str, min_words: int = 1, max_words: int = 1000) -> float:
    """Scores a response 1 when it has from `min_words` to `max_words` words, which white space separates.

    Below, the score is the share of `min_words` that is there; above, it falls linearly to 0 at twice `max_words`, as
    the soft punishment of DAPO does (arXiv 2503.14476, equation 13).

    Args:
        min_words, max_words: columns of the task where it has them.

    Raises:
        RewardError: the bounds are not 1 ≤ `min_words` ≤ `max_words`.
    """
    if not 1 <= min_words <= max_words:
        raise RewardError(f"bounds {min_words} and {max_words} are not in order", hint="1 ≤ min_words ≤ max_words")
    words = len(response.split())
    if words <= max_words:
        return min(1.0, words / min_words)
    return max(0.0, 2.0 - words / max_words)
