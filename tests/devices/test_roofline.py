"""Times of stages: numbers by hand for Qwen2.5-7B on a made-up chip, experts by drawing, and properties."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rollcli.devices import roofline
from rollcli.devices.constants import Constants
from rollcli.devices.facts import facts_from_config
from rollcli.devices.roofline import Degrees

CHIP = SimpleNamespace(memory_gib=80.0, bandwidth_gb_s=2000.0, bf16_tflops=500.0, link_gb_s=800.0, network_gb_s=50.0)
PERFECT = Constants(
    train_compute=1.0, prefill_compute=1.0, decode_compute=1.0, decode_bandwidth=1.0, optimizer_bandwidth=1.0, link=1.0,
    network=1.0, decode_call_s=0.0, hop_s=0.0, pass_s=0.0, step_s=0.0,
)  # fmt: skip
MATRIX = 7_615_616_512 - 152_064 * 3584  # all of Qwen2.5-7B but its table of embeddings
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 100, "num_experts": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip


def test_operations_of_a_forward_pass(qwen):
    assert roofline.matrix_parameters(qwen) == MATRIX
    sequences = np.array([100, 300])
    attention = 2 * 28 * 3584 * (100**2 + 300**2)
    assert roofline.forward_operations(qwen, 400, (sequences**2).sum()) == 2 * MATRIX * 400 + attention


def test_a_tied_head_multiplies_though_it_is_no_parameter_of_its_own(tiny):
    assert roofline.matrix_parameters(tiny) == tiny.total


def test_few_rows_take_as_long_as_memory_and_many_as_the_matrices(qwen):
    step = roofline.decode(qwen, CHIP, PERFECT, Degrees(), np.array([1, 2000]), 1000.0)
    cache = 2 * 28 * 512 * 2  # bytes of a token
    assert step["decode_bandwidth"][0] == pytest.approx((2 * MATRIX + 1000 * cache) / 2e12)
    assert step["decode_compute"][0] == 0
    step = roofline.decode(qwen, CHIP, PERFECT, Degrees(), np.array([2000]), 10.0)
    assert step["decode_compute"][0] == pytest.approx(2000 * (2 * MATRIX + 4 * 28 * 3584 * 10) / 5e14)


def test_a_spread_replica_moves_less_and_sends_more(qwen):
    rows = np.array([64])
    step = roofline.decode(qwen, CHIP, replace(PERFECT, hop_s=1e-5), Degrees(tensor=4), rows, 1000.0)
    assert step["decode_bandwidth"][0] == pytest.approx((2 * MATRIX + 64 * 1000 * 57_344) / 4 / 2e12)
    assert step["link"][0] == pytest.approx(2 * 28 * 2 * 3 / 4 * 64 * 3584 * 2 / 4e11)
    assert step["hop_s"][0] == pytest.approx(56e-5)
    # 4 heads of keys and values on 8 devices: each is there twice.
    eight = roofline.decode(qwen, CHIP, PERFECT, Degrees(tensor=8), rows, 1000.0)
    assert eight["decode_bandwidth"][0] == pytest.approx((2 * MATRIX / 8 + 64 * 1000 * 57_344 / 4) / 2e12)


def test_experts_touched_are_those_of_drawn_tokens():
    facts, luck = facts_from_config(MOE, "moe"), np.random.default_rng(0)
    expert, rows = 3 * 64 * 32 * 3, 6
    drawn = [len({e for _ in range(rows) for e in luck.choice(16, 2, replace=False)}) for _ in range(4000)]
    always = roofline.matrix_parameters(facts) - 2 * expert
    expected = (roofline.touched_parameters(facts, np.array([rows]))[0] - always) / expert
    assert expected == pytest.approx(np.mean(drawn), rel=0.02)
    one, all_of_them = roofline.touched_parameters(facts, np.array([1, 10_000]))
    assert one == pytest.approx(roofline.matrix_parameters(facts))
    assert all_of_them == pytest.approx(facts.total - 100 * 64)


def test_an_update_takes_six_operations_a_parameter_and_token(qwen):
    def seconds(**more):
        sizes = {"tokens": 1e6, "squares": 0.0, "micro_tokens": 16384.0, **more}
        return roofline.update(qwen, CHIP, PERFECT, sizes.pop("degrees", Degrees()), **sizes)

    optimizer = 30 * 7_615_616_512 / 2e12
    assert seconds().seconds == pytest.approx(6 * MATRIX * 1e6 / 5e14 + optimizer)
    assert seconds(recompute=True).seconds == pytest.approx(8 * MATRIX * 1e6 / 5e14 + optimizer)
    assert seconds(steps=4).parts["optimizer_bandwidth"] == pytest.approx(4 * optimizer)
    attention = 6 * 28 * 3584 * 1e9 / 5e14
    assert seconds(squares=1e9).seconds - seconds().seconds == pytest.approx(attention)
    pipelined = seconds(degrees=Degrees(pipeline=4), micro_tokens=1e5)
    assert pipelined.parts["train_compute"] == pytest.approx(6 * MATRIX * 1e6 / 5e14 / 4 * (1 + 3 / 10))


def test_sharded_copies_wait_for_the_network_when_micro_batches_are_small(qwen):
    degrees = Degrees(data=16)
    large = roofline.update(qwen, CHIP, PERFECT, degrees, 1e7, 0.0, 1e5)
    assert "network" not in large.parts
    small = roofline.update(qwen, CHIP, PERFECT, degrees, 1e7, 0.0, 1000.0)
    assert small.parts["network"] == pytest.approx(625 * 3 * 15 / 16 * 2 * 7_615_616_512 / 5e10)
    within = roofline.update(qwen, CHIP, PERFECT, Degrees(data=8), 1e7, 0.0, 100.0)
    assert within.parts["link"] == pytest.approx(12_500 * 3 * 7 / 8 * 2 * 7_615_616_512 / 4e11)


def test_tensor_parallel_training_pays_for_all_reduces(qwen):
    cost = roofline.update(qwen, CHIP, PERFECT, Degrees(tensor=2), 1e5, 0.0, 1e5)
    assert cost.parts["link"] == pytest.approx(3 * 2 * 28 * 2 * (1 / 2) * 1e5 * 3584 * 2 / 4e11)


def test_weights_on_their_way(qwen):
    whole = 2 * 7_615_616_512
    store = roofline.sync(qwen, CHIP, Constants(), Degrees(), Degrees(), "object_store")
    assert store.parts == {"store_gb_s": pytest.approx(whole / 2e9)}
    wire = roofline.sync(qwen, CHIP, PERFECT, Degrees(data=8), Degrees(tensor=2, data=8), "broadcast")
    assert wire.parts["network"] == pytest.approx(whole / 2 / 5e10)
    shared = roofline.sync(qwen, CHIP, PERFECT, Degrees(data=8), Degrees(data=8), "cuda_ipc")
    assert shared.seconds == pytest.approx(7 / 8 * whole / 4e11 + 2 * whole / 2e12)


def test_hand_over_and_checkpoint(qwen):
    total = 7_615_616_512
    kept = roofline.hand_over(qwen, Constants(), Degrees(data=4), Degrees(data=4), False)
    moved = roofline.hand_over(qwen, Constants(), Degrees(data=4), Degrees(data=4), True)
    assert kept.seconds == pytest.approx(2 * (2 * total + total) / 2e10)
    assert moved.seconds - kept.seconds == pytest.approx(2 * 8 * total / 4 / 2e10)
    saved = roofline.checkpoint(qwen, Constants(), Degrees(data=32))
    assert saved.seconds == pytest.approx(12 * total / 4 / 2e9)


def test_rows_that_fit(qwen):
    room = 80 * 2**30 * 0.9 - 2 * 7_615_616_512
    assert roofline.rows_that_fit(qwen, CHIP, Degrees(), 4096) == int(room // (4096 * 57_344))
    assert roofline.rows_that_fit(qwen, replace_chip(memory_gib=8.0), Degrees(), 4096) == 1


def replace_chip(**values):
    return SimpleNamespace(**{**vars(CHIP), **values})


@pytest.mark.parametrize("rate", ["bandwidth_gb_s", "bf16_tflops", "link_gb_s", "network_gb_s"])
def test_a_faster_chip_is_never_slower(qwen, rate):
    degrees, faster = Degrees(tensor=2, pipeline=2, context=2, data=4), replace_chip(**{rate: 2 * getattr(CHIP, rate)})
    for chip, other in ((CHIP, faster),):
        for stage in (roofline.update, roofline.forward):
            sizes = (degrees, 1e6, 1e9, 16384.0)
            assert stage(qwen, other, PERFECT, *sizes).seconds <= stage(qwen, chip, PERFECT, *sizes).seconds
        rows = np.arange(1, 257)
        slow, fast = (sum(roofline.decode(qwen, c, PERFECT, degrees, rows, 2e3).values()) for c in (chip, other))
        assert (fast <= slow).all()


@pytest.mark.parametrize("name", ["qwen", "moe"])
def test_more_rows_make_a_step_longer_and_a_token_cheaper(qwen, name):
    facts = qwen if name == "qwen" else facts_from_config(MOE, "moe")
    rows = np.arange(1, 513)
    step = sum(roofline.decode(facts, CHIP, Constants(), Degrees(), rows, 2e3).values())
    assert (np.diff(step) >= 0).all() and (np.diff(step / rows) <= 1e-12).all()
