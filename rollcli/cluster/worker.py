"""What every worker process has in common: a name, a log file, its share of the cores, and the recipe."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcli.config.load import rebuild
from rollcli.config.schema import Recipe


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is told when it starts.

    Attributes:
        role: `policy`, `reference`, `critic`, `rollout`, `environment`, `reward` or `reward.<task>`, `judge.<name>` or
            `reward_model.<name>`.
        rank: which of the role's workers this is.
        count: workers of the role.
        threads: CPU threads it may use.
        values: the recipe's plain values; the worker builds its own recipe from them.
        folder: where relative plug-in files are looked for.
        logs: folder of this attempt's log files.
    """

    role: str
    rank: int
    count: int
    threads: int
    values: Mapping[str, Any]
    folder: str | None
    logs: str | None

    @property
    def name(self) -> str:
        """`role-rank`, as logs and messages call the worker."""
        return f"{self.role}-{self.rank}"


class Worker:
    """Base of all actors. Subclasses import heavy packages inside methods, after the threads are pinned."""

    def __init__(self, spec: WorkerSpec) -> None:
        _ignore_interrupts()
        # Two busy thread pools on two cores run many times slower, so every process gets its share and no more.
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(spec.threads)
        # Workers of different roles take turns: threads that wait must sleep, not burn the cores of whose turn it is.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if spec.logs:
            _redirect_output(Path(spec.logs) / f"{spec.name}.log")
        # What a crash leaves behind is how its cause is found (cluster/autopsy.py).
        faulthandler.enable(2, all_threads=False)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(spec.threads)
        self.spec = spec
        self.recipe: Recipe = rebuild(spec.values, spec.folder)

    def ready(self) -> dict[str, Any]:
        """Answers when the worker has started."""
        return {"name": self.spec.name, "pid": os.getpid()}

    def stuck_s(self) -> float:
        """Returns for how long the worker has had work and got nowhere: 0, for one that answers at all."""
        return 0.0

    def memory(self) -> float:
        """Returns the resident memory of this process and its children, in GiB."""
        pids = [os.getpid(), *_children(os.getpid())]
        return sum(_resident_bytes(pid) for pid in pids) / 2**30


def _ignore_interrupts() -> None:
    """Ignores SIGINT: the terminal sends Ctrl-C to every process, and the driver alone decides what it means.

    Asynchronous actors are constructed off the main thread, where Python's own `signal.signal` refuses to work.
    """
    ctypes.CDLL(None).signal(int(signal.SIGINT), ctypes.c_void_p(1))


def _redirect_output(path: Path) -> None:
    """Sends everything this process prints, native libraries included, to a file of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_children(int(child))]
    except OSError:
        pass
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
