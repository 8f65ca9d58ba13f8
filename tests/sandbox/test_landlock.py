"""A process that restricted itself reads and writes what was named, and nothing else."""

import os
import subprocess
import sys

import pytest

from rollcli.sandbox import landlock

CODE = """
import ctypes, os, sys
from rollcli.sandbox import landlock
rules = landlock.ruleset([sys.argv[1], "/does/not/exist"], [sys.argv[2]])
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
landlock.restrict(rules)
def attempt(path, mode):
    try:
        open(path, mode).close()
        return "yes"
    except PermissionError:
        return "no"
a, b = sys.argv[1:]
words = attempt(a + "/x", "r"), attempt(a + "/y", "w"), attempt(b + "/y", "w"), attempt("/etc/passwd", "r")
sys.stdout.write(" ".join(words))
"""


@pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")
def test_only_what_is_named(tmp_path):
    for name in ("a", "b"):
        os.mkdir(tmp_path / name)
    (tmp_path / "a" / "x").write_text("")
    words = [sys.executable, "-c", CODE, str(tmp_path / "a"), str(tmp_path / "b")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "yes no yes no"
