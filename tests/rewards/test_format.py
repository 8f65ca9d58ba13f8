"""Thoughts, then the answer, each once and between its marks."""

import pytest

from rollcli.rewards.format import format


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("", 0.0),
        ("<think>a</think>b", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> bye", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("<think>" * 100_000, 0.0),
    ],
)
def test_format(response: str, score: float) -> None:
    assert format(response) == score
