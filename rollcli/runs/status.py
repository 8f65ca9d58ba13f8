"""`status.json`: where a run stands. Written whole or not at all; a heartbeat tells a dead run from a living one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

HEARTBEAT_S = 5.0
LOST_AFTER_S = 60.0
RUNNING = ("starting", "running", "checkpointing", "stopping")


@dataclass
class Status:
    """State of a run: `starting`, `running`, `checkpointing`, `stopping`, `stopped`, `finished`, `failed`; readers also
    see `lost`, a run that says it runs and does not."""

    state: str = "starting"
    recipe: str = ""
    step: int = 0
    steps: int = 0
    checkpoint: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    reason: str = ""
    pid: int = 0
    host: str = ""
    started: float = 0.0
    heartbeat: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether the run's process is still there."""
        return self.state in RUNNING


class StatusFile:
    """The writer's side. A thread of its own keeps the heartbeat, however long a stage blocks the run."""

    def __init__(self, path: Path, **values: Any) -> None:
        self.path = path
        self.status = Status(pid=os.getpid(), host=socket.gethostname(), started=time.time(), **values)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.update()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._thread.start()

    def update(self, **values: Any) -> None:
        """Changes fields and writes the file."""
        with self._lock:
            for name, value in values.items():
                setattr(self.status, name, value)
            self.status.heartbeat = time.time()
            write_json(self.path, asdict(self.status))

    def close(self) -> None:
        """Ends the heartbeat; the last state stands."""
        self._closed.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            # A full disk must not end the heartbeat: the next one may find room.
            with contextlib.suppress(OSError):
                self.update()


def read_status(path: Path) -> Status:
    """Returns a run's status; a run whose process is gone or silent is `lost`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        return Status(state="lost", reason="no readable status")
    known = {member.name for member in fields(Status)}
    status = Status(**{name: value for name, value in values.items() if name in known})
    if status.state in RUNNING and not _living(status):
        status.state = "lost"
    return status


def _living(status: Status) -> bool:
    if status.host == socket.gethostname():
        if status.pid <= 0:
            return False
        try:
            os.kill(status.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _is_the_runs(status)
    return time.time() - status.heartbeat < LOST_AFTER_S


def _is_the_runs(status: Status) -> bool:
    """False when the process is dead and only not yet collected, or started after the run's last heartbeat."""
    try:
        facts = Path(f"/proc/{status.pid}/stat").read_text().rpartition(")")[2].split()
        if facts[0] in "ZX":
            return False
        ticks = int(facts[19])
        boot = next(
            int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return True
    return boot + ticks / os.sysconf("SC_CLK_TCK") < status.heartbeat + 2


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole: beside, then renamed."""
    beside = path.with_name(path.name + ".tmp")
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    beside.replace(path)
