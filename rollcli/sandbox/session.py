"""Starts a guest for the programs of one answer, sends them one by one, and returns how each ended."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rollcli.errors import EngineError
from rollcli.sandbox.base import Limits, Outcome, Program, SandboxUnavailable
from rollcli.sandbox.guest import receive, send

DEFAULT_LIMITS = Limits()
START_LIMIT_S = 20.0
GRACE_S = 3.0
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_HINT = "install the Debian package `bubblewrap`, or use a kernel with Landlock (5.13 or newer)"
# The guest's modules without the packages around them, whose imports would cost each start milliseconds.
_BOOT = """
import sys, types
for name in ("rollcli", "rollcli.sandbox"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [sys.argv[3]] if name.endswith("sandbox") else []
sys.path += sys.argv[4:]
from rollcli.sandbox import guest
guest.main()
"""


def run(
    programs: Sequence[Program], limits: Limits = DEFAULT_LIMITS, stop: Callable[[int, Outcome], bool] | None = None
) -> list[Outcome]:
    """Runs programs one after the other, each confined and apart from the others, all in one start.

    Args:
        stop: called with a program's number and outcome; when true, the programs after it are left out.

    Returns:
        one outcome for each program that was not left out, in their order, whatever any of them does.

    Raises:
        SandboxUnavailable: neither bubblewrap nor Landlock and seccomp can confine a program here.
        EngineError: the sandbox itself broke.
    """
    if not programs:
        return []
    with tempfile.TemporaryDirectory(prefix="roll-sandbox-") as folder:
        os.chmod(folder, 0o755)
        guest = _start(limits, folder)
        try:
            deadline = time.monotonic() + limits.total_s
            outcomes: list[Outcome] = []
            for number, program in enumerate(programs):
                outcomes.append(_outcome(guest, program, limits, deadline))
                if stop is not None and stop(number, outcomes[-1]):
                    break
            return outcomes
        finally:
            guest.end()


@dataclass
class _Guest:
    """A started guest."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    def end(self) -> None:
        """Ends it with all it started."""
        self.control.close()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def readable_paths() -> list[str]:
    """Returns what a program may read: Python's standard library and packages, its binary, shared libraries."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    library = os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("LDLIBRARY") or "")
    paths += [_python(), os.path.realpath(_python()), library, os.path.realpath(library), *_LIBRARIES, *_DEVICES]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def bubblewrap_command(binary: str, folder: str, control: int) -> list[str]:
    """Returns what goes before Python's own command line so that it runs inside bubblewrap.

    The guest still is who it was (root, or the user) and confines each program further.
    """
    binds = [word for path in (*readable_paths(), os.path.dirname(__file__)) if not path.startswith("/dev/")
             for word in ("--ro-bind-try", path, path)]  # fmt: skip
    return [
        binary, "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-pid", "--die-with-parent",
        "--proc", "/proc", "--dev", "/dev", *binds, "--bind", folder, folder, "--chdir", folder, "--",
    ]  # fmt: skip


def _python() -> str:
    return getattr(sys, "_base_executable", None) or sys.executable


@cache
def _packages() -> tuple[str, ...]:
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _start(limits: Limits, folder: str) -> _Guest:
    """Starts a guest inside bubblewrap where there is one, else with Landlock; whichever first says it is ready."""
    binary, reasons = shutil.which("bwrap"), []
    for walled in ([True] if binary else []) + [False]:
        ours, theirs = socket.socketpair()
        with theirs:
            wall = bubblewrap_command(binary, folder, theirs.fileno()) if walled and binary else []
            # Inside a pid namespace the host has no number.
            arguments = [str(theirs.fileno()), "1" if walled else str(os.getpid())]
            process = subprocess.Popen(
                [*wall, _python(), "-I", "-S", "-c", _BOOT, *arguments, os.path.dirname(__file__), *_packages()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=folder,
                pass_fds=(theirs.fileno(),), start_new_session=True,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        guest = _Guest(process, ours)
        ours.settimeout(START_LIMIT_S)
        try:
            send(ours, _settings(limits, folder, walled))
            reply = receive(ours)
        except (EOFError, OSError) as error:
            reply = {"error": f"{type(error).__name__} {error}".strip()}
        if reply.get("ready"):
            assert process.stderr is not None
            process.stderr.close()
            return guest
        guest.end()
        assert process.stderr is not None
        with process.stderr as stream:
            said = stream.read(2000).decode(errors="replace").strip().splitlines()
        reasons.append(f"{'bubblewrap' if walled else 'Landlock and seccomp'}: {said[-1] if said else reply['error']}")
    raise SandboxUnavailable(f"no sandbox on this machine; {'; '.join(reasons)}", hint=_HINT)


def _settings(limits: Limits, folder: str, walled: bool) -> dict[str, Any]:
    bounds = {
        "memory_bytes": limits.memory_mib << 20, "cpu_s": limits.cpu_s, "disk_bytes": limits.disk_mib << 20,
        "processes": limits.processes, "threads": limits.threads,
    }  # fmt: skip
    return {
        "bounds": bounds, "readable": readable_paths(), "folder": folder, "wall_s": limits.wall_s,
        "output_bytes": limits.output_bytes, "walled": walled,
    }  # fmt: skip


def _outcome(guest: _Guest, program: Program, limits: Limits, deadline: float) -> Outcome:
    if program.checks is None:
        return _asked(guest, program, 0, limits, deadline)
    if not program.checks.tests:
        raise ValueError("checks without tests")
    verdicts: list[bool] = []
    error, cpu_s = "", 0.0
    while True:
        outcome = _asked(guest, program, len(verdicts), limits, deadline)
        cpu_s, error = cpu_s + outcome.cpu_s, error or outcome.error
        verdicts += outcome.verdicts
        wanted = len(program.checks.tests)
        if program.checks.pytest:
            break
        if len(verdicts) < wanted and outcome.ended != "exit":
            verdicts.append(False)  # the one that took too long
        if len(verdicts) >= wanted or (program.checks.stop_early and not all(verdicts)):
            break
        if not outcome.verdicts and outcome.ended == "exit":
            verdicts.append(False)
        if time.monotonic() > deadline:
            verdicts += [False] * (wanted - len(verdicts))
            break
    return Outcome(outcome.ended, outcome.exit_code, outcome.stdout, outcome.stderr, tuple(verdicts), error, cpu_s)


def _asked(guest: _Guest, program: Program, skip: int, limits: Limits, deadline: float) -> Outcome:
    """Has the guest run a program once; `skip` tests of it are done."""
    if time.monotonic() > deadline:
        return Outcome("timeout", 0, "", "")
    checks = program.checks
    count = len(checks.tests) - skip if checks else 1
    guest.control.settimeout(limits.wall_s * (count + 1) + limits.total_s + GRACE_S)
    try:
        send(guest.control, {"source": program.source, "stdin": program.stdin, "checked": checks is not None,
                             "skip": skip})  # fmt: skip
        if checks is not None:
            send(guest.control, asdict(checks))
        reply = receive(guest.control)
    except (EOFError, OSError, ValueError) as error:
        raise EngineError(f"the sandbox ended while a program ran: {type(error).__name__} {error}") from error
    # Where the guest ended it (over time, too much output), one of the two processes may not have come so far as to
    # confine itself; it has run nothing of the model's either.
    if not reply.pop("sealed") and reply["ended"] == "exit":
        raise EngineError(f"the sandbox could not confine a program: {reply['stderr'][-300:]}", hint=_HINT)
    verdicts, error = _verdicts(reply.pop("verdicts"))
    if checks is not None and checks.pytest:
        # Only pytest knows how many tests there are, and says when it is through: `null`, at the end.
        through = verdicts[-1:] == (None,)
        verdicts = tuple(each for each in verdicts if each is not None) + (() if through else (False,))
        verdicts = verdicts or (False,)
    return Outcome(**reply, verdicts=verdicts, error=error)


def _verdicts(lines: str) -> tuple[tuple[bool, ...], str]:
    told = [json.loads(line) for line in lines.splitlines(keepends=True) if line.endswith("\n")]
    return tuple(passed for passed, _ in told), next((error for passed, error in told if passed is False), "")
