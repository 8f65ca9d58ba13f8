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
    print(wrong, sum(seen.values()))
    assert len(wrong) / sum(seen.values()) <= 0.005, wrong
