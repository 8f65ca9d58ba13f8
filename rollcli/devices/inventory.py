"""Hardware as a YAML file or a Ray cluster describes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcli.config.build import Builder
from rollcli.config.load import read_yaml
from rollcli.devices.chips import Chip, catalogue, chips_from, find_chip
from rollcli.devices.hardware import GIB, MOST_DEVICES, Hardware, Pool, check_total, cpu
from rollcli.errors import ConfigError, PlanError


@dataclass(frozen=True)
class _PoolEntry:
    """One item of `pools` in a hardware file."""

    chip: str
    count: int
    nodes: int = 1

    def problems(self) -> Iterable[tuple[str, str]]:
        for field in ("count", "nodes"):
            if not 0 < getattr(self, field) <= MOST_DEVICES:
                yield field, f"must be from 1 to {MOST_DEVICES:,}, is {getattr(self, field):,}"


@dataclass(frozen=True)
class _MachineEntry:
    """`cpu` in a hardware file."""

    cores: int
    memory_gib: float

    def problems(self) -> Iterable[tuple[str, str]]:
        for field in ("cores", "memory_gib"):
            if getattr(self, field) <= 0:
                yield field, f"must be above 0, is {getattr(self, field):g}"


def read_hardware(path: Path, chips: Mapping[str, Chip] | None = None) -> Hardware:
    """Returns the hardware that a YAML file describes.

        pools:                      # or `cpu: {cores: 64, memory_gib: 512}`
          - {chip: H100-80GB, count: 8, nodes: 4}     # 8 in each of 4 nodes
          - {chip: mine, count: 4}
        chips:                      # optional: in the format of chips.yaml
          mine: {memory_gib: 96, bandwidth_gb_s: 3000, ...}

    Raises:
        ConfigError: the file cannot be read or says something else; every problem at its place.
        PlanError: an unknown chip, at its place.
    """
    values, places = read_yaml(path)
    known = {**(catalogue() if chips is None else chips)}
    builder = Builder(places)
    for key in values:
        if key not in ("pools", "cpu", "chips"):
            builder.unknown((key,), ["pools", "cpu", "chips"])
    if ("pools" in values) == ("cpu" in values):
        builder.report((), "a hardware file has either `pools` or `cpu`")
    own, listed = values.get("chips") or {}, values.get("pools") or []
    if not isinstance(own, Mapping):
        builder.report(("chips",), "expected a block of chips")
    elif own:
        known |= chips_from(own, places, ("chips",))
    if not isinstance(listed, list) or ("pools" in values and not listed):
        listed = builder.report(("pools",), "expected a list of `{chip, count, nodes}`") and []
    entries = [builder.dataclass(_PoolEntry, item, ("pools", number)) for number, item in enumerate(listed)]
    machine = builder.dataclass(_MachineEntry, values["cpu"], ("cpu",)) if "cpu" in values else None
    if builder.found:
        raise ConfigError(builder.found, hint="`pools: [{chip: H100-80GB, count: 8, nodes: 4}]`, or `cpu: {...}`")
    if machine is not None:
        return cpu(machine.cores, machine.memory_gib, str(path))
    pools = []
    for number, entry in enumerate(entries):
        try:
            chip = find_chip(entry.chip, known)
        except PlanError as error:
            place = places.get(("pools", number, "chip"), places[()])
            raise PlanError(f"{place.problem('').location}: `pools`: {error.message}", error.hint) from error
        per_node = entry.count if entry.nodes > 1 else min(entry.count, chip.node_size)
        pools.append(Pool(chip, entry.count * entry.nodes, per_node))
    check_total(pools, str(path))
    return Hardware(tuple(pools))


def from_ray_nodes(nodes: Iterable[Mapping[str, Any]], chips: Mapping[str, Chip] | None = None) -> Hardware:
    """Returns the hardware of a Ray cluster, from what `ray.nodes()` lists.

    Ray says how many accelerators a node has and of what kind (`accelerator_type:H100`), not their memory. Where a
    kind comes in sizes the smallest is taken, and noted. Without accelerators the largest machine stands for all.

    Raises:
        PlanError: no node is alive, or a kind is not in the catalogue.
    """
    known = catalogue() if chips is None else chips
    alive = [node["Resources"] for node in nodes if node.get("Alive", node.get("alive"))]
    if not alive:
        raise PlanError("the Ray cluster has no live node", hint="`ray status` shows why")
    pools: list[Pool] = []
    notes: list[str] = []
    for resources in alive:
        count = int(resources.get("GPU", 0) or resources.get("NPU", 0))
        if not count:
            continue
        kinds = [key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")]
        if not kinds:
            raise PlanError(
                f"a node of the Ray cluster has {count} accelerators and does not say of what kind",
                hint="plan with `--gpus`, or start Ray with `--resources '{\"accelerator_type:H100\": 1}'`",
            )
        chip, note = _smallest(kinds[0], known)
        notes += [note] if note and note not in notes else []
        alike = next((i for i, pool in enumerate(pools) if (pool.chip, pool.per_node) == (chip, count)), None)
        if alike is None:
            pools.append(Pool(chip, count, count))
        else:
            pools[alike] = replace(pools[alike], count=pools[alike].count + count)
    if pools:
        return Hardware(tuple(pools), notes=tuple(notes))
    largest = max(alive, key=lambda resources: resources.get("memory", 0))
    return cpu(int(largest.get("CPU", 1)), largest.get("memory", 0) / GIB, "the largest node of the Ray cluster")


def _smallest(kind: str, chips: Mapping[str, Chip]) -> tuple[Chip, str | None]:
    """Returns the chip that Ray calls `kind`, and a note where it may be one of several."""
    name = re.sub(r"(?i)^(nvidia|amd|instinct|intel|google|huawei)[-_]", "", kind)
    name = re.sub(r"(?i)^instinct[-_]|[-_](oam|hf|vf|hbm3|sxm\d?)\b", "", name)
    name = re.sub(r"(\d)G$", r"\1GB", name)
    sizes = [chip for chip in chips.values() if chip.name.rpartition("-")[0].lower() == name.lower()]
    if len(sizes) > 1:
        chip = min(sizes, key=lambda chip: chip.memory_gib)
        others = " or ".join(f"`{other.name}`" for other in sizes)
        return chip, f"Ray says `{kind}`, which may be {others}: planned with the smaller; `--gpus` says which"
    return find_chip(name, chips), None
