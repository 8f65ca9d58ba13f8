"""Every key of a recipe is documented, every registered name resolves, every error survives pickling."""

from __future__ import annotations

import ast
import pickle
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import rollcli
from rollcli import errors, registry
from rollcli.config.explain import describe, field_docs
from rollcli.config.schema import PIPELINES

ROOT = Path(rollcli.__file__).parent


@pytest.mark.parametrize("cls", PIPELINES.values(), ids=PIPELINES)
def test_every_key_says_what_it_means(cls):
    assert [doc.key for doc in describe(cls) if not doc.doc] == []


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_registered_name_resolves_and_is_documented(kind):
    for name in registry.builtin(kind):
        target = registry.resolve(kind, name)
        assert target.__doc__, f"{kind} `{name}` has no docstring"
        if is_dataclass(target):
            undocumented = {member.name for member in fields(target) if member.init} - set(field_docs(target))
            assert undocumented == set(), f"{kind} `{name}`"


def every_error() -> list[type]:
    found, rest = [], [errors.RollError]
    while rest:
        found.append(rest.pop())
        rest += found[-1].__subclasses__()
    return [cls for cls in found if cls.__module__.startswith("rollcli.")]


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls):
    error = pickle.loads(pickle.dumps(cls("what failed", hint="what to do")))
    assert type(error) is cls and str(error) == "what failed" and error.hint == "what to do"


def test_the_tree_in_the_docstring_is_whole():
    for cls in every_error():
        if cls.__module__ == "rollcli.errors":
            assert cls.__name__ in errors.__doc__ and cls.__doc__


def public(tree: ast.AST):
    """Yields public functions, classes and methods; a method that may override another is documented there."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef) and not node.bases:
                yield from public(node)


def test_every_module_and_public_name_has_a_docstring():
    missing = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and not ast.get_docstring(tree):
            missing.append(str(path.relative_to(ROOT)))
        missing += [f"{path.relative_to(ROOT)}:{n.lineno}: {n.name}" for n in public(tree) if not ast.get_docstring(n)]
    # A schema's `problems` is described once, in the module's docstring.
    assert [each for each in missing if not each.endswith(": problems")] == []
