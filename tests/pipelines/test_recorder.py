import json

import pytest

from rollcli.pipelines import recorder as module
from rollcli.pipelines.recorder import Recorder
from rollcli.runs.directory import RunDirectory
from rollcli.runs.events import read_lines
from rollcli.runs.status import StatusFile


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


class Mirror:
    """Keeps what it is given."""

    def __init__(self):
        self.logged = []
        self.closed = False

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def close(self):
        self.closed = True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def recorder(tmp_path, clock):
    directory = RunDirectory(tmp_path)
    status = StatusFile(directory.status, recipe="r", steps=10)
    status.update(state="running")
    return Recorder(directory, status, Mirror())


def events(recorder, *types):
    found = [dict(event) for event in read_lines(recorder.directory.events)]
    for event in found:
        event.pop("time")
    return [event for event in found if not types or event["type"] in types]


def state(recorder):
    return json.loads(recorder.directory.status.read_text())


def test_a_step_is_written_to_metrics_events_status_and_mirror(recorder, clock):
    recorder.begin_step(3)
    with recorder.timed("rollout"):
        clock.now += 2.0
    for seconds in (1.0, 3.0):
        with recorder.timed("update"):
            clock.now += seconds
    clock.now += 4.0
    metrics = {"reward": 0.5, "accuracy": 0.25, "sampled_tokens": 100.0, "trained_tokens": 80.0}
    recorder.end_step(metrics, [{"task": "a/1", "reward": 1.0}])
    expected = {
        **metrics,
        "speed/rollout_tokens_per_s": 50.0,  # 100 tokens in 2 s
        "speed/train_tokens_per_s": 20.0,  # 80 tokens in 1 + 3 s
        "speed/tokens_per_s": 8.0,  # 80 tokens in the step's 10 s
        "time/rollout_s": 2.0,
        "time/update_s": 4.0,
        "time/step_s": 10.0,
    }
    assert read_lines(recorder.directory.metrics) == [{"step": 3, **expected}]
    assert events(recorder, "step", "sample") == [
        {"type": "sample", "step": 3, "task": "a/1", "reward": 1.0},
        {"type": "step", "step": 3, "metrics": expected},
    ]
    assert recorder.mirror.logged == [(3, expected)]
    written = state(recorder)
    assert (written["step"], written["reward"], written["accuracy"], written["state"]) == (3, 0.5, 0.25, "running")


def test_where_sampling_goes_on_all_step_long_its_speed_is_over_the_step(recorder, clock):
    recorder.overlapped = True
    recorder.begin_step(1)
    with recorder.timed("rollout"):
        clock.now += 1.0
    with recorder.timed("update"):
        clock.now += 4.0
    recorder.end_step({"sampled_tokens": 100.0, "trained_tokens": 80.0}, [])
    (record,) = read_lines(recorder.directory.metrics)
    assert (record["speed/rollout_tokens_per_s"], record["speed/train_tokens_per_s"]) == (20.0, 20.0)
    assert record["time/rollout_s"] == 1.0


def test_times_belong_to_their_step(recorder, clock):
    recorder.begin_step(1)
    with recorder.timed("rollout"):
        clock.now += 2.0
    recorder.end_step({}, [])
    recorder.begin_step(2)
    with recorder.timed("update"):
        clock.now += 1.0
    recorder.end_step({}, [])
    assert [set(record) - {"step", "time/step_s"} for record in read_lines(recorder.directory.metrics)] == [
        {"time/rollout_s"},
        {"time/update_s"},
    ]


def test_what_was_not_measured_has_no_speed(recorder):
    recorder.begin_step(1)
    recorder.end_step({"sampled_tokens": 5.0}, [])
    (record,) = read_lines(recorder.directory.metrics)
    assert not any(name.startswith("speed/") for name in record)


def test_not_a_number_is_null_in_the_files(recorder):
    recorder.begin_step(1)
    recorder.end_step({"kl": float("nan")}, [])
    assert read_lines(recorder.directory.metrics)[0]["kl"] is None


def test_stages_nest_and_end_when_they_fail(recorder, clock):
    recorder.begin_step(1)
    with pytest.raises(RuntimeError), recorder.timed("rollout"):
        clock.now += 1.0
        with recorder.timed("sync"):
            assert recorder.stage == "sync"
            clock.now += 0.5
        assert recorder.stage == "rollout"
        raise RuntimeError
    assert recorder.stage is None and recorder.times == {"sync": 0.5, "rollout": 1.5}
    assert [(event["type"], event["stage"], event.get("seconds")) for event in events(recorder)] == [
        ("stage_started", "rollout", None),
        ("stage_started", "sync", None),
        ("stage", "sync", 0.5),
        ("stage", "rollout", 1.5),
    ]


def test_progress_is_told_at_most_twice_a_second(recorder, clock):
    recorder.begin_step(1)
    for done in range(21):
        recorder.progress(done, 20, {"generating": 20 - done}, 7)
        clock.now += 0.125
    told = events(recorder, "progress")
    assert [event["done"] for event in told] == [0, 4, 8, 12, 16, 20]
    assert told[1]["states"] == {"generating": 16} and told[1]["total"] == 20 and told[1]["longest"] == 7


def test_a_checkpoint_shows_while_it_is_written(recorder, tmp_path):
    recorder.begin_step(4)
    with recorder.timed("checkpoint"):
        assert state(recorder)["state"] == "checkpointing"
    recorder.checkpoint(4, tmp_path / "step_000004", 1.23456)
    assert (state(recorder)["state"], state(recorder)["checkpoint"]) == ("running", 4)
    assert events(recorder, "checkpoint") == [
        {"type": "checkpoint", "step": 4, "path": str(tmp_path / "step_000004"), "seconds": 1.235}
    ]


def test_a_run_that_is_stopping_says_so_to_its_end(recorder, tmp_path):
    recorder.begin_step(1)
    recorder.status.update(state="stopping")
    recorder.end_step({"reward": 1.0}, [])
    with recorder.timed("checkpoint"):
        assert state(recorder)["state"] == "stopping"
    recorder.checkpoint(1, tmp_path, 1.0)
    assert state(recorder)["state"] == "stopping" and state(recorder)["step"] == 1


def test_an_evaluation(recorder):
    recorder.evaluation(2, {"a": {"accuracy": 0.5, "length": 3.0}, "b": {"accuracy": 1.0}}, 0.75)
    (event,) = events(recorder)
    assert (event["type"], event["step"], event["accuracy"], event["tasks"]["a"]["length"]) == (
        "evaluation", 2, 0.75, 3.0,
    )  # fmt: skip
    assert recorder.mirror.logged == [(2, {"evaluation/a/accuracy": 0.5, "evaluation/b/accuracy": 1.0})]


def test_warnings(recorder):
    recorder.begin_step(6)
    recorder.warning("disk is nearly full")
    assert events(recorder) == [{"type": "warning", "step": 6, "message": "disk is nearly full"}]


def test_close_lets_the_mirror_speak_last(recorder):
    recorder.mirror.close = lambda: recorder.warning("left behind")
    recorder.close()
    assert [event["message"] for event in events(recorder)] == ["left behind"]


def test_a_second_attempt_goes_on_in_the_same_files(recorder):
    recorder.begin_step(1)
    recorder.end_step({"reward": 1.0}, [])
    recorder.close()
    again = Recorder(recorder.directory, recorder.status, Mirror())
    again.begin_step(2)
    again.end_step({"reward": 2.0}, [])
    assert [record["step"] for record in read_lines(recorder.directory.metrics)] == [1, 2]
