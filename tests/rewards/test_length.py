"""1 within bounds, a share below, down to 0 at twice the limit."""

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.length import length


@pytest.mark.parametrize(
    ("words", "score"), [(0, 0.0), (2, 0.5), (4, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (1000, 0.0)]
)
def test_length(words: int, score: float) -> None:
    assert length("word " * words, min_words=4, max_words=10) == pytest.approx(score)


@pytest.mark.parametrize("bounds", [(0, 10), (11, 10)])
def test_bounds_out_of_order(bounds: tuple[int, int]) -> None:
    with pytest.raises(RewardError, match="not in order"):
        length("a", *bounds)
