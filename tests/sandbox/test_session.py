"""What is confined stays confined, and comes back as it ended."""

import os
import time
from pathlib import Path

import pytest

from rollcli.sandbox import session
from rollcli.sandbox.base import Checks, Limits, Program, SandboxUnavailable
from rollcli.sandbox.session import run

QUICK = Limits(wall_s=3.0, cpu_s=3)


def one(source: str, stdin: str = "", limits: Limits = QUICK):
    return run([Program(source, stdin)], limits)[0]


def sandboxes() -> list[Path]:
    """Returns processes that a sandbox left behind: those whose user id is one of its own."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and process.stat().st_uid >= 1 << 30:
                found.append(process)
        except FileNotFoundError:
            continue
    return found


def test_programs_run_apart_and_in_order():
    first = "import sys\nopen('mine', 'w').write('x')\nprint(int(input()) + 1)"
    second = "import os, sys\nprint(os.listdir('.'))\nsys.stderr.write('told')\nsys.exit(3)"
    outcomes = run([Program(first, "41\n"), Program(second)], QUICK)
    assert [(each.ended, each.exit_code, each.stdout, each.stderr) for each in outcomes] == [
        ("exit", 0, "42\n", ""),
        ("exit", 3, "[]\n", "told"),
    ]


def test_nothing_to_run():
    assert run([]) == []


def test_main_is_the_program():
    source = "from dataclasses import dataclass\n@dataclass\nclass A: x: int\nif __name__ == '__main__': print(A(1))"
    assert one(source).stdout == "A(x=1)\n"


def test_time_and_output_are_bounded():
    limits = Limits(wall_s=0.5, output_bytes=1000)
    loop, sleep, loud = run(
        [Program("while 1: pass"), Program("import time; time.sleep(99)"), Program("while 1: print('x' * 99)")], limits
    )
    assert (loop.ended, sleep.ended, loud.ended) == ("timeout", "timeout", "output")
    assert len(loud.stdout) == 1000 and loop.exit_code == -9


def test_total_time_is_bounded():
    outcomes = run([Program("while 1: pass")] * 50, Limits(wall_s=0.3, total_s=0.4))
    assert {each.ended for each in outcomes} == {"timeout"}


def test_processes_are_counted_even_for_root():
    source = """import os, time
count = 0
try:
    while count < 1000:
        if not os.fork():
            time.sleep(99)
        count += 1
except OSError:
    print(count)
"""
    assert one(source).stdout == "0\n"
    outcome = one(source, limits=Limits(processes=8, threads=4))
    assert 4 <= int(outcome.stdout) <= 12
    # Those of other tests, which run beside this one, end by themselves; one that was left would sleep on.
    left, deadline = set(sandboxes()), time.monotonic() + 60
    while left and os.getuid() == 0:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
        left &= set(sandboxes())


def test_threads_and_subprocesses_work_where_allowed():
    source = "import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()"
    assert one(source).stdout == "1\n"
    source = "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-S', '-c', 'print(7)']))"
    assert one(source, limits=Limits(processes=4)).stdout == "b'7\\n'\n"


def test_the_folder_is_bounded_and_gone_afterwards():
    source = "import os\nprint(os.getcwd())\nopen('a', 'wb').write(bytes(1 << 20))\nos.mkdir('b'); os.remove('a')"
    outcome = one(source)
    assert outcome.exit_code == 0 and not Path(outcome.stdout.strip()).exists()
    full = "for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))"
    assert "No space left" in one(full, limits=Limits(disk_mib=4)).stderr


def test_checks_call_the_answer_in_another_process():
    answer = (
        "import os\nclass Bad(ValueError): pass\ndef fail(): raise Bad('so')\ndef f(x): x.append(1)\npid = os.getpid"
    )
    tests = (
        "import os\nassert pid() != os.getpid()",
        "try:\n    fail()\nexcept Bad as error:\n    assert str(error) == 'so'",
        "x = [0]\nf(x)\nassert x == [0, 1]",
        "assert f([]) == 1",
        "assert absent() == 1",
    )
    outcome = run([Program(answer, checks=Checks(tests))], QUICK)[0]
    assert outcome.verdicts == (True, True, True, False, False)


def test_an_answer_that_dies_is_started_again_for_the_next_test():
    answer = "import os\ndef f(x):\n    return os._exit(0) if x == 1 else x"
    outcome = run([Program(answer, checks=Checks(("assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2")))], QUICK)
    assert outcome[0].verdicts == (True, False, True)


def test_no_sandbox_is_an_error_that_names_the_package(monkeypatch):
    monkeypatch.setattr(session, "_python", lambda: "/bin/false")
    with pytest.raises(SandboxUnavailable) as caught:
        one("print(1)")
    assert "bubblewrap" in caught.value.hint


def test_bubblewrap_shows_only_what_is_readable(tmp_path):
    words = session.bubblewrap_command("/usr/bin/bwrap", str(tmp_path), 3)
    bound = [words[i + 1] for i, word in enumerate(words) if word in ("--ro-bind-try", "--bind")]
    assert str(tmp_path) in bound and not {"/", "/etc", "/root", "/home"} & set(bound)
    assert "--unshare-net" in words and "--die-with-parent" in words
