"""Roles laid out on devices: what each device holds, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollcli.config.schema import Recipe, RlRecipe
from rollcli.devices.arithmetic import Arithmetic, arithmetic
from rollcli.devices.assignment import assign, is_placed, ranges, role_workers
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import Hardware
from rollcli.devices.memory import GPU_SHARE, parts_of
from rollcli.devices.parts import Part, Setting, peak_gib, peak_stage, role_gib, stage_gib

TIGHT = 0.05
"""Share of a device below which free memory is called `tight`: the allocator's fragmentation is not in the model."""


@dataclass(frozen=True)
class RolePlan:
    """One role: its workers, where they are, and the memory of one of them.

    Attributes:
        devices: of each worker in order of rank; empty for workers that hold none.
    """

    role: str
    engine: str | None
    workers: int
    devices: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def peak(self) -> str | None:
        """Stage in which a worker needs most; None when it always needs the same."""
        return peak_stage(self.parts)

    @property
    def used_gib(self) -> float:
        """Memory of one worker in that stage."""
        return peak_gib(self.parts)

    @property
    def total_gib(self) -> float:
        """Memory of all workers, each at its peak; what only the first one holds counts once."""
        return role_gib(self.parts, self.workers)

    @property
    def host_gib(self) -> float:
        """Main memory that all workers need beside their accelerators: what is offloaded, what a checkpoint gathers."""
        return sum(part.gib * (1 if part.once else self.workers) for part in self.parts if part.host)

    def turn_gib(self, turn: str) -> float:
        """Returns a worker's memory while roles that share its device take turns: `sample`, `sync` or `train`.

        Trainers keep what is theirs for a sync, and a replica its weights; whose turn it is not keeps its context.
        """
        if turn == "sync":
            return stage_gib(self.parts, "sync")
        if (turn == "sample") == (self.role == "rollout"):
            return self.used_gib
        return sum(part.gib for part in self.parts if part.name == "context")

    def at_peak(self, part: Part) -> bool:
        """Returns whether a part is on the device when the worker needs most."""
        return not part.host and (not part.stages or self.peak in part.stages)

    def part_gib(self, *names: str) -> float:
        """Returns the memory of the parts with these names when the worker needs most."""
        return sum(part.gib for part in self.parts if part.name in names and self.at_peak(part))


@dataclass(frozen=True)
class DevicePlan:
    """Devices that hold the same roles, or the machine that holds all of them.

    Attributes:
        devices: their numbers; empty for a machine without accelerators.
        roles: role to its workers on one of these devices.
        used_gib: sum over the workers, each at its peak: processes keep what they once had, so peaks add up. Where
            trainers and replicas take turns, the turn that needs most.
        memory_gib: of one device.
        turns: what each turn needs, where they take turns.
    """

    devices: tuple[int, ...]
    roles: Mapping[str, int]
    used_gib: float
    memory_gib: float
    turns: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Device numbers, or `cpu`."""
        return ranges(self.devices).replace("-", "–") or "cpu"

    @property
    def free_gib(self) -> float:
        """Memory left; negative when there is too little."""
        return self.memory_gib - self.used_gib

    @property
    def status(self) -> str:
        """`ok`, `tight`, `over` or `unused`."""
        if not self.roles:
            return "unused"
        if self.free_gib < 0:
            return "over"
        return "tight" if self.free_gib < TIGHT * self.memory_gib else "ok"


@dataclass(frozen=True)
class Change:
    """A setting that frees memory.

    Attributes:
        frees_gib: on the fullest device; of several changes, beside those before it.
        fits: whether that is enough.
    """

    key: str
    old: Any
    new: Any
    frees_gib: float
    fits: bool

    @property
    def override(self) -> str:
        """The setting as it is typed after a recipe's name."""
        new = str(self.new).lower() if isinstance(self.new, bool) else self.new
        return f"{self.key}={new}"


