"""What answers at once imports nothing heavy; measured in a process of its own, by modules and not by seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "torch", "ray", "vllm", "sglang", "transformers", "datasets", "deepspeed", "omegaconf", "swanlab", "tensorboard",
    "pyarrow", "numpy", "rich", "math_verify", "reasoning_gym",
}  # fmt: skip
CODE = """
import sys
from rollcli.cli.app import main
sys.argv = ["roll", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
sys.stderr.write(" ".join(sorted({name.split(".")[0] for name in sys.modules})))
"""


def imported(folder, *words: str) -> set[str]:
    """Returns the packages that a command line imports."""
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["runs", "ls"], ["--version"]])
def test_nothing_heavy(tmp_path, words):
    assert imported(tmp_path, *words) & HEAVY == set()


def test_checking_a_recipe_imports_no_engine(tmp_path):
    recipe = "model: {path: x}\nsteps: 1\ntasks: [{name: a, source: sums, rewards: [{name: math}]}]\n"
    (tmp_path / "mine.yaml").write_text(recipe)
    allowed = {"omegaconf", "numpy"}
    assert imported(tmp_path, "config", "validate", "mine.yaml") & HEAVY <= allowed
    assert imported(tmp_path, "config", "show", "mine.yaml") & HEAVY <= allowed
    assert imported(tmp_path, "config", "explain", "seed") & HEAVY <= allowed - {"omegaconf"}
