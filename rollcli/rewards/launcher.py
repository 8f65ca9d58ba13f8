"""The process that forks reward workers, and what runs inside each of them.

    caller (threads, Ray) ──exec──▶ launcher (one thread, imports done) ──fork──▶ worker (one at a time)
           └───────────────────────── requests and results ─────────────────────────┘

A fork of a threaded process is not safe and an exec costs a second of imports, so a small process in between has the
imports done and does nothing but fork, which takes milliseconds. `multiprocessing`'s fork server is built alike, but
runs the caller's `__main__` again in every worker; under Ray that is Ray's own start script.

Nothing outlives the caller: its death closes the control socket, at which the launcher kills its worker and ends; the
kernel kills the worker when the launcher dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

from rollcli import registry
from rollcli.errors import PluginError, RollError
from rollcli.rewards.base import Reward, call_reward

MAX_RESULT_BYTES = 1 << 20
_LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1


def send_frame(channel: socket.socket, payload: bytes, deadline: float | None = None) -> None:
    """Sends one message. Raises `TimeoutError` after `deadline` (`time.monotonic`), OSError when the peer is gone."""
    channel.settimeout(_left(deadline))
    channel.sendall(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)


def receive_frame(channel: socket.socket, deadline: float | None = None, max_bytes: int = 1 << 40) -> bytes:
    """Receives one message. Raises EOFError when the peer is gone, ValueError for too long a message, TimeoutError."""
    length = int.from_bytes(_receive(channel, _LENGTH_BYTES, deadline), "big")
    if length > max_bytes:
        raise ValueError(f"message of {length} bytes")
    return _receive(channel, length, deadline)


def _receive(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        channel.settimeout(_left(deadline))
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def main() -> None:
    """Runs the launcher: `python -m rollcli.rewards.launcher CONTROL_FD MEMORY_BYTES MODULE[:FUNCTION]…`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    preload(sys.argv[3:])
    gc.freeze()  # what is imported stays shared with the workers
    control.send(b"ready")
    _serve_caller(control, int(sys.argv[2]))


def preload(targets: Iterable[str]) -> None:
    """Imports each `module`, and calls the function of each `module:function`, once for all workers to come."""
    for target in targets:
        module_name, _, function = target.partition(":")
        # A module that is not installed is reported by the reward that needs it.
        with contextlib.suppress(ImportError):
            module = importlib.import_module(module_name)
            if function:
                getattr(module, function)()


def _serve_caller(control: socket.socket, memory_bytes: int) -> None:
    """Starts and ends workers as the caller asks: `start` with a socket, `end`, until the control socket closes."""
    caller, worker = os.getppid(), None
    control.settimeout(1.0)
    while True:
        try:
            command, channels, _, _ = socket.recv_fds(control, 16, 1)
        except TimeoutError:
            # A process forked from the caller may hold a copy of its end; then only this shows that it died.
            command, channels = (b"" if os.getppid() != caller else b"wait"), []
        if command == b"wait":
            continue
        status = _end(worker) if worker is not None else 0
        worker = None
        if command == b"start":
            worker = _fork(control, channels[0], memory_bytes)
            os.close(channels[0])
        elif not command:
            return
        control.send(str(status).encode())


def _end(worker: int) -> int:
    """Kills a worker with all it started; returns its exit status, negative for a signal."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _fork(control: socket.socket, channel: int, memory_bytes: int) -> int:
    launcher = os.getpid()
    worker = os.fork()
    if worker:
        return worker
    status, requests = 1, socket.socket(fileno=channel)  # open to the very end: its closing tells that the worker ended
    try:
        control.close()
        _confine(launcher, memory_bytes)
        _serve_requests(requests)
        status = 0
    except SystemExit as ended:  # a reward that calls `sys.exit(3)` ends its worker with 3
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        # Whatever ends a worker, it must not return into the launcher's loop.
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(status & 0xFF)


def _confine(launcher: int, memory_bytes: int) -> None:
    """Ties a worker's life to the launcher's and bounds its memory."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        with open("/proc/self/statm") as pages:
            base = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (base + memory_bytes, base + memory_bytes))


def _serve_requests(channel: socket.socket) -> None:
    """Answers (verb, id, reward, fields, limit in seconds), one by one, each with JSON, until the caller is gone."""
    functions: dict[str, Reward] = {}
    while True:
        try:
            request = receive_frame(channel)
        except (EOFError, ConnectionError):
            return
        send_frame(channel, json.dumps(_answer(request, functions)).encode())


def _answer(request: bytes, functions: dict[str, Reward]) -> dict[str, Any]:
    verb, number, name, fields, limit_s = pickle.loads(request)
    used = time.process_time()
    # The caller's clock is the limit that counts; this one is for a worker whose caller hangs.
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + limit_s) + 5, resource.RLIM_INFINITY))
    try:
        if verb == "load":
            functions[name] = _load(name)
            return {"id": number}
        result = call_reward(functions[name], pickle.loads(fields))
    except Exception as error:
        # The border of reward calls: whatever a reward or its file raises is this sample's result, and no other's.
        return {"id": number, "error": _told(name, error)}
    return {"id": number, "score": result.score, "metrics": result.metrics, "accuracy": result.accuracy}


def _load(name: str) -> Reward:
    function = registry.resolve("rewards", name)
    if not callable(function):
        raise PluginError(f"reward `{name}` is not a function but {type(function).__name__}")
    return function


def _told(name: str, error: Exception) -> str:
    if isinstance(error, RollError):
        return f"{error.message}; {error.hint}" if error.hint else error.message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"reward `{name}` raised {type(error).__name__}: {str(error)[:300]} ({place})"


if __name__ == "__main__":
    main()
