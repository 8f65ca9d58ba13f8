"""The chosen letter is read where a response says it, and nowhere else."""

import json
import os
from pathlib import Path

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.choice import choice, chosen_letter

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"), ("(b)", "B"), ("**B**", "B"), ("B.", "B"), ("B. a bank", "B"), ("(B) a bank", "B"),
        ("B) bank", "B"),
        ("It is a bank.\nThe answer is B.", "B"), ("The answer is (C), a mall.", "C"), ("Answer: **D**", "D"),
        (r"so \boxed{E}", "E"), (r"\boxed{\text{E}}", "E"), ("<think>A?</think><answer>B</answer>", "B"),
        ("#### A\n", "A"), ("The answer is A. No, the answer is B.", "B"), ("thinking\noption C", "C"),
        ("A dog would", None), ("", None), ("I think so", None), ("ABC", None), ("\ud800", None),
        ("The answer is 4", None),
    ],
)  # fmt: skip
def test_the_letter_a_response_chooses(response: str, letter: str | None) -> None:
    assert chosen_letter(response) == letter


def test_scores_and_counts() -> None:
    assert choice("B", "b").score == 1.0 and choice("B", "(B)").accuracy == 1.0
    assert choice("C", "B").score == 0.0 and choice("C", "B").metrics == {"choice_unparsable": 0.0}
    assert choice("", "B").metrics == {"choice_unparsable": 1.0}


@pytest.mark.parametrize("answer", ["", "bank", "4", None])
def test_a_right_answer_that_is_no_letter_is_a_data_error(answer: str | None) -> None:
    with pytest.raises(RewardError, match="is not a letter"):
        choice("B", answer)


def test_commonsenseqa_letters() -> None:
    file = DATA / "commonsenseqa" / "dev_rand_split.jsonl"
    if not file.exists():
        pytest.skip(f"no test data `commonsenseqa` in {DATA}")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        for one in row["question"]["choices"]:
            score = choice(f"Thus the answer is ({one['label']}) {one['text']}.", row["answerKey"]).score
            assert score == float(one["label"] == row["answerKey"])
