"""Where a response states its answer."""

import pytest

from rollcli.rewards.answers import stated_answer


@pytest.mark.parametrize(
    ("response", "stated"),
    [
        ("<answer> Paris </answer>", "Paris"),
        ("<answer>x</answer> then <answer>y</answer>", "y"),
        ("<answer>never closed", None),
        (r"so \boxed{Paris} at last", "Paris"),
        ("work\n#### Paris\nmore", "Paris"),
        ("The answer is Paris.\nBye", "Paris."),
        ("Answer: Rome\nAnswer: **Paris**", "Paris**"),
        ("to answer this", None),
        ("", None),
    ],
)
def test_stated_answer(response: str, stated: str | None) -> None:
    assert stated_answer(response) == stated


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", r"\boxed{", "#### ", "answer is ", "answer", " ", "("])
def test_a_million_characters_end_in_time(piece: str) -> None:
    stated_answer(piece * (1_000_000 // len(piece)))
