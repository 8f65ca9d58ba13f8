"""`roll replay`, with the pipeline replaced by a double."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

STEP = SimpleNamespace(
    step=2,
    recorded={"loss": -0.45031602680683136, "grad_norm": 0.5, "kl_old": None},
    replayed={"loss": -0.45031602680683136, "grad_norm": 0.75, "kl_old": 0.0, "kl_reference": 1e-6},
    differing=["grad_norm", "kl_old"],
)
SAME = SimpleNamespace(step=3, recorded={"loss": 1.0}, replayed={"loss": 1.0}, differing=[])


@pytest.fixture
def asked(module):
    calls = []

    def replay(run, steps, overrides, tell, **options):
        calls.append((run, steps, list(overrides), options))
        tell("replaying")
        found = [step for step in (STEP, SAME) if steps[0] <= step.step <= steps[1]]
        return SimpleNamespace(run=run, start=1, steps=found, equal=not any(step.differing for step in found))

    module("rollcli.pipelines.replay", replay=replay)
    return calls


def test_a_table_for_each_step(roll, asked):
    result = roll("replay", "x", "--step", "2-3")
    assert result.code == 0, result.err
    assert result.out == (
        "step 2\n"
        "metric         recorded   replayed    difference\n"
        "loss          -0.450316  -0.450316         equal\n"
        "grad_norm           0.5       0.75         +0.25\n"
        "kl_old                -          0    not finite\n"
        "kl_reference          -      1e-06  not recorded\n"
        "\n"
        "step 3\n"
        "metric  recorded  replayed  difference\n"
        "loss           1         1       equal\n"
    )
    assert result.err == "replaying\n\n\n2 of 4 numbers differ\n"
    assert roll("replay", "x", "--step", "3").err.endswith("\nevery number equals the recorded one\n")


def test_options(roll, asked):
    roll("replay", "x", "--step", "3", "algorithm=dapo", "-o", "epochs=2", "--address", "here:1")
    assert asked == [("x", (3, 3), ["algorithm=dapo", "epochs=2"], {"address": "here:1"})]


def test_json_and_quiet(roll, asked):
    result = roll("replay", "x", "--step", "2", "--json")
    assert result.err == ""
    assert json.loads(result.out) == {
        "run": "x", "start": 1, "equal": False,
        "steps": [
            {"step": 2, "recorded": STEP.recorded, "replayed": STEP.replayed, "differing": ["grad_norm", "kl_old"]}
        ],
    }  # fmt: skip
    assert roll("replay", "x", "--step", "2", "-q").out == "different\n"
    assert roll("replay", "x", "--step", "3", "-q").out == "equal\n"


@pytest.mark.parametrize("step", ["x", "0", "3-2", "1-", "-1", "1-2-3", "1.5", ""])
def test_what_is_no_step(roll, asked, step):
    result = roll("replay", "x", f"--step={step}")
    assert result.code == 2 and asked == []
    assert f"`{step}` is not a step; write 12, or 11-13" in result.err


def test_a_step_is_asked_for(roll, asked):
    result = roll("replay", "x")
    assert result.code == 2 and "missing option `--step`" in result.err


def test_an_error_keeps_its_exit_code(roll, make_run):
    result = roll("replay", "nobody", "--step", "1")
    assert result.code == 1 and result.err.startswith("error: no run called `nobody`\n")
    make_run("sums-7f3a")
    result = roll("replay", "sums-7f3a", "--step", "1")
    assert result.code == 1
    assert result.err == "error: run `sums-7f3a` has no recorded rollouts of step 1\n\nhint: it has none yet\n"
