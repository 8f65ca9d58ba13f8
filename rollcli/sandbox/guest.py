"""The trusted process inside: forks a confined process for each program, watches it, ends it, tells what happened.

It never reads tests: `checker` takes them from the control socket itself, so no answer is forked from a process that
has seen what is expected of it. It runs nothing of the model's and imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollcli.sandbox import checks, confine, landlock, seccomp

MAX_VERDICT_BYTES = 1 << 20
SEALED = b"sealed\n"


def send(channel: socket.socket, message: Any) -> None:
    """Sends one message as JSON. Raises OSError."""
    frame = json.dumps(message).encode()
    channel.sendall(len(frame).to_bytes(8, "big") + frame)


def receive(channel: socket.socket) -> Any:
    """Receives one message. Raises EOFError when the other side is gone, OSError, TimeoutError of the socket."""
    length = int.from_bytes(_exactly(channel, 8), "big")
    return json.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


@dataclass
class _House:
    """What all programs of this guest share."""

    control: socket.socket
    bounds: confine.Bounds
    readable: list[str]
    folder: str
    wall_s: float
    output_bytes: int
    namespaces: bool
    guest: int
    mounted: bool = False
    rounds: int = 0


@dataclass
class _Watched:
    """What is seen of a program while it runs."""

    deadline: float
    texts: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    verdicts: bytearray = field(default_factory=bytearray)
    sealed: bytearray = field(default_factory=bytearray)
    ended: str = "exit"


def main() -> None:
    """Runs the guest: arguments are the control socket's number and the host's pid, as it is seen from here."""
    control, host = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confine.die_with(host)
    settings = receive(control)
    if not seccomp.supported() or not (landlock.version() or settings["walled"]):
        send(control, {"error": "the kernel has no Landlock, or the processor's system calls are not known"})
        return
    namespaces = confine.enter_namespaces()
    if not namespaces and settings["bounds"]["processes"] > 1 and not settings["walled"]:
        send(control, {"error": "programs of several processes need a pid namespace, which is refused"})
        return
    if namespaces:
        inner = os.fork()
        if inner:
            control.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        confine.die_with(0)
    confine.hide()
    bounds = confine.Bounds(**settings.pop("bounds"))
    settings.pop("walled")
    house = _House(control, bounds, namespaces=namespaces, guest=os.getpid(), **settings)
    send(control, {"ready": True})
    while True:
        try:
            request = receive(control)
        except (EOFError, ConnectionError):
            os._exit(0)
        send(control, _run(house, request))


def _run(house: _House, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one program, checked or not, and returns the fields of its outcome."""
    folders = _fresh_folders(house)
    uid, watched = confine.draw_uid(), _Watched(time.monotonic() + house.wall_s)
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "sealed", "verdicts")}
    talk = socket.socketpair() if request["checked"] else None
    if house.mounted:
        os.chown(folders[0], uid, uid)
    answer = _fork(lambda: _answer(house, request, talk, pipes, folders[0], uid))
    children = [answer]
    if talk:
        # From here to its verdict the control socket is the checker's.
        children.append(_fork(lambda: _checker(house, request["skip"], talk, pipes, folders[1], confine.draw_uid())))
        for end in talk:
            end.close()
    for _, write_end in pipes.values():
        os.close(write_end)
    _watch(house, watched, {name: ends[0] for name, ends in pipes.items()}, children)
    status, cpu_s = _end(house, children)
    return {
        "ended": watched.ended,
        "exit_code": os.waitstatus_to_exitcode(status),
        "sealed": bytes(watched.sealed).count(SEALED) == len(children),
        "verdicts": watched.verdicts.decode(errors="replace"),
        "cpu_s": cpu_s,
        **{name: text.decode(errors="replace") for name, text in watched.texts.items()},
    }


def _fresh_folders(house: _House) -> tuple[str, str]:
    """Returns empty folders for the answer and for its tests: on a file system of their own, where one can be made."""
    if house.namespaces:
        house.mounted = confine.mount_folder(house.folder, house.bounds.disk_bytes, not house.mounted)
    house.rounds += 1
    folders = tuple(os.path.join(house.folder, f"{name}-{house.rounds}") for name in ("answer", "checker"))
    for folder in folders:
        os.mkdir(folder, 0o755)
    return folders


def _fork(run: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        # Whatever ends a program, it must not return into the guest's loop.
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)


