"""Why a worker ended, as far as this machine can tell.

Ray starts the workers, so nobody here can wait for their exit status. What is left behind: the worker's log, with the
traceback that Python's fault handler writes for every signal but SIGKILL; its note, if it ended itself; and the
kernel's count of processes it killed for memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from rollcli.errors import WorkerDied

LOG_TAIL_BYTES = 4096
LOG_LINES = 3
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")
FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)


def note_path(logs: str | Path, name: str) -> Path:
    """Returns where a worker that ends itself says why."""
    return Path(logs) / f"{name}.ended"


class Autopsy:
    """Knows the logs of one attempt.

    Args:
        logs: its folder; None where nothing is logged.
    """

    def __init__(self, logs: Path | None) -> None:
        self.logs = logs
        self._killed_for_memory = _memory_kills()
        self._read: dict[str, int] = {}
        self._hung: dict[str, float] = {}

    def hung(self, name: str, seconds: float) -> None:
        """Remembers that a worker is about to be ended because it hangs."""
        self._hung[name] = seconds

    def cause(self, name: str, error: WorkerDied) -> str:
        """Returns what happened, as in "worker `rollout-0` …", with the last lines of its log."""
        tail = self._tail(name)
        lines = [line.strip() for line in tail.splitlines() if line.strip()][-LOG_LINES:]
        return self._what(name, tail, error) + (f" (its log ends: {' ⏎ '.join(lines)})" if lines else "")

    def culprit(self, name: str) -> str | None:
        """Returns the episode that a worker's note blames for its end, and forgets the note."""
        if self.logs is None or not (note := note_path(self.logs, name)).is_file():
            return None
        lines = note.read_text(encoding="utf-8").splitlines()
        note.unlink()
        return lines[0] if lines else None

    def _what(self, name: str, tail: str, error: WorkerDied) -> str:
        if name in self._hung:
            return f"did nothing for {self._hung.pop(name):g} s and was ended"
        if error.silent:
            return error.message.partition("` ")[2] or error.message
        kills = _memory_kills()
        if kills > self._killed_for_memory:
            self._killed_for_memory = kills
            return "was killed by the kernel: out of memory"
        fatal = FATAL.findall(tail)
        if fatal:
            return f"crashed: {fatal[-1]}"
        if self.logs is not None and note_path(self.logs, name).is_file():
            return "ended itself: an episode blocked it"
        if error.exit_code is not None:
            return f"ended with exit code {error.exit_code}"
        return "was killed (SIGKILL, by hand or by the system), or left without a word"

    def _tail(self, name: str) -> str:
        log = None if self.logs is None else self.logs / f"{name}.log"
        if log is None or not log.is_file():
            return ""
        # What a worker of the same name left behind, which has been told already, is not this one's.
        size, told = log.stat().st_size, self._read.get(name, 0)
        self._read[name] = size
        with log.open("rb") as file:
            file.seek(max(size - LOG_TAIL_BYTES, told))
            return file.read().decode("utf-8", "replace")


def _memory_kills() -> int:
    """Returns how many processes of this control group the kernel has killed for memory; 0 where it does not say."""
    try:
        counts = dict(line.split() for line in MEMORY_EVENTS.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
