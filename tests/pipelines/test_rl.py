"""The step of the paper's figure 2, with doubles for every role."""

from __future__ import annotations

import numpy as np
import pytest

from rollcli.errors import RolloutError
from rollcli.pipelines.rl import RlPipeline
from rollcli.runs.events import read_lines
from tests.pipelines.doubles import Stage, run
from tests.rollout.doubles import trajectory


def stage(tmp_path, *overrides, **options) -> tuple[Stage, RlPipeline]:
    made = Stage(tmp_path / "run", *overrides, **options)
    return made, RlPipeline(made.recipe, made.roles, made.recorder)


def varied(order):
    done = trajectory(order, float(order.sample > 1))
    done.reward = float(order.sample)
    return done


def stages(made: Stage) -> list[str]:
    return [event["stage"] for event in made.events("stage_started")]


def test_order_of_a_step(tmp_path):
    made, pipeline = stage(tmp_path, "algorithm.kl_coefficient=0.1", "steps=1", "evaluation.at_start=false")
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
        ((parts, temperature),) = arguments
        assert len(parts) == minibatches and temperature == made.recipe.rollout.sampling.temperature
        assert "old_logprobs" not in parts[0].tokens
        assert all("old_logprobs" in part.tokens for part in parts[1:])


def test_reference_is_asked_only_where_the_algorithm_pays_for_it(tmp_path):
    made, pipeline = stage(tmp_path)
    run(pipeline.run())
    (((parts, _),),) = made.policy.arguments["update"][0]
    assert made.reference is None and "reference_logprobs" not in parts[0].tokens
    made, pipeline = stage(
        tmp_path / "2" if (tmp_path / "2").mkdir() is None else tmp_path, "algorithm.kl_coefficient=1"
    )
    run(pipeline.run())
    (((parts, _),),) = made.policy.arguments["update"][0]
    assert made.asked.count("reference.logprobs") == 3 and (parts[0].tokens["reference_logprobs"] == -0.5).all()


@pytest.mark.parametrize("policies", [1, 3])
def test_every_sample_is_trained_once_with_its_groups_advantage(tmp_path, policies):
    made, pipeline = stage(tmp_path, "minibatches=3", policies=policies, play=varied)
    run(pipeline.run())
    for step, (arguments,) in enumerate(made.policy.arguments["update"]):
        assert len(arguments) == policies
        seen = {}
        for parts, _ in arguments:
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
