"""The main job as its user sees it: a run's output, its files, evaluation, and real data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

DATA = Path(os.environ.get("ROLL_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def test_output_in_a_pipe_is_plain_lines(undisturbed: tuple[Any, str]) -> None:
    _, output = undisturbed
    assert "\x1b" not in output and "\r" not in output
    assert output.endswith("\n")
    steps = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(steps) == 6
    tail = output[output.rindex("finished") :]
    assert "accuracy" in tail and "→" in tail
    assert "checkpoints/step_000006" in tail
    assert "roll eval whole" in tail and "roll samples whole" in tail


def test_run_directory_holds_what_it_promises(undisturbed: tuple[Any, str]) -> None:
    workspace, _ = undisturbed
    run = workspace.runs / "whole"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["packages"]["torch"] and manifest["attempts"][0]["status"] == "finished"
    assert len(workspace.metrics("whole")) == 6
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000004", "step_000006"]
    assert sorted(path.name for path in (run / "evals").glob("*.json")) == ["step_000000.json", "step_000006.json"]
    names = {path.name for path in (run / "logs" / "latest").iterdir()}
    assert {"policy-0.log", "rollout-0.log", "environment-0.log", "reward-0.log"} <= names
    rows = pyarrow.parquet.read_table(run / "rollouts" / "step_000003.parquet").to_pylist()
    assert len(rows) == 64 and {row["step"] for row in rows} == {3}
    for row in rows:
        assert sum(row["loss_mask"]) == row["response_tokens"] and row["reward"] in (0.0, 1.0)
        assert {version for version, sampled in zip(row["versions"], row["loss_mask"]) if sampled} == {2}


def test_first_update_is_on_policy(undisturbed: tuple[Any, str]) -> None:
    workspace, _ = undisturbed
    for step in workspace.metrics("whole"):
        assert step["rollout_gap_max"] < 1e-4
        assert step["staleness_max"] == 0


def test_saved_config_starts_the_same_run(undisturbed: tuple[Any, str], workspace: Any) -> None:
    """The same seed a second time, too: with it every bit is the same."""
    whole, _ = undisturbed
    workspace.roll("train", str(whole.runs / "whole" / "config.yaml"), "--name", "copy")
    assert workspace.metrics("copy") == whole.metrics("whole")
    assert workspace.digests("copy", 6) == whole.digests("whole", 6) != {}


def test_eval_of_a_checkpoint(undisturbed: tuple[Any, str]) -> None:
    workspace, _ = undisturbed
    output = workspace.roll("eval", "whole@6", "--problems", "16", "--samples", "4", "--json")
    report = json.loads(output)
    facts = report["tasks"]["sums"]
    assert facts["accuracy_low"] <= facts["accuracy"] <= facts["accuracy_high"]
    assert facts["pass@1"] == pytest.approx(facts["accuracy"])
    assert facts["pass@4"] >= facts["pass@2"] >= facts["pass@1"]
    assert len(pyarrow.parquet.read_table(report["samples_path"])) == 64


def test_gsm8k_with_a_real_model(workspace: Any) -> None:
    model, data = DATA / "stories260K" / "hf", DATA / "gsm8k"
    if not model.is_dir():
        pytest.skip(f"no test data at {DATA}; point ROLL_TEST_DATA at it")
    workspace.roll(
        "train", "grpo-gsm8k", f"model.path={model}", "model.chat_template=plain", f"tasks[0].source.path={data}",
        "steps=2", "prompts_per_step=8", "group_size=8", "rollout.sampling.max_tokens=32",
        "rollout.max_prompt_tokens=300", "evaluation.problems_per_task=4", "--name", "gsm8k",
    )  # fmt: skip
    run = workspace.runs / "gsm8k"
    for step, metrics in enumerate(workspace.metrics("gsm8k"), 1):
        rows = pyarrow.parquet.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        usable = [row for row in rows if row["error"] is None]
        # A prompt that is too long is counted under its own name, never cut; an answer that is, is counted too.
        assert metrics["failed"] == metrics.get("failed/prompt_too_long", 0.0)
        assert all(len(row["tokens"]) - sum(row["loss_mask"]) <= 300 for row in usable)
        assert max(row["response_tokens"] for row in usable) <= 32
        cut = sum(row["stop_reason"] == "length" for row in usable) / len(usable)
        assert metrics["truncated"] == pytest.approx(cut)
        assert metrics["kl_reference"] >= 0 and "reward/gsm8k" in metrics


@pytest.mark.slow
def test_the_first_readme_command_learns(workspace: Any) -> None:
    output = workspace.roll("train", "grpo-math", "--name", "learns", timeout_s=600)
    first, last = workspace.events("learns", "evaluation")[0], workspace.events("learns", "evaluation")[-1]
    assert first["accuracy"] <= 0.5 and last["accuracy"] >= 0.9
    assert last["tasks"]["sums"]["length"] > 1.5 * first["tasks"]["sums"]["length"]
    assert f"{first['accuracy']:.3f} → {last['accuracy']:.3f}" in output
    started, finished = workspace.events("learns", "run_started")[0], workspace.events("learns", "run_finished")[0]
    assert finished["time"] - started["time"] < 300


def test_sft_starts_from_random_weights_and_learns(workspace: Any) -> None:
    workspace.roll("train", "sft-tiny", "--steps", "60", "--name", "sft")
    losses = [step["loss"] for step in workspace.metrics("sft")]
    assert losses[0] > 2 * losses[-1]
    workspace.roll("eval", "sft", "--recipe", "grpo-math", "--problems", "8")


def test_local_swanlab_mirror(undisturbed: tuple[Any, str]) -> None:
    workspace, _ = undisturbed
    assert any((workspace.runs / "whole" / "swanlab").rglob("*"))
