import re

import pytest

from rollcli.errors import RollError, RunExists
from rollcli.runs.directory import COMPLETE, RunDirectory, list_checkpoints, runs_root, step_name


def test_a_run_is_called_after_its_recipe(runs):
    first, second = RunDirectory.create("grpo-math"), RunDirectory.create("grpo-math")
    assert re.fullmatch(r"grpo-math-[0-9a-f]{4}", first.id)
    assert first.path.is_dir() and first.path.parent == runs_root() and first.id != second.id


def test_runs_stay_in_the_working_directory_unless_told(monkeypatch):
    monkeypatch.delenv("ROLL_RUNS", raising=False)
    assert str(runs_root()) == "runs"


def test_an_empty_folder_may_be_used(runs):
    (runs_root() / "mine").mkdir(parents=True)
    assert RunDirectory.create("r", "mine").id == "mine"


@pytest.mark.parametrize("made_by", ["run", "someone", "file"])
def test_a_used_directory_is_refused_with_three_ways_out(runs, made_by):
    if made_by == "run":
        runs("mine")
    elif made_by == "someone":
        (runs_root() / "mine" / "a").mkdir(parents=True)
    else:
        runs_root().mkdir()
        (runs_root() / "mine").write_text("x")
    with pytest.raises(RunExists, match="already in use") as caught:
        RunDirectory.create("r", "mine")
    assert all(way in caught.value.hint for way in ("roll resume mine", "--name OTHER", "--clean"))


@pytest.mark.parametrize("mark", ["status.json", "manifest.json"])
def test_clean_deletes_what_a_run_left(runs, mark):
    path = runs_root() / "mine"
    (path / "rollouts").mkdir(parents=True)
    (path / mark).write_text("{}")
    directory = RunDirectory.create("r", "mine", clean=True)
    assert directory.path == path and not any(path.iterdir())


def test_clean_leaves_alone_what_no_run_made(runs):
    path = runs_root() / "thesis"
    path.mkdir(parents=True)
    (path / "chapter1.tex").write_text("…")
    with pytest.raises(RunExists, match="is not a run's directory") as caught:
        RunDirectory.create("r", "thesis", clean=True)
    assert (path / "chapter1.tex").exists() and "--clean" not in caught.value.hint


def test_clean_leaves_a_living_run_alone(runs):
    directory = runs("mine", state="running")
    with pytest.raises(RunExists, match="still running"):
        RunDirectory.create("r", "mine", clean=True)
    assert directory.status.exists()


def test_clean_of_nothing(runs):
    assert RunDirectory.create("r", "new", clean=True).path.is_dir()


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "/tmp/x", "..", "."])
def test_a_name_stays_in_the_runs_folder(runs, name):
    with pytest.raises(RollError, match="not a name for a run"):
        RunDirectory.create("r", name, clean=True)


def test_no_free_name(runs, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "abcd")
    assert RunDirectory.create("r").id == "r-abcd"
    with pytest.raises(RunExists, match="no free name") as caught:
        RunDirectory.create("r")
    assert "--name" in caught.value.hint


def test_attempts_and_the_newest_logs(runs):
    directory = runs("mine")
    assert directory.attempts() == 0
    for number in (1, 2, 3):
        folder = directory.new_attempt()
        assert folder.name == f"attempt_{number}" and directory.attempts() == number
        assert directory.logs.resolve() == folder.resolve()


def test_only_finished_checkpoints_count_in_order_of_step(tmp_path):
    for name in ("step_000100", "step_000020", "step_1000000", "step_000030.tmp", "step_000040.old", "step_x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMPLETE).write_text("{}")
    (tmp_path / step_name(50)).mkdir()
    assert list_checkpoints(tmp_path) == [20, 100, 1000000]
    assert list_checkpoints(tmp_path / "gone") == []


def test_paths(tmp_path):
    directory = RunDirectory(tmp_path / "r-1a2b")
    names = ("config", "manifest", "status", "events", "metrics", "rollouts", "evals", "checkpoints")
    assert [getattr(directory, name).name for name in names] == [
        "config.yaml", "manifest.json", "status.json", "events.jsonl", "metrics.jsonl", "rollouts", "evals",
        "checkpoints",
    ]  # fmt: skip
    assert directory.id == "r-1a2b"
