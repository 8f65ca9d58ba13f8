"""`roll runs`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rollcli.cli import runs


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (300, "5 min"), (7200, "2 h"), (400000, "5 d"), (-3, "0 s")])
def test_age(seconds, text):
    assert runs.age(1000.0, 1000.0 + seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(54.4, "54 s"), (200, "3 min 20 s"), (7860, "2 h 11 min")])
def test_duration(seconds, text):
    assert runs.duration(seconds) == text


def test_ls(roll, make_run, monkeypatch):
    monkeypatch.setattr(runs.time, "time", lambda: 1700010000.0)
    make_run("old", started=1.6e9, reward=None, steps=(), state="finished", step=500)
    path = make_run("sums-7f3a")
    (path / "events.jsonl").write_text('{"type": "run_started", "devices": "1 policy, 1 rollout"}\n')
    assert roll("runs", "ls").out == (
        "run        recipe  status       step  reward     age  devices\n"
        "sums-7f3a  sums    stopped   142/500   0.551     3 h  1 policy, 1 rollout\n"
        "old        sums    finished  500/500       -  1158 d  -\n"
    )


def test_ls_chooses(roll, make_run):
    for number in range(3):
        make_run(f"run-{number}", started=float(number), state="failed" if number else "finished")
    assert roll("runs", "ls", "-q").out == "run-2\nrun-1\nrun-0\n"
    result = roll("runs", "ls", "-n", "1")
    assert result.out.splitlines()[1].startswith("run-2") and "2 older runs are not shown" in result.err
    assert len(json.loads(roll("runs", "ls", "-n", "1", "--all", "--json").out)) == 3
    assert [e["run"] for e in json.loads(roll("runs", "ls", "--status", "finished", "--json").out)] == ["run-0"]
    assert roll("runs", "ls", "--status", "odd").code == 2


def test_ls_of_nothing(roll):
    result = roll("runs", "ls")
    assert (result.code, result.out, result.err) == (0, "", "no runs in `runs`\n")


def test_a_killed_run_is_lost(roll, make_run):
    make_run("dead", state="running", pid=2**22 - 1, host=__import__("socket").gethostname())
    assert json.loads(roll("runs", "ls", "--json").out)[0]["state"] == "lost"


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def full(make_run):
    path = make_run("sums-7f3a", (100, 140), reason="stopped by SIGINT")
    metrics = [{"step": 1, "reward": 0.1, "time/step_s": 2.0, "memory/policy_gib": 3.0},
               {"step": 2, "reward": 0.5, "time/step_s": 4.0, "memory/policy_gib": 5.0}]  # fmt: skip
    (path / "metrics.jsonl").write_text(lines(metrics))
    events = [{"type": "evaluation", "step": 0, "accuracy": 0.12}, {"type": "warning", "message": "mind this"},
              {"type": "evaluation", "step": 140, "accuracy": 0.63}]  # fmt: skip
    (path / "events.jsonl").write_text(lines(events))
    manifest = {
        "rollcli": "0.1.0", "python": "3.11.7", "started": "2026-01-01T00:00:00", "attempts": [{}, {}],
        "git": {"commit": "0123456789abcdef", "diff": "x"}, "overrides": ["seed=1"],
        "estimate": {"memory/policy_gib": 4.0, "time/step_s": 3.0, "unmeasured": 1.0},
    }  # fmt: skip
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_show(roll, full):
    result = roll("runs", "show", "sums-7f3a")
    assert result.out == (
        "run          runs/sums-7f3a\n"
        "recipe       sums\n"
        "status       stopped, stopped by SIGINT\n"
        "step         142/500\n"
        "started      2026-01-01T00:00:00, 2 attempts\n"
        "reward       0.100 → 0.500\n"
        "time         6 s in 2 steps, 3.0 s each\n"
        "accuracy     0.12 at step 0, 0.63 at step 140\n"
        "checkpoints  100, 140\n"
        "rollcli      0.1.0 (Python 3.11.7)\n"
        "commit       0123456789ab with uncommitted changes\n"
        "overrides    seed=1\n"
        "\n"
        "estimate           estimated  measured  ratio\n"
        "memory/policy_gib          4         5   1.25\n"
        "time/step_s                3         3      1\n"
    )
    assert result.err == "warning: mind this\n"


def test_show_of_a_bare_run(roll, make_run):
    make_run("bare")
    assert roll("runs", "show", "bare").code == 0


def test_show_as_json(roll, full):
    found = json.loads(roll("runs", "show", "sums-7f3a", "--json").out)
    assert found["checkpoints"] == [100, 140] and found["metrics"]["step"] == 2
    assert found["estimates"][0] == {"name": "memory/policy_gib", "estimated": 4.0, "measured": 5.0, "ratio": 1.25}


def test_watch(roll, make_run, module):
    seen = []

    def watch(directory, **options):
        seen.append((directory.id, options))
        return "detached"

    module("rollcli.monitor.follow", watch=watch, should_be_live=lambda stream: False)
    make_run("busy")
    assert roll("runs", "watch", "busy").err == "no longer watching; run `busy` goes on\n"
    assert seen == [("busy", {"live": False, "color": False})]


def test_diff_shows_only_what_differs(roll, full, make_run):
    other = make_run("sums-19c0", step=90)
    (other / "config.yaml").write_text((full / "config.yaml").read_text().replace("seed: 3", "seed: 4"))
    changed = {"started": "later", "python": "3.12.1", "overrides": ["seed=4"]}
    manifest = json.loads((full / "manifest.json").read_text()) | changed
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert roll("runs", "diff", "sums-7f3a", "sums-19c0").out == (
        "key              sums-7f3a  sums-19c0\n"
        "seed             3          4\n"
        "manifest.python  3.11.7     3.12.1\n"
        "result.step      142        90\n"
    )
    found = json.loads(roll("runs", "diff", "sums-7f3a", "sums-19c0", "--json").out)
    assert found["differences"][0] == {"key": "seed", "first": 3, "second": 4}


def test_no_differences(roll, full):
    assert roll("runs", "diff", "sums-7f3a", "sums-7f3a").out == "no differences\n"


@pytest.mark.parametrize("words", [("show", "x"), ("watch", "x"), ("diff", "x", "x")])
def test_an_unknown_run(roll, words):
    result = roll("runs", *words)
    assert result.code == 1 and result.err.startswith("error: no run called `x`")


def test_watch_as_json_streams_events(roll, make_run):
    path = make_run("done", state="finished")
    events = [{"time": 1.0, "type": "run_started"}, {"time": 2.0, "type": "run_finished", "reason": "日本"}]
    (path / "events.jsonl").write_text(lines(events))
    result = roll("runs", "watch", "done", "--json")
    assert result.code == 0 and result.err == ""
    assert [json.loads(line) for line in result.out.splitlines()] == events


def test_a_stream_goes_on_while_the_run_does(make_run, monkeypatch):
    from rollcli.runs.directory import RunDirectory

    path = make_run("busy")
    log = path / "events.jsonl"
    first, second = {"time": 1.0, "type": "warning"}, {"time": 2.0, "type": "step"}
    log.write_text(lines([first]))
    alive = iter([True, True, False])
    monkeypatch.setattr("rollcli.runs.status.read_status", lambda path: SimpleNamespace(alive=next(alive)))
    found = runs.stream(RunDirectory(path))
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: None)
    assert next(found) == first
    # A resume cuts the file, which then is another one: what was told is not told again.
    (path / "new").write_text(lines([first, second]))
    (path / "new").replace(log)
    assert list(found) == [second]


def test_one_attempt(roll, make_run):
    path = make_run("one")
    (path / "manifest.json").write_text(json.dumps({"started": "now", "attempts": [{}]}))
    assert "started      now, 1 attempt\n" in roll("runs", "show", "one").out


def test_diff_fits_the_terminal(roll, make_run, monkeypatch):
    a, b = make_run("one"), make_run("two")
    for path, text in ((a, "x" * 300), (b, "y" * 300)):
        (path / "config.yaml").write_text(f"description: {text}\n")
    assert "x" * 300 in roll("runs", "diff", "one", "two").out
    monkeypatch.setattr("rollcli.cli.output.Output.width", 60)
    table = roll("runs", "diff", "one", "two").out.splitlines()
    assert all(len(line) <= 60 for line in table) and table[1].count("…") == 2 and "y" in table[1]
