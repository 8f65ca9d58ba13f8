"""The plan of a recipe on given hardware: a pure function.

    recipe ─▶ batch arithmetic ─┐
    config.json ─▶ model facts ─┼─▶ memory by part and role ─▶ roles on devices ─▶ fits, or what to change
    hardware, placement ────────┘

It imports neither torch nor Ray. Time is `simulate.py`'s, and ways to choose from are `search.py`'s.
"""

from __future__ import annotations

from rollcli.config.schema import Recipe
from rollcli.devices.assignment import assign
from rollcli.devices.changes import changes
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import Hardware
from rollcli.devices.layout import Plan, lay_out

__all__ = ["Plan", "assign", "plan"]


def plan(recipe: Recipe, hardware: Hardware, facts: ModelFacts) -> Plan:
    """Returns where the recipe's roles go on `hardware`, what they need, and what to change if that is too much.

    Raises:
        PlanError: the placement does not fit the devices, or a sequence the model's context; shows the arithmetic.
    """
    found = lay_out(recipe, hardware, facts)
    if not found.fits:
        found.changes, found.together = changes(recipe, hardware, facts)
    return found
