"""The step of the paper's figure 2, with doubles for every role."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from rollcli.errors import EngineError, RolloutError, WorkerDied
from rollcli.pipelines.rl import RlPipeline
from rollcli.runs.events import read_lines
from tests.pipelines.doubles import Stage, run
from tests.rollout.doubles import trajectory


def stage(tmp_path, *overrides, name="run", **options) -> tuple[Stage, RlPipeline]:
    made = Stage(tmp_path / name, *overrides, **options)
    return made, RlPipeline(made.recipe, made.roles, made.recorder)


def varied(order):
    done = trajectory(order, float(order.sample > 1))
    done.reward = float(order.sample)
    return done


def stages(made: Stage) -> list[str]:
    return [event["stage"] for event in made.events("stage_started")]


def test_order_of_a_step(tmp_path):
    made, pipeline = stage(tmp_path, "algorithm.kl.coefficient=0.1", "steps=1", "evaluation.at_start=false")
    run(pipeline.run())
    assert made.asked == [
        "rollout.load_weights", "reference.logprobs", "policy.logprobs", "policy.update",
        "rollout.load_weights", "policy.save",
    ]  # fmt: skip
    assert stages(made) == ["sync", "rollout", "logprobs", "advantages", "update", "evaluate", "checkpoint"]
    assert len(made.environments.orders) == 2 * 4 + 3


@pytest.mark.parametrize(("minibatches", "asked"), [(1, 0), (2, 3), (4, 3)])
def test_old_logprobs_are_computed_only_when_a_later_update_needs_them(tmp_path, minibatches, asked):
    made, pipeline = stage(tmp_path, f"minibatches={minibatches}")
    run(pipeline.run())
    assert made.asked.count("policy.logprobs") == asked
    for (arguments,) in made.policy.arguments["update"]:
        ((parts, _, _, temperature),) = arguments
        assert len(parts) == minibatches and temperature == made.recipe.rollout.sampling.temperature
        assert "old_logprobs" not in parts[0].tokens
        assert all("old_logprobs" in part.tokens for part in parts[1:])


def test_reference_is_asked_only_where_the_algorithm_pays_for_it(tmp_path):
    made, pipeline = stage(tmp_path)
    run(pipeline.run())
    (((parts, *_),),) = made.policy.arguments["update"][0]
    assert made.reference is None and "reference_logprobs" not in parts[0].tokens
    made, pipeline = stage(
        tmp_path / "2" if (tmp_path / "2").mkdir() is None else tmp_path, "algorithm.kl.coefficient=1"
    )
    run(pipeline.run())
    (((parts, *_),),) = made.policy.arguments["update"][0]
    assert made.asked.count("reference.logprobs") == 3 and (parts[0].tokens["reference_logprobs"] == -0.5).all()


@pytest.mark.parametrize("policies", [1, 3])
def test_every_sample_is_trained_once_with_its_groups_advantage(tmp_path, policies):
    made, pipeline = stage(tmp_path, "minibatches=3", policies=policies, play=varied)
    run(pipeline.run())
    for step, (arguments,) in enumerate(made.policy.arguments["update"]):
        assert len(arguments) == policies
        seen = {}
        for parts, *_ in arguments:
            for part in parts:
                for row in range(len(part)):
                    start = part.offsets[row]
                    index, sample = part.tokens["ids"][start + 1 : start + 3]
                    assert (index, sample) not in seen
                    seen[index, sample] = part.tokens["advantages"][start : start + 3]
        assert set(seen) == {(index, sample) for index in (2 * step, 2 * step + 1) for sample in range(4)}
        for (_, sample), advantage in seen.items():
            # Rewards 0, 1, 2, 3: mean 1.5, standard deviation sqrt(5/3) with n - 1 or sqrt(5/4) with n.
            assert advantage[0] == 0 and advantage[1] == advantage[2]
            assert np.sign(advantage[1]) == np.sign(sample - 1.5)


def rows_of(part):
    """Task index and sample of each trajectory of a minibatch."""
    return [tuple(int(n) for n in part.tokens["ids"][start + 1 : start + 3]) for start in part.offsets[:-1]]


def updates_of(cluster) -> list[list]:
    """The minibatches of each step, of a cluster with one worker."""
    return [arguments[0][0] for (arguments,) in cluster.arguments["update"]]


@pytest.mark.parametrize("minibatches", [1, 3])
def test_each_epoch_trains_every_sample_once_in_another_order(tmp_path, minibatches):
    made, pipeline = stage(tmp_path, "epochs=3", f"minibatches={minibatches}", "prompts_per_step=4")
    run(pipeline.run())
    orders = []
    for step, parts in enumerate(updates_of(made.policy)):
        assert len(parts) == 3 * minibatches
        for epoch in range(3):
            mine = [rows_of(part) for part in parts[epoch * minibatches : (epoch + 1) * minibatches]]
            expected = {(index, sample) for index in range(4 * step, 4 * step + 4) for sample in range(4)}
            assert {row for rows in mine for row in rows} == expected and sum(map(len, mine)) == 16
            orders.append([[(index - 4 * step, sample) for index, sample in rows] for rows in mine])
        # The first pass of all is the old policy itself; whatever follows needs its log-probabilities.
        assert ["old_logprobs" in part.tokens for part in parts] == [False] + [True] * (3 * minibatches - 1)
        for part in parts:
            assert part.tokens["loss_weights"].sum() == pytest.approx(1.0)
    if minibatches > 1:
        assert all(orders[0] != other for other in orders[1:])
    assert made.asked.count("policy.logprobs") == 3


def test_epochs_are_shuffled_by_the_seed_alone(tmp_path):
    def order(name: str, *overrides) -> list:
        made, pipeline = stage(tmp_path, "epochs=2", "minibatches=4", "steps=1", *overrides, name=name)
        run(pipeline.run())
        return [rows_of(part) for part in updates_of(made.policy)[0]]

    assert order("a") == order("b") != order("c", "seed=2")


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_rollout_engines_logprobs_may_stand_for_the_old_policys(tmp_path, epochs):
    def sampled(order):
        done = varied(order)
        done.logprobs = np.array([0, -1 - order.sample, -9], np.float32)
        return done

    made, pipeline = stage(
        tmp_path, "algorithm.correction.old_logprobs=rollout", f"epochs={epochs}", "minibatches=2", play=sampled
    )
    run(pipeline.run())
    assert "policy.logprobs" not in made.asked
    for parts in updates_of(made.policy):
        assert len(parts) == 2 * epochs
        for part in parts:
            np.testing.assert_array_equal(part.tokens["old_logprobs"], part.tokens["rollout_logprobs"])
            assert (part.tokens["old_logprobs"].reshape(-1, 3)[:, 2] == -9).all()


CRITIC = ("algorithm={name: ppo, kl: {coefficient: 0}}", "evaluation.at_start=false")


def test_a_critic_values_before_advantages_and_learns_before_the_policy(tmp_path):
    made, pipeline = stage(tmp_path, *CRITIC, "steps=1")
    run(pipeline.run())
    assert made.asked == [
        "rollout.load_weights", "critic.values", "policy.logprobs", "critic.update", "policy.update",
        "rollout.load_weights", "policy.save", "critic.save",
    ]  # fmt: skip
    (row,) = read_lines(made.directory.metrics)
    assert row["loss"] == row["critic/loss"] == 0.5 and row["critic/optimizer_steps"] == row["optimizer_steps"] == 2
    for parts in (*updates_of(made.critic), *updates_of(made.policy)):
        assert all({"values", "returns", "advantages"} <= part.tokens.keys() for part in parts)
    assert [rows_of(part) for part in updates_of(made.critic)[0]] == [
        rows_of(part) for part in updates_of(made.policy)[0]
    ]


def test_the_critic_alone_is_trained_while_it_warms_up(tmp_path):
    made, pipeline = stage(tmp_path, *CRITIC, "steps=4", "critic.warmup_steps=2")
    run(pipeline.run())
    trained = [name for name in made.asked if name.endswith(".update")]
    assert trained == ["critic.update"] * 2 + ["critic.update", "policy.update"] * 2
    rows = read_lines(made.directory.metrics)
    assert ["loss" in row for row in rows] == [False, False, True, True]
    assert all(row["critic/loss"] == 0.5 for row in rows)


@pytest.mark.parametrize("overrides", [(), CRITIC, ("epochs=2",), ("algorithm.correction.old_logprobs=rollout",)])
def test_a_step_with_nothing_to_train_on_takes_no_update(tmp_path, overrides):
    made, pipeline = stage(
        tmp_path, *overrides, "algorithm.masking.truncated=true",
        play=lambda order: replace(trajectory(order, float(order.sample % 2)), stop_reason="length"),
    )  # fmt: skip
    run(pipeline.run())
    assert pipeline.steps_done == 3 and made.checkpoints()[-1] == "step_000003"
    assert updates_of(made.policy) == [[], [], []]
    for row in read_lines(made.directory.metrics):
        assert row["trained_tokens"] == row["optimizer_steps"] == 0 and row["truncated"] == 1
        assert not any(isinstance(value, float) and np.isnan(value) for value in row.values())


def test_what_is_masked_in_part_is_left_out_of_minibatches(tmp_path):
    made, pipeline = stage(
        tmp_path, "algorithm.masking.truncated=true", "epochs=2",
        play=lambda order: replace(varied(order), stop_reason="length" if order.sample == 0 else "stop"),
    )  # fmt: skip
    run(pipeline.run())
    for step, parts in enumerate(updates_of(made.policy)):
        expected = sorted((index, sample) for index in (2 * step, 2 * step + 1) for sample in (1, 2, 3))
        assert sorted(row for part in parts for row in rows_of(part)) == sorted(expected * 2)


def test_greedy_baselines_are_sampled_beside_each_group_and_never_trained(tmp_path):
    def play(order):
        done = trajectory(order, float(order.sample % 2))
        if order.sampling.temperature == 0:
            done.reward = 0.25
        return done

    remax = "algorithm={name: remax, kl: {coefficient: 0}}"
    made, pipeline = stage(tmp_path, remax, "steps=1", "minibatches=1", play=play)
    run(pipeline.run())
    by_split = {split: [o for o in made.environments.orders if o.task.split == split] for split in ("train", "test")}
    assert len(by_split["train"]) == 2 * (4 + 1) and len(by_split["test"]) == 2 * 3
    assert [o.sample for o in by_split["train"] if o.sampling.temperature == 0] == [4, 4]
    assert not any(o.sampling.temperature == 0 for o in by_split["test"])
    ((part,),) = updates_of(made.policy)
    assert len(part) == 8 and 4 not in {sample for _, sample in rows_of(part)}
    np.testing.assert_allclose(part.tokens["advantages"].reshape(-1, 3)[:, 1], [-0.25, 0.75] * 4)
    (row,) = read_lines(made.directory.metrics)
    assert (row["greedy_reward"], row["reward"]) == (0.25, 0.5)


def test_versions_count_the_steps_behind_the_weights(tmp_path):
    made, pipeline = stage(tmp_path, "evaluation.every=2")
    run(pipeline.run())
    references = [arguments for arguments in made.rollout.arguments["load_weights"]]
    assert {reference for reference, _ in references} == {"weights of policy-0"}
    # Start evaluation, steps 1 and 2, evaluation after 2, step 3, evaluation at the end.
    assert [version for _, version in references] == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), [0, 3]),
        (("evaluation.at_start=false",), [3]),
        (("steps=5", "evaluation.every=2"), [0, 2, 4, 5]),
        (("steps=4", "evaluation.every=2", "evaluation.at_start=false"), [2, 4]),
    ],
)
def test_evaluation_cadence(tmp_path, overrides, steps):
    made, pipeline = stage(tmp_path, *overrides)
    run(pipeline.run())
    assert [event["step"] for event in made.events("evaluation")] == steps
    assert sorted(path.name for path in made.directory.evals.glob("*.json")) == [f"step_{s:06d}.json" for s in steps]


def test_evaluation_is_remembered_as_start_and_end(tmp_path):
    accuracy = iter([0.0] * 3 + [1.0] * 8)
    seen = {"eval": 0}

    def play(order):
        if order.task.split == "test":
            seen["eval"] += 1
            return trajectory(order, next(accuracy))
        return trajectory(order, float(order.sample % 2))

    _, pipeline = stage(tmp_path, "steps=1", play=play)
    run(pipeline.run())
    assert pipeline.accuracies == {"start": 0.0, "end": 1.0} and seen["eval"] == 6


def test_metrics_and_samples_are_written(tmp_path):
    made, pipeline = stage(tmp_path)
    run(pipeline.run())
    rows = read_lines(made.directory.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        expected = {"reward": 0.5, "accuracy": 0.5, "length": 2.0, "loss": 0.5, "groups_started": 2.0, "failed": 0.0}
        assert expected.items() <= row.items()
        assert {"time/step_s", "time/rollout_s", "time/update_s", "memory/policy_gib", "trained_tokens"} <= row.keys()
    assert sorted(path.name for path in made.directory.rollouts.iterdir()) == [
        "step_000001.parquet", "step_000002.parquet", "step_000003.parquet",
    ]  # fmt: skip
    assert made.events("sample") and made.recorder.status.status.step == 3


def test_groups_not_worth_training_on_end_the_run_at_the_cap(tmp_path):
    made, pipeline = stage(
        tmp_path, "algorithm.dynamic_sampling=true", "rollout.max_group_attempts=3", "evaluation.at_start=false",
        play=lambda order: trajectory(order, 1.0),
    )  # fmt: skip
    with pytest.raises(RolloutError, match=r"6 groups were sampled for a batch of 2 .* 100% all right"):
        run(pipeline.run())
    assert "policy.update" not in made.asked


def versioned(made: Stage):
    """Plays episodes whose tokens say which version the replicas had."""

    def play(order):
        done = trajectory(order, float(order.sample % 2))
        done.versions[1:] = made.rollout.arguments["load_weights"][-1][1]
        return done

    return play


ASYNC = ("rollout.max_staleness=2", "steps=8", "evaluation.at_start=false")


def test_sampling_runs_ahead_of_training_as_far_as_it_may(tmp_path):
    made, pipeline = stage(tmp_path, *ASYNC)
    made.environments.workers[0].play = versioned(made)
    in_update = []

    async def update(*_):
        in_update.append(pipeline.stream.counts[0])
        await asyncio.sleep(0.02)

    made.policy.during["update"] = update
    run(pipeline.run())
    # Two prompts a step, two steps ahead: of the 16 of the run, 6 are drawn before the first update, 2 more for each.
    assert in_update == [6, 8, 10, 12, 14, 16, 16, 16]
    rows = read_lines(made.directory.metrics)
    assert [row["staleness_max"] for row in rows] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert [row["groups_buffered"] + row["groups_in_flight"] for row in rows] == [4] * 6 + [2, 0]
    assert made.recorder.overlapped


def test_a_checkpoint_of_an_asynchronous_run_keeps_the_draws_that_wait_and_a_resume_trains_them(tmp_path):
    made, pipeline = stage(tmp_path, *ASYNC, "checkpoints.every=3", "checkpoints.keep_last=9")
    run(pipeline.run())
    path = made.directory.checkpoints / "step_000003"
    cursor = json.loads((path / "state.json").read_text())["cursor"]
    assert [index for _, index, _ in cursor["pending"]] == [6, 7, 8, 9] and cursor["stream"]["sums"]["drawn"] == 10
    again, resumed = stage(tmp_path, *ASYNC, name="again")

    async def go_on():
        await resumed.restore(path)
        await resumed.run()

    run(go_on())
    trained = [row for parts in updates_of(again.policy) for part in parts for row in rows_of(part)]
    assert sorted(trained) == [(index, sample) for index in range(6, 16) for sample in range(4)]
    seeds = {order.task.index: order.task.seed for order in made.environments.orders if order.task.split == "train"}
    for order in again.environments.orders:
        assert order.task.split == "test" or order.task.seed == seeds[order.task.index]


def test_an_evaluation_in_between_does_not_stop_sampling_or_count_as_training(tmp_path):
    made, pipeline = stage(tmp_path, *ASYNC, "evaluation.every=2")
    made.environments.workers[0].play = versioned(made)
    run(pipeline.run())
    assert [event["step"] for event in made.events("evaluation")] == [2, 4, 6, 8]
    rows = read_lines(made.directory.metrics)
    assert max(row["staleness_max"] for row in rows) <= 2 and len(rows) == 8
    assert sum(len(part) for parts in updates_of(made.policy) for part in parts) == 8 * 8


def test_a_sample_that_fails_in_the_background_ends_the_run_in_the_next_step(tmp_path):
    def play(order):
        if order.task.split == "train" and order.task.index == 6:
            return EngineError("no memory")
        return trajectory(order, float(order.sample % 2))

    made, pipeline = stage(tmp_path, *ASYNC, play=play)
    with pytest.raises(EngineError, match="no memory"):
        run(pipeline.run())
    # Whenever it is noticed: at the latest by the step that needs draw 6, the fourth.
    assert 1 <= made.asked.count("policy.update") <= 3 and made.environments.running == 0


def test_close_ends_what_is_sampled_for_later_steps(tmp_path):
    def play(order):
        return None if order.task.split == "train" and order.task.index > 3 else trajectory(order, order.sample % 2)

    made, pipeline = stage(tmp_path, *ASYNC, play=play)

    async def main():
        await pipeline.sync_weights()
        await pipeline.roll_out()
        await asyncio.sleep(0.01)
        assert made.environments.running == 2 * 4
        await pipeline.close()
        await asyncio.sleep(0.01)
        assert made.environments.running == 0

    run(main())


def test_a_call_is_made_again_when_a_worker_in_it_was_replaced(tmp_path):
    made, pipeline = stage(tmp_path, "steps=2", "evaluation.at_start=false")
    replaced = []

    async def replace(error, seen):
        replaced.append(error.worker)

    pipeline.supervisor.replace = replace
    made.rollout.failing["load_weights"] = WorkerDied("worker `rollout-1` died", worker="rollout-1")
    run(pipeline.run())
    assert replaced == ["rollout-1"] and pipeline.steps_done == 2
    assert [version for _, version in made.rollout.arguments["load_weights"]] == [0, 0, 1, 2]


def test_a_replica_that_died_before_the_trainers_turn_is_replaced(tmp_path):
    made, pipeline = stage(tmp_path, "steps=2", "evaluation.at_start=false")
    replaced, deaths = [], [WorkerDied("worker `rollout-1` died", worker="rollout-1")]

    async def replace(error, seen):
        replaced.append(error.worker)

    async def turn():
        if deaths:
            raise deaths.pop()

    pipeline.supervisor.replace, made.roles.training_turn = replace, turn
    run(pipeline.run())
    assert replaced == ["rollout-1"] and pipeline.steps_done == 2


def test_a_trainers_death_is_nobodys_to_mend(tmp_path):
    made, pipeline = stage(tmp_path, "evaluation.at_start=false")
    made.policy.failing["update"] = WorkerDied("worker `policy-0` died", worker="policy-0")
    with pytest.raises(WorkerDied, match="policy-0"):
        run(pipeline.run())
    assert made.checkpoints() == []
