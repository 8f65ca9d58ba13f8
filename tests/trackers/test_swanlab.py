"""Against the real package, offline, each run in a process of its own: SwanLab keeps one run per process."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("swanlab") is None, reason="the package `swanlab` is not installed")

HEAD = """
import signal, sys, threading
from pathlib import Path
from rollcli.config.schema import TrackerConfig
from rollcli.trackers.base import Mirror
folder = Path(sys.argv[1])
warnings = []
hook, handler = sys.excepthook, signal.getsignal(signal.SIGINT)
"""
TAIL = """
assert sys.excepthook is hook and signal.getsignal(signal.SIGINT) is handler
for warning in warnings: sys.stdout.write(warning + chr(10))
"""


def run(body, folder, **environment):
    for name in ("SWANLAB_API_KEY", "SWANLAB_API_HOST"):
        environment.setdefault(name, "")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWANLAB_")}
    process = subprocess.run(
        [sys.executable, "-c", HEAD + body + TAIL, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env=kept | {name: value for name, value in environment.items() if value} | {"HOME": str(folder)},
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    return process.stdout


def records(folder, text):
    """How often `text` is in the one data file below `folder`."""
    (file,) = folder.glob("run-*/run-*.swanlab")
    return file.read_bytes().count(text.encode())


def test_offline_writes_files_and_nothing_else(tmp_path):
    body = """
mirror = Mirror([TrackerConfig(name="swanlab", project="tests")], warnings.append)
mirror.start("grpo-math-7f3a", {"seed": 1, "model": {"path": "tiny"}}, folder / "trackers", attempt=2, resume_step=20)
assert signal.getsignal(signal.SIGINT) is handler and sys.excepthook is hook
for step in (21, 22, 23):
    mirror.log(step, {"reward": 0.1 * step, "staleness/0": 1.0, "loss": float("nan")})
mirror.close()
"""
    assert run(body, tmp_path) == ""
    folder = tmp_path / "trackers" / "swanlab"
    (config,) = folder.glob("run-*/files/config.yaml")
    text = config.read_text()
    assert "seed" in text and "attempt" in text and "resume_step" in text and "tiny" in text
    assert records(folder, "grpo-math-7f3a-attempt-2") == 1
    assert records(folder, "staleness/0") >= 3
    assert "swanlab" in (folder / "swanlab.log").read_text()


def test_online_without_key_goes_offline_with_one_warning(tmp_path):
    body = """
mirror = Mirror([TrackerConfig(name="swanlab", mode="online")], warnings.append)
mirror.start("run-1", {}, folder)
mirror.log(1, {"reward": 1.0})
mirror.close()
"""
    output = run(body, tmp_path)
    assert output == "tracker `swanlab` is offline: no API key; set SWANLAB_API_KEY, or `mode: offline`\n"
    assert records(tmp_path / "swanlab", "reward") >= 1


def test_unreachable_server_goes_offline_with_one_warning(tmp_path):
    body = """
mirror = Mirror([TrackerConfig(name="swanlab", mode="online")], warnings.append)
mirror.start("run-1", {}, folder)
mirror.log(1, {"reward": 1.0})
mirror.close()
"""
    output = run(body, tmp_path, SWANLAB_API_KEY="k" * 21, SWANLAB_API_HOST="http://127.0.0.1:9")
    assert (
        output.startswith("tracker `swanlab` is offline: http://127.0.0.1:9 cannot be reached")
        and output.count("\n") == 1
    )
    assert records(tmp_path / "swanlab", "reward") >= 1


def test_bad_project_name_stops_before_training(tmp_path):
    body = """
from rollcli.errors import RollError
mirror = Mirror([TrackerConfig(name="swanlab", project="not a name!")], warnings.append)
try:
    mirror.start("run-1", {}, folder)
except RollError as error:
    sys.stdout.write(str(error))
"""
    assert run(body, tmp_path).startswith("tracker `swanlab` did not start: ")


def test_refused_key_stops_before_training(tmp_path):
    body = """
import http.server
from rollcli.errors import RollError

class Refuses(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(401)
        self.end_headers()
    do_POST = do_HEAD
    def log_message(self, *arguments): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
threading.Thread(target=server.serve_forever, daemon=True).start()
import os
os.environ["SWANLAB_API_HOST"] = f"http://127.0.0.1:{server.server_port}"
mirror = Mirror([TrackerConfig(name="swanlab", mode="online")], warnings.append)
try:
    mirror.start("run-1", {}, folder)
except RollError as error:
    sys.stdout.write(str(error))
"""
    output = run(body, tmp_path, SWANLAB_API_KEY="k" * 21)
    assert output.startswith("tracker `swanlab` did not start: AuthenticationError")


def test_attempts_of_a_run_are_separate_and_one_group(tmp_path):
    body = """
for attempt, resume in ((1, None), (2, 1)):
    mirror = Mirror([TrackerConfig(name="swanlab")], warnings.append)
    mirror.start("run-1", {}, folder, attempt=attempt, resume_step=resume)
    mirror.log(2, {"reward": 1.0})
    mirror.close()
"""
    run(body, tmp_path)
    files = sorted((tmp_path / "swanlab").glob("run-*/run-*.swanlab"))
    assert len(files) == 2
    names = {name for name in (b"run-1-attempt-1", b"run-1-attempt-2") for file in files if name in file.read_bytes()}
    assert len(names) == 2


def test_missing_package_names_the_extra(monkeypatch):
    from rollcli.config.schema import TrackerConfig
    from rollcli.errors import PluginError
    from rollcli.trackers.swanlab import SwanlabTracker

    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(PluginError, match="needs the package `swanlab`") as caught:
        SwanlabTracker(TrackerConfig(name="swanlab"), lambda message: None)
    assert caught.value.hint == "pip install 'rollcli[swanlab]'"
