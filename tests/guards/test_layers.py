"""Imports point one way: nothing on the left of the house knows what is on its right.

A module sees what is below its own layer and what is in its own package. Imports under TYPE_CHECKING do not count.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import rollcli

ROOT = Path(rollcli.__file__).parent
LAYERS = [
    {"__init__", "companions", "errors", "registry", "suggest"},
    {"config"},
    {"runs", "devices", "sandbox"},
    {"data"},
    {"algorithms", "rewards", "environments"},
    {"engines"},
    {"cluster", "checkpoints", "trackers"},
    {"rollout"},
    {"pipelines"},
    {"verify"},
    {"doctor"},
    {"monitor"},
    {"cli"},
]
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("rollcli.devices.shapes", "rollcli.runs.locations"): "the model that is planned for may be a run's checkpoint",
}
"""(importing module, imported module): why it may, nevertheless. Empty it rather than fill it."""


@cache
def modules() -> dict[str, ast.Module]:
    """Returns every module of rollcli by its dotted name, parsed."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.AST, top_only: bool = False) -> set[str]:
    """Returns the modules of rollcli that a module imports, in functions too unless `top_only`."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if name in modules()} or {node.module}
        elif not (top_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            found |= imports(node, top_only)
    return {name for name in found if name in modules()}


def level(module: str) -> int:
    """Returns the layer of a module, counted from the bottom."""
    package = [*module.split("."), "__init__"][1]
    return next(number for number, layer in enumerate(LAYERS) if package in layer)


def same_package(a: str, b: str) -> bool:
    return a.split(".")[:2] == b.split(".")[:2] or level(a) == level(b) == 0


def test_every_package_has_a_layer():
    for module in modules():
        level(module)


def test_imports_point_down():
    wrong = [
        f"{module} imports {imported}"
        for module, tree in modules().items()
        for imported in sorted(imports(tree))
        if not same_package(module, imported)
        and level(imported) >= level(module)
        and (module, imported) not in EXCEPTIONS
    ]
    assert wrong == []


def test_exceptions_are_still_needed():
    for module, imported in EXCEPTIONS:
        assert imported in imports(modules()[module]), f"{module} no longer imports {imported}: drop the exception"


def test_no_cycles():
    graph = {module: imports(tree, top_only=True) - {module} for module, tree in modules().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
