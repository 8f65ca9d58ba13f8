"""Rewards that misbehave, named by their file in `test_isolation.py`."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from rollcli.rewards import RewardResult


def echo(response: str) -> float:
    return float(response)


def detailed(response: str) -> RewardResult:
    return RewardResult(0.5, {"length": len(response)}, accuracy=1.0)


def loop() -> float:
    while True:
        pass


def leave() -> float:
    os._exit(3)


def sys_exit() -> float:
    sys.exit(4)


def crash() -> float:
    ctypes.string_at(0)
    return 0.0


def gigabytes() -> float:
    return float(len(bytearray(8 << 30)))


def raises(response: str) -> float:
    raise ValueError(f"cannot read {response}")


def nothing() -> None:
    return None


def talk(response: str) -> float:
    print("said", response)
    return 1.0


def with_child(pid_file: str) -> float:
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(child.pid))
    time.sleep(600)
    return 1.0


def environment() -> float:
    return float(os.environ["OMP_NUM_THREADS"])


not_a_function = 7
