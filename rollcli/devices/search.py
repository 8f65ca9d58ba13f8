"""The best ways to put a recipe's roles on given devices: what fits, by the memory model, ranked by the simulation.

    colocated, split in several shares, tensor degrees ─▶ most that fits ─▶ rough time ─▶ the best of them simulated

What a search changes is where and how things run: workers, replicas, degrees of parallelism, micro-batches,
recomputation, placement. Of what is learned it changes one thing, and only where it is told to: `max_staleness`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from rollcli.config.schema import ParallelConfig, RlRecipe
from rollcli.devices.assignment import ranges
from rollcli.devices.changes import changed
from rollcli.devices.constants import Constants
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import Hardware
from rollcli.devices.layout import Plan, lay_out
from rollcli.devices.lengths import Distribution
from rollcli.devices.simulate import Inputs, Simulation, from_recipe, mean_batch, simulate, speeds_of
from rollcli.errors import PlanError

DEGREES = {"fsdp": ("tensor", "context", "expert"), "megatron": ("tensor", "expert"), "deepspeed": ()}
"""What each training engine spreads a model by; `context` is left to the user, who knows how long sequences are."""
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
"""Of the devices, those of the trainers where roles have their own."""
MICRO_TOKENS = (65536, 32768, 16384, 8192, 4096)
SIMULATED = 20
"""Candidates that are simulated: the best by a rough time."""
ASSUMED_PROMPT = 512
"""Mean tokens of a prompt where nothing is known of it."""


@dataclass(frozen=True)
class Choice:
    """One way that fits.

    Attributes:
        settings: keys of the recipe and the values it takes.
        plan: what each device holds.
        simulation: what a step takes.
        why: what speaks for it, and what it costs.
    """

    settings: dict[str, Any]
    plan: Plan
    simulation: Simulation
    why: str

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells ways apart that are worth a choice: layout, devices of each role, staleness."""
        placement, staleness = self.settings["placement"], self.settings.get("rollout.max_staleness")
        return self.plan.layout, placement["policy"], placement["rollout"], staleness

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON; the keys are stable."""
        return {
            "settings": self.settings,
            "why": self.why,
            "used_gib": round(max(device.used_gib for device in self.plan.devices), 3),
            "free_gib": round(self.plan.free_gib, 3),
            "simulation": self.simulation.to_dict(),
        }


@dataclass(frozen=True)
class Question:
    """What is searched for.

    Attributes:
        recipe: whose batch, algorithm and engines stay as they are.
        prompt_tokens: mean tokens of a prompt.
        answers: tokens of an answer; None assumes a long tail.
        price: of a device for an hour; None when it is not known.
        staleness: values of `max_staleness` to try where roles have devices of their own.
        constants: of the time model.
    """

    recipe: RlRecipe
    hardware: Hardware
    facts: ModelFacts
    prompt_tokens: float = ASSUMED_PROMPT
    answers: Distribution | None = None
    price: float | None = None
    staleness: Sequence[int] = ()
    constants: Constants = Constants()


def search(question: Question, count: int = 3) -> list[Choice]:
    """Returns the best ways that fit, the fastest first; empty when none does.

    Raises:
        PlanError: there is no accelerator, or there are several kinds; the recipe's sequences do not fit the model.
    """
    hardware = question.hardware
    if hardware.kind == "cpu":
        raise PlanError(
            "on a machine without accelerators all roles share it: there is nothing to search",
            hint="name accelerators, for example `--gpus 8xH100-80GB`",
        )
    fitting = [(_rough_s(inputs), way, inputs) for way, inputs in _fitting(question)]
    fitting.sort(key=lambda found: found[0])
    choices = [
        Choice(settings, plan, simulate(inputs, quick=True), "") for _, (settings, plan), inputs in fitting[:SIMULATED]
    ]
    choices.sort(key=lambda choice: choice.simulation.step_s)
    # Ways that differ in a degree alone are close to each other: of each kind one is shown.
    kinds: dict[tuple[Any, ...], Choice] = {}
    for choice in choices:
        kinds.setdefault(choice.kind, choice)
    return [replace(choice, why=_why(choice, choices[0])) for choice in [*kinds.values()][:count]]


def frontier(question: Question) -> list[Choice]:
    """Returns the best way on all devices, on half of them, a quarter, …, leaving out those that gain nothing.

    From the first to the last a step takes longer and holds fewer devices.
    """
    found: list[Choice] = []
    pool = question.hardware.pools[0]
    count = question.hardware.count
    while count >= 1:
        smaller = replace(question.hardware, pools=(replace(pool, count=count),))
        best = search(replace(question, hardware=smaller), 1)
        if best:
            while found and found[-1].simulation.step_s >= best[0].simulation.step_s:
                found.pop()
            found.append(best[0])
        count //= 2
    return found


def _fitting(question: Question) -> Iterator[tuple[tuple[dict[str, Any], Plan], Inputs]]:
    """Yields the ways whose memory fits, each with the largest micro-batch that does, recomputing if it must."""
    recipe, hardware, facts = question.recipe, question.hardware, question.facts
    for way in _ways(recipe, hardware, facts):
        for settings, made, plan in _that_fit(recipe, way, hardware, facts):
            yield from _aged(question, settings, made, plan)


def _aged(
    question: Question, settings: dict[str, Any], made: RlRecipe, plan: Plan
) -> Iterator[tuple[tuple[dict[str, Any], Plan], Inputs]]:
    """Yields a way with each staleness that is allowed and makes sense for its layout."""
    given, split = question.recipe.rollout.max_staleness, plan.layout == "split"
    for staleness in dict.fromkeys([given, *question.staleness]):
        if split or not staleness:
            aged, chosen = made, settings
            if staleness != given:
                aged = changed(made, "rollout.max_staleness", staleness)
                chosen = {**settings, "rollout.max_staleness": staleness}
            inputs = from_recipe(
                aged, question.facts, _chip(question.hardware), not split, question.prompt_tokens, question.answers,
                price=question.price, constants=question.constants,
            )  # fmt: skip
            yield (chosen, plan), inputs


def _chip(hardware: Hardware) -> Any:
    """Returns the chip of all devices.

    Raises:
        PlanError: they are of several kinds.
    """
    if len(hardware.pools) > 1:
        raise PlanError(
            f"{hardware.label}: devices of several kinds are planned for, not searched over",
            hint="search each kind on its own, or write the placement yourself",
        )
    return hardware.pools[0].chip


def _ways(recipe: RlRecipe, hardware: Hardware, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    """Yields settings of workers, degrees and placement: sharing all devices, or each role with its own."""
    count, per_node = hardware.count, min(hardware.pools[0].per_node, hardware.count)
    spread = DEGREES.get(recipe.policy.engine, ())
    asynchronous = recipe.rollout.max_staleness > 0
    for tensor in _degrees(facts, per_node) if "tensor" in spread else [1]:
        for each in _degrees(facts, per_node):
            if not asynchronous and count % tensor == 0 and count % each == 0:
                yield _way(recipe, tensor, each, range(count), range(count), facts, spread)
            for share in SHARES if count > 1 else ():
                trainers = max(tensor, round(share * count) // tensor * tensor)
                samplers = count - trainers
                if samplers >= each and samplers % each == 0:
                    yield _way(recipe, tensor, each, range(trainers), range(trainers, count), facts, spread)


def _degrees(facts: ModelFacts, per_node: int) -> list[int]:
    """Returns the tensor degrees that a model's heads can be split by within a node."""
    return [n for n in (1, 2, 4, 8, 16) if n <= per_node and facts.heads % n == 0]