@dataclass
class Plan:
    """Where everything goes and what it needs.

    Attributes:
        layout: `colocated` (policy and rollout on the same devices), `split`, `overlapping`, or `alone` (no rollout).
        reason: why it is laid out so.
        host: roles that hold no accelerator on GPU hardware, with their memory in GiB.
        batch, sequence: arithmetic in lines.
        changes: settings that would make it fit, when it does not: each alone, or all `together`.
        notes: what is assumed or approximate.
    """

    hardware: Hardware
    facts: ModelFacts
    sizes: Arithmetic
    layout: str
    reason: str
    roles: dict[str, RolePlan]
    devices: list[DevicePlan]
    host: dict[str, float]
    batch: list[str]
    sequence: list[str]
    notes: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    together: bool = False

    @property
    def assignment(self) -> dict[str, list[int]]:
        """Devices of each role that holds any, as the runtime wants them."""
        return {role: list(plan.devices) for role, plan in self.roles.items() if is_placed(role)}

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return all(device.free_gib >= 0 for device in self.devices)

    @property
    def free_gib(self) -> float:
        """Memory left on the fullest device; negative when it has too little."""
        return min(device.free_gib for device in self.devices)

    @property
    def short_gib(self) -> float:
        """Memory that the fullest device lacks; 0 when all fits."""
        return max(0.0, -self.free_gib)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON; the keys are stable."""
        return {
            "fits": self.fits,
            "hardware": self.hardware.to_dict(),
            "model": {
                "name": self.facts.name,
                "model_type": self.facts.model_type,
                "parameters": {**self.facts.parameters, "total": self.facts.total, "active": self.facts.active},
                "context": self.facts.context,
                "origin": self.facts.origin,
                "approximate": list(self.facts.approximate),
            },
            "layout": self.layout,
            "reason": self.reason,
            "roles": [_role_dict(role) for role in self.roles.values()],
            "devices": [
                {
                    "devices": list(device.devices),
                    "workers": dict(device.roles),
                    "used_gib": round(device.used_gib, 3),
                    "memory_gib": round(device.memory_gib, 3),
                    "free_gib": round(device.free_gib, 3),
                    "status": device.status,
                    "turns_gib": {turn: round(gib, 3) for turn, gib in device.turns.items()},
                }
                for device in self.devices
            ],
            "host_gib": {role: round(gib, 3) for role, gib in self.host.items()},
            "batch": {name: size for name, size in vars(self.sizes).items() if isinstance(size, int)},
            "text": {"batch": self.batch, "sequence": self.sequence},
            "changes": [{**vars(change), "override": change.override} for change in self.changes],
            "together": self.together,
            "notes": self.notes,
        }


def lay_out(recipe: Recipe, hardware: Hardware, facts: ModelFacts) -> Plan:
    """Returns the plan of a recipe, without advice.

    Raises:
        PlanError: the placement does not fit the devices, or a sequence the model's context.
    """
    sizes = arithmetic(recipe, facts)
    held = assign(recipe, hardware.count)
    setting = Setting(recipe, facts, sizes, hardware.kind == "gpu")
    least = {
        role: min((hardware.pool_of(device).chip.memory_gib for device in devices), default=0.0)
        for role, devices in held.items()
    }
    engines = {"policy": recipe.policy.engine}
    if isinstance(recipe, RlRecipe):
        engines |= {"reference": recipe.reference_workers.engine}
        engines |= {"rollout": recipe.rollout.engine, "critic": recipe.critic.engine}
        engines |= {model.role: model.engine for model in recipe.reward_models}
    roles = {
        role: RolePlan(
            role,
            engines.get(role),
            count,
            tuple(held.get(role, ())),
            parts_of(role, replace(setting, memory_gib=least.get(role, 0.0))),
        )
        for role, count in {**role_workers(recipe), "services": 1}.items()
    }
    layout, reason = _layout(recipe, held, hardware)
    turns = setting.gpu and _take_turns(recipe, held)
    plan = Plan(
        hardware=hardware,
        facts=facts,
        sizes=sizes,
        layout=layout,
        reason=reason,
        roles=roles,
        devices=_devices(roles, hardware, turns),
        host=_host(roles, held, turns) if setting.gpu else {},
        batch=list(sizes.lines),
        sequence=_sequence_lines(recipe, facts, sizes),
    )
    plan.notes = _notes(plan, recipe, setting)
    return plan


def _layout(recipe: Recipe, held: Mapping[str, list[int]], hardware: Hardware) -> tuple[str, str]:
    policy, rollout = held["policy"], held.get("rollout")
    if rollout is None:
        return "alone", "supervised fine-tuning starts the policy only"
    if hardware.kind == "cpu":
        return "colocated", "a machine without accelerators: all workers share it"
    shared = set(policy) & set(rollout)
    layout = "split" if not shared else "colocated" if set(policy) == set(rollout) else "overlapping"
    if recipe.placement != "auto":
        return layout, "as the recipe's `placement` says"
    arithmetic = f"{len(policy)} policy + {len(rollout)} rollout workers"
    if (critic := set(held.get("critic", ()))) and not critic & {*policy, *rollout}:
        arithmetic = f"{len(policy)} policy + {len(critic)} critic + {len(rollout)} rollout workers"
    if not shared:
        return layout, f"{arithmetic} have a device each on {hardware.count}"
    return layout, f"{arithmetic} on {hardware.count} device{'s' * (hardware.count != 1)}: they share"


def _take_turns(recipe: Recipe, held: Mapping[str, list[int]]) -> bool:
    """Whether trainers and replicas share devices and give them up to each other (pipelines/roles.py): those of a
    synchronous run do, in an asynchronous one both work at once."""
    if not isinstance(recipe, RlRecipe) or recipe.rollout.max_staleness:
        return False
    trained = {device for role, devices in held.items() if role != "rollout" for device in devices}
    return bool(trained & set(held["rollout"]))


def _host(roles: Mapping[str, RolePlan], held: Mapping[str, list[int]], turns: bool) -> dict[str, float]:
    """Returns the main memory that roles without devices take, and what those with devices keep there: what they
    offload, and where they take turns what of trainers waits while the replicas sample."""
    host = {role: plan.used_gib * plan.workers for role, plan in roles.items() if role not in held}
    offloaded = sum(plan.host_gib for role, plan in roles.items() if role in held)
    if turns:
        asleep = [plan for role, plan in roles.items() if role in held and role != "rollout"]
        offloaded += sum(
            part.gib * plan.workers
            for plan in asleep
            for part in plan.parts
            if not part.stages and not part.host and part.name != "context"
        )
    return {**host, "offloaded": offloaded} if offloaded else host


def _devices(roles: Mapping[str, RolePlan], hardware: Hardware, turns: bool) -> list[DevicePlan]:
    """Groups devices that hold the same."""
    if hardware.kind == "cpu":
        counts = {role: plan.workers for role, plan in roles.items()}
        used = sum(plan.total_gib for plan in roles.values())
        return [DevicePlan((), counts, used, hardware.machine_gib)]
    alike: dict[tuple[float, tuple[str, ...]], list[int]] = {}
    places = {role: set(plan.devices) for role, plan in roles.items()}
    device = 0
    for pool in hardware.pools:
        for _ in range(pool.count):
            held = tuple(role for role, there in places.items() if device in there)
            alike.setdefault((pool.chip.memory_gib, held), []).append(device)
            device += 1
    return [_device(devices, held, roles, memory_gib, turns) for (memory_gib, held), devices in alike.items()]


def _device(
    devices: list[int], held: tuple[str, ...], roles: Mapping[str, RolePlan], memory_gib: float, turns: bool
) -> DevicePlan:
    counts, used = dict.fromkeys(held, 1), sum(roles[role].used_gib for role in held)
    if not turns or "rollout" not in held or len(held) == 1:
        return DevicePlan(tuple(devices), counts, used, memory_gib)
    needs = {turn: sum(roles[role].turn_gib(turn) for role in held) for turn in ("sample", "sync", "train")}
    return DevicePlan(tuple(devices), counts, max(needs.values()), memory_gib, needs)


def _sequence_lines(recipe: Recipe, facts: ModelFacts, sizes: Arithmetic) -> list[str]:
    context = f" (context {facts.context:,})" if facts.context else ""
    if not isinstance(recipe, RlRecipe):
        return [f"demonstrations of any length up to the context of {facts.context:,} tokens"]
    lines = [f"≤ {sizes.prompt:,} prompt + ≤ {sizes.answer:,} answer = {sizes.sequence:,} tokens{context}"]
    at_once = f"each rollout replica decodes ≤ {sizes.rows:,} at once"
    replicas = recipe.rollout.replicas
    shared = f" ÷ {replicas} replicas" if replicas > 1 else ""
    sampled = f"{sizes.answers:,} {'samples' if sizes.answers == sizes.samples else 'answers'}"
    share = f"{sampled}{shared}, `rollout.max_rows` {recipe.rollout.max_rows}"
    return [*lines, f"{at_once} ({share})"]


def _notes(plan: Plan, recipe: Recipe, setting: Setting) -> list[str]:
    notes = [*plan.hardware.notes, *plan.facts.approximate]
    if plan.sizes.assumption:
        notes.append(plan.sizes.assumption)
    if plan.facts.experts:
        notes.append("activations of experts depend on how evenly the router spreads tokens; even is assumed")
    for device in plan.devices:
        if device.turns:
            needs = ", ".join(f"{turn} {gib:,.1f}" for turn, gib in device.turns.items())
            notes.append(f"roles on gpu {device.label} take turns and give the device up: {needs} GiB")
    notes += _waiting(plan, setting)
    unused = [device for device in plan.devices if device.status == "unused"]
    if unused:
        notes.append(f"gpu {unused[0].label} unused: more `policy.workers` or `rollout.replicas` would use them")
    if plan.roles["policy"].workers > -(-plan.sizes.samples // plan.sizes.minibatches):
        notes.append("there are more policy workers than samples in a minibatch: some have nothing to do")
    if "critic" in plan.roles and recipe.critic.path is not None:
        notes.append(f"the critic is planned with the policy's shapes; those of `{recipe.critic.path}` may differ")
    for part in plan.roles["services"].parts:
        if part.name == "distribution":
            notes.append(
                f"the reference's distribution of every token of a step is in the driver, {part.formula} = "
                f"{part.gib:,.1f} GiB at most, and in parts on its way to the workers; other KL estimators need none"
            )
    return notes


def _waiting(plan: Plan, setting: Setting) -> list[str]:
    """Notes where a replica's cache holds fewer rows than it may decode, which costs time and no memory."""
    rollout = plan.roles.get("rollout")
    if rollout is None or rollout.engine not in GPU_SHARE or not setting.gpu:
        return []
    kept = sum(part.gib for part in rollout.parts if part.name == "kv")
    asked = sum(part.gib for part in parts_of("rollout", setting) if part.name == "kv")
    if kept >= asked:
        return []
    rows = int(kept / asked * plan.sizes.rows)
    return [f"a replica's cache holds {rows:,} of {plan.sizes.rows:,} rows at their longest: others wait"]


def _role_dict(plan: RolePlan) -> dict[str, Any]:
    return {
        "role": plan.role,
        "engine": plan.engine,
        "workers": plan.workers,
        "devices": list(plan.devices),
        "used_gib": round(plan.used_gib, 3),
        "peak": plan.peak,
        "parts": [
            {
                "name": part.name,
                "gib": round(part.gib, 3),
                "formula": part.formula,
                "stages": list(part.stages),
                "host": part.host,
                "at_peak": plan.at_peak(part),
            }
            for part in plan.parts
        ],
    }
