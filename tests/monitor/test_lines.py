from rollcli.monitor.lines import Lines
from rollcli.monitor.view import RunView
from tests.monitor.events import event, run, started, step


def written(*events, watching=False):
    view, lines = RunView(), Lines(watching)
    found = []
    for one in events:
        view.apply(one)
        found += lines.of(one, view)
    return found


def test_step_line_is_the_promised_one():
    assert written(started(), step(142, 1055))[1] == (
        "step 142/500  reward 0.551  kl 0.0051  len 384  54.8 s  11.4k tok/s  staleness ≤2"
    )


def test_lines_of_a_whole_run():
    tasks = {"math500": {"accuracy": 0.412, "accuracy_low": 0.352, "accuracy_high": 0.478, "length": 402.0}}
    lines = written(
        started(),
        event("evaluation", 1010, step=0, tasks=tasks, accuracy=0.412),
        step(1, 1075),
        event("checkpoint", 1078, step=1, path="runs/x/checkpoints/step_000001", seconds=3.21),
        event("warning", 1079, message="slow \x1b[31mdisk"),
        event("stopping", 1080, signal="SIGINT", step=2),
        event("run_finished", 1120, status="stopped", reason="SIGINT", exit_code=130, steps=2, hint="roll resume x"),
    )
    assert lines == [
        "run grpo-math-7f3a  grpo  500 steps  seed=1  algorithm.clip=0.3",
        "eval step 0  math500  accuracy 0.412 (0.35–0.48)  len 402",
        "step   1/500  reward 0.551  kl 0.0051  len 384  54.8 s  11.4k tok/s  staleness ≤2",
        "checkpoint step 1  runs/x/checkpoints/step_000001  3.2 s",
        "warning: slow ␛[31mdisk",
        "stopping: will checkpoint at step 2 (about 50s). press ctrl-c again to kill",
        "stopped  step 1/500  2m 00s  SIGINT",
    ]


def test_columns_stay_aligned_when_a_value_is_wide_or_missing():
    lines = written(
        started(),
        step(9, 1055, reward=0.5),
        step(10, 1110, reward=-0.25, length=1384.0),
        event("step", 1165, step=11, metrics={"reward": 0.75, "length": 90.0, "time/step_s": 5.0}),
    )
    assert lines[1:] == [
        "step   9/500  reward 0.500  kl 0.0051  len 384  54.8 s  11.4k tok/s  staleness ≤2",
        "step  10/500  reward -0.250  kl 0.0051  len 1384  54.8 s  11.4k tok/s  staleness ≤2",
        "step  11/500  reward  0.750  kl      -  len   90   5.0 s            -  staleness  -",
    ]


def test_failures_and_drops_appear_when_there_are_any():
    line = written(started(), step(1, 1055, failed=3.0, dropped=2.0))[1]
    assert line.endswith("staleness ≤2  failed 3  dropped 2")


def test_sft_line_has_the_loss():
    metrics = {"loss": 1.25, "time/step_s": 2.0, "speed/train_tokens_per_s": 900.0}
    assert written(started(pipeline="sft", steps=20), event("step", 1002, step=1, metrics=metrics))[1] == (
        "step  1/20  loss 1.250  2.0 s  900 tok/s"
    )


def test_several_tasks_are_evaluated_in_a_line_each():
    tasks = {"a": {"accuracy": 0.5}, "b": {"accuracy": None}}
    assert written(event("evaluation", step=3, tasks=tasks, accuracy=0.25)) == [
        "eval step 3  a  accuracy 0.500",
        "eval step 3  b  accuracy -",
        "eval step 3  all tasks  accuracy 0.250",
    ]


def test_a_repeated_warning_is_one_line():
    assert written(*(event("warning", message=message) for message in "aab")) == ["warning: a", "warning: b"]


def test_watching_does_not_offer_to_kill_and_passes_the_hint_on():
    lines = written(
        started(),
        event("stopping", 1080, signal="SIGTERM", step=1),
        event("run_finished", 1090, status="failed", reason="disk full", hint="make room"),
        watching=True,
    )
    assert lines[1:] == [
        "stopping: will checkpoint at step 1",
        "failed  step 0/500  1m 30s  disk full",
        "hint: make room",
    ]


def test_no_line_holds_a_control_character():
    hostile = "\x1b[2J\r\n\x07"
    lines = written(
        started(run=hostile, overrides=[hostile]),
        event("evaluation", step=1, tasks={hostile: {"accuracy": 1.0}}, accuracy=1.0),
        event("checkpoint", step=1, path=hostile, seconds=1.0),
        event("run_finished", status=hostile, reason=hostile),
    )
    assert len(lines) == 4 and all(line.isprintable() for line in lines)


def test_heartbeat_says_stage_and_progress():
    view = RunView()
    lines = Lines()
    assert lines.heartbeat(view, 0.0) == "...  starting"
    for one in run(142):
        view.apply(one)
    assert lines.heartbeat(view, view.updated + 52) == "...  step 143/500  rollout  371/512 samples  1m 02s"
    view.apply(event("run_finished", status="finished"))
    assert lines.heartbeat(view, 0.0) is None


def test_heartbeat_during_the_start():
    view = RunView()
    view.apply(started(1000.0))
    assert Lines().heartbeat(view, 1075.0) == "...  step 1/500  starting  1m 15s"