def _way(
    recipe: RlRecipe, tensor: int, each: int, policy: range, rollout: range, facts: ModelFacts, spread: Sequence[str]
) -> dict[str, Any]:
    expert = 1
    if facts.experts and "expert" in spread:
        expert = max(n for n in (1, 2, 4, 8, 16, 32, 64) if facts.experts % n == 0 and len(policy) % n == 0)
    degrees = {"tensor": tensor, "expert": expert}
    settings: dict[str, Any] = {
        "policy.workers": len(policy) // tensor,
        "policy.parallel": {name: n for name, n in degrees.items() if n > 1},
        "rollout.replicas": len(rollout) // each,
        "rollout.parallel": {"tensor": each} if each > 1 else {},
        "placement": {"policy": ranges(tuple(policy)), "rollout": ranges(tuple(rollout))},
    }
    needs = recipe.algorithm.needs()
    if "critic" in needs:
        settings |= {"critic.workers": settings["policy.workers"], "critic.parallel": settings["policy.parallel"]}
        settings["placement"]["critic"] = ranges(tuple(policy))
    if needs & {"reference", "reference_distribution"} and not recipe.is_own_reference:
        settings |= {"reference.workers": None, "reference.parallel": None}
        settings["placement"]["reference"] = ranges(tuple(policy))
    for model in recipe.reward_models:  # beside the rollout, which waits for them
        wanted = model.replicas * model.parallel.processes
        settings["placement"][model.role] = ranges(tuple(range(max(rollout.stop - wanted, 0), rollout.stop)))
    return settings


