"""A rollout engine in a process of its own: vLLM changes too much of the one it runs in for other tests to follow.

python engine_process.py SOCKET NAME MODEL_CONFIG OPTIONS
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any


class Remote:
    """Stands for an engine that another process holds: what is asked of the one is done by the other.

    Args:
        folder: for the socket and what the process prints.
        name: registered name of the engine.
        model: the recipe's `model` block.
        options: `max_rows` and engine arguments.
    """

    def __init__(self, folder: Path, name: str, model: dict[str, Any], **options: Any) -> None:
        with Listener(str(folder / "socket"), "AF_UNIX") as listener:
            command = [sys.executable, __file__, listener.address, name, json.dumps(model), json.dumps(options)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            with (folder / "log").open("w") as log:
                self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            self._log = folder / "log"
            # A process that dies before it connects would leave `accept` waiting.
            listener._listener._socket.settimeout(1)
            while True:
                try:
                    self._connection = listener.accept()
                    break
                except TimeoutError:
                    assert self._process.poll() is None, self._log.read_text()
        self._answer()

    def __getattr__(self, name: str) -> Any:
        if name in ("version", "max_context", "pending", "max_rows"):
            return self._ask(name, None)
        return lambda *arguments, **named: self._ask(name, (arguments, named))

    def _ask(self, name: str, call: tuple | None) -> Any:
        self._connection.send_bytes(pickle.dumps((name, call)))  # `send` would share memory, and tensors by it
        return self._answer()

    def _answer(self) -> Any:
        try:
            error, value = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise AssertionError(self._log.read_text()) from None
        if error is not None:
            raise error
        return value

    def memory_mib(self) -> float:
        """Returns the resident memory of the engine's process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serve(address: str, name: str, model: str, options: str) -> None:
    """Loads an engine and does what comes over the socket until it closes."""
    import torch

    torch.set_num_threads(1)
    from rollcli import registry
    from rollcli.config.schema import ModelConfig, ParallelConfig

    with Client(address, "AF_UNIX") as connection:
        engine = registry.resolve("infer_engines", name).load(
            ModelConfig(**json.loads(model)), device=torch.device("cpu"), seed=0, parallel=ParallelConfig(),
            **json.loads(options),
        )  # fmt: skip
        connection.send_bytes(pickle.dumps((None, None)))
        while True:
            try:
                asked, call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                value = getattr(engine, asked)
                connection.send_bytes(pickle.dumps((None, value if call is None else value(*call[0], **call[1]))))
            except Exception as error:
                connection.send_bytes(pickle.dumps((error, None)))


if __name__ == "__main__":
    serve(*sys.argv[1:])
