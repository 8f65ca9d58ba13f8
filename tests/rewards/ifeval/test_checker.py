"""Verdicts are the reference checker's; what cannot be right is told."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.ifeval.checker import VERIFIERS, ifeval, ifeval_loose, verdicts

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[3].parent / "shared" / "data")


def test_instructions_agree_with_the_reference() -> None:
    pytest.importorskip("langdetect")
    if not (DATA / "ifeval").exists():
        pytest.skip(f"no test data `ifeval` in {DATA}")
    inputs, answers = (
        [json.loads(line) for line in (DATA / "ifeval" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("input_data", "reference_gpt4")
    )
    problems = {row["key"]: row for row in inputs}
    differ, seen = Counter(), Counter()
    for answer in answers:
        problem = problems[answer["key"]]
        ours = verdicts(answer["response"], problem["instruction_id_list"], problem["kwargs"])
        for kind, mine, theirs in zip(("strict", "loose"), ours, (answer["strict"], answer["loose"])):
            for name, one, other in zip(problem["instruction_id_list"], mine, theirs, strict=True):
                seen[name] += 1
                differ[kind, name, answer["key"]] += one != other
    assert set(seen) == set(VERIFIERS) and len(VERIFIERS) == 25
    wrong = [each for each, count in differ.items() if count]
    # Why this one differs: the module's docstring.
    assert wrong == [("loose", "keywords:letter_frequency", 1122)] and sum(seen.values()) == 1664


def test_strict_and_loose() -> None:
    given = ["punctuation:no_comma", "startend:quotation"], [{}, None]
    assert verdicts('Sure, here:\n"yes"', *given) == ([False, False], [True, True])
    assert ifeval('Sure, here:\n"yes"', *given).score == 0.0 and ifeval_loose('Sure, here:\n"yes"', *given).score == 1.0
    half = ifeval("no comma", *given)
    assert half.score == 0.0 and half.metrics == {
        "ifeval_strict": 0.0, "ifeval_loose": 0.0, "ifeval_instructions_strict": 0.5, "ifeval_instructions_loose": 0.5,
    }  # fmt: skip
    assert ifeval_loose("no comma", *given).metrics == half.metrics
    assert verdicts("", *given) == ([False, False], [False, False])


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        ([], [], "0 instructions"),
        (["punctuation:no_comma"], [], "arguments for 0"),
        (["punctuation:no_coma"], [{}], "unknown instruction `punctuation:no_coma`"),
        (["keywords:frequency"], [{"keyword": "a", "relation": None}], "do not fit"),
        (["startend:quotation"], [{"surplus": 1}], "do not fit"),
    ],
)
def test_what_cannot_be_right_is_a_data_error(names: list, arguments: list, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        ifeval("text", names, arguments)


def test_hostile_answers_end_in_time() -> None:
    endless = {"capital_relation": "at least", "capital_frequency": 10**7}
    problems = [
        ("detectable_content:number_placeholders", {"num_placeholders": 1}),
        ("detectable_format:title", {}),
        ("detectable_format:number_bullet_lists", {"num_bullets": 1}),
        ("detectable_format:json_format", {}),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 1}),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}),
        ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 10**7}),
        ("change_case:capital_word_frequency", endless),
    ]
    for piece in ("[", "<<", "\n", "*a", "(", "."):
        verdicts(piece * (1_000_000 // len(piece)), *zip(*problems))
