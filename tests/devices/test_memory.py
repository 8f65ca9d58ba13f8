"""Memory by part: by hand, against what autograd keeps, and how it must move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollcli.devices.arithmetic import arithmetic
from rollcli.devices.facts import facts_from_config
from rollcli.devices.memory import parts_of
from rollcli.devices.parts import Setting, peak_gib
from rollcli.devices.shapes import catalogue

GIB = 2**30


def parts(role, recipe, facts, gpu=True):
    return parts_of(role, Setting(recipe, facts, arithmetic(recipe, facts), gpu))


def size(found, name, stage=None):
    return sum(part.gib for part in found if part.name == name and (stage is None or stage in part.stages))


def test_sharded_states_of_a_policy_by_hand(rl, qwen):
    found = parts("policy", rl(workers=8), qwen)
    assert size(found, "weights") == pytest.approx(7_615_616_512 * 4 / 8 / GIB)
    assert size(found, "optimizer") == pytest.approx(7_615_616_512 * 8 / 8 / GIB)
    assert size(found, "gradients") == pytest.approx(7_615_616_512 * 4 / 8 / GIB)
    # 16 bytes a parameter in all, the K = 12 of ZeRO's table and 4 of fp32 gradients instead of 2 + 2.
    states = sum(size(found, name) for name in ("weights", "optimizer", "gradients"))
    assert states * 8 * GIB == pytest.approx(16 * qwen.total)
    # A sync takes a bucket, here as large as the largest tensor; a checkpoint weights and moments, in main memory.
    assert size(found, "sync") == pytest.approx(152064 * 3584 * 4 / GIB)
    (saved,) = (part for part in found if part.name == "checkpoint")
    assert saved.host and saved.once and saved.gib == pytest.approx(7_615_616_512 * 12 / GIB)


def test_gathered_units_of_a_policy_by_hand(rl, qwen):
    layer = 2 * 3584 * (3584 + 512) + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    rest = 2 * 152064 * 3584 + 3584
    assert size(parts("policy", rl(workers=8), qwen), "gathered") * GIB == pytest.approx(2 * (3 * layer + 2 * rest))


def test_logits_of_a_policy_by_hand(rl, qwen):
    found = parts("policy", rl(prompt=1024, answer=1024, tokens=8192), qwen)
    assert size(found, "logits", "loss") == pytest.approx(8192 * 152064 * (4 * 4 + 2) / GIB)
    assert size(found, "logits", "backward") == pytest.approx(8192 * 152064 * 4 / GIB)
    on_cpu = parts("policy", rl(prompt=1024, answer=1024, tokens=8192), qwen, gpu=False)
    assert size(on_cpu, "logits", "loss") == pytest.approx(8192 * 152064 * 4 * 4 / GIB)


def test_kv_cache_of_a_replica_by_hand(rl, qwen):
    found = parts("rollout", rl(prompt=1024, answer=4096, max_rows=64), qwen)
    # 57,344 bytes a token: keys and values, 28 layers, 4 heads of 128, bfloat16.
    assert size(found, "kv") == pytest.approx(64 * 5120 * 57_344 / GIB)
    assert size(found, "weights") == pytest.approx(7_615_616_512 * 2 / GIB)
    on_cpu = parts("rollout", rl(prompt=1024, answer=4096, max_rows=64), qwen, gpu=False)
    assert size(on_cpu, "kv") == pytest.approx(2 * 64 * 5120 * 57_344 / GIB)


def test_the_recipes_dtype_decides_the_width(rl, tiny):
    recipe = rl()
    recipe.model.dtype = "bfloat16"
    assert size(parts("rollout", recipe, tiny, gpu=False), "weights") == pytest.approx(2 * tiny.total / GIB)


def test_a_reference_has_neither_optimizer_nor_gradients(rl, tiny):
    names = {part.name for part in parts("reference", rl(kl=0.1), tiny)}
    assert names == {"weights", "gathered", "activations", "logits", "context"}


def test_a_critic_is_trained_like_a_policy_without_logits(rl, qwen):
    recipe = rl(workers=2, critic=4, minibatches=1)
    policy, critic = parts("policy", recipe, qwen), parts("critic", recipe, qwen)
    # One weight for each input and a bias in place of V × h.
    total = 7_615_616_512 - 152064 * 3584 + 3584 + 1
    assert size(critic, "weights") == pytest.approx(total * 4 / 4 / GIB)
    assert size(critic, "optimizer") == pytest.approx(total * 8 / 4 / GIB)
    assert size(critic, "gradients") == pytest.approx(total * 4 / 4 / GIB)
    assert size(critic, "activations") == size(policy, "activations")
    assert {part.name for part in policy} - {part.name for part in critic} == {"logits", "sync", "checkpoint"}


def test_a_critics_own_settings_decide(rl, qwen):
    recipe = rl(critic=1)
    recipe.critic.micro_batch_tokens = 4096
    policy, critic = parts("policy", recipe, qwen), parts("critic", recipe, qwen)
    assert size(policy, "activations") > 3 * size(critic, "activations")
    recipe.critic.recompute_activations = True
    assert size(parts("critic", recipe, qwen), "activations") == pytest.approx(4096 * 28 * 3584 * 2 / GIB)
    assert size(parts("policy", recipe, qwen), "activations") == size(policy, "activations")


def test_a_tied_critic_has_a_head_of_its_own(tiny):
    assert replace(tiny, critic=True).total == tiny.total + 64 + 1


def test_whole_distributions_are_in_the_driver(rl, qwen):
    found = parts("services", rl(kl=0.1, estimator="full", prompts=2, group=4, prompt=100, answer=28), qwen)
    assert size(found, "distribution") == pytest.approx(8 * 128 * 152064 * 4 / GIB)
    assert size(parts("services", rl(kl=0.1), qwen), "distribution") == 0


def test_workers_without_a_model_are_a_process(rl, tiny):
    for role in ("environment", "reward"):
        (only,) = parts(role, rl(), tiny)
        assert only.name == "process" and 0.1 < only.gib < 0.5


def test_services_hold_the_weights_in_transit(rl, sft, tiny):
    assert size(parts("services", rl(), tiny), "transit") == pytest.approx(2 * tiny.total / GIB)
    assert size(parts("services", rl(), tiny, gpu=False), "transit") == pytest.approx(4 * tiny.total / GIB)
    recipe = rl()
    recipe.rollout.sync.transport = "broadcast"
    assert size(parts("services", recipe, tiny), "transit") == 0
    assert {part.name for part in parts("services", sft(), tiny)} == {"driver", "Ray"}


@pytest.mark.parametrize("role", ["policy", "reference", "critic", "rollout", "environment", "reward", "services"])
@pytest.mark.parametrize("gpu", [True, False])
def test_every_part_has_a_size_and_a_formula_with_numbers(rl, qwen, role, gpu):
    for part in parts(role, rl(workers=2, kl=0.1), qwen, gpu):
        assert part.gib > 0
        assert any(character.isdigit() for character in part.formula)


def test_recomputation_keeps_inputs_only(rl, qwen):
    kept = parts("policy", rl(), qwen)
    recomputed = parts("policy", rl(recompute=True), qwen)
    assert size(recomputed, "activations") == pytest.approx(16384 * 28 * 3584 * 2 / GIB)
    assert size(recomputed, "backward") > size(kept, "backward")
    assert peak_gib(recomputed) < peak_gib(kept)


@pytest.mark.parametrize("name", ["weights", "optimizer", "gradients"])
def test_more_workers_never_raise_the_states_of_one(rl, qwen, name):
    sizes = [size(parts("policy", rl(workers=workers), qwen), name) for workers in (1, 2, 3, 8, 64)]
    assert sizes == sorted(sizes, reverse=True)


def test_longer_and_more_never_need_less(rl, qwen):
    for role, key, values in (
        ("policy", "tokens", (512, 4096, 16384, 65536)),
        ("policy", "answer", (16, 256, 4096)),
        ("rollout", "answer", (16, 256, 4096)),
        ("rollout", "max_rows", (1, 16, 256, 1024)),
        ("rollout", "prompts", (1, 8, 64)),
    ):
        peaks = [peak_gib(parts(role, rl(**{key: value}), qwen)) for value in values]
        assert peaks == sorted(peaks), (role, key)


def test_a_larger_model_never_needs_less(rl, qwen):
    for changed in ("layers", "hidden", "vocab", "intermediate"):
        larger = replace(qwen, **{changed: 2 * getattr(qwen, changed)})
        for role in ("policy", "rollout"):
            assert peak_gib(parts(role, rl(), larger)) > peak_gib(parts(role, rl(), qwen))


def served(rl, facts, memory, tensor=1, share=None, engine="vllm"):
    recipe = rl(prompt=1024, answer=4096)
    recipe.rollout.engine, recipe.rollout.parallel.tensor = engine, tensor
    if share is not None:
        recipe.rollout.engine_args = {"gpu_memory_utilization": share}
    return parts_of("rollout", Setting(recipe, facts, arithmetic(recipe, facts), True, memory))


def test_vllm_fills_its_share_of_a_device_with_keys_and_values(rl, qwen):
    found = served(rl, qwen, 80.0, share=0.5)
    assert peak_gib(found) == pytest.approx(40.0)
    (kv,) = (part for part in found if part.name == "kv")
    rows = int(kv.gib * GIB / (5120 * 57_344))
    assert f"{rows:,} of 256 rows × 5,120 tokens" in kv.formula
    assert peak_gib(served(rl, qwen, 80.0)) == pytest.approx(72.0)


def test_a_share_without_room_for_one_row_does_not_fit(rl, qwen):
    assert peak_gib(served(rl, qwen, 80.0, share=0.19)) > 80.0
    assert peak_gib(served(rl, qwen, 80.0, share=0.3)) == pytest.approx(24.0)


def test_keys_and_values_are_split_by_heads_and_compressed_ones_are_not(rl, qwen):
    assert size(served(rl, qwen, 0.0, tensor=2), "kv") == pytest.approx(size(served(rl, qwen, 0.0), "kv") / 2)
    assert size(served(rl, qwen, 0.0, tensor=8), "kv") == size(served(rl, qwen, 0.0, tensor=4), "kv")
    latent = facts_from_config(catalogue()["deepseek-ai/DeepSeek-V3"], "v3")
    one = size(served(rl, latent, 0.0), "kv")
    assert one == pytest.approx(256 * 5120 * 61 * (512 + 64) * 2 / GIB)
    assert size(served(rl, latent, 0.0, tensor=8), "kv") == one
    sizes = [size(served(rl, latent, 0.0, tensor=tensor), "weights") for tensor in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
