"""A chat-completions server for tests: a thread that answers as the last word of a question says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Keeps what it was sent; `reply` answers, `failures` calls are refused first, `release` ends what hangs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.reply = "It agrees.\nScore: 8"
        self.finish = "stop"
        self.failures = 0
        self.hangs = 0
        self.raw: bytes | None = None
        self.release = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """What a recipe calls it."""
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            refused = self.server.failures > 0
            self.server.failures -= refused
            hangs = self.server.hangs > 0
            self.server.hangs -= hangs
        if hangs:
            self.server.release.wait(60)
        status = 404 if self.path != "/v1/chat/completions" else 500 if refused else 200
        choice = {"message": {"role": "assistant", "content": self.server.reply}, "finish_reason": self.server.finish}
        answer = self.server.raw or json.dumps({"choices": [choice]}).encode()
        with contextlib.suppress(OSError):  # whoever asked has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)


@contextlib.contextmanager
def served() -> Iterator[Server]:
    """A server while the block runs."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
