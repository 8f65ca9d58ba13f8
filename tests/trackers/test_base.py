import math
import threading
import time

import pytest

from rollcli import registry
from rollcli.config.schema import TrackerConfig
from rollcli.errors import PluginError, RollError
from rollcli.trackers import BUILTIN
from rollcli.trackers.base import Mirror

PLUGIN = """
from rollcli.errors import PluginError

class Memory:
    made = []

    def __init__(self, config, warn):
        self.config, self.warn, self.calls, self.failing = config, warn, [], 0
        self.hold = None
        Memory.made.append(self)

    def start(self, run_id, config, folder, attempt, resume_step):
        self.calls.append(("start", run_id, config, folder, attempt, resume_step))
        self.warn("started with a remark")

    def log(self, step, metrics):
        if self.hold is not None:
            self.hold.wait()
        if self.failing:
            self.failing -= 1
            raise OSError("disk full\\nsecond line")
        self.calls.append(("log", step, metrics))

    def close(self):
        self.calls.append(("close",))

class Refuses(Memory):
    def start(self, *arguments):
        raise ValueError("bad project name\\nand details")

class Leaves(Memory):
    def start(self, *arguments):
        raise SystemExit(0)

class Absent(Memory):
    def __init__(self, config, warn):
        raise PluginError("needs a package", hint="pip install it")
"""


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    return lambda name: TrackerConfig(name=f"{file}:{name}")


def made(config):
    return registry.resolve("trackers", config.name).made


def test_builtin_names_resolve():
    for name in BUILTIN:
        assert registry.resolve("trackers", name).__name__.endswith("Tracker")


def test_mirror_passes_everything_on_in_order(plugin, tmp_path):
    config, warnings = plugin("Memory"), []
    mirror = Mirror([config], warnings.append)
    mirror.start("run-1", {"seed": 1}, tmp_path / "trackers", attempt=2, resume_step=20)
    mirror.log(21, {"reward": 0.5, "bad": math.nan, "missing": None, "count": 3})
    mirror.log(22, {"reward": 0.6})
    mirror.close()
    (tracker,) = made(config)
    folder = tmp_path / "trackers" / "Memory"
    assert folder.is_dir()
    assert tracker.calls == [
        ("start", "run-1", {"seed": 1}, folder, 2, 20),
        ("log", 21, {"reward": 0.5, "count": 3.0}),
        ("log", 22, {"reward": 0.6}),
        ("close",),
    ]
    assert warnings == ["started with a remark"]


def test_failed_start_stops_the_run_and_closes_the_others(plugin, tmp_path):
    good = plugin("Memory")
    mirror = Mirror([good, plugin("Refuses")], lambda message: None)
    with pytest.raises(RollError, match=r"did not start: ValueError: bad project name$") as caught:
        mirror.start("run-1", {}, tmp_path)
    assert "trackers=[]" in caught.value.hint
    assert made(good)[0].calls[-1] == ("close",)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tracker_that_exits_does_not_hang_the_start(plugin, tmp_path):
    with pytest.raises(RollError, match="did not start: RuntimeError: it ended its own thread"):
        Mirror([plugin("Leaves")], lambda message: None).start("run-1", {}, tmp_path)


def test_missing_package_is_known_before_anything_starts(plugin):
    with pytest.raises(PluginError, match="needs a package"):
        Mirror([plugin("Absent")], lambda message: None)


def test_unknown_name():
    with pytest.raises(PluginError, match="did you mean `swanlab`"):
        Mirror([TrackerConfig(name="swanlap")], lambda message: None)


def test_later_failure_costs_one_warning_and_no_step(plugin, tmp_path):
    config, warnings = plugin("Memory"), []
    mirror = Mirror([config], warnings.append)
    mirror.start("run-1", {}, tmp_path)
    (tracker,) = made(config)
    tracker.failing = 2
    for step in (1, 2, 3, 4):
        mirror.log(step, {"reward": float(step)})
    mirror.close()
    assert [call[1] for call in tracker.calls if call[0] == "log"] == [1, 2, 3, 4]
    (warning,) = [message for message in warnings if "failed" in message]
    assert warning.startswith("tracker `") and "OSError: disk full; training goes on" in warning


def test_warnings_come_in_the_callers_thread(plugin, tmp_path):
    config, threads = plugin("Memory"), []
    mirror = Mirror([config], lambda message: threads.append(threading.current_thread()))
    mirror.start("run-1", {}, tmp_path)
    made(config)[0].failing = 1
    mirror.log(1, {})
    mirror.close()
    assert threads == [threading.current_thread()] * 2


def test_slow_tracker_delays_neither_step_nor_exit(plugin, tmp_path):
    config, warnings = plugin("Memory"), []
    mirror = Mirror([config], warnings.append)
    mirror.start("run-1", {}, tmp_path)
    made(config)[0].hold = threading.Event()
    begin = time.monotonic()
    mirror.log(1, {})
    mirror.close(timeout_s=0.1)
    assert time.monotonic() - begin < 30
    assert "did not close within 0 s" in warnings[-1]
    made(config)[0].hold.set()


def test_no_trackers_is_fine(tmp_path):
    mirror = Mirror([], lambda message: None)
    mirror.start("run-1", {}, tmp_path)
    mirror.log(1, {"reward": 1.0})
    mirror.close()


def test_close_without_start(plugin):
    Mirror([plugin("Memory")], lambda message: None).close()
