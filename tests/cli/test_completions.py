"""The completion scripts in the tree are those that the application generates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rollcli.cli import completions

FOLDER = Path(__file__).resolve().parents[2] / "completions"


def test_up_to_date():
    for name, text in completions.scripts().items():
        assert (FOLDER / name).read_text() == text, "run `python -m rollcli.cli.completions`"


def test_write(tmp_path):
    completions.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_roll", "roll.bash", "roll.fish"]


@pytest.mark.parametrize(("shell", "name"), [("bash", "roll.bash"), ("zsh", "_roll"), ("fish", "roll.fish")])
def test_shells_can_read_them(shell, name):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n", str(FOLDER / name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
