"""`roll eval`, with the pipeline replaced by a double."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

ROW = {
    "accuracy": 0.625, "accuracy_low": 0.5, "accuracy_high": 0.73, "problems": 64.0, "samples": 8.0, "pass@1": 0.625,
    "pass@8": 0.9, "length": 211.6, "truncated": 0.031, "failed": 0.0,
}  # fmt: skip


@pytest.fixture
def asked(module):
    calls = []

    def evaluate(checkpoint, **options):
        calls.append((checkpoint, options))
        tasks = {"sums": ROW, "harder-sums": {**ROW, "accuracy": 0.125}}
        return SimpleNamespace(
            checkpoint=checkpoint, tasks=tasks, samples_path=Path("runs/x/evals/step_000010.parquet")
        )

    module("rollcli.pipelines.evaluate", evaluate=evaluate)
    return calls


def test_table(roll, asked):
    result = roll("eval", "x@10")
    assert result.code == 0, result.err
    assert result.out == (
        "task         accuracy  95 % interval  pass@1  pass@8  length  truncated  failed  problems  samples\n"
        "sums            0.625  0.500 – 0.730   0.625   0.900     212      3.1 %       0        64        8\n"
        "harder-sums     0.125  0.500 – 0.730   0.625   0.900     212      3.1 %       0        64        8\n"
    )
    assert result.err == "\nsamples kept in runs/x/evals/step_000010.parquet\n"


def test_options(roll, asked):
    roll(
        "eval", "org/model", "seed=1", "--recipe", "sums", "--task", "sums", "--problems", "8", "--samples", "4",
        "--temperature", "0",
    )  # fmt: skip
    assert asked == [
        (
            "org/model",
            {
                "recipe": "sums", "overrides": ["seed=1"], "task": "sums", "problems": 8, "samples": 4,
                "temperature": 0.0, "address": None,
            },
        )
    ]  # fmt: skip


def test_json_and_quiet(roll, asked):
    found = json.loads(roll("eval", "x", "--json").out)
    assert found["accuracy"] == 0.375 and found["tasks"]["sums"]["pass@8"] == 0.9
    assert found["samples_path"] == "runs/x/evals/step_000010.parquet"
    assert roll("eval", "x", "-q").out == "0.3750\n"


def test_a_negative_temperature_is_refused(roll, asked):
    assert roll("eval", "x", "--temperature", "-1").code == 2 and asked == []


def test_counts_are_whole_numbers_in_json(roll, asked):
    row = json.loads(roll("eval", "x", "--json").out)["tasks"]["sums"]
    assert [repr(row[name]) for name in ("problems", "samples", "failed", "pass@1")] == ["64", "8", "0", "0.625"]


@pytest.mark.parametrize("name", ["one@", "one@x", "@5"])
def test_a_step_that_is_none(roll, asked, name):
    result = roll("eval", name)
    assert result.code == 1 and asked == []
    assert result.err.startswith(f"error: `{name}` is not of the form RUN@STEP\n\nhint: write the step after the `@`")


def test_a_path_may_hold_an_at(roll, asked, workplace):
    (workplace / "my@model").mkdir()
    assert roll("eval", "my@model").code == 0 and len(asked) == 1
