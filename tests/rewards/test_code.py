"""Right programs score 1, wrong ones their share, hostile ones 0, and the host never notices."""

import gzip
import importlib.util
import json
import os
from pathlib import Path

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.check import check
from rollcli.rewards.code import code, extract_code, same_output

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
needs_data = pytest.mark.skipif(not (DATA / "mbpp").is_dir(), reason="no data sets here")
_spec = importlib.util.spec_from_file_location("attacks", Path(__file__).parents[1] / "sandbox" / "attacks.py")
attacks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(attacks)

SUM = "```python\nprint(sum(map(int, input().split())))\n```"
ASSERTS = ["assert f(1) == 41, 'SECRET'", "assert f(2.5) - 42.5 == 0", "assert f(7) in (47,)"]


def mbpp() -> list[dict]:
    return [json.loads(line) for line in (DATA / "mbpp" / "mbpp.jsonl").read_text().splitlines()]


def humaneval() -> list[dict]:
    with gzip.open(DATA / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def humaneval_score(row: dict) -> float:
    return code(
        row["prompt"] + row["canonical_solution"], row["test"], row["entry_point"], preamble=row["prompt"]
    ).score


def mbpp_score(row: dict) -> float:
    return code(f"```python\n{row['code']}\n```", row["test_list"], setup=row["test_setup_code"]).score


def test_the_task_of_the_attacks_can_be_solved():
    assert code("def f(x): return x + 40", ASSERTS).score == 1


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_attacks_score_nothing_and_harm_nothing(name):
    result = code(attacks.ATTACKS[name], ASSERTS, grade="all", timeout_s=2.0, total_s=4.0)
    assert (result.score, result.accuracy) == (0.0, 0.0)
    assert not Path("/tmp/roll-attack").exists() and not Path("/roll-attack").exists()


@pytest.mark.parametrize(
    "name", ["os._exit(0)", "printed success", "1 GB of output", "endless loop", "success on every file"]
)
def test_attacks_on_outputs_score_nothing(name):
    result = code(attacks.ATTACKS[name], [{"input": "1", "output": "41"}], timeout_s=2.0)
    assert result.score == 0


def test_attacks_on_pytest_score_nothing():
    tests = "from solution import *\ndef test_a():\n    assert f(1) == 41\n"
    for name in ("os._exit(0)", "os._exit(0) when asked", "patched builtins", "equal to everything"):
        assert code(attacks.ATTACKS[name], tests).score == 0


def test_a_right_value_of_another_type_counts_by_its_value():
    answer = "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(x): return P(x, 2)"
    assert code(answer, ["assert f(1) == (1, 2)"]).score == 1


def test_outputs():
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}, {"input": "1 1", "output": "3"}]
    result = code(SUM, tests)
    assert (result.score, result.accuracy) == (pytest.approx(2 / 3), 0.0)
    assert code(SUM, json.dumps({"inputs": ["1 2", "0"], "outputs": ["3", "0"]}), grade="all").score == 1
    assert code(SUM, tests, grade="all").score == 0
    assert code("print(3)\nraise ValueError", tests[:1]).score == 0


def test_pytest_files():
    tests = """from solution import double
import pytest
def test_numbers():
    assert double(2) == 4
@pytest.mark.parametrize("x", [1, 3])
def test_wrong(x):
    assert double(x) == x + 1
def test_raises():
    with pytest.raises(TypeError):
        double({})
"""
    # pytest is slow to import where others use the cores.
    found = code("def double(x):\n    return x * 2", tests, timeout_s=30.0, total_s=60.0)
    assert found.score == pytest.approx(3 / 4)


def test_humaneval_names_of_the_preamble_are_the_tests_own():
    preamble = "def helper(x):\n    return x * 2\n\ndef g(x):\n    ''' doubled '''\n"
    test = "def check(candidate):\n    assert helper(candidate(4)) == 16\n"
    assert code("def g(x):\n    return 2 * x", test, "g", preamble=preamble).score == 1
    assert code("def helper(x):\n    return 16\ndef g(x):\n    return 0", test, "g", preamble=preamble).score == 0


@pytest.mark.parametrize("tests", [[], "", None, {}, [""], [{"input": "1"}], 3, ["assert f(1)", {}], "[]"])
def test_no_tests_are_never_a_pass(tests):
    with pytest.raises(RewardError, match="tests"):
        code("def f(x): return 1", tests)


def test_unknown_grade():
    with pytest.raises(RewardError, match="grade"):
        code(SUM, ["assert 1"], grade="most")


def test_the_last_python_block_counts():
    assert extract_code("```python\na\n```\ntext\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert extract_code("no fence") == "no fence"
    assert extract_code("```\nunfinished\n") == "unfinished\n"
    assert code("", ["assert f(1) == 1"]).metrics["no_code"] == 1


def test_outputs_are_compared_line_by_line():
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2") and not same_output("12", "1 2")


def test_it_keeps_its_contract_in_a_reward_worker():
    assert [(each.case, each.got) for each in check("code") if not each.passed] == []


@needs_data
def test_a_sample_of_the_reference_solutions_pass():
    assert [row["task_id"] for row in humaneval()[::16] if humaneval_score(row) != 1] == []
    assert [row["task_id"] for row in mbpp()[::60] if mbpp_score(row) != 1] == []


@needs_data
@pytest.mark.slow
def test_all_reference_solutions_pass_but_one():
    assert [row["task_id"] for row in humaneval() if humaneval_score(row) != 1] == []
    # 126 asks for a function `sum`; tests take builtins from nobody unless `entry_point` names them.
    assert [row["task_id"] for row in mbpp() if mbpp_score(row) != 1] == [126]
