"""The time of a step on given devices: the roofline's speeds, put through the simulation of events.

    Inputs ─▶ roofline.py: seconds of a decode step, of prefill, of each training stage ─▶ events.py ─▶ Simulation

`Inputs` knows of no recipe; `from_recipe` makes one. Roles that overlap on some of their devices take turns as if they
shared all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollcli.config.schema import RlRecipe
from rollcli.devices import roofline
from rollcli.devices.constants import Constants, Cost
from rollcli.devices.events import Run
from rollcli.devices.facts import ModelFacts
from rollcli.devices.lengths import Distribution, Fixed, long_tailed, longest_of
from rollcli.devices.roofline import Degrees, Rates
from rollcli.devices.workload import Schedule, Segment, Speeds, Stage, Trace, Work
from rollcli.errors import PlanError

QUICK_SAMPLES = 512
"""Samples of a step that a quick simulation follows; of larger ones it follows a part of the replicas and prompts."""
ASSUMED_SHARE = 0.25
"""Of `max_tokens`, the mean answer, where no lengths are given."""
MOST_ROWS = 4096


@dataclass(frozen=True)
class Inputs:
    """What a step's time depends on.

    Attributes:
        facts: the model's shapes.
        chip: of all devices.
        trainers: how the policy is spread.
        replicas: how one rollout replica is spread; `data` is how many there are.
        work: what a step samples and trains.
        colocated: sampling and training take turns on the same devices.
        max_rows: samples at most on one replica; fewer where its memory holds fewer.
        max_staleness, extra_groups: as in a recipe.
        micro_tokens: of one micro-batch.
        minibatches, epochs: optimizer steps of a pass over the batch, and passes.
        forwards: forward passes over the batch beside the update: of the reference, of the old policy.
        critic: a critic of the policy's shapes is trained as well.
        recompute: activations are computed anew in the backward pass.
        transport: of the weights: `cuda_ipc`, `broadcast` or `object_store`.
        offload: the optimizer's state leaves the device, too, when a colocated replica takes it.
        price: of one device for an hour, in any currency; None when it is not known.
        constants: what share of their peaks devices reach.
        seed: of all that is drawn.
        assumptions: what had to be assumed, for the reader.
    """

    facts: ModelFacts
    chip: Rates
    trainers: Degrees
    replicas: Degrees
    work: Work
    colocated: bool = False
    max_rows: int = 256
    max_staleness: int = 0
    extra_groups: int | None = None
    micro_tokens: int = 16384
    minibatches: int = 1
    epochs: int = 1
    forwards: int = 0
    critic: bool = False
    recompute: bool = False
    transport: str = "broadcast"
    offload: bool = False
    price: float | None = None
    constants: Constants = field(default_factory=Constants)
    seed: int = 0
    assumptions: tuple[str, ...] = ()

    @property
    def devices(self) -> dict[str, int]:
        """Devices of each group: of `policy` and `rollout`, or of `all` where these take turns."""
        if self.colocated:
            return {"all": max(self.trainers.devices, self.replicas.devices)}
        return {"policy": self.trainers.devices, "rollout": self.replicas.devices}


@dataclass(frozen=True)
class Simulation:
    """What a step takes, on average over the counted ones.

    Attributes:
        step_s: seconds of a step.
        steps: of each counted one.
        stages: seconds by stage, as the trainer sees them: `rollout` is how long it waits. They add up to `step_s`.
        costs: predicted parts by stage, for `constants.fit`; those of `rollout` in the shares of a decode step.
        devices: number of devices by group.
        idle: share of time in which a device of a group has nothing to do.
        rows: mean rows on a replica that decodes.
        tokens_per_s: of trained sequences, with their prompts.
        sampled_per_s: tokens decoded.
        controller_per_s: events that the driver handles: episodes that start and end, groups that end.
        requests_per_s: requests that replicas answer: turns.
        staleness: mean versions between admission and training.
        cost: of a step, in the currency of the price; None without one.
        timeline: what `policy` and `rollout` do in the last counted step, from its beginning; where they take turns
            both are the same devices. `tail` is when less than half of the replicas have anything to decode.
        assumptions: what had to be assumed.
    """

    step_s: float
    steps: tuple[float, ...]
    stages: dict[str, float]
    costs: dict[str, Cost]
    devices: dict[str, int]
    idle: dict[str, float]
    rows: float
    tokens_per_s: float
    sampled_per_s: float
    controller_per_s: float
    requests_per_s: float
    staleness: float
    cost: float | None
    timeline: tuple[Segment, ...]
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON; the keys are stable."""
        plain = {name: value for name, value in vars(self).items() if name not in ("costs", "timeline")}
        parts = {stage: dict(cost.parts) for stage, cost in self.costs.items()}
        return {**plain, "parts": parts, "timeline": [vars(segment) for segment in self.timeline]}