def _that_fit(
    recipe: RlRecipe, way: dict[str, Any], hardware: Hardware, facts: ModelFacts
) -> Iterator[tuple[dict[str, Any], RlRecipe, Plan]]:
    """Yields a way with the largest micro-batch that fits, without and with recomputation: settings, recipe, plan."""
    made = recipe
    for key, value in way.items():
        made = changed(made, key, ParallelConfig(**value) if key.endswith(".parallel") and value is not None else value)
    if list(made.problems()):
        return
    trained = ("policy", "critic") if "critic" in recipe.algorithm.needs() else ("policy",)
    for recompute in (False, True):
        for tokens in MICRO_TOKENS:
            own = {f"{role}.recompute_activations": recompute for role in trained}
            own |= {f"{role}.micro_batch_tokens": tokens for role in trained}
            tried = made
            for key, value in own.items():
                tried = changed(tried, key, value)
            try:
                plan = lay_out(tried, hardware, facts)
            except PlanError:
                return
            if plan.fits:
                yield {key: value for key, value in {**way, **own}.items() if value not in ({}, None)}, tried, plan
                break


def _rough_s(inputs: Inputs) -> float:
    """Returns a step's seconds by mean lengths: the sum of its stages, or the longer of two that overlap."""
    work, schedule_rows = inputs.work, inputs.max_rows
    speeds, _ = speeds_of(inputs, schedule_rows)
    tokens, squares = mean_batch(work)
    samples = work.prompts * work.group_size
    rows = min(max(-(-samples // inputs.replicas.data), 1), schedule_rows)
    waves = -(-samples // (inputs.replicas.data * rows))
    sampling = waves * work.answers.mean * work.turns.mean * speeds.step_s[rows]
    training = sum(stage.fixed_s + stage.token_s * tokens + stage.square_s * squares for stage in speeds.stages)
    if inputs.max_staleness:
        return max(sampling, training) + speeds.sync_s
    return sampling + training + speeds.sync_s + 2 * speeds.switch_s


def _why(choice: Choice, best: Choice) -> str:
    """Says what the way is, where its time goes, and how far behind the best it is."""
    found, plan = choice.simulation, choice.plan
    stages = sorted(found.stages.items(), key=lambda item: -item[1])
    longest = ", ".join(f"{name} {seconds / found.step_s:.0%}" for name, seconds in stages[:2])
    idle = ", ".join(f"{name} idle {share:.0%}" for name, share in found.idle.items())
    said = [f"{plan.layout}; {longest} of the step; {idle}"]
    if choice.settings.get("policy.recompute_activations"):
        said.append("recomputes activations to make room")
    if choice.settings.get("rollout.max_staleness"):
        said.append("trains on samples of an earlier policy, which changes what is learned")
    if choice is not best:
        said.append(f"{found.step_s / best.simulation.step_s - 1:+.0%} time against the first")
    return "; ".join(said)


def recipe_text(values: Mapping[str, Any], choice: Choice) -> str:
    """Returns a whole recipe: the plain `values` of one, with a choice's settings in them."""
    merged = copy.deepcopy(dict(values))
    for key, value in choice.settings.items():
        target = merged
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    found = choice.simulation
    head = f"# {choice.why}.\n# Expected: {found.step_s:,.1f} s a step on {sum(found.devices.values())} devices.\n"
    return head + yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, width=110)
