"""Only `cli/output.py` prints, and nothing asks."""

from __future__ import annotations

import ast
from pathlib import Path

import rollcli

ROOT = Path(rollcli.__file__).parent


def calls(path: Path) -> list[str]:
    """Returns the places of `print` and `input`, and of writes to the standard streams, in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("print", "input", "breakpoint", "sys.stdout.write", "sys.stderr.write", "typer.echo"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    return found


def test_one_place_prints():
    found = [call for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "cli" / "output.py" for call in calls(path)]
    assert found == []
    assert len(calls(ROOT / "cli" / "output.py")) == 1
