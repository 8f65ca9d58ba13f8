"""Predicted beside measured: the plan's memory and the simulation's stages against what a run's metrics say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcli.config.schema import RlRecipe
from rollcli.devices.chips import Chip
from rollcli.devices.constants import Constants, Cost, fit
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import Hardware
from rollcli.devices.layout import Plan
from rollcli.devices.lengths import Distribution, Fixed
from rollcli.devices.simulate import from_recipe, simulate
from rollcli.errors import PlanError

CORE_TFLOPS, CORE_GB_S = 0.1, 8.0
"""Peaks of a core of a machine without accelerators: of float32 with wide vectors, and its share of the bandwidth."""
ROUNDS = 4
WARM = 1
"""First steps that are left out: caches are cold, kernels are chosen."""


@dataclass(frozen=True)
class Comparison:
    """One number: of memory in GiB, or of a stage in seconds.

    Attributes:
        name: of the metric, `memory/policy_gib` or `time/update_s`.
        predicted: by the plan or the simulation.
        measured: the largest of a run's steps for memory, the mean for times.
    """

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; infinite where nothing was predicted."""
        return self.measured / self.predicted if self.predicted else float("inf")


@dataclass(frozen=True)
class Lengths:
    """What a run's episodes were like, on average; `answers` are the tokens of a turn."""

    prompt_tokens: float
    answers: Distribution
    turns: float = 1.0
    observation_tokens: float = 0.0


def estimate(plan: Plan) -> dict[str, float]:
    """Returns what a plan predicts, by the name of the metric that measures it."""
    return {
        f"memory/{role}_gib": round(found.used_gib * found.workers, 4)
        for role, found in plan.roles.items()
        if role != "services"
    }


def chip_of(hardware: Hardware) -> Chip:
    """Returns the chip that a step's time is told for; of a machine without any, its cores as one.

    Raises:
        PlanError: there are several kinds.
    """
    if len(hardware.pools) > 1:
        raise PlanError(f"{hardware.label}: times are told for devices of one kind", hint="name one of them")
    if hardware.pools:
        return hardware.pools[0].chip
    cores = max(hardware.cores, 1)
    tflops, bandwidth = cores * CORE_TFLOPS, cores * CORE_GB_S
    return Chip(hardware.name, hardware.machine_gib, bandwidth, tflops, 0.0, bandwidth, bandwidth)


def stages(
    recipe: RlRecipe, facts: ModelFacts, hardware: Hardware, layout: str, lengths: Lengths,
    metrics: Sequence[Mapping[str, Any]], constants: Constants,
) -> list[tuple[Comparison, Cost]]:  # fmt: skip
    """Returns each stage's predicted and measured seconds, with the parts of the prediction for `fit`.

    Raises:
        PlanError: the run has too few steps, or its devices are of several kinds.
    """
    rows = list(metrics)[WARM:] or list(metrics)
    if not rows:
        raise PlanError("the run has not finished a step: there is nothing to compare with")
    inputs = from_recipe(
        recipe, facts, chip_of(hardware), layout != "split", lengths.prompt_tokens, lengths.answers,
        constants=constants, turns=Fixed(max(lengths.turns, 1.0)), observation_tokens=lengths.observation_tokens,
    )  # fmt: skip
    found = simulate(inputs)
    compared = []
    for name, seconds in found.stages.items():
        values = [row[f"time/{name}_s"] for row in rows if isinstance(row.get(f"time/{name}_s"), (int, float))]
        measured = sum(values) / len(values) if values else 0.0
        if measured > 0 and seconds > 0:
            compared.append((Comparison(f"time/{name}_s", seconds, measured), found.costs.get(name, Cost())))
    return compared


def memory(predicted: Mapping[str, float], metrics: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Returns each role's predicted and largest measured memory."""
    compared = []
    for name, value in predicted.items():
        values = [row[name] for row in metrics if isinstance(row.get(name), (int, float))]
        if values:
            compared.append(Comparison(name, value, max(values)))
    return compared


def calibrated(
    recipe: RlRecipe, facts: ModelFacts, hardware: Hardware, layout: str, lengths: Lengths,
    metrics: Sequence[Mapping[str, Any]], constants: Constants,
) -> Constants:  # fmt: skip
    """Returns constants under which the predictions come closest to the measurements.

    What a constant says of a stage depends on the others through the simulation, and one fit moves none far: several
    rounds are taken.

    Raises:
        PlanError: as `stages`; or no stage was measured.
    """
    for _ in range(ROUNDS):
        found = stages(recipe, facts, hardware, layout, lengths, metrics, constants)
        constants = fit(constants, [(cost, each.measured) for each, cost in found if cost.parts])
    return constants
