"""What to change when a plan does not fit: each setting that frees memory, by the same model that found it too small."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from rollcli.config.schema import Recipe, RlRecipe
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import Hardware
from rollcli.devices.layout import Change, Plan, lay_out
from rollcli.errors import PlanError

LEAST_TOKENS = 256
WORTH_GIB = 0.01


def changes(recipe: Recipe, hardware: Hardware, facts: ModelFacts, plan: Plan) -> list[Change]:
    """Returns settings that make `plan` fit, one at a time; where one alone is not enough, as far as it goes.

    Those that suffice come first, in the order in which they cost least: recomputation costs time, smaller
    micro-batches some speed, fewer rows longer rollouts, more workers devices, shorter answers what is learned.
    """
    found = []
    for key, values in _candidates(recipe, hardware):
        best = None
        for value in values:
            try:
                short = lay_out(changed(recipe, key, value), hardware, facts).short_gib
            except PlanError:
                continue
            frees = plan.short_gib - short
            if frees > WORTH_GIB and (best is None or frees > best.frees_gib + WORTH_GIB):
                best = Change(key, _value(recipe, key), value, round(frees, 2), short == 0)
            if short == 0:
                break
        if best:
            found.append(best)
    return sorted(found, key=lambda change: not change.fits)


def changed(recipe: Recipe, key: str, value: Any) -> Recipe:
    """Returns a copy of the recipe with one setting changed."""
    recipe = copy.deepcopy(recipe)
    *parents, last = key.split(".")
    target: Any = recipe
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, last, value)
    return recipe


def _candidates(recipe: Recipe, hardware: Hardware) -> Iterator[tuple[str, list[Any]]]:
    """Yields settings and values to try, the mildest first."""
    if not recipe.policy.recompute_activations:
        yield "policy.recompute_activations", [True]
    yield "policy.micro_batch_tokens", _halves(recipe.policy.micro_batch_tokens, LEAST_TOKENS)
    if isinstance(recipe, RlRecipe):
        rows = -(-recipe.samples_per_step // recipe.rollout.replicas)
        yield "rollout.max_rows", _halves(min(recipe.rollout.max_rows, rows), 1)
    if hardware.kind == "gpu" and recipe.placement == "auto":
        yield "policy.workers", _doubles(recipe.policy.workers, hardware.count)
    if hardware.kind == "cpu" and recipe.policy.workers > 1:
        yield "policy.workers", _halves(recipe.policy.workers, 1)
    if isinstance(recipe, RlRecipe):
        yield "rollout.sampling.max_tokens", _halves(recipe.rollout.sampling.max_tokens, LEAST_TOKENS)


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _halves(value: int, least: int) -> list[int]:
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def _doubles(value: int, most: int) -> list[int]:
    found = []
    while value < most:
        value = min(2 * value, most)
        found.append(value)
    return found
