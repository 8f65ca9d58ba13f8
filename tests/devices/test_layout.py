"""Roles on devices: what a device holds, and whether that fits."""

from __future__ import annotations

import json

import pytest

from rollcli.config.schema import ModelConfig, RewardModelConfig
from rollcli.devices.hardware import cpu, parse_gpus
from rollcli.devices.layout import lay_out


def test_a_machine_without_accelerators_holds_every_worker(rl, tiny):
    plan = lay_out(rl(workers=2, replicas=3), cpu(4, 16.0), tiny)
    (machine,) = plan.devices
    assert machine.roles == {"policy": 2, "rollout": 3, "environment": 1, "reward": 1, "services": 1}
    assert machine.used_gib == pytest.approx(sum(role.used_gib * role.workers for role in plan.roles.values()))
    assert (plan.layout, machine.label, machine.status, plan.fits) == ("colocated", "cpu", "ok", True)
    assert plan.assignment == {"policy": [], "rollout": []}
    assert plan.host == {}


def test_devices_that_hold_the_same_are_one_line(rl, tiny):
    plan = lay_out(rl(workers=4, replicas=2), parse_gpus("8xH100"), tiny)
    assert [(device.label, dict(device.roles)) for device in plan.devices] == [
        ("0–3", {"policy": 1}), ("4–5", {"rollout": 1}), ("6–7", {})
    ]  # fmt: skip
    assert [device.status for device in plan.devices] == ["ok", "ok", "unused"]
    assert plan.layout == "split"
    assert plan.notes == ["gpu 6–7 unused: more `policy.workers` or `rollout.replicas` would use them"]
    assert set(plan.host) == {"environment", "reward", "services", "offloaded"}
    assert plan.host["offloaded"] * 2**30 == pytest.approx(12 * 260_032)  # what a checkpoint gathers


def test_roles_that_share_a_device_take_turns_or_add_up(rl, qwen):
    recipe = rl(workers=2, replicas=2, kl=0.1)
    plan = lay_out(recipe, parse_gpus("2xH200"), qwen)
    (both,) = plan.devices
    policy, reference, rollout = (plan.roles[role] for role in ("policy", "reference", "rollout"))
    context = next(part.gib for part in policy.parts if part.name == "context")
    assert both.turns["train"] == pytest.approx(policy.used_gib + reference.used_gib + context)
    assert both.turns["sample"] == pytest.approx(rollout.used_gib + 2 * context)
    # Between them all have their weights, and the policy its moments: 4 + 8 + 4 bytes of half of N, 2 of all of it.
    bucket = 4 * 152064 * 3584 / 2**30
    kept = (8 + 2) * 7_615_616_512 / 2**30 + 3 * context + bucket * 1.5
    assert both.turns["sync"] == pytest.approx(kept)
    assert both.used_gib == max(both.turns.values()) and plan.layout == "colocated"
    assert any(note.startswith("roles on gpu 0–1 take turns and give the device up: sample") for note in plan.notes)
    # What waits while the replicas sample is in main memory: weights and moments of both, and a checkpoint's.
    assert plan.host["offloaded"] * 2**30 == pytest.approx((12 + 4 + 12) * 7_615_616_512)
    recipe.rollout.max_staleness = 1
    (at_once,) = lay_out(recipe, parse_gpus("2xH200"), qwen).devices
    assert at_once.turns == {}
    assert at_once.used_gib == pytest.approx(policy.used_gib + reference.used_gib + rollout.used_gib)


def test_mixed_pools_are_told_apart(rl, tiny):
    plan = lay_out(rl(workers=2, replicas=2), parse_gpus("3xH100-80GB+3xL40S"), tiny)
    assert [(device.label, list(device.roles), device.memory_gib) for device in plan.devices] == [
        ("0–1", ["policy"], 79.14), ("2", ["rollout"], 79.14), ("3", ["rollout"], 44.34), ("4–5", [], 44.34)
    ]  # fmt: skip


def test_a_critic_adds_up_where_it_shares_and_is_said_where_it_does_not(rl, tiny):
    shared = lay_out(rl(workers=2, replicas=2, critic=2), parse_gpus("4xH100"), tiny)
    assert [(device.label, list(device.roles)) for device in shared.devices] == [
        ("0–1", ["policy", "critic"]), ("2–3", ["rollout"])
    ]  # fmt: skip
    roles = shared.roles
    assert shared.devices[0].used_gib == pytest.approx(roles["policy"].used_gib + roles["critic"].used_gib)
    assert shared.reason == "2 policy + 2 rollout workers have a device each on 4"
    apart = lay_out(rl(workers=2, replicas=2, critic=2), parse_gpus("6xH100"), tiny)
    assert apart.reason == "2 policy + 2 critic + 2 rollout workers have a device each on 6"
    assert apart.assignment == {"policy": [0, 1], "critic": [4, 5], "rollout": [2, 3]}
    assert apart.roles["critic"].engine == "fsdp"


def test_a_critic_of_another_model_is_noted(rl, tiny):
    recipe = rl(critic=1)
    assert lay_out(recipe, cpu(4, 16.0), tiny).notes == []
    recipe.critic.path = "embedded:other"
    assert lay_out(recipe, cpu(4, 16.0), tiny).notes == [
        "the critic is planned with the policy's shapes; those of `embedded:other` may differ"
    ]


