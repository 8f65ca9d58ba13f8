"""Any agent that speaks OpenAI's protocol: it is given an address, and its calls become the trajectory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcli import registry
from rollcli.config.schema import Problems
from rollcli.data.carriers import Task
from rollcli.data.images import referring
from rollcli.environments.base import Model, StepResult
from rollcli.environments.blocking import perform
from rollcli.environments.chat_protocol import POLICY
from rollcli.environments.chat_server import Session, shared_server
from rollcli.errors import EpisodeError, PluginError

_OUTPUT_BYTES = 64 * 1024
_ERROR_BYTES = 4 * 1024
_DRAIN_S = 2.0
_importing = threading.Lock()


@dataclass
class Agent:
    """An agent's own program, or function, plays the episode.

    A program is started for each episode, finds `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` in its
    environment, and the problem as JSON (`id`, `split`, `seed`, `messages`, `payload`) on its standard input and in the
    file that `ROLL_TASK_FILE` names. Rewards may ask for `output`, the end of what it printed. What it writes as a JSON
    object to the file that `ROLL_RESULT_FILE` names are fields for rewards, except `metrics` and `reward`: a number, or
    numbers by agent. What it prints is never taken for a result: it may be the model's own words. An exit code other
    than 0 fails the episode, with the end of its standard error; at the episode's time limit its whole process group is
    killed.

    A function, plain or async, is called in a thread with the same problem, the address and the key, and returns the
    same object, a number, a StepResult, or nothing. A plain one that never returns cannot be killed, only its key.

    A chat that an agent goes on with continues its tokens, whatever fields it adds; words of the model that it rewrites
    begin a trajectory of their own. Asking for the model `policy/NAME` is the turn of the agent NAME, with a
    trajectory, a reward and a token budget of its own. Sampling is the recipe's: see `chat_protocol`. A chat without
    room, or a spent budget, is answered by 400 `context_length_exceeded`; an agent that fails by it ends its episode as
    cut.
    """

    command: list[str] = field(default_factory=list)
    """Program and arguments; it is started in the directory of the run's command, without a shell."""
    agent: str = field(default="", metadata={"target": True})
    """In place of a command: `./file.py:function` or `module:function`."""
    models: list[str] = field(default_factory=list)
    """Names that an agent may ask for beside `policy`, such as one that is written into it."""
    untrained: list[str] = field(default_factory=list)
    """Names of agents whose chats are no part of the update."""

    def __post_init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._group: int | None = None

    def problems(self) -> Problems:
        if bool(self.command) == bool(self.agent):
            yield "command" if self.command else "agent", "give one of `command` and `agent`"
        if self.agent and ":" not in self.agent:
            yield "agent", f"must be `./file.py:function` or `module:function`, is `{self.agent}`"
        elif self.agent:
            try:
                registry.resolve("agents", self.agent)
            except PluginError as error:
                yield "agent", f"{error}; {error.hint}"

    async def play(self, task: Task, model: Model) -> StepResult | dict[str, StepResult]:
        """Has the agent play.

        Raises:
            OutOfTokens: it failed after it was told that it may say no more.
            EpisodeError: it failed otherwise, or its result is none.
        """
        server = await asyncio.to_thread(shared_server)
        session = Session(model, tuple(self.models), tuple(self.untrained))
        token = server.admit(session)
        document = _document(task)
        playing = asyncio.ensure_future(
            self._run(document, server.url, token) if self.command else self._call(document, server.url, token)
        )
        try:
            await asyncio.wait([playing])
        finally:
            server.dismiss(token)
            if not playing.done():
                playing.cancel()
                self._kill()
        error = playing.exception()
        if error is not None:
            raise session.spent or session.fault or error
        return result_of(playing.result())

    async def close(self) -> None:
        """Kills what is left of the program."""
        self._kill()

    async def _call(self, document: dict[str, Any], url: str, token: str) -> Any:
        function = await asyncio.to_thread(_imported, self.agent)
        return await perform(_Threaded(function), "call", document, url, token)

    async def _run(self, document: dict[str, Any], url: str, token: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="roll-agent-") as folder:
            problem, result = Path(folder, "task.json"), Path(folder, "result.json")
            problem.write_text(json.dumps(document), encoding="utf-8")
            files = {"ROLL_TASK_FILE": str(problem), "ROLL_RESULT_FILE": str(result)}
            with problem.open("rb") as standard_input:
                await self._start(standard_input, _environment(url, token) | files)
            output, errors = await self._ended()
            code = self._process.returncode
            if code:
                told = f": …{errors.strip()[-1000:]}" if errors.strip() else ", and nothing on standard error"
                raise EpisodeError(f"agent `{self.command[0]}` ended with {_reason(code)}{told}")
            return {"output": output, **_read_result(result)}

    async def _start(self, standard_input: Any, environment: dict[str, str]) -> None:
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, stdin=standard_input, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
        except OSError as error:
            raise EpisodeError(
                f"agent `{self.command[0]}` cannot be started: {error.strerror}", hint="see `environment.command`"
            ) from error
        self._group = self._process.pid

    async def _ended(self) -> tuple[str, str]:
        """Waits for the program; what it started and left behind ends with it. Returns the ends of what it wrote."""
        streams = [(self._process.stdout, _OUTPUT_BYTES), (self._process.stderr, _ERROR_BYTES)]
        tails = [bytearray(), bytearray()]
        readers = [asyncio.ensure_future(_read(*stream, tail)) for stream, tail in zip(streams, tails)]
        try:
            await self._process.wait()
            self._kill()
            await asyncio.wait(readers, timeout=_DRAIN_S)
        finally:
            for reader in readers:
                reader.cancel()
        return tuple(tail.decode("utf-8", errors="replace") for tail in tails)

    def _kill(self) -> None:
        """Kills the program's process group, once: its number may be another's later."""
        if self._group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
            self._group = None


