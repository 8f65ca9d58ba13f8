"""What there is to run on: pools of accelerators by name, or this machine. `inventory.py` reads files and clusters.

Devices are numbered through the pools in order, node after node.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollcli.devices.chips import Chip, catalogue, find_chip, recognize
from rollcli.errors import PlanError

GIB = 2**30
MOST_DEVICES = 1 << 20
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 10
_FORM = "write count, `x` and chip, for example 8xH100-80GB; pools with `+`, nodes before: 4x8xH100-80GB+16xL40S"
_TIMES = r"\s*[x×*]\s*"


@dataclass(frozen=True)
class Pool:
    """Accelerators of one kind.

    Attributes:
        chip: their kind.
        count: all of them.
        per_node: those of one node, which its link joins; the last node may have fewer.
    """

    chip: Chip
    count: int
    per_node: int = 8

    @property
    def nodes(self) -> int:
        """Machines they are in."""
        return -(-self.count // self.per_node)

    @property
    def label(self) -> str:
        """The pool in a few words."""
        what = f"{self.count} × {self.chip.name} ({self.chip.memory_gib:.1f} GiB each)"
        return f"{what} in {self.nodes} nodes of {self.per_node}" if self.nodes > 1 else what


@dataclass(frozen=True)
class Hardware:
    """What a recipe is planned for: accelerators, one worker's process each, or one machine that all workers share.

    Attributes:
        pools: accelerators; none on a CPU.
        cores: of the machine without accelerators; 0 when it is not known.
        machine_gib: memory of that machine.
        name: of that machine.
        notes: what had to be taken for granted.
    """

    pools: tuple[Pool, ...] = ()
    cores: int = 0
    machine_gib: float = 0.0
    name: str = "this machine"
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["gpu", "cpu"]:
        """Whether there are accelerators."""
        return "gpu" if self.pools else "cpu"

    @property
    def count(self) -> int:
        """Accelerators; 0 on a CPU."""
        return sum(pool.count for pool in self.pools)

    @property
    def memory_gib(self) -> float:
        """Memory of the accelerator that has least, or of the machine."""
        return min((pool.chip.memory_gib for pool in self.pools), default=self.machine_gib)

    @property
    def label(self) -> str:
        """The hardware in a few words."""
        if self.pools:
            return " + ".join(pool.label for pool in self.pools)
        return f"{self.name}: {self.cores} cores, {self.machine_gib:.1f} GiB"

    def pool_of(self, device: int) -> Pool:
        """Returns the pool that a device is in.

        Raises:
            IndexError: there is no such device.
        """
        first = 0
        for pool in self.pools:
            if first <= device < first + pool.count:
                return pool
            first += pool.count
        raise IndexError(f"device {device} of {self.count}")

    def node_of(self, device: int) -> int:
        """Returns the number of the node that a device is in; nodes are counted through the pools."""
        node = 0
        for pool in self.pools:
            if device < pool.count:
                return node + device // pool.per_node
            device, node = device - pool.count, node + pool.nodes
        raise IndexError(f"no device {device} beyond the last")

    def to_dict(self) -> dict[str, Any]:
        """Returns the hardware for JSON; the keys are stable."""
        return {
            "kind": self.kind,
            "name": " + ".join(pool.chip.name for pool in self.pools) or self.name,
            "count": self.count,
            "memory_gib": self.memory_gib,
            "cores": self.cores,
            "pools": [
                {"chip": vars(pool.chip), "count": pool.count, "per_node": pool.per_node, "nodes": pool.nodes}
                for pool in self.pools
            ],
        }


def parse_gpus(text: str, chips: Mapping[str, Chip] | None = None, nodes: int = 1) -> Hardware:
    """Returns the hardware that `8xH100-80GB`, `H100`, `4x8xH100` (nodes first) or `8xH100+16xL40S` stands for.

    Args:
        text: pools, joined by `+`.
        chips: those known; the catalogue's if None.
        nodes: machines that have what `text` says, each; only of one pool.

    Raises:
        PlanError: no such chip, several chips of that name, or a count that cannot be.
    """
    if nodes < 1:
        raise PlanError(f"`--nodes {nodes}`: {nodes} nodes cannot be", hint="a number of nodes is at least 1")
    pieces = text.split("+")
    if nodes > 1 and len(pieces) > 1:
        each = "+".join(f"{nodes}x{piece.strip()}" for piece in pieces)
        raise PlanError(
            f"`--nodes {nodes}`: `{text}` has {len(pieces)} pools, which may be in different numbers of nodes",
            hint=f"write the nodes before each pool: `--gpus {each}`",
        )
    pools = tuple(_pool(piece, catalogue() if chips is None else chips, nodes, text) for piece in pieces)
    check_total(pools, text)
    return Hardware(pools)


def _pool(piece: str, chips: Mapping[str, Chip], nodes: int, text: str) -> Pool:
    pattern = rf"\s*(?:([+-]?\d+){_TIMES})?(?:([+-]?\d+){_TIMES})?([A-Za-z0-9][\w. -]*?)\s*"
    match = re.fullmatch(pattern, piece)
    if match is None or re.fullmatch(r"[\dx×*]+", match[3]):
        raise PlanError(f"`{text}` does not name accelerators", hint=_FORM)
    counts = [int(number) for number in match.groups()[:2] if number is not None]
    for number in counts:
        if not 0 < number <= MOST_DEVICES:
            raise PlanError(f"`{text}`: {number} accelerators cannot be", hint=f"a count is from 1 to {MOST_DEVICES:,}")
    if len(counts) == 2 and nodes > 1:
        raise PlanError(
            f"`--nodes {nodes}`: `{text}` says {counts[0]} nodes", hint="say the number of nodes in one of the two"
        )
    chip = find_chip(match[3], chips)
    count = counts[-1] if counts else 1
    if len(counts) == 2:
        nodes = counts[0]
    return Pool(chip, count * nodes, count if nodes > 1 else min(count, chip.node_size))


def check_total(pools: Iterable[Pool], text: str) -> None:
    """Refuses more devices than are planned for.

    Raises:
        PlanError: there are.
    """
    total = sum(pool.count for pool in pools)
    if total > MOST_DEVICES:
        raise PlanError(
            f"`{text}`: {total:,} accelerators cannot be", hint=f"{MOST_DEVICES:,} are the most that are planned for"
        )


def cpu(cores: int | None = None, memory_gib: float | None = None, name: str = "this machine") -> Hardware:
    """Returns this machine without its accelerators, or one with the cores and memory given.

    Raises:
        PlanError: no cores or no memory.
    """
    cores = available_cores() if cores is None else cores
    memory_gib = available_memory_gib() if memory_gib is None else memory_gib
    if cores < 1 or memory_gib <= 0:
        raise PlanError(f"a machine with {cores} cores and {memory_gib:g} GiB cannot be")
    return Hardware(cores=cores, machine_gib=memory_gib, name=name)


def this_machine(chips: Mapping[str, Chip] | None = None) -> Hardware:
    """Returns this machine's accelerators (as `nvidia-smi` lists them), or its CPU when there are none."""
    try:
        listed = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout
        found = [(name.strip(), int(mib)) for name, _, mib in (line.rpartition(",") for line in listed.splitlines())]
    except (OSError, subprocess.SubprocessError, ValueError):
        found = []
    if not found:
        return cpu()
    pools: list[Pool] = []
    for name, mib in found:  # neighbours of one kind are a pool: the driver's order is that of the devices
        chip = recognize(name, mib / 1024, chips)
        if pools and pools[-1].chip == chip:
            pools[-1] = Pool(chip, pools[-1].count + 1, pools[-1].count + 1)
        else:
            pools.append(Pool(chip, 1, 1))
    return Hardware(tuple(pools), cores=available_cores())


def available_cores() -> int:
    """Returns the cores this process may use, within its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory_gib() -> float:
    """Returns the memory of this machine, or of its control group when that is less, in GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit) if limit.isdigit() else total) / GIB


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
