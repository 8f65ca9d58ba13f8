import pytest

from rollcli.monitor.view import RunView
from tests.monitor.events import event, run, sample, started, step


def fold(*events):
    view = RunView()
    for one in events:
        view.apply(one)
    return view


def test_start_names_the_run():
    view = fold(started())
    assert (view.run, view.recipe, view.algorithm, view.steps, view.step) == (
        "grpo-math-7f3a",
        "grpo-math",
        "grpo",
        500,
        0,
    )
    assert view.overrides == ["seed=1", "algorithm.clip=0.3"]
    assert view.elapsed_s(1030.0) == 30.0
    assert view.left_s(1030.0) is None and view.checkpoint is None and view.finished is None


def test_step_fills_series_and_kl_prefers_the_reference():
    view = fold(started(), step(1, 1055, reward=0.1), step(2, 1110, reward=0.5))
    assert view.step == 2
    assert view.series["reward"].change == pytest.approx(0.4)
    assert view.series["kl"].last == (2, 0.0051)
    assert view.series["entropy"].last == (2, 0.83)
    only_old = fold(started(), event("step", step=1, metrics={"kl_old": 0.02, "reward": None, "length": float("nan")}))
    assert only_old.series["kl"].last == (1, 0.02)
    assert only_old.series["reward"].last is None and only_old.series["length"].last is None


def test_time_left_follows_the_recent_steps_and_leaves_the_start_up_out():
    view = fold(started(), step(1, 2000.0, **{"time/step_s": 50.0}), step(2, 2070.0))
    assert view.step_s() == 60.0
    assert view.left_s(2070.0) == 498 * 60.0
    assert view.left_s(2100.0) == 498 * 60.0 - 30
    assert view.left_s(9999.0) == 497 * 60.0
    assert view.step_left_s(2080.0) == 50.0
    assert view.step_left_s(9999.0) == 0.0


def test_stages_open_and_close():
    view = fold(started(), event("stage_started", 1010, step=1, stage="rollout"))
    view.apply(event("progress", 1012, step=1, stage="rollout", done=3, total=8, longest=40, states={"generating": 5}))
    assert view.stage == "rollout"
    assert (view.progress.done, view.progress.total, view.progress.longest) == (3, 8, 40)
    assert view.progress.states == {"generating": 5}
    view.apply(event("stage_started", 1013, step=1, stage="update"))
    assert view.stage == "update" and view.progress.done == 3
    view.apply(event("stage", 1014, step=1, stage="update", seconds=1.0))
    assert view.stage == "rollout"
    view.apply(event("stage", 1014, step=1, stage="rollout", seconds=4.0))
    assert (view.stage, view.doing, view.progress.total) == ("", "starting", 0)
    view.apply(step(1, 1015))
    assert view.doing == "between stages"


def test_stage_seconds_keep_the_order_of_the_step_and_name_the_idle_time():
    view = fold(started(), step(1, 1055))
    assert list(view.stage_seconds()) == ["sync", "rollout", "logprobs", "advantages", "update", "idle"]
    assert view.stage_seconds()["idle"] == pytest.approx(3.9)
    assert view.last_step_s() == 54.8
    bare = fold(started(), event("step", step=1, metrics={"time/update_s": 2.0, "time/own_s": 1.0}))
    assert bare.stage_seconds() == {"update": 2.0, "own": 1.0} and bare.last_step_s() == 3.0


def test_staleness_and_tasks():
    view = fold(started(), step(1, 1055))
    assert view.staleness() == {0: 0.61, 1: 0.32, 2: 0.07}
    assert view.by_task() == {"gsm8k": 0.61, "sokoban": 0.32}
    assert fold(started()).staleness() == {}
    rewards = fold(event("step", step=1, metrics={"reward/a": 1.0, "reward/b": 2.0, "accuracy/a": 0.5}))
    assert rewards.by_task() == {"a": 0.5, "b": 2.0}


def test_samples_are_those_of_the_newest_step():
    view = fold(sample(1, 0.2), sample(1, 0.9), sample(2, 0.5))
    assert [one["reward"] for one in view.samples] == [0.5]


def test_keys_walk_through_the_samples():
    view = fold(*(sample(1, reward) for reward in (0.5, 1.0, 0.0)))
    seen = [view.sample()["reward"]]
    for key in "nnnpbnwp":
        view.select(key)
        seen.append(view.sample()["reward"])
    assert seen == [0.5, 1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_best_and_worst_hold_for_later_steps():
    view = fold(sample(1, 0.5), sample(1, 1.0))
    view.select("b")
    for reward in (0.1, None, 0.7, 0.3):
        view.apply(sample(2, reward))
    assert view.sample()["reward"] == 0.7


def test_keys_without_samples():
    view = RunView()
    for key in "npbw":
        view.select(key)
    assert view.sample() is None


def test_last_three_warnings_each_once():
    view = fold(*(event("warning", message=message) for message in ("a", "b", "a", "c", "d", "c")))
    assert view.warnings == [("a", 2), ("d", 1), ("c", 2)]


def test_evaluation_checkpoint_stopping_finish():
    view = fold(*run(steps=40), event("stopping", 9000, signal="SIGINT", step=41))
    assert view.checkpoint == 40 and view.evaluation["accuracy"] == 0.612
    assert view.stopping["step"] == 41
    view.apply(event("run_finished", 9010, status="stopped", reason="SIGINT", exit_code=130, steps=41))
    assert view.finished["status"] == "stopped" and view.stage == ""
    assert view.elapsed_s(99999.0) == 9010 - 1000
    assert view.left_s(99999.0) is None


def test_resume_counts_only_the_time_that_was_worked():
    view = fold(started(1000), step(1, 1055), event("run_finished", 1060, status="stopped"))
    view.apply(started(5000, attempt=2))
    assert view.finished is None and view.attempt == 2
    assert view.elapsed_s(5010) == 70
    view.apply(step(1, 5055, reward=0.9))
    assert view.series["reward"].first == (1, 0.9)


def test_file_read_from_its_start_again_gives_the_same_view():
    events = run(steps=30)
    once, twice = fold(*events), fold(*events, *events)
    assert once == twice


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"type": None},
        {"type": "unheard_of", "time": 1.0},
        {"type": "step", "metrics": "text"},
        {"type": "step", "step": "seven"},
        {"type": "progress", "states": ["no", "mapping"]},
        {"type": "run_started", "time": "noon"},
    ],
)
def test_events_of_unknown_shape_are_passed_over(broken):
    view = fold(started(), step(3, 1055))
    view.apply(broken)
    assert view.step == 3 and view.run == "grpo-math-7f3a"
