"""`roll doctor`: packages and machine from a planted report, the gap from real engines with planted faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollcli.cli import doctor
from rollcli.doctor import environment
from rollcli.doctor.causes import Diagnosis
from rollcli.doctor.environment import EnvironmentReport, PackageReport

FAULTY = Path(__file__).resolve().parents[1] / "doctor" / "faulty.py"
SMALL = ("--samples", "8", "--max-tokens", "16", "policy.threads=1")
MATH = """\
model: {path: embedded:sums}
steps: 1
tasks: [{name: sums, source: sums, rewards: [{name: math}]}]
"""
SCREEN = """\
rollcli  0.1.0
python   3.12.3, Linux
engines  train fsdp; infer transformers
gpu      none seen by torch
cores    2

package  version  state            for
torch    2.13.0   ok               trainer
ray      2.60.0   does not import  workers

not installed  bring it with                for
vllm           pip install 'rollcli[vllm]'  rollout engine

error: `ray` 2.60.0 does not import: ImportError: no libz
"""


@pytest.fixture
def report(monkeypatch):
    packages = [
        PackageReport("torch", "trainer", True, "2.13.0", "ok"),
        PackageReport("ray", "workers", True, "2.60.0", "does not import", "ImportError: no libz", "pip install ray"),
        PackageReport(
            "vllm", "rollout engine", False, None, "not installed", advice="pip install 'rollcli[vllm]'"
        ),
    ]  # fmt: skip
    found = EnvironmentReport(
        versions={"rollcli": "0.1.0", "python": "3.12.3", "platform": "Linux"},
        engines={"train_engines": ["fsdp"], "infer_engines": ["transformers"]},
        packages=packages,
        machine={"gpu": "none seen by torch", "cores": "2"},
        warnings=["threads would fight"],
    )
    monkeypatch.setattr(environment, "examine", lambda: found)
    return found


def test_environment(roll, report):
    result = roll("doctor")
    assert result.code == 1 and result.out == SCREEN
    assert "warning: threads would fight\n" in result.err
    assert result.err.endswith("hint: rollcli does not work without `ray`: `pip install ray`\n")
    assert max(map(len, result.out.splitlines())) <= 80


def test_environment_without_fault(roll, report):
    del report.packages[1]
    result = roll("doctor")
    assert result.code == 0 and "error" not in result.out and "hint" not in result.err
    assert roll("doctor", "-q").out == "ok\n"


def test_another_version_is_a_warning(roll, report):
    report.packages[1] = PackageReport("ray", "workers", True, "1.0", "other version", "rollcli was tried with >=2")
    result = roll("doctor")
    assert result.code == 0
    assert "warning: `ray` 1.0 is another version than was tried: rollcli was tried with >=2\n" in result.out


def test_environment_as_json(roll, report):
    result = roll("doctor", "--json")
    found = json.loads(result.out)
    assert result.code == 1 and found["healthy"] is False
    assert found["packages"][2]["advice"] == "pip install 'rollcli[vllm]'" and found["machine"]["cores"] == "2"
    assert roll("doctor", "-q").out == "broken\n"


@pytest.fixture
def recipe(workplace):
    (workplace / "recipes" / "mine.yaml").write_text(MATH)
    return "mine"


def test_a_healthy_model(roll):
    result = roll("doctor", "embedded:sums", *SMALL)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "model    embedded:sums, float32"
    assert lines[1] == "engines  rollout transformers, training fsdp"
    assert "verdict  ok, explained by float32 rounding" in lines
    assert max(map(len, lines)) <= 80 and "tried" not in result.out


def test_bfloat16_hides_small_faults_and_says_so(roll):
    result = roll("doctor", "embedded:sums", "model.dtype=bfloat16", *SMALL)
    assert result.code == 0 and "verdict  ok, explained by bfloat16 rounding" in result.out
    assert result.err.endswith(
        "hint: a fault smaller than the rounding hides in it; `model.dtype=float32` would show it\n"
    )


def test_a_healthy_recipe_as_json(roll, recipe):
    result = roll("doctor", recipe, "rollout.sampling.temperature=0.7", *SMALL, "--json")
    found = json.loads(result.out)
    assert result.code == 0 and found["explained"] is True and found["cause"] is None
    assert found["gap"]["mean"] < 1e-4 and found["answers"] == 8 and found["sampling"]["temperature"] == 0.7


def test_a_fault_is_named(roll, recipe):
    result = roll("doctor", recipe, "-o", f"rollout.engine={FAULTY}:Shifted", *SMALL)
    assert result.code == 1
    assert "\nverdict   too much for float32 rounding\n" in result.out and "\ncause     order\n" in result.out
    assert "\nevidence  each log-probability taken for the previous token:\n          mean " in result.out
    assert "hint: correct the engine" in result.err
    assert roll("doctor", recipe, f"rollout.engine={FAULTY}:Shifted", *SMALL, "-q").out == "order\n"


def test_a_fault_as_json(roll, recipe):
    words = ("rollout.sampling.temperature=0.7", f"rollout.engine={FAULTY}:IgnoresTemperature")
    result = roll("doctor", recipe, *words, *SMALL, "--json")
    found = json.loads(result.out)
    assert result.code == 1 and found["cause"]["cause"] == "temperature"
    assert found["cause"]["gap"]["mean"] < 1e-4 < found["gap"]["mean"]
    assert [trial["cause"] for trial in found["tried"]] == ["order", "temperature"]


def test_no_cause(roll, recipe, monkeypatch):
    monkeypatch.setattr("rollcli.doctor.causes.diagnose", lambda found, progress: Diagnosis())
    result = roll("doctor", recipe, f"rollout.engine={FAULTY}:Shifted", *SMALL)
    assert result.code == 1 and "cause    unknown: nothing tried explains it\n" in result.out
    assert "hint: report it" in result.err


def test_nothing_of_that_name(roll):
    result = roll("doctor", "smus")
    assert result.code == 1 and result.err.startswith("error: no recipe called `smus`") and "`sums`" in result.err
    assert roll("doctor", "embedded:smus").err.startswith("error: no embedded model `smus` (did you mean `sums`?)")


def test_completion(workplace, make_run):
    make_run("sums-7f3a", steps=(10,))
    assert [value for value, _ in doctor.subject("sums")] == ["sums", "sums-7f3a@10"]
