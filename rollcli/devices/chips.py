"""Kinds of accelerators: a catalogue with sources in `chips.yaml`, and the user's own in the same format.

Memory of a chip is what a process can have, which is less than its name says. Rates are the data sheets' peaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcli.errors import ConfigError, PlanError
from rollcli.suggest import nearest

if TYPE_CHECKING:
    from rollcli.config.locate import Path as KeyPath
    from rollcli.config.locate import Place

BUILT_IN = Path(__file__).with_name("chips.yaml")
_BRANDS = re.compile(r"^(?:nvidia|geforce|tesla|rtx|amd|instinct|huawei|ascend)+(?=.*\d)")
_LIKE = 0.12
"""Most by which the memory of a recognized device may differ from the catalogue's: ECC, reserved parts, other units."""


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        name: vendor's name and nominal memory, `H100-80GB`.
        memory_gib: memory a process can have, in GiB.
        bandwidth_gb_s: of the device's memory, in GB/s.
        bf16_tflops: dense bfloat16 matrix peak, in 10^12 operations a second.
        fp8_tflops: the same in 8 bits; 0 where it has no such units.
        link_gb_s: to other devices of its node, both directions together, in GB/s; 0 where there is no link.
        network_gb_s: between nodes, for each device and direction, in GB/s.
        vendor: who makes it.
        source: where the numbers come from.
        node_size: devices that the link joins.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float
    link_gb_s: float
    network_gb_s: float
    vendor: str = ""
    source: str = ""
    node_size: int = 8

    @property
    def has_rates(self) -> bool:
        """Whether more than its memory is known, so that times can be told."""
        return min(self.bandwidth_gb_s, self.bf16_tflops, self.network_gb_s) > 0

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, message)` for every number that cannot be."""
        for field in ("memory_gib", "bandwidth_gb_s", "bf16_tflops", "network_gb_s", "node_size"):
            if getattr(self, field) <= 0:
                yield field, f"must be above 0, is {getattr(self, field):g}"
        for field in ("fp8_tflops", "link_gb_s"):
            if getattr(self, field) < 0:
                yield field, f"must not be negative, is {getattr(self, field):g}"


@cache
def catalogue() -> Mapping[str, Chip]:
    """Returns the chips known here, by name."""
    import yaml  # not above: `roll doctor` names this machine's devices with no package at all

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    values = yaml.load(BUILT_IN.read_text(encoding="utf-8"), loader)
    return {name: Chip(name, **fields) for name, fields in values.items()}


def read_chips(path: Path) -> dict[str, Chip]:
    """Returns the chips of the catalogue and those of a file in its format, which win.

    Raises:
        ConfigError: the file cannot be read or does not say chips; every problem at its place.
    """
    from rollcli.config.load import read_yaml

    values, places = read_yaml(path)
    return {**catalogue(), **chips_from(values, places)}


def chips_from(values: Mapping[str, Any], places: Mapping[KeyPath, Place], at: KeyPath = ()) -> dict[str, Chip]:
    """Returns the chips that plain values stand for, of which `places` says where they were written.

    Raises:
        ConfigError: a field is unknown, missing, of the wrong type or cannot be.
    """
    from rollcli.config.build import Builder

    builder = Builder(places)
    found = {}
    for name, fields in values.items():
        named = {**fields, "name": name} if isinstance(fields, Mapping) else fields
        found[name] = builder.dataclass(Chip, named, (*at, name))
    if builder.found:
        raise ConfigError(builder.found, hint="`rollcli/devices/chips.yaml` shows and explains the format")
    return found


def find_chip(name: str, chips: Mapping[str, Chip] | None = None) -> Chip:
    """Returns the chip of that name; its vendor's words, and memory where only one size is known, may be left out.

    Raises:
        PlanError: with the nearest names.
    """
    chips = catalogue() if chips is None else chips
    wanted = _plain(name)
    named = [chip for chip in chips.values() if _plain(chip.name) == wanted]
    named = named or [chip for chip in chips.values() if _plain(chip.name.rpartition("-")[0] or chip.name) == wanted]
    if len(named) == 1:
        return named[0]
    if named:
        raise PlanError(f"`{name}` comes in sizes", hint=f"write {' or '.join(chip.name for chip in named)}")
    close = nearest(name, chips, count=3, cutoff=0.5)
    meant = f"did you mean {', '.join(f'`{chip}`' for chip in close)}? " if close else ""
    raise PlanError(
        f"unknown accelerator `{name}`",
        hint=f"{meant}known: {', '.join(chips)}; add yours with `--chips FILE`",
    )


def recognize(reported: str, memory_gib: float, chips: Mapping[str, Chip] | None = None) -> Chip:
    """Returns the chip that a driver reports as `reported`, with the memory it reports.

    One that the catalogue does not have is returned with its memory alone (`has_rates` is then False).
    """
    words = {_plain(word) for word in re.split(r"[\s_-]+", reported)}
    best: tuple[int, float, Chip] | None = None
    for chip in (catalogue() if chips is None else chips).values():
        parts = {_plain(part) for part in chip.name.rpartition("-")[0].split("-")}
        off = abs(chip.memory_gib / memory_gib - 1) if memory_gib else 0.0
        if parts <= words and off <= _LIKE and (best is None or (len(parts), -off) > best[:2]):
            best = (len(parts), -off, chip)
    if best is None:
        return Chip(reported, memory_gib, 0.0, 0.0, 0.0, 0.0, 0.0, source="the driver: only its memory is known")
    chip = best[2]
    return Chip(**{**vars(chip), "memory_gib": memory_gib or chip.memory_gib})


def _plain(name: str) -> str:
    """Returns a name without case, spaces and the vendor's words."""
    return _BRANDS.sub("", re.sub(r"[\s_]", "", name).lower())
