"""What there is to run on: accelerators by name from a small catalogue, or this machine.

Memory of a chip is what CUDA hands out, which is less than its name says: the "total capacity" that PyTorch prints
when memory runs out, as reported in public issues. Peak rates are dense bf16 of the vendors' data sheets.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollcli.errors import PlanError
from rollcli.suggest import nearest

GIB = 2**30
MOST_DEVICES = 1 << 20
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 10


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        name: vendor's name and nominal memory, `H100-80GB`.
        memory_gib: memory a process can have, in GiB.
        tflops: dense bf16 matrix peak, in 10^12 operations a second.
        bandwidth: of the device's memory, in GB/s.
    """

    name: str
    memory_gib: float
    tflops: float
    bandwidth: float


# Memory: "total capacity" in PyTorch's out-of-memory messages, the lowest found: 40 GB 39.38, 80 GB 79.14 (A100
# and H100 report 79.14 to 79.25), H200 139.72, B200 178.35, L40S 44.34, RTX 4090 23.52, L4 and A10G 22.03. Without such
# a message: H20 and RTX 3090 nominal less 1 and 2 %, Ascend nominal less 1 GiB, MI300X the pool that `rocminfo` lists.
# Rates: vendors' data sheets, dense bf16 with fp32 accumulation (NVIDIA A100, H100 SXM, H200, HGX B200, L40S, L4, A10G,
# H20; white papers of GA102 and AD102; AMD Instinct MI300X); Ascend 910B as its users publish it, the least certain.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("A100-40GB", 39.38, 312, 1555),
        Chip("A100-80GB", 79.14, 312, 2039),
        Chip("A10G-24GB", 22.03, 70, 600),
        Chip("Ascend910B-64GB", 63.0, 376, 1600),
        Chip("B200-180GB", 178.35, 2250, 8000),
        Chip("H100-80GB", 79.14, 989, 3350),
        Chip("H20-96GB", 95.0, 148, 4000),
        Chip("H200-141GB", 139.72, 989, 4800),
        Chip("L4-24GB", 22.03, 121, 300),
        Chip("L40S-48GB", 44.34, 362, 864),
        Chip("MI300X-192GB", 191.98, 1307, 5300),
        Chip("RTX3090-24GB", 23.5, 71, 936),
        Chip("RTX4090-24GB", 23.52, 165, 1008),
    )
}


@dataclass(frozen=True)
class Hardware:
    """What a recipe is planned for.

    Attributes:
        kind: `gpu`: `count` accelerators, one worker of a role each; `cpu`: one machine that all workers share.
        name: of the chip, or `this machine`.
        count: accelerators; 0 on a CPU.
        memory_gib: of one accelerator, or of the machine.
        cores: of the machine; 0 when it is not known.
    """

    kind: Literal["gpu", "cpu"]
    name: str
    count: int
    memory_gib: float
    cores: int = 0

    @property
    def label(self) -> str:
        """The hardware in a few words."""
        if self.kind == "gpu":
            return f"{self.count} × {self.name} ({self.memory_gib:.1f} GiB each)"
        return f"{self.name}: {self.cores} cores, {self.memory_gib:.1f} GiB"


def parse_gpus(text: str) -> Hardware:
    """Returns the hardware that `8xH100-80GB`, `8xH100` or `H100` stands for.

    Raises:
        PlanError: no such chip, several chips of that name, or a count that cannot be.
    """
    match = re.fullmatch(r"\s*(?:([+-]?\d+)\s*[x×*]\s*)?([A-Za-z][\w. -]*?)\s*", text)
    if match is None:
        raise PlanError(
            f"`{text}` does not name accelerators", hint="write count, `x` and chip, for example 8xH100-80GB"
        )
    count = int(match[1] or 1)
    if not 0 < count <= MOST_DEVICES:
        raise PlanError(f"`{text}`: {count} accelerators cannot be", hint=f"a count is from 1 to {MOST_DEVICES:,}")
    chip = find_chip(match[2])
    return Hardware("gpu", chip.name, count, chip.memory_gib)


def find_chip(name: str) -> Chip:
    """Returns the chip of that name; the memory may be left out where only one size is known.

    Raises:
        PlanError: with the nearest names.
    """
    wanted = re.sub(r"[\s_]", "", name).lower()
    named = [c for c in CHIPS.values() if wanted in (c.name.lower(), c.name.lower().rpartition("-")[0])]
    if len(named) == 1:
        return named[0]
    if named:
        raise PlanError(f"`{name}` comes in sizes", hint=f"write {' or '.join(chip.name for chip in named)}")
    close = nearest(name, CHIPS, count=3, cutoff=0.5)
    meant = f"did you mean {', '.join(f'`{c}`' for c in close)}? " if close else ""
    raise PlanError(f"unknown accelerator `{name}`", hint=f"{meant}known: {', '.join(CHIPS)}")


def cpu(cores: int | None = None, memory_gib: float | None = None, name: str = "this machine") -> Hardware:
    """Returns this machine without its accelerators, or one with the cores and memory given.

    Raises:
        PlanError: no cores or no memory.
    """
    cores = available_cores() if cores is None else cores
    memory_gib = available_memory_gib() if memory_gib is None else memory_gib
    if cores < 1 or memory_gib <= 0:
        raise PlanError(f"a machine with {cores} cores and {memory_gib:g} GiB cannot be")
    return Hardware("cpu", name, 0, memory_gib, cores)


def this_machine() -> Hardware:
    """Returns this machine's accelerators (as `nvidia-smi` lists them), or its CPU when there are none.

    Where chips differ, the smallest memory counts for all.
    """
    try:
        listed = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout
        found = [(name.strip(), int(mib)) for name, _, mib in (line.rpartition(",") for line in listed.splitlines())]
    except (OSError, subprocess.SubprocessError, ValueError):
        found = []
    if not found:
        return cpu()
    name, mib = min(found, key=lambda chip: chip[1])
    return Hardware("gpu", name, len(found), mib / 1024, available_cores())


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
