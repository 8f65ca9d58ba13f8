"""The filter refuses what it lists; its numbers are those of the kernel's headers where these are installed."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rollcli.sandbox import seccomp

HEADERS = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
CODE = """
import ctypes, os, socket, sys, threading
from rollcli.sandbox import seccomp
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
seccomp.install(seccomp.build(forks=False, signals=False))
thread = threading.Thread(target=sys.stdout.write, args=("thread ",))
thread.start()
thread.join()
for attempt in (os.fork, socket.socket, lambda: os.kill(os.getpid(), 9), lambda: os.memfd_create("x")):
    try:
        attempt()
        sys.stdout.write("done ")
    except PermissionError:
        sys.stdout.write("refused ")
"""


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_the_kernels(column):
    if not HEADERS[column].is_file():
        pytest.skip("no kernel headers here")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text()))
    calls = {**seccomp._DENIED, **seccomp._SIGNALS, **seccomp._FORKS}
    wrong = {name: numbers[column] for name, numbers in calls.items()
             if numbers[column] >= 0 and name in known and int(known[name]) != numbers[column]}  # fmt: skip
    assert wrong == {}
    assert sum(name in known for name in calls) > 60


def test_jumps_stay_inside():
    program = seccomp.build(forks=False, signals=False)
    length = len(program) // 8
    for index, (operation, yes, no, _) in enumerate(struct.iter_unpack("HBBI", program)):
        if operation & 7 == 5:
            assert index + 1 + max(yes, no) < length


@pytest.mark.skipif(not seccomp.supported(), reason="not this processor")
def test_refused():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["thread", "refused", "refused", "refused", "refused"], done.stderr
