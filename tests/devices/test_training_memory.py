"""States of each engine by hand, and how the memory of training must move."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rollcli.devices.arithmetic import arithmetic
from rollcli.devices.facts import facts_from_config
from rollcli.devices.parts import Setting, peak_gib
from rollcli.devices.shapes import catalogue
from rollcli.devices.training_memory import trained

GIB = 2**30


@pytest.fixture
def update(rl, qwen):
    """Returns the parts of a policy worker with the settings a test cares about."""

    def make(engine="fsdp", workers=8, stage=None, facts=qwen, rank=0, dtype="auto", options=None, **more):
        parallel = {key: more.pop(key) for key in ("tensor", "pipeline", "context", "expert") if key in more}
        recipe = rl(workers=workers, **more)
        recipe.model.dtype = dtype
        recipe.policy.engine, recipe.policy.lora.rank = engine, rank
        recipe.policy.engine_args = options or {}
        if stage is not None:
            recipe.policy.engine_args = {"zero_optimization": {"stage": stage, **(options or {})}}
        for key, value in parallel.items():
            setattr(recipe.policy.parallel, key, value)
        return trained(Setting(recipe, facts, arithmetic(recipe, facts), True), recipe.policy)

    return make


def bytes_of(parts, *names, host=False):
    return sum(part.gib for part in parts if part.name in names and part.host == host) * GIB


STATES = ("weights", "masters", "optimizer", "gradients")
BYTES = {  # of the weights, masters, moments and gradients of each parameter, of which N / W parameters are sharded
    0: ((4, 0, 8, 4), (0, 0, 0, 0)),
    1: ((4, 0, 0, 4), (0, 4, 8, 0)),
    2: ((2, 0, 0, 0), (0, 4, 8, 4)),
    3: ((0, 0, 0, 0), (2, 4, 8, 4)),
}


@pytest.mark.parametrize("stage", BYTES)
def test_states_of_zero_by_hand(update, qwen, stage):
    parts = update("deepspeed", stage=stage)
    for name, whole, sharded in zip(STATES, *BYTES[stage]):
        assert bytes_of(parts, name) == pytest.approx((whole + sharded / 8) * qwen.total), name


def test_megatron_keeps_both_precisions_and_shares_moments(update, qwen):
    parts = update("megatron", workers=4)
    assert bytes_of(parts, "weights") == 2 * qwen.total and bytes_of(parts, "masters") == 4 * qwen.total
    assert bytes_of(parts, "optimizer") == pytest.approx(8 * qwen.total / 4)
    assert bytes_of(parts, "gradients") == (4 + 2) * qwen.total
    whole = update("megatron", workers=4, dtype="float32")
    assert bytes_of(whole, "masters") == 0 and bytes_of(whole, "weights") == 4 * qwen.total


def test_offloaded_states_are_in_main_memory(update, qwen):
    parts = update(options={"offload": True})
    assert bytes_of(parts, "weights", "optimizer") == 0
    assert bytes_of(parts, "weights", "optimizer", host=True) == pytest.approx(12 * qwen.total / 8)
    assert bytes_of(parts, "gathered") > 0
    zero = update("deepspeed", stage=2, options={"offload_optimizer": {"device": "cpu"}})
    assert bytes_of(zero, "optimizer", "masters", "gradients", host=True) == pytest.approx(16 * qwen.total / 8)
    assert bytes_of(zero, "weights") == 2 * qwen.total


def test_adapters_train_little(update, qwen):
    parts = update(rank=16)
    adapters = 16 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert bytes_of(parts, "weights") == pytest.approx(4 * qwen.total / 8)
    assert bytes_of(parts, "optimizer", "gradients") == pytest.approx(12 * adapters / 8)


def test_context_parallelism_splits_activations_and_no_logits(update):
    one, four = update(packing=False), update(packing=False, context=4)
    assert bytes_of(four, "activations") == pytest.approx(bytes_of(one, "activations") / 4)
    assert bytes_of(four, "logits") == bytes_of(one, "logits")


def test_a_pipeline_keeps_as_many_layers_alive(update):
    one, four = (update("megatron", 1, packing=False, tokens=1024, pipeline=degree) for degree in (1, 4))
    assert bytes_of(four, "activations") == bytes_of(one, "activations")
    assert bytes_of(four, "weights") < bytes_of(one, "weights") / 2


def test_buffers_of_zero_by_hand(update, qwen):
    parts = update("deepspeed", stage=2, dtype="bfloat16")
    assert bytes_of(parts, "buffers") == 4 * 500_000_000
    assert bytes_of(parts, "gathered") == 2 * 500_000_000
    assert bytes_of(update("deepspeed", stage=0, dtype="float32"), "buffers", "gathered") == 0
    # Autocast keeps a cast copy of every weight below stage 2.
    assert bytes_of(update("deepspeed", stage=0), "gathered") == 2 * qwen.total


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_more_tensor_parallelism_never_raises_a_part(update, name, engine):
    facts = facts_from_config(catalogue()[name], name)
    for few, many in pairwise(update(engine, workers=4, tensor=tensor, facts=facts) for tensor in (1, 2, 4, 8)):
        for part in (*STATES, "activations", "backward", "gathered", "logits"):
            assert bytes_of(many, part) <= bytes_of(few, part), part


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_more_zero_never_raises_the_states(update, workers, dtype):
    sizes = [bytes_of(update("deepspeed", workers, stage, dtype=dtype), *STATES) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed", "megatron"])
def test_longer_sequences_and_larger_passes_never_lower_the_peak(update, engine):
    for key, values in (("answer", (16, 256, 4096, 16384)), ("tokens", (256, 4096, 65536))):
        peaks = [peak_gib(update(engine, **{key: value})) for value in values]
        assert peaks == sorted(peaks), key


def test_recomputation_keeps_inputs_of_layers_that_tensor_parallelism_does_not_split(update):
    one, two = update(recompute=True), update(recompute=True, tensor=2)
    assert bytes_of(one, "activations") == bytes_of(two, "activations") == 16 * 384 * 28 * 3584 * 2
