"""Programs a second that the sandbox runs, one after the other on one core. Run by hand.

    python tests/benchmarks/sandbox.py [ANSWERS]

`start` is one program in a start of its own; `batch` is each of ten tests of one answer; CPU counts all processes.
"""

from __future__ import annotations

import resource
import sys
import time

from rollcli.rewards.code import code


def measure(name: str, rounds: int, tests: list) -> None:
    """Scores the same answer `rounds` times and writes what one test of it takes."""
    began, before = time.monotonic(), _cpu_s()
    for _ in range(rounds):
        assert code("x = int(input())\nprint(x + 1)", tests).score == 1
    count = rounds * len(tests)
    wall, cpu = (time.monotonic() - began) / count, (_cpu_s() - before) / count
    sys.stdout.write(f"{name}: {1 / wall:.0f} programs a second by the clock, {1 / cpu:.0f} by CPU\n")


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    answers = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    cases = [{"input": str(x), "output": str(x + 1)} for x in range(10)]
    measure("start", answers, cases[:1])
    measure("batch", answers // 5, cases)
