"""`roll devices explain`: a run's numbers beside the plan's."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.cli.test_devices import RECIPE, TINY


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of a run of two steps, as far as it is asked for."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "runs" / "sums-1a2b"
    (path / "rollouts").mkdir(parents=True)
    (path / "config.yaml").write_text(RECIPE)
    (path / "manifest.json").write_text("{}")
    (path / "status.json").write_text(json.dumps({"state": "finished", "recipe": "sums", "step": 2, "steps": 2}))
    rows = [
        {"step": step, "memory/policy_gib": 0.5 * step, "time/rollout_s": 3.0, "time/update_s": 4.0, "time/sync_s": 0.1}
        for step in (1, 2)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = pa.table(
        {"turns": [[[10, 40]], [[12, 52]], []]}, schema=pa.schema([("turns", pa.list_(pa.list_(pa.int64())))])
    )
    pq.write_table(turns, path / "rollouts" / "step_000001.parquet")
    return path


def test_predicted_beside_measured(roll, run):
    result = roll("devices", "explain", "sums-1a2b")
    assert result.code == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines()[1:]}
    assert rows["memory/policy_gib"][1] == "1.000" and rows["time/update_s"][1] == "4.000"
    assert float(rows["time/rollout_s"][2]) == pytest.approx(3.0 / float(rows["time/rollout_s"][0]), rel=0.1)


def test_constants_are_fitted_written_and_used(roll, run, tmp_path):
    found = json.loads(roll("devices", "explain", "sums-1a2b", "--calibrate", "c.yaml", "--json").out)
    assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == pytest.approx(found["constants"])
    before = {each["name"]: each["ratio"] for each in found["compared"]}
    after = json.loads(roll("devices", "explain", "sums-1a2b", "--constants", "c.yaml", "--json").out)
    ratios = {each["name"]: each["ratio"] for each in after["compared"]}
    for name in ("time/update_s", "time/rollout_s"):
        assert abs(ratios[name] - 1) < abs(before[name] - 1)


def test_a_run_without_samples_or_constants_that_are_none(roll, run, tmp_path):
    (tmp_path / "c.yaml").write_text("train_computer: 1\n")
    wrong = roll("devices", "explain", "sums-1a2b", "--constants", "c.yaml")
    assert wrong.code == 1 and "did you mean `train_compute`" in wrong.err
    (run / "rollouts" / "step_000001.parquet").unlink()
    nothing = roll("devices", "explain", "sums-1a2b")
    assert nothing.code == 1 and "has recorded no sample" in nothing.err