def _answer(house: _House, request: dict[str, Any], talk: Any, pipes: dict[str, tuple[int, int]], folder: str,
            uid: int) -> None:  # fmt: skip
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(request["stdin"].encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    channel = talk[0] if talk else None
    sealed = pipes["sealed"][1]
    _take_streams(stdin, pipes["stdout"][1], pipes["stderr"][1], {sealed, *([channel.fileno()] if channel else [])})
    _seal(house, folder, uid, house.mounted, sealed)
    source = request.pop("source")
    if channel:
        checks.serve_answer(source, channel)
        return
    module = types.ModuleType("__main__")
    module.__file__ = "answer.py"
    sys.modules["__main__"] = module
    sys.argv = ["answer.py"]
    exec(compile(source, "answer.py", "exec"), module.__dict__)


def _checker(house: _House, skip: int, talk: Any, pipes: dict[str, tuple[int, int]], folder: str, uid: int) -> None:
    tests = receive(house.control)
    if tests["pytest"]:
        with open(os.path.join(folder, checks.PYTEST_FILE), "w", encoding="utf-8") as file:
            file.write(tests["tests"][0])
    verdicts, sealed = pipes["verdicts"][1], pipes["sealed"][1]
    nothing = os.open(os.devnull, os.O_RDWR)
    _take_streams(nothing, pipes["stdout"][1], pipes["stderr"][1], {verdicts, sealed, talk[1].fileno()})
    if house.mounted and os.getuid() == 0:
        os.chown(folder, uid, uid)
    _seal(house, folder, uid, house.mounted, sealed)

    def tell(passed: bool | None, failure: str) -> None:
        os.write(verdicts, json.dumps([passed, failure]).encode() + b"\n")

    checks.run_checks(tests, skip, talk[1], folder, tell)


def _take_streams(stdin: int, stdout: int, stderr: int, keep: set[int]) -> None:
    """Makes these the standard streams and closes every other file but `keep`."""
    for number, source in enumerate((stdin, stdout, stderr)):
        os.dup2(source, number)
    last = 2
    for number in (*sorted(keep), confine.FILES + 65536):
        os.closerange(last + 1, number)
        last = number
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors=errors, closefd=False)
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _seal(house: _House, folder: str, uid: int, writable: bool, sealed: int) -> None:
    """Confines this process and says so; what is to run afterwards may be anything."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    confine.confine(house.bounds, uid, house.readable, folder, writable, house.guest, house.namespaces)
    os.write(sealed, SEALED)
    os.close(sealed)


def _watch(house: _House, watched: _Watched, ends: dict[str, int], children: list[int]) -> None:
    """Reads what comes until the program (with tests: the checker) has ended, is over time, or wrote too much."""
    with selectors.DefaultSelector() as selector:
        for name, end in ends.items():
            selector.register(end, selectors.EVENT_READ, name)
        last = os.pidfd_open(children[-1])
        selector.register(last, selectors.EVENT_READ, "last")
        over = False
        while not over and watched.ended == "exit":
            ready = selector.select(max(0.0, watched.deadline - time.monotonic()))
            if not ready:
                watched.ended = "timeout"
            over = any(key.data == "last" for key, _ in ready)
            for key, _ in ready:
                if key.data != "last":
                    _take(house, watched, key, selector)
        # What a program wrote before it ended may still be in the pipes.
        while watched.ended == "exit":
            ready = [each for each in selector.select(0) if each[0].data != "last"]
            if not ready:
                break
            for key, _ in ready:
                _take(house, watched, key, selector)
    for end in (*ends.values(), last):
        os.close(end)


def _take(house: _House, watched: _Watched, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    part = os.read(key.fd, 1 << 16)
    if not part:
        selector.unregister(key.fd)
    elif key.data == "sealed":
        watched.sealed += part[:64]
    elif key.data == "verdicts":
        watched.verdicts += part
        watched.deadline = time.monotonic() + house.wall_s  # each test has its own limit
        if len(watched.verdicts) > MAX_VERDICT_BYTES:
            watched.ended = "output"
    else:
        left = house.output_bytes - sum(map(len, watched.texts.values()))
        watched.texts[key.data] += part[:left]
        if len(part) > left:
            watched.ended = "output"


def _end(house: _House, children: list[int]) -> tuple[int, float]:
    """Kills all that is left and takes it off the process table; returns the answer's status and seconds of CPU."""
    targets = [-1] if house.namespaces else children
    for target in targets:
        try:
            os.kill(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
    statuses, cpu_s = {}, 0.0
    while True:
        try:
            child, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            return statuses[children[0]], cpu_s
        statuses[child] = status
        cpu_s += used.ru_utime + used.ru_stime
