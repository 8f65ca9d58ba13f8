"""Catching everything is rare, and each place says why.

A handler that cleans up and raises again catches nothing, so it is not counted.
"""

from __future__ import annotations

import ast
from pathlib import Path

import rollcli

ROOT = Path(rollcli.__file__).parent
MOST = 12
"""Two of them are the sandbox's, whose programs and tests raise whatever they like."""


def broad() -> list[tuple[Path, int]]:
    """Returns file and line of every handler that keeps `Exception`, `BaseException` or everything."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                names = {ast.unparse(each) if each is not None else "everything" for each in caught}
                raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if names & {"Exception", "BaseException", "everything"} and not raises_again:
                    found.append((path, node.lineno))
    return found


def test_few():
    places = [f"{path.relative_to(ROOT)}:{line}" for path, line in broad()]
    assert len(places) <= MOST, places


def test_each_says_why():
    silent = []
    for path, line in broad():
        lines = path.read_text(encoding="utf-8").splitlines()
        around = (lines[line - 2].strip(), lines[line - 1].partition("except")[2], lines[line].strip())
        if not (around[0].startswith("#") or "#" in around[1] or around[2].startswith("#")):
            silent.append(f"{path.relative_to(ROOT)}:{line}")
    assert silent == []