def simulate(inputs: Inputs, quick: bool = False, steps: int = 3) -> Simulation:
    """Returns what a step takes.

    Args:
        quick: follow a part of a large step only, for a search over many settings.
        steps: that are counted, after those that fill the pipeline.

    Raises:
        PlanError: a number cannot be.
    """
    check(inputs)
    work, schedule, part = inputs.work, _schedule(inputs, steps), 1.0
    if quick:
        work, schedule, part = _part(work, schedule)
    speeds, costs = speeds_of(inputs, schedule.max_rows)
    stages = tuple(replace(s, token_s=s.token_s / part, square_s=s.square_s / part) for s in speeds.stages)
    trace = Run(work, replace(speeds, stages=stages), schedule).run()
    return _summary(inputs, schedule, trace, costs, part)


def check(inputs: Inputs) -> None:
    """Looks at the numbers that people give.

    Raises:
        PlanError: one of them cannot be.
    """
    price, work = inputs.price, inputs.work
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise PlanError(f"a price of {price} for a device and hour cannot be", hint="give a number from 0")
    if not 0 <= work.refused < 1:
        raise PlanError(
            f"a share of {work.refused:g} refused groups cannot be",
            hint="give a number from 0 and below 1: with 1 no batch would ever be full",
        )
    if inputs.transport not in ("cuda_ipc", "broadcast", "object_store"):
        raise PlanError(
            f"unknown transport of weights `{inputs.transport}`", hint="known: cuda_ipc, broadcast, object_store"
        )
    for name in ("prompts", "group_size"):
        if getattr(work, name) < 1:
            raise PlanError(f"{name} is {getattr(work, name)}, must be at least 1")
    if not work.answers.mean > 0:
        raise PlanError("answers of no tokens cannot be simulated", hint="give lengths with a mean above 0")
    counts = {"max_rows": inputs.max_rows, "rollout replicas": inputs.replicas.data, "trainers": inputs.trainers.data}
    for name, count in counts.items():
        if count < 1:
            raise PlanError(f"{name}: {count} cannot be", hint="at least 1")


def from_recipe(
    recipe: RlRecipe,
    facts: ModelFacts,
    chip: Rates,
    colocated: bool,
    prompt_tokens: float,
    answers: Distribution | None = None,
    **more: Any,
) -> Inputs:
    """Returns the inputs that a recipe stands for.

    Args:
        colocated: whether policy and rollout share devices, as its placement says.
        prompt_tokens: mean tokens of a prompt.
        answers: tokens of a turn; None assumes `ASSUMED_SHARE` of `max_tokens` on average, with a published tail.
        more: fields of `Inputs` and of `Work` that no recipe says, as `price`, `constants`, `environment_s`.
    """
    policy, rollout, algorithm = recipe.policy, recipe.rollout, recipe.algorithm
    needs = algorithm.needs() if algorithm is not None else frozenset()
    assumptions = []
    if answers is None:
        answers = long_tailed(ASSUMED_SHARE * rollout.sampling.max_tokens, rollout.sampling.max_tokens)
        assumptions.append(
            f"answers of {answers.mean:,.0f} tokens on average ({ASSUMED_SHARE:.0%} of `max_tokens`), long-tailed"
        )
    old = not getattr(algorithm, "old_from_rollout", False)
    old = old and ("old" in needs or recipe.minibatches * recipe.epochs > 1)
    transport = rollout.sync.transport
    if transport == "auto":
        transport = "cuda_ipc" if colocated else "broadcast"
    spread, each = policy.parallel, rollout.parallel
    names = set(Work.__dataclass_fields__)
    given = {name: more.pop(name) for name in [*more] if name in names}
    return Inputs(
        facts=facts,
        chip=chip,
        trainers=Degrees(spread.tensor, spread.pipeline, spread.context, spread.expert, policy.workers),
        replicas=Degrees(each.tensor, each.pipeline, each.context, each.expert, rollout.replicas),
        work=Work(recipe.prompts_per_step, recipe.group_size, prompt_tokens, answers, **given),
        colocated=colocated,
        max_rows=rollout.max_rows,
        max_staleness=rollout.max_staleness,
        extra_groups=rollout.extra_groups,
        micro_tokens=policy.micro_batch_tokens,
        minibatches=recipe.minibatches,
        epochs=recipe.epochs,
        forwards=int(old) + bool(needs & {"reference", "reference_distribution"}),
        critic="critic" in needs,
        recompute=policy.recompute_activations,
        transport=transport,
        assumptions=tuple(assumptions),
        **more,
    )


