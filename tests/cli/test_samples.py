"""`roll samples`: reads Parquet that training wrote."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def row(index, response, reward, **values):
    return {
        "step": 2, "task": "sums", "index": index, "sample": 0, "prompt": "1+1?", "response": response,
        "reward": reward, "accuracy": reward, "rewards": json.dumps({"math": reward, "length": 0.0}),
        "advantage": reward, "response_tokens": 5, "stop_reason": "stop", "error": None, "error_kind": None,
        "tokens": [1, 2], "logprobs": [0.0, 0.0], **values,
    }  # fmt: skip


@pytest.fixture
def run(make_run):
    path = make_run("sums-7f3a")
    (path / "rollouts").mkdir()
    rows = [
        row(0, "three", 0.0),
        row(1, "it is two", 1.0),
        row(2, "", None, error="env broke", error_kind="environment", advantage=None, task="other"),
        row(3, "zwei\n2", 0.5),
    ]
    pq.write_table(pa.Table.from_pylist(rows), path / "rollouts" / "step_000002.parquet")
    pq.write_table(pa.Table.from_pylist([row(9, "old", 1.0)]), path / "rollouts" / "step_000001.parquet")
    return path


def test_the_newest_step(roll, run):
    result = roll("samples", "sums-7f3a", "-n", "1")
    assert result.out == (
        "sums #0.0  step 2  reward 0  advantage +0.000  5 tokens  stop stop\n"
        "rewards   math 0  length 0\n"
        "prompt    1+1?\n"
        "response  three\n"
    )
    assert result.err.strip().startswith("1 of 4 samples in ")


def indices(result):
    return [sample["index"] for sample in json.loads(result.out)["samples"]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-n", "9"], [0, 1, 2, 3]),
        (["--best"], [1, 3, 0]),
        (["--worst", "-n", "9"], [0, 3, 1, 2]),
        (["--contains", "two"], [1]),
        (["--task", "other"], [2]),
        (["--step", "1"], [9]),
    ],
)
def test_choosing(roll, run, words, expected):
    assert indices(roll("samples", "sums-7f3a", "--json", *words)) == expected


def test_json_has_components_and_no_token_ids(roll, run):
    sample = json.loads(roll("samples", "sums-7f3a", "--json").out)["samples"][0]
    assert sample["rewards"] == {"math": 0.0, "length": 0.0} and "tokens" not in sample


def test_an_error_shows(roll, run):
    out = roll("samples", "sums-7f3a", "--task", "other").out
    assert "reward -  advantage -" in out and "error     environment: env broke" in out


def test_a_greedy_baseline_says_that_it_is_one(roll, run):
    rows = [row(4, "two", 1.0, greedy=False), row(4, "also two", 1.0, greedy=True, sample=4, advantage=None)]
    pq.write_table(pa.Table.from_pylist(rows), run / "rollouts" / "step_000003.parquet")
    plain, greedy = roll("samples", "sums-7f3a").out.split("\n\n")
    assert "greedy" not in plain
    assert greedy.startswith(
        "sums #4.4  step 2  reward 1  advantage -  5 tokens  stop stop  greedy baseline, not trained on\n"
    )
    found = json.loads(roll("samples", "sums-7f3a", "--json").out)["samples"]
    assert [sample["greedy"] for sample in found] == [False, True]


def test_several_turns_are_shown_turn_by_turn(roll, run):
    call = {"function": {"name": "add", "arguments": {}}}
    chat = [
        {"role": "system", "content": "play"}, {"role": "user", "content": "1\n2"},
        {"role": "assistant", "content": "shown"},
        {"role": "user", "content": "3"}, {"role": "assistant", "content": "left", "turn": 0},
        {"role": "tool", "content": "4"}, {"role": "assistant", "content": "right", "turn": 1},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]  # fmt: skip
    values = {"chat": json.dumps(chat), "rewards": "{}", "agent": ""}
    rows = [
        row(4, "left\nright", 1.0, turn_rewards=[0.0, 1.0], **values),
        row(5, "left\nright", 0.0, turn_rewards=[0.0, 0.0], **{**values, "agent": "first"}),
        row(6, "left", 0.0, turn_rewards=[0.0], **{**values, "chat": json.dumps(chat[3:5])}),
    ]
    pq.write_table(pa.Table.from_pylist(rows), run / "rollouts" / "step_000003.parquet")
    one, other, single = roll("samples", "sums-7f3a").out.split("\n\n")
    assert one == (
        "sums #4.0  step 2  reward 1  advantage +1.000  5 tokens  stop stop\n"
        "system      play\n"
        "user        1\n"
        "            2\n"
        "assistant   shown\n"
        "user        3\n"
        "model 1     left\n"
        "tool        4\n"
        "model 2 +1  right\n"
        'assistant   [{"function": {"name": "add", "arguments": {}}}]'
    )
    assert other.startswith("sums #5.0  first  step 2") and "\nfirst 1    left\n" in other
    assert single.splitlines()[1:] == ["prompt    1+1?", "response  left"]
    found = json.loads(roll("samples", "sums-7f3a", "--json").out)["samples"]
    assert found[0]["chat"] == chat and found[0]["turn_rewards"] == [0.0, 1.0]


def test_best_and_worst(roll, run):
    assert roll("samples", "sums-7f3a", "--best", "--worst").code == 2


def test_what_is_not_there(roll, run, make_run):
    result = roll("samples", "sums-7f3a", "--step", "7")
    assert result.code == 1
    assert result.err == "error: run `sums-7f3a` has no samples of step 7\n\nhint: there are steps 1 to 2\n"
    make_run("empty-0000")
    assert "has no samples yet" in roll("samples", "empty-0000").err


def test_a_task_that_is_not_there(roll, run):
    result = roll("samples", "sums-7f3a", "--task", "foo")
    assert result.code == 1
    assert result.err == "error: run `sums-7f3a` has no task `foo`\n\nhint: it has sums, other\n"


def test_no_match(roll, run):
    result = roll("samples", "sums-7f3a", "--contains", "nowhere")
    assert result.code == 0 and result.out == ""
    assert result.err == "0 of 4 samples match in runs/sums-7f3a/rollouts/step_000002.parquet\n"
