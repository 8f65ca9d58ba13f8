import pytest

from rollcli.errors import RunNotFound
from rollcli.runs.directory import runs_root
from rollcli.runs.listing import find_run, list_runs


def test_newest_first(runs):
    for name, started in (("b", 2.0), ("a", 3.0), ("c", 1.0)):
        runs(name, started=started)
    (runs_root() / "no-run").mkdir()
    assert [entry.directory.id for entry in list_runs()] == ["a", "b", "c"]


def test_no_runs_folder(runs):
    assert list_runs() == []
    with pytest.raises(RunNotFound, match="no run to resume"):
        find_run()


def test_the_newest_that_can_go_on(runs):
    runs("old", "stopped", started=1.0)
    runs("newer", "failed", started=2.0)
    runs("living", "running", started=3.0)
    runs("done", "finished", started=4.0)
    assert find_run().id == "newer"
    runs("killed", "running", started=5.0, pid=0)
    assert find_run().id == "killed"


def test_by_id_by_start_of_an_id_and_by_path(runs, tmp_path, monkeypatch):
    for name in ("grpo-math-1a2b", "grpo-math-1a2c", "grpo-math", "sokoban-77ff"):
        runs(name)
    assert find_run("grpo-math").id == "grpo-math"
    assert find_run("soko").id == "sokoban-77ff"
    assert find_run("runs/grpo-math-1a2b").id == "grpo-math-1a2b"
    assert find_run(str(tmp_path / "runs" / "grpo-math-1a2b") + "/").id == "grpo-math-1a2b"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_run("~/runs/sokoban-77ff").id == "sokoban-77ff"
    monkeypatch.chdir(tmp_path / "runs" / "sokoban-77ff")
    assert find_run(".").id == "sokoban-77ff"


def test_a_start_that_several_share_names_them(runs):
    for name in ("grpo-1a2b", "grpo-1a2c"):
        runs(name)
    with pytest.raises(RunNotFound, match="no run called `grpo-1a`") as caught:
        find_run("grpo-1a")
    assert "`grpo-1a2b`" in caught.value.hint and "`grpo-1a2c`" in caught.value.hint


def test_an_unknown_id_says_the_nearest(runs):
    for name in ("grpo-math-1a2b", "sokoban-77ff"):
        runs(name)
    with pytest.raises(RunNotFound) as caught:
        find_run("grpo-maht-1a2b")
    assert "`grpo-math-1a2b`" in caught.value.hint and "sokoban" not in caught.value.hint
    assert "roll runs ls" in caught.value.hint