def speeds_of(inputs: Inputs, rows: int) -> tuple[Speeds, dict[str, Cost]]:
    """Returns what the devices take, and the same by constant for each stage of training at its mean batch.

    Args:
        rows: most rows of a replica.
    """
    facts, chip, constants, work = inputs.facts, inputs.chip, inputs.constants, inputs.work
    tokens, squares = mean_batch(work)
    samples = work.prompts * work.group_size
    context = work.prompt_tokens + max(squares / tokens - work.prompt_tokens, 0.0) / 2
    parts = roofline.decode(facts, chip, constants, inputs.replicas, np.arange(rows + 1), context)
    common = (facts, chip, constants)
    reading = roofline.prefill(*common, inputs.replicas, work.prompt_tokens, work.prompt_tokens**2)
    costs, stages = {}, []
    passes = inputs.forwards + inputs.critic
    if passes:
        costs["logprobs"] = roofline.forward(*common, inputs.trainers, tokens, squares, inputs.micro_tokens) * passes
        flat = roofline.forward(*common, inputs.trainers, tokens, 0, inputs.micro_tokens) * passes
        stages.append(_stage("logprobs", Cost(), flat, costs["logprobs"], tokens, squares))

    def update(squares: float) -> Cost:
        optimizer_steps = inputs.minibatches * inputs.epochs
        sizes = (tokens * inputs.epochs, squares * inputs.epochs, inputs.micro_tokens)
        one = roofline.update(*common, inputs.trainers, *sizes, optimizer_steps, inputs.recompute)
        return one * (1 + inputs.critic) + fixed

    fixed = Cost({"step_s": constants.step_s})
    costs["update"] = update(squares)
    stages.append(_stage("update", fixed, update(0.0), costs["update"], tokens, squares))
    costs["sync"] = roofline.sync(*common, inputs.trainers, inputs.replicas, inputs.transport)
    if inputs.colocated:
        costs["switch"] = roofline.hand_over(facts, constants, inputs.trainers, inputs.replicas, inputs.offload)
    likely = min(max(round(samples / inputs.replicas.data / 2), 1), rows)
    costs["rollout"] = Cost({name: float(seconds[likely]) for name, seconds in parts.items() if seconds[likely] > 0})
    speeds = Speeds(
        step_s=tuple(sum(parts.values()).tolist()),
        prefill_s=reading.seconds / work.prompt_tokens if work.prompt_tokens else 0.0,
        stages=tuple(stages),
        sync_s=costs["sync"].seconds,
        switch_s=costs["switch"].seconds if inputs.colocated else 0.0,
    )
    return speeds, costs


def mean_batch(work: Work) -> tuple[float, float]:
    """Returns the expected tokens of a step's sequences, and their expected squared lengths, summed.

    Turns are taken as independent: the length of n of them, a tokens and an observation each, has the second moment
    E[n²] (E a)² + E[n] Var a.
    """
    samples, prompt, turn = work.prompts * work.group_size, work.prompt_tokens, work.answers
    turns = max(work.turns.mean, 1.0)
    each = turn.mean + work.observation_tokens * (turns > 1)
    spread = turn.mean * (turn.size_biased - turn.mean)
    answer = turns * each
    second = turns * max(work.turns.size_biased, 1.0) * each**2 + turns * spread
    return samples * (prompt + answer), samples * (prompt**2 + 2 * prompt * answer + second)


