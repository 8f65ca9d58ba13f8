"""What to change when a plan does not fit, by the same memory model that found it too small."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from rollcli.config.schema import Recipe, RlRecipe
from rollcli.devices.assignment import role_workers
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import Hardware
from rollcli.devices.layout import Change, lay_out
from rollcli.devices.memory import GPU_SHARE
from rollcli.errors import PlanError

LEAST_TOKENS = 256
WORTH_GIB = 0.01


def changes(recipe: Recipe, hardware: Hardware, facts: ModelFacts) -> tuple[list[Change], bool]:
    """Returns the settings that would each make the plan fit; where none does, those that do, or do most, together.

    They come in the order in which they cost least: recomputation costs time, smaller micro-batches some speed, fewer
    rows longer rollouts, other numbers of workers devices or time, shorter answers what can be learned.

    Returns:
        The changes, and whether they are meant together.
    """
    single = [_best(recipe, key, values, hardware, facts) for key, values in _candidates(recipe, hardware)]
    enough = [change for change in single if change and change.fits]
    if enough:
        return enough, False
    together = []
    for key, values in _candidates(recipe, hardware):
        change = _best(recipe, key, values, hardware, facts)
        if change:
            together.append(change)
            recipe = changed(recipe, key, change.new)
            if change.fits:
                break
    return together, True


def _best(recipe: Recipe, key: str, values: list[Any], hardware: Hardware, facts: ModelFacts) -> Change | None:
    """Returns the first of `values` that makes the recipe fit, else the first that frees most; None if none helps."""
    before = lay_out(recipe, hardware, facts).free_gib
    best = None
    for value in values:
        try:
            after = lay_out(changed(recipe, key, value), hardware, facts).free_gib
        except PlanError:
            continue
        frees = after - before
        if frees > WORTH_GIB + (best.frees_gib if best else 0):
            best = Change(key, _value(recipe, key), value, round(frees, 2), after >= 0)
        if after >= 0:
            break
    return best


def changed(recipe: Recipe, key: str, value: Any) -> Recipe:
    """Returns a copy of the recipe with one setting changed."""
    recipe = copy.deepcopy(recipe)
    *parents, last = key.split(".")
    target: Any = recipe
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(target, dict):
        target[last] = value
    else:
        setattr(target, last, value)
    return recipe


def _candidates(recipe: Recipe, hardware: Hardware) -> Iterator[tuple[str, list[Any]]]:
    """Yields settings and values to try, the mildest first."""
    trained = {role: getattr(recipe, role) for role in ("policy", "critic") if role in role_workers(recipe)}
    for role, config in trained.items():
        if not config.recompute_activations:
            yield f"{role}.recompute_activations", [True]
    for role, config in trained.items():
        yield f"{role}.micro_batch_tokens", _halves(config.micro_batch_tokens, LEAST_TOKENS)
    if isinstance(recipe, RlRecipe):
        rows = -(-recipe.samples_per_step // recipe.rollout.replicas)
        if recipe.rollout.engine in GPU_SHARE and hardware.kind == "gpu":
            option, usual = GPU_SHARE[recipe.rollout.engine]
            now = recipe.rollout.engine_args.get(option, usual)
            shares = [share / 10 for share in range(8, 1, -1) if share / 10 < now]
            yield f"rollout.engine_args.{option}", shares
        yield "rollout.max_rows", _halves(min(recipe.rollout.max_rows, rows), 1)
    for role, config in trained.items():
        if hardware.kind == "gpu" and recipe.placement == "auto":
            yield f"{role}.workers", _doubles(config.workers, hardware.count)
        if hardware.kind == "cpu" and config.workers > 1:
            yield f"{role}.workers", _halves(config.workers, 1)
    if isinstance(recipe, RlRecipe):
        yield "rollout.sampling.max_tokens", _halves(recipe.rollout.sampling.max_tokens, LEAST_TOKENS)


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
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
