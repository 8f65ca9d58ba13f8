"""`tests/` mirrors `rollcli/`: a module's tests are found without searching."""

from __future__ import annotations

import ast
from pathlib import Path

import rollcli

ROOT = Path(rollcli.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
ELSEWHERE: dict[str, str] = {}
"""Module: test file that covers it under another name, and only for a reason that stands here."""


def has_code(path: Path) -> bool:
    """Returns whether a module defines anything that can be tested."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in tree.body)


def test_every_module_has_a_test_file():
    missing = []
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT)
        expected = ELSEWHERE.get(str(module), str(module.with_name(f"test_{module.name}")))
        if has_code(path) and not (TESTS / expected).is_file():
            missing.append(f"{module}: tests/{expected}")
    assert missing == []


def test_exceptions_are_still_needed():
    for module in ELSEWHERE:
        path = Path(module)
        assert (ROOT / path).is_file() and not (TESTS / path.with_name(f"test_{path.name}")).is_file()