def test_whole_distributions_are_noted_with_their_size(rl, tiny):
    recipe = rl(kl=0.1, estimator="full", prompts=2, group=4)
    (note,) = lay_out(recipe, cpu(4, 16.0), tiny).notes
    assert "8 samples × 384 tokens × V 512 × 4 B = 0.0 GiB at most" in note
    recipe = rl(kl=0.1, estimator="full", prompts=512, group=16)
    plan = lay_out(recipe, cpu(4, 1.0), tiny)
    assert "= 6.0 GiB at most" in plan.notes[0] and plan.short_gib > 5


@pytest.mark.parametrize(
    ("placement", "layout"),
    [
        ({"policy": "0-1", "rollout": "2-3"}, "split"),
        ({"policy": "0-1", "rollout": "1-2"}, "overlapping"),
        ({"policy": "0-1", "rollout": "0-1"}, "colocated"),
    ],
)
def test_an_explicit_placement_is_named_after_what_it_is(rl, tiny, placement, layout):
    count = 1 + max(int(text[-1]) for text in placement.values())
    plan = lay_out(rl(workers=2, replicas=2, placement=placement), parse_gpus(f"{count}xH100"), tiny)
    assert plan.layout == layout
    assert plan.reason == "as the recipe's `placement` says"


def test_demonstrations_have_one_role(sft, tiny):
    plan = lay_out(sft(workers=2), parse_gpus("2xL4"), tiny)
    assert plan.layout == "alone"
    assert plan.assignment == {"policy": [0, 1]}


def test_fits_tight_and_over_are_said(rl, tiny):
    used = lay_out(rl(), cpu(4, 100.0), tiny).devices[0].used_gib
    for memory, status in ((used * 1.5, "ok"), (used * 1.01, "tight"), (used * 0.99, "over")):
        plan = lay_out(rl(), cpu(4, memory), tiny)
        assert plan.devices[0].status == status
        assert plan.fits == (status != "over")
        assert plan.short_gib == pytest.approx(max(0.0, used - memory))


def test_more_memory_never_turns_fits_into_does_not_fit(rl, qwen, gpus):
    for recipe in (rl(workers=2, replicas=2), rl(workers=2, replicas=2, recompute=True, kl=0.1)):
        verdicts = [lay_out(recipe, gpus(2, memory), qwen).fits for memory in range(1, 400, 7)]
        assert verdicts == sorted(verdicts)
        assert verdicts[0] is False and verdicts[-1] is True


def test_part_of_a_role_counts_only_what_is_there_at_its_peak(rl, qwen):
    policy = lay_out(rl(), parse_gpus("2xH200"), qwen).roles["policy"]
    names = {part.name for part in policy.parts}
    assert policy.part_gib(*names) == pytest.approx(policy.used_gib)
    assert policy.part_gib("sync") == 0


def test_workers_without_samples_are_noted(rl, tiny):
    plan = lay_out(rl(workers=8, prompts=1, group=4, minibatches=1), cpu(8, 64.0), tiny)
    assert "there are more policy workers than samples in a minibatch: some have nothing to do" in plan.notes


def test_the_document_is_json_with_stable_keys(rl, tiny):
    document = json.loads(json.dumps(lay_out(rl(), cpu(4, 16.0), tiny).to_dict()))
    assert list(document) == [
        "fits", "hardware", "model", "layout", "reason", "roles", "devices", "host_gib", "batch", "text", "changes",
        "together", "notes",
    ]  # fmt: skip
    assert document["model"]["parameters"]["total"] == 260_032
    assert list(document["roles"][0]) == ["role", "engine", "workers", "devices", "used_gib", "peak", "parts"]
    assert document["batch"]["samples"] == 512


def test_reward_models_are_planned_with_shapes_of_their_own(rl, tiny):
    small = ModelConfig("embedded:sums")
    models = [RewardModelConfig("j", small, max_rows=8), RewardModelConfig("rm", small, kind="classifier")]
    plan = lay_out(rl(reward_models=models), parse_gpus("4xH100"), tiny)
    assert plan.assignment == {"policy": [0], "rollout": [1], "judge.j": [2], "reward_model.rm": [3]}
    judge, classifier = plan.roles["judge.j"], plan.roles["reward_model.rm"]
    assert (judge.engine, [part.name for part in judge.parts]) == (
        "transformers", ["weights", "kv", "activations", "context"]
    )  # fmt: skip
    # 505,472 parameters of two bytes; a classifier's head is one row of 128 beside the embedding.
    assert judge.part_gib("weights") == pytest.approx(505_472 * 2 / 2**30)
    assert classifier.part_gib("weights") == pytest.approx((505_472 + 129) * 2 / 2**30, rel=1e-5)
    assert not classifier.part_gib("kv")
    # Context 256 bounds a row: 8 rows × 256 tokens × 2 tables × 3 layers × 128 numbers at most × 2 bytes.
    assert 0 < judge.part_gib("kv") <= 8 * 256 * 2 * 3 * 128 * 2 / 2**30
