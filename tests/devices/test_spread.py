"""What divides what: by hand, and in the direction it must move."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from rollcli.config.schema import ParallelConfig, PolicyConfig
from rollcli.devices.facts import facts_from_config
from rollcli.devices.shapes import catalogue
from rollcli.devices.spread import adapter_parameters, held, spread_of

MODELS = ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "google/gemma-2-9b"]


def facts_of(name):
    return facts_from_config(catalogue()[name], name)


def policy(engine="fsdp", workers=1, stage=None, **more):
    parallel = {key: more.pop(key) for key in ("tensor", "pipeline", "context", "expert") if key in more}
    arguments = {"zero_optimization": {"stage": stage}} if stage is not None else more
    return PolicyConfig(engine=engine, workers=workers, parallel=ParallelConfig(**parallel), engine_args=arguments)


@pytest.mark.parametrize("name", MODELS)
def test_one_process_has_all(name):
    facts = facts_of(name)
    assert held(facts).total == facts.total
    assert held(facts).routed == facts.routed


def test_tensor_parallelism_by_hand():
    facts = facts_of("Qwen/Qwen2.5-7B")
    layer = 2 * 3584 * (3584 + 512) + 3584 + 2 * 512 + 3 * 3584 * 18944
    table, norms = 152064 * 3584, 28 * 2 * 3584 + 3584
    assert held(facts, tensor=2).total == pytest.approx(28 * layer / 2 + norms + 2 * table / 2)
    # `fsdp` keeps embeddings whole that are not tied to the head.
    assert held(facts, tensor=2, embeddings=False).total == pytest.approx(28 * layer / 2 + norms + table + table / 2)
    # Beyond 4 heads of keys and values these are repeated.
    again = 2 * 28 * 3584 * 512 * (1 / 4 - 1 / 8)
    assert held(facts, tensor=8).total == pytest.approx(28 * layer / 8 + again + norms + 2 * table / 8)


def test_expert_parallelism_splits_experts_and_nothing_else():
    facts = facts_of("Qwen/Qwen3-30B-A3B")
    whole, split = held(facts), held(facts, expert=8)
    assert split.routed == whole.routed / 8 == 48 * 128 * 3 * 2048 * 768 / 8
    assert split.dense == whole.dense


def test_a_pipeline_splits_layers_and_keeps_its_larger_end():
    facts = facts_of("Qwen/Qwen2.5-7B")
    table, layers = 152064 * 3584, facts_of("Qwen/Qwen2.5-7B").total - 2 * 152064 * 3584 - 3584
    assert held(facts, pipeline=4).total == pytest.approx(layers / 4 + table + 3584)


@pytest.mark.parametrize("name", MODELS)
def test_more_parallelism_never_raises_what_a_process_holds(name):
    facts = facts_of(name)
    for pipeline, expert, table in product((1, 2, 4), (1, 8), (True, False)):
        for few, many in pairwise((1, 2, 4, 8, 16)):
            assert held(facts, many, pipeline, expert, table).total <= held(facts, few, pipeline, expert, table).total
    for tensor in (1, 2, 8):
        for few, many in pairwise((1, 2, 4, 8)):
            assert held(facts, tensor, many).total <= held(facts, tensor, few).total
            assert held(facts, 1, 1, 2 * many).total <= held(facts, 1, 1, 2 * few).total


def test_zero_shards_from_its_stage_on():
    facts = facts_of("Qwen/Qwen2.5-7B")
    for stage in range(4):
        spread = spread_of(policy("deepspeed", 8, stage))
        kept = [round(facts.total / spread.sharded(facts, of).total) for of in (1, 2, 3)]
        assert kept == [8 if stage >= of else 1 for of in (1, 2, 3)]
    assert spread_of(policy("deepspeed", 8)).stage == 3


def test_fsdp_shards_over_all_but_tensor_peers_and_experts_over_all():
    facts = facts_of("Qwen/Qwen3-30B-A3B")
    spread = spread_of(policy("fsdp", 8, tensor=2, context=2))
    assert spread.processes == 32 and spread.shard == 16
    mine = spread.sharded(facts, 3)
    assert mine.routed == pytest.approx(facts.routed / 32)
    assert mine.dense == pytest.approx(held(facts, 2, embeddings=False).dense / 16)
    expert = spread_of(policy("fsdp", 32, expert=8)).sharded(facts, 3)
    assert expert.routed == pytest.approx(facts.routed / 32)
    copies = spread_of(policy("fsdp", 32, shard_size=8)).sharded(facts, 3)
    assert copies.total == pytest.approx(facts.total / 8)


def test_megatron_shares_moments_alone():
    facts = facts_of("Qwen/Qwen3-30B-A3B")
    spread = spread_of(policy("megatron", 8, tensor=2))
    assert spread.sharded(facts, 3) == spread.model(facts)
    assert spread.sharded(facts, 1).dense == pytest.approx(spread.model(facts).dense / 8)
    experts = spread_of(policy("megatron", 8, expert=4))
    assert experts.sharded(facts, 1).routed == pytest.approx(facts.routed / 4 / 2)
    assert experts.sharded(facts, 1).dense == pytest.approx(held(facts).dense / 8)


def test_offload_is_read_from_each_engines_own_words():
    assert spread_of(policy("fsdp", 2, offload=True)).offload_weights
    zero = PolicyConfig(
        engine="deepspeed", workers=2,
        engine_args={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    )  # fmt: skip
    spread = spread_of(zero)
    assert spread.offload_optimizer and not spread.offload_weights


def test_adapters_by_hand():
    facts = facts_of("Qwen/Qwen2.5-0.5B")
    attention = (896 + 896) + 2 * (896 + 128) + (896 + 896)
    everything = 24 * (attention + 3 * (896 + 4864))
    assert adapter_parameters(facts, 16, ["all-linear"]) == 16 * everything
    assert adapter_parameters(facts, 8, ["q_proj", "v_proj"]) == 8 * 24 * ((896 + 896) + (896 + 128))
    assert adapter_parameters(facts, 0, ["all-linear"]) == 0
    mixture = facts_of("Qwen/Qwen3-30B-A3B")  # experts get none
    assert adapter_parameters(mixture, 1, ["all-linear"]) == 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))
