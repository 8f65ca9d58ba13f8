"""The share of new runs of words, counted by hand."""

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.repetition import repetition


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("", 0.0),
        ("one two", 1.0),
        ("a b c d", 1.0),
        ("a b c A b C", 3 / 4),  # abc bca cab abc
        ("x " * 12, 1 / 10),
    ],
)
def test_repetition(response: str, score: float) -> None:
    assert repetition(response) == pytest.approx(score)


def test_runs_of_another_length() -> None:
    assert repetition("a a b", ngram_words=1) == pytest.approx(2 / 3)
    with pytest.raises(RewardError, match="below 1"):
        repetition("a", ngram_words=0)
