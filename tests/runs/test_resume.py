import json

import pytest

from rollcli.errors import ConfigError
from rollcli.runs.directory import list_checkpoints
from rollcli.runs.events import read_lines
from rollcli.runs.resume import UNRECORDED, check_unchanged, cut_after, flat_differences


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(runs):
    """A run that recorded five steps, saved three of them, and was killed while it wrote the samples of the sixth."""
    directory = runs("mine", steps=(2, 4, 5))
    write(directory.metrics, [{"step": step, "reward": step / 10} for step in range(1, 6)])
    events = [{"type": "run_started"}, {"type": "evaluation", "step": 0}]
    events += [{"type": "step", "step": step} for step in range(1, 6)]
    events += [{"type": "warning", "step": None}, {"type": "stage", "step": 6}, {"type": "run_finished", "steps": 5}]
    write(directory.events, events)
    for step in range(1, 7):
        write(directory.rollouts / f"step_{step:06d}.parquet", [step])
    write(directory.rollouts / "step_000007.parquet.tmp", [7])
    for step in (0, 2, 4):
        write(directory.evals / f"step_{step:06d}.json", [step])
        write(directory.evals / f"step_{step:06d}.parquet", [-step])
    return directory


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_came_after_is_cut_and_kept(run):
    attempt = run.new_attempt()
    assert cut_after(run, 2, attempt) == 3
    assert [record["step"] for record in read_lines(run.metrics)] == [1, 2]
    assert [record.get("step") for record in read_lines(run.events)] == [None, 0, 1, 2, None]
    assert names(run.rollouts) == ["step_000001.parquet", "step_000002.parquet"]
    assert names(run.evals) == [f"step_00000{step}.{kind}" for step in (0, 2) for kind in ("json", "parquet")]
    assert list_checkpoints(run.checkpoints) == [2]
    assert [record["step"] for record in read_lines(attempt / "cut_metrics.jsonl")] == [3, 4, 5]
    kept = read_lines(attempt / "cut_events.jsonl")
    assert [record["type"] for record in kept] == ["step", "step", "step", "stage", "run_finished"]
    # Files of one step in two folders do not take each other's place.
    assert json.loads((attempt / "cut_rollouts_step_000004.parquet").read_text()) == 4
    assert json.loads((attempt / "cut_evals_step_000004.parquet").read_text()) == -4
    assert (attempt / "cut_rollouts_step_000007.parquet.tmp").exists()
    assert (attempt / "cut_checkpoints_step_000005" / "complete").exists()


def test_going_on_from_the_newest_cuts_only_what_was_begun(run):
    assert cut_after(run, 5, run.new_attempt()) == 0
    assert len(read_lines(run.metrics)) == 5 and list_checkpoints(run.checkpoints) == [2, 4, 5]
    assert "run_finished" not in [record["type"] for record in read_lines(run.events)]


def test_starting_over_keeps_nothing_in_place(run):
    attempt = run.new_attempt()
    assert cut_after(run, UNRECORDED, attempt) == 5
    assert read_lines(run.metrics) == read_lines(run.events) == []
    assert names(run.rollouts) == names(run.evals) == names(run.checkpoints) == []
    assert len(read_lines(attempt / "cut_events.jsonl")) == 10


def test_a_run_that_recorded_nothing(runs):
    directory = runs("mine")
    assert cut_after(directory, 3, directory.new_attempt()) == 0


OLD = {
    "steps": 10,
    "seed": 1,
    "model": {"path": "m", "revision": None},
    "tasks": [{"name": "a", "weight": 1.0}, {"name": "b", "weight": 2.0}],
    "policy": {"optimizer": {"learning_rate": 1e-6}},
    "checkpoints": {"every": 5},
    "trackers": [],
}


def changed(**values):
    return {**OLD, **values}


def test_differences_are_told_by_key():
    new = changed(seed=2, model={"path": "n"}, tasks=[{"name": "a", "weight": 1}, {"name": "b", "weight": 3.0}])
    assert flat_differences(OLD, new) == [
        ("seed", 1, 2), ("model.path", "m", "n"), ("tasks[1].weight", 2.0, 3.0),
    ]  # fmt: skip
    assert flat_differences({"a": [1]}, {"a": [1, 2]}) == [("a", [1], [1, 2])]
    assert flat_differences({"a": {"b": 1}}, {"a": 2}) == [("a", {"b": 1}, 2)]
    assert flat_differences({"a": 1}, {"b": 2}) == [("a", 1, None), ("b", None, 2)]


def test_what_alters_the_remaining_steps_is_refused_with_the_difference():
    with pytest.raises(ConfigError) as caught:
        check_unchanged(OLD, changed(seed=2, policy={"optimizer": {"learning_rate": 1e-5}}))
    assert "`seed` was 1, is 2" in str(caught.value)
    assert "`policy.optimizer.learning_rate` was 1e-06, is 1e-05" in str(caught.value)
    assert "--allow-change" in caught.value.hint


@pytest.mark.parametrize(
    "values", [{}, {"steps": 20}, {"checkpoints": {"every": 1, "keep_last": 3}}, {"trackers": [{"name": "swanlab"}]}]
)
def test_what_does_not_alter_them_may_change(values):
    check_unchanged(OLD, changed(**values))


@pytest.mark.parametrize("allowed", ["seed", "model", "model.path", "tasks", "tasks[1]", "tasks[1].weight"])
def test_a_key_may_be_allowed_to_change(allowed):
    new = {
        "seed": changed(seed=2),
        "model": changed(model={"path": "n"}),
        "tasks": changed(tasks=[OLD["tasks"][0], {"name": "b", "weight": 9.0}]),
    }[allowed.split(".")[0].split("[")[0]]
    check_unchanged(OLD, new, (allowed,))


@pytest.mark.parametrize("allowed", ["se", "mod", "model.pat", "tasks[1].w", "tasks[11]", ""])
def test_a_key_is_not_allowed_by_its_first_letters(allowed):
    new = changed(seed=2, model={"path": "n"}, tasks=[OLD["tasks"][0], {"name": "b", "weight": 9.0}])
    with pytest.raises(ConfigError, match=r"seed.*model\.path.*tasks\[1\]\.weight"):
        check_unchanged(OLD, new, (allowed,))


def test_keys_that_begin_like_a_free_one_are_not_free():
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        check_unchanged({"steps_per_epoch": 1}, {"steps_per_epoch": 2})
