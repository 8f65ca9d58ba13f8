"""Calls rewards in a process of their own, with a hard limit on time and memory.

A reward that loops, crashes, exhausts memory or raises costs its own sample and nothing else: the worker is killed,
the sample is flagged, and the next one finds a fresh worker some milliseconds later. Works from any thread and inside
a Ray actor, for it uses neither signals nor `multiprocessing`. How the processes hang together: `launcher.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollcli.errors import RewardError
from rollcli.rewards.base import RewardResult, to_result
from rollcli.rewards.launcher import MAX_RESULT_BYTES, receive_frame, send_frame

PRELOAD = ("rollcli.rewards.math:warm_up",)
START_LIMIT_S = 60.0
CLOSE_LIMIT_S = 0.5
# One thread each, for many run side by side; unbuffered, so that what a killed worker printed is in the log.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONUNBUFFERED"), "1")


@dataclass(frozen=True)
class RewardFailure:
    """Why a sample has no score.

    Attributes:
        kind: `timeout`; `judge` or `reward_model` of one that asks a model; or `reward` for everything else: words of
            `Trajectory.error_kind`.
        message: the reward's name and what happened.
    """

    kind: str
    message: str


class IsolatedCaller:
    """Runs rewards by name, one at a time, in a worker process that is replaced whenever it has to be killed."""

    def __init__(
        self,
        *,
        memory_gib: float | None = 4.0,
        preload: Sequence[str] = PRELOAD,
        log: Path | None = None,
        load_limit_s: float = 60.0,
    ) -> None:
        """Starts nothing yet; the first call, or `start`, does.

        Args:
            memory_gib: address space a worker may use beyond what it starts with; None for no limit.
            preload: modules, or `module:function` to call, that every worker finds ready.
            log: file that takes what rewards print; nowhere when None.
            load_limit_s: how long importing a reward may take; not part of a call's own limit.
        """
        self._memory_bytes = int((memory_gib or 0) * 2**30)
        self._preload = tuple(preload)
        self._log = log
        self._load_limit_s = load_limit_s
        self._lock = threading.Lock()
        self._closed = False
        self._launcher: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._channel: socket.socket | None = None
        self._loaded: set[str] = set()
        self._unloadable: dict[str, RewardFailure] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the worker now rather than at the first call.

        Raises:
            RewardError: the caller is closed, or its processes do not start.
        """
        with self._lock:
            self._ready()

    def call(self, reward: str, fields: Mapping[str, Any], timeout_s: float) -> RewardResult | RewardFailure:
        """Returns the score of one sample, or why it has none; see `call_many`."""
        return self.call_many([(reward, fields)], timeout_s)[0]

    def call_many(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]], timeout_s: float
    ) -> list[RewardResult | RewardFailure]:
        """Scores samples one after the other.

        Args:
            requests: (reward as the registry resolves it, fields of the sample).
            timeout_s: wall-clock limit of each call, in seconds.

        Returns:
            one result for each request, in their order, whatever happens to any of them. Raises nothing.
        """
        return [self._call(reward, fields, timeout_s) for reward, fields in requests]

    def close(self) -> None:
        """Ends every process, also in the middle of a call, within a second; what was running is flagged."""
        self._closed = True
        # Not under the lock, which a busy call holds: closing the control socket is what ends that call.
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
        if not self._lock.acquire(timeout=CLOSE_LIMIT_S):
            if self._launcher is not None:
                self._launcher.kill()
            self._lock.acquire()
        try:
            self._dispose()
        finally:
            self._lock.release()

    def _dispose(self) -> None:
        for end in (self._channel, self._control):
            if end is not None:
                end.close()
        if self._launcher is not None:
            try:
                self._launcher.wait(CLOSE_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
        self._channel = self._control = self._launcher = None

    def _call(self, reward: str, fields: Mapping[str, Any], timeout_s: float) -> RewardResult | RewardFailure:
        try:
            payload = pickle.dumps(dict(fields))
        except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
            return _failed(reward, f"cannot be sent its fields: {error}")
        with self._lock:
            if reward in self._unloadable:
                return self._unloadable[reward]
            try:
                self._ready()
            except RewardError as error:
                return _failed(reward, f"was not called: {error}")
            if reward not in self._loaded:
                loaded = self._ask("load", reward, b"", self._load_limit_s)
                if isinstance(loaded, RewardFailure):
                    # What an import tells, or takes, it will again; that a worker died may be nobody's fault.
                    if self._channel is not None or loaded.kind == "timeout":
                        self._unloadable[reward] = loaded
                    return loaded
                self._loaded.add(reward)
            answer = self._ask("call", reward, payload, timeout_s)
            return answer if isinstance(answer, RewardFailure) else _result(reward, answer)

    def _ask(self, verb: str, reward: str, payload: bytes, limit_s: float) -> dict[str, Any] | RewardFailure:
        """Returns the worker's answer; a worker that gives none in time, or dies, is ended and flagged."""
        assert self._channel is not None
        number, deadline = next(self._numbers), time.monotonic() + limit_s
        try:
            send_frame(self._channel, pickle.dumps((verb, number, reward, payload, limit_s)), deadline)
            answer = json.loads(receive_frame(self._channel, deadline, MAX_RESULT_BYTES))
            if answer["id"] != number:
                raise ValueError("answer to another question")
        except TimeoutError:
            self._end_worker()
            what = "exceeded" if verb == "call" else "was being imported beyond"
            return RewardFailure("timeout", f"reward `{reward}` {what} its limit of {limit_s:g} s and was stopped")
        except (EOFError, OSError):
            return _failed(reward, "was not finished: the caller is closed" if self._closed else self._end_worker())
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._end_worker()
            return _failed(reward, f"gave an answer that cannot be read: {error}")
        return RewardFailure("reward", str(answer["error"])) if "error" in answer else answer

    def _ready(self) -> None:
        """Sees to it that a worker waits for requests."""
        if self._closed:
            raise RewardError("the caller is closed")
        try:
            self._ensure_worker()
        except OSError as error:  # no log folder, no more files or processes
            raise RewardError(f"the reward launcher does not start: {error}") from error

    def _ensure_worker(self) -> None:
        if self._launcher is None or self._launcher.poll() is not None:
            if self._channel is not None:  # its worker went with the launcher
                self._channel.close()
                self._channel = None
            self._start_launcher()
        if self._channel is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._command(b"start", theirs)
        self._channel, self._loaded = ours, set()

    def _start_launcher(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_LIMIT_S)
        if self._control is not None:
            self._control.close()
        self._control = ours
        if self._closed:  # from another thread, which may not have seen this socket
            theirs.close()
            raise RewardError("the caller is closed")
        arguments = [str(theirs.fileno()), str(self._memory_bytes), *self._preload]
        with theirs, open(self._log or os.devnull, "ab") as log:
            self._launcher = subprocess.Popen(
                # -P: what lies in the working directory must not stand in for a module of that name.
                [sys.executable, "-P", "-m", "rollcli.rewards.launcher", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": _python_path()},
                start_new_session=True,
            )
        self._reply()

    def _command(self, command: bytes, channel: socket.socket | None = None) -> bytes:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [command], [channel.fileno()] if channel else [])
        except OSError:
            pass  # the launcher is gone, which the missing reply tells
        return self._reply()

    def _reply(self) -> bytes:
        assert self._control is not None and self._launcher is not None
        try:
            reply = self._control.recv(64)
        except OSError:
            reply = b""
        if reply:
            return reply
        self._launcher.kill()
        status = self._launcher.wait()
        where = f"see {self._log}" if self._log else "give a log file to see why"
        raise RewardError(f"the reward launcher ended ({_ending(status)})", hint=where)

    def _end_worker(self) -> str:
        """Ends the worker if it still runs, and says how it ended."""
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        try:
            status = int(self._command(b"end"))
        except RewardError as error:
            return f"ended its process: {error}"
        return f"ended its process ({_ending(status)})"


def _python_path() -> str:
    """Where this process finds modules: a reward named as `module:function` must be found there as it is here."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _failed(reward: str, what: str) -> RewardFailure:
    return RewardFailure("reward", f"reward `{reward}` {what}")


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    return f"signal {name}, perhaps out of memory" if name == "SIGKILL" else f"signal {name}"


def _result(reward: str, answer: dict[str, Any]) -> RewardResult | RewardFailure:
    """Checks again what the worker checked: its memory was in the hands of what it ran."""
    try:
        return to_result(RewardResult(answer["score"], answer["metrics"], answer["accuracy"]), reward)
    except (RewardError, KeyError) as error:
        return _failed(reward, f"gave an answer that cannot be read: {error}")