def _stage(name: str, fixed: Cost, flat: Cost, whole: Cost, tokens: float, squares: float) -> Stage:
    """A stage whose time is `whole` for the mean batch, and `flat` for one of as many tokens without attention."""
    token_s = (flat.seconds - fixed.seconds) / tokens
    return Stage(name, fixed.seconds, token_s, (whole.seconds - flat.seconds) / squares)


def _schedule(inputs: Inputs, steps: int) -> Schedule:
    tokens, _ = mean_batch(inputs.work)
    mean = tokens / (inputs.work.prompts * inputs.work.group_size)
    fitting = roofline.rows_that_fit(inputs.facts, inputs.chip, inputs.replicas, mean)
    return Schedule(
        replicas=inputs.replicas.data,
        max_rows=min(inputs.max_rows, fitting, MOST_ROWS),
        colocated=inputs.colocated,
        max_staleness=inputs.max_staleness,
        extra_groups=inputs.extra_groups,
        warmup=min(inputs.max_staleness, 4) + 2 if inputs.max_staleness else 0,
        steps=_whole_periods(steps, inputs.max_staleness),
        seed=inputs.seed,
    )


def _whole_periods(steps: int, max_staleness: int) -> int:
    """Returns steps enough for whole rounds of k + 1: once in so many, the slowest group of a version is waited for."""
    round_ = max_staleness + 1
    return steps if round_ > 6 else -(-steps // round_) * round_


def _part(work: Work, schedule: Schedule) -> tuple[Work, Schedule, float]:
    """Returns a smaller step with as much work for each replica, and what part of the whole it is.

    What a synchronous step waits for is the longest of all its answers, which a part of them lacks: it is put in.
    """
    wanted = QUICK_SAMPLES / (work.prompts * work.group_size)
    steps = _whole_periods(2, schedule.max_staleness) if schedule.max_staleness else 1
    if wanted >= 1:
        return work, replace(schedule, steps=steps), 1.0
    replicas = max(round(schedule.replicas * wanted), 1)
    prompts = max(round(work.prompts * replicas / schedule.replicas), 1)
    part = prompts / work.prompts
    extra = schedule.extra_groups
    smaller = replace(
        schedule, replicas=replicas, extra_groups=None if extra is None else round(extra * part), steps=steps
    )
    single = schedule.max_staleness == 0 and not isinstance(work.answers, Fixed) and work.turns == Fixed(1)
    longest = longest_of(work.answers, work.prompts * work.group_size) if single else 0.0
    return replace(work, prompts=prompts, longest=longest), smaller, part


def _summary(inputs: Inputs, schedule: Schedule, trace: Trace, costs: dict[str, Cost], part: float) -> Simulation:
    count, whole = len(trace.ends), trace.ends[-1]
    stages = {name: seconds / count for name, seconds in trace.seconds.items()}
    step_s, decoding_s = whole / count, trace.decoding_s / schedule.replicas / count
    if inputs.colocated:
        others = sum(seconds for name, seconds in stages.items() if name != "rollout")
        idle = {"all": 1 - (decoding_s + others) / step_s}
    else:
        idle = {
            "policy": stages.get("rollout", 0.0) / step_s,
            "rollout": 1 - (decoding_s + stages.get("sync", 0.0)) / step_s,
        }
    costs = dict(costs)
    if costs["rollout"].seconds:
        costs["rollout"] = costs["rollout"] * (stages.get("rollout", 0.0) / costs["rollout"].seconds)
    begin = whole - step_s if count == 1 else trace.ends[-2]
    timeline = tuple(replace(s, start=s.start - begin, end=s.end - begin) for s in trace.segments)
    hours = sum(inputs.devices.values()) * step_s / 3600
    return Simulation(
        step_s=step_s,
        steps=tuple(np.diff([0.0, *trace.ends]).tolist()),
        stages=stages,
        costs=costs,
        devices=inputs.devices,
        idle={name: max(share, 0.0) for name, share in idle.items()},
        rows=trace.rows,
        tokens_per_s=trace.trained / part / whole,
        sampled_per_s=trace.sampled / part / whole,
        controller_per_s=(2 * trace.episodes + trace.groups) / part / whole,
        requests_per_s=trace.requests / part / whole,
        staleness=trace.staleness,
        cost=None if inputs.price is None else hours * inputs.price,
        timeline=timeline,
        assumptions=inputs.assumptions,
    )
