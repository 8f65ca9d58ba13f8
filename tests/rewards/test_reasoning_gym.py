"""Data sets' own scores, and answers that their scorers would evaluate."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from rollcli.data.sources.reasoning_gym import ReasoningGymSource
from rollcli.errors import DatasetNotFound
from rollcli.rewards.reasoning_gym import FORMULAS, LITERALS, is_harmless, reasoning_gym

SOME = ["basic_arithmetic", "codeio", "countdown", "knights_knaves", "n_queens", "spiral_matrix", "simple_integration"]


@pytest.mark.parametrize("dataset", SOME)
def test_the_gold_answer_of_a_problem_scores_1_and_another_less(dataset: str) -> None:
    problem = ReasoningGymSource(dataset).open("train", 3)[0].payload
    fields = {key: problem[key] for key in ("dataset", "options", "entry")}
    gold = reasoning_gym(f"<think>hm</think>So <answer>{problem['answer']}</answer>.", **fields)
    assert (gold.score, gold.accuracy, gold.metrics) == (1.0, 1.0, {"refused": 0.0})
    for wrong in ("", "no idea", f"<think><answer>{problem['answer']}</answer></think> I cannot."):
        result = reasoning_gym(wrong, **fields)
        assert result.score < 0.1 and result.accuracy == 0


def test_a_part_of_a_score_is_the_packages() -> None:
    """Countdown gives 0.05 for a formula of the wrong value and 0.01 for none: no accuracy."""
    entry = {"question": "", "answer": "3 + 5", "metadata": {"numbers": [3, 5], "target": 8}}
    scores = [reasoning_gym(rf"\boxed{{{text}}}", "countdown", entry) for text in ("5+3", "5-3", "five")]
    assert [(each.score, each.accuracy) for each in scores] == [(1.0, 1.0), (0.05, 0.0), (0.0, 0.0)]
    assert scores[2].metrics == {"refused": 1.0}, "a word that is no function is not evaluated"


def test_a_composite_is_scored_by_the_data_set_of_its_entry() -> None:
    options = {"datasets": [{"name": "countdown"}]}
    problem = ReasoningGymSource("composite", options=options).open("train", 0)[0].payload
    fields = {key: problem[key] for key in ("dataset", "options", "entry")}
    assert reasoning_gym(problem["answer"], **fields).score == 1
    assert reasoning_gym("exec(chr(49))", **fields).metrics == {"refused": 1.0}


HOSTILE = [
    "__import__('os').system('touch hostile')",
    "exec(chr(49))",
    "[open(chr(47))]",
    "(lambda: exit())()",
    "[x for x in ().__class__.__base__.__subclasses__()]",
    "f'{open(1)}'",
    "(" * 100_000,
]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:20])
@pytest.mark.parametrize("dataset", sorted(LITERALS | FORMULAS))
def test_code_is_not_evaluated(dataset: str, answer: str) -> None:
    assert not is_harmless(dataset, answer)


@pytest.mark.parametrize(
    "answer", ["9**9**9**9", "(9**9)**9", "9^9999", "2**(-99999)", "x.subs(1)", "1 .real", "x" * 2000]
)
def test_formulas_that_are_too_large_or_no_formula(answer: str) -> None:
    assert not is_harmless("countdown", answer)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("simple_integration", "3*x**2/2 + sin(x)*exp(-x) + C"), ("puzzle24", "(5 - 1) * 6.0"),
        ("polynomial_multiplication", "2*x**12 - x*y + 7"), ("intermediate_integration", "x**(3/2)*log(x)/3 + C"),
        ("n_queens", "[['_', 'Q'], ('Q', '_')]"), ("n_queens", "_ Q\nQ _"), ("spiral_matrix", "1 2 3"),
        ("word_sorting", "exec(1)"),
    ],
)  # fmt: skip
def test_answers_as_they_are_meant_pass(dataset: str, answer: str) -> None:
    assert is_harmless(dataset, answer)


def test_every_scorer_that_evaluates_is_known() -> None:
    """What the installed version's scorers are made of: a new `eval` of an answer would show here."""
    from reasoning_gym.factory import DATASETS

    found = set()
    for name, (cls, _) in DATASETS.items():
        # Of the whole module, for a scorer may call its helpers; `composite` asks the data sets it is made of.
        source = Path(inspect.getfile(cls)).read_text() if name != "composite" else ""
        if re.search(r"(?<!def )\b(?:eval|exec|parse_expr|sympify|literal_eval)\(\s*(?:user_)?answer", source):
            found.add(name)
    assert found == LITERALS | FORMULAS


def test_what_a_scorer_stumbles_over_scores_0() -> None:
    assert reasoning_gym("x", "basic_arithmetic", {"question": ""}).score == 0
    with pytest.raises(DatasetNotFound, match="no data set `no_such`"):
        reasoning_gym("x", "no_such", {"answer": "x"})
