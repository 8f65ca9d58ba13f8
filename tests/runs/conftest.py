import json

import pytest

from rollcli.runs.directory import COMPLETE, RunDirectory, step_name
from rollcli.runs.status import StatusFile


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty runs folder, with a maker of runs in it."""
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def make(name, state="stopped", started=0.0, steps=(), **values):
        directory = RunDirectory(tmp_path / "runs" / name)
        directory.path.mkdir(parents=True)
        StatusFile(directory.status, recipe="r").update(state=state, started=started, **values)
        for step in steps:
            folder = directory.checkpoints / step_name(step)
            (folder / "model").mkdir(parents=True)
            (folder / "model" / "config.json").write_text("{}")
            (folder / COMPLETE).write_text(json.dumps({}))
        return directory

    return make
