"""What is run in a sandbox, what it may use, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from rollcli.errors import EngineError


class SandboxUnavailable(EngineError):
    """Nothing on this machine can confine a program."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        wall_s: seconds by the clock, for a script and for each test of an answer.
        total_s: seconds by the clock for all programs of one `run`; what was not begun by then counts as `timeout`.
        cpu_s: seconds of CPU, of each process.
        memory_mib: address space of each process, Python's own 30 MiB or so included.
        output_bytes: standard output and error together; who writes more is killed.
        disk_mib: the temporary folder; 0 where the machine lets no file system be mounted, whatever is asked here.
        processes: how many at once; with 1 no process can be started. More ask for a pid namespace or bubblewrap.
        threads: how many at once besides each process's first.
    """

    wall_s: float = 4.0
    total_s: float = 30.0
    cpu_s: int = 4
    memory_mib: int = 1024
    output_bytes: int = 1 << 20
    disk_mib: int = 16
    processes: int = 1
    threads: int = 32


@dataclass(frozen=True)
class Checks:
    """Tests of an answer; they run in a process of their own, where the answer's names stand for calls to it.

    Attributes:
        tests: Python text, each one test; or, with `pytest`, one test file.
        setup: Python text that runs before the tests.
        preamble: what the answer was given to start from: runs before the tests, and its names win over the answer's,
            except `entry_point`.
        entry_point: the only name of the answer that tests see; None for all that are no builtin or stdlib module.
        pytest: run by pytest, which finds the answer as the module `solution`.
        stop_early: leave out what comes after the first failure.
    """

    tests: tuple[str, ...]
    setup: str = ""
    preamble: str = ""
    entry_point: str | None = None
    pytest: bool = False
    stop_early: bool = False


@dataclass(frozen=True)
class Program:
    """Python text to run as a script with `stdin`, or to put to `checks`."""

    source: str
    stdin: str = ""
    checks: Checks | None = None


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        ended: `exit`, `timeout`, or `output` when it wrote too much.
        exit_code: negative for a signal.
        stdout: what it wrote, at most `Limits.output_bytes`, undecodable bytes replaced.
        stderr: as `stdout`.
        verdicts: one for each test, in order; those after the first failure are missing with `stop_early`.
        error: what the first failing test said.
        cpu_s: seconds of CPU.
    """

    ended: str
    exit_code: int
    stdout: str
    stderr: str
    verdicts: tuple[bool, ...] = ()
    error: str = ""
    cpu_s: float = 0.0