def _imported(name: str) -> Any:
    """Returns a function; episodes that begin at once import its file once."""
    with _importing:
        return registry.resolve("agents", name)


class _Threaded:
    """A function that `perform` calls in a thread."""

    blocking = True

    def __init__(self, call: Any) -> None:
        self.call = call


def result_of(value: Any) -> StepResult | dict[str, StepResult]:
    """Returns what an agent gave back as results.

    Raises:
        EpisodeError: it is nothing of what an agent may return.
    """
    if value is None:
        return StepResult(done=True)
    if isinstance(value, StepResult):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return StepResult(done=True, reward=value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise EpisodeError(
            f"an agent returned {type(value).__name__}", hint="it may return a reward, an object of fields, or nothing"
        )
    fields = {key: item for key, item in value.items() if key not in ("reward", "metrics")}
    reward, metrics = value.get("reward", 0.0), value.get("metrics") or {}
    if isinstance(reward, Mapping):
        names = {"" if name == POLICY else name: each for name, each in reward.items()}
        return {name: StepResult([], True, each, fields, metrics) for name, each in names.items()}
    return StepResult([], True, reward, fields, metrics)


def _document(task: Task) -> dict[str, Any]:
    """Returns a problem as JSON can hold it.

    Raises:
        EpisodeError: its payload cannot be written so.
    """
    document = {
        "id": task.id, "split": task.split, "seed": task.seed, "messages": referring(task.messages),
        "payload": task.payload,
    }  # fmt: skip
    try:
        return json.loads(json.dumps(document))
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"the problem cannot be given to an agent as JSON: {error}") from error


def _environment(url: str, token: str) -> dict[str, str]:
    """Returns this process's environment with the address; no proxy stands between."""
    direct = ",".join(part for part in (os.environ.get("NO_PROXY"), "127.0.0.1") if part)
    return {
        **os.environ,
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": token,
        "OPENAI_MODEL": POLICY,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _read_result(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise EpisodeError(f"an agent's result is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise EpisodeError(f"an agent's result is {type(found).__name__}, not an object")
    return found


def _reason(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


async def _read(stream: asyncio.StreamReader, most: int, tail: bytearray) -> None:
    """Reads to the end, and keeps the last `most` bytes."""
    while piece := await stream.read(64 * 1024):
        tail += piece
        del tail[:-most]
