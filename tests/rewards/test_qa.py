"""Exact match and F1 as SQuAD computes them, on hand-worked cases."""

import json
import os
from pathlib import Path

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.qa import f1, normalized, qa, qa_f1

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def test_normalized() -> None:
    assert normalized(" The  Jamaican-English, a  Language! ") == "jamaicanenglish language"
    assert normalized("An apple; theater") == "apple theater"


def test_f1_by_hand() -> None:
    assert f1("cat sat down", "cat sat") == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert f1("cat cat", "cat") == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert f1("dog", "cat") == 0.0 and f1("", "cat") == 0.0


def test_any_accepted_answer_counts() -> None:
    accepted = ["Jamaican Creole English Language", "Jamaican English"]
    assert qa("jamaican english.", accepted).score == 1.0
    partly = qa("English", accepted)
    assert partly.score == 0.0 and partly.metrics["qa_f1"] == pytest.approx(2 / 3)
    assert qa_f1("English", accepted).score == pytest.approx(2 / 3) and qa_f1("English", accepted).accuracy == 0.0
    assert qa("I know this: the answer is the Lawyer.", "lawyer").score == 1.0
    assert qa("", accepted).score == 0.0 and qa("1945", 1945).score == 1.0
    assert qa("The The", ["The The"]).score == 1.0 and qa("a", ["The The"]).score == 0.0


@pytest.mark.parametrize("answer", ["", [], [""], None])
def test_no_accepted_answer_is_a_data_error(answer: object) -> None:
    with pytest.raises(RewardError, match="accepted answers"):
        qa("x", answer)


def test_webquestions_gold_answers_all_score_1() -> None:
    if not (DATA / "webquestions").exists():
        pytest.skip(f"no test data `webquestions` in {DATA}")
    for row in json.loads((DATA / "webquestions" / "test.json").read_text()):
        assert {qa(each, row["answers"]).score for each in row["answers"]} == {1.0}
        assert qa("no such thing", row["answers"]).score == 0.0
