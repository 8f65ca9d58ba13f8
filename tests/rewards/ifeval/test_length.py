"""Words, sentences and paragraphs, counted by hand."""

import pytest

from rollcli.rewards.ifeval.length import (
    compare,
    count_sentences,
    nth_paragraph_first_word,
    number_paragraphs,
    number_words,
)


def test_compare() -> None:
    assert compare(3, "at least", 3) and compare(2, "less than", 3) and not compare(3, "less than", 3)
    with pytest.raises(ValueError, match="at most"):
        compare(3, "at most", 3)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("One. Two! Three?", 3), ("Mr. Smith met J. Doe. He left.", 2), ('"Go." He went (twice). So', 3),
     ("See e.g. this one.", 1), ("no mark", 1)],
)  # fmt: skip
def test_count_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_words_and_paragraphs() -> None:
    assert number_words("it's two-fold", "at least", 4) and not number_words("a b", "at least", 3)
    assert number_paragraphs("***\na\n***\nb\n***", 2) and not number_paragraphs("a *** *** b", 2)
    text = "One is.\n\n'Two' is.\n\nThree"
    assert nth_paragraph_first_word(text, 3, 2, "two") and not nth_paragraph_first_word(text, 2, 2, "two")
    assert not nth_paragraph_first_word(text, 3, 4, "two") and nth_paragraph_first_word(text, 3, 3, "Three")
