"""What is said of an engine without importing it is what the engine itself says."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from typing import Any, get_type_hints

import pytest

from rollcli import registry
from rollcli.algorithms.grpo import Grpo
from rollcli.config.schema import LoraConfig, ParallelConfig, PolicyConfig, RlRecipe
from rollcli.engines import INFER_ENGINES, TRAIN_ENGINES, facts
from rollcli.engines.facts import FACTS, check_abilities, check_options, own_options
from rollcli.errors import EngineError

MODEL = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


def needs(engine: str) -> None:
    if importlib.util.find_spec(FACTS[engine].package) is None:
        pytest.skip(f"needs {FACTS[engine].package}")


def refusal(engine: str, options: dict) -> EngineError:
    with pytest.raises(EngineError) as caught:
        check_options(engine, options, "policy")
    return caught.value


def test_every_built_in_engine_has_facts():
    assert FACTS.keys() == {**TRAIN_ENGINES, **INFER_ENGINES}.keys()
    check_options("./mine.py:Engine", {"anything": 1}, "policy")


@pytest.mark.parametrize(
    ("engine", "others"),
    [
        ("fsdp", {"self", "model", "config", "frozen", "dtype", "seed"}),
        ("transformers", {"config", "device", "seed", "max_rows", "parallel"}),
    ],
)
def test_options_of_our_own_are_the_signatures(engine, others):
    kind = "train_engines" if engine in TRAIN_ENGINES else "infer_engines"
    made = registry.resolve(kind, engine)
    taken = inspect.signature(made.__init__ if engine == "fsdp" else made.load).parameters
    assert own_options(engine).keys() == taken.keys() - others


def test_options_read_from_megatrons_source_are_those_of_its_class():
    needs("megatron")
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = own_options("megatron")
    assert known.keys() == {field.name for field in dataclasses.fields(TransformerConfig)}
    assert known.keys() >= FACTS["megatron"].decided.keys()


def test_options_read_from_vllms_source_are_fields_of_a_class_it_has():
    needs("vllm")
    known = own_options("vllm")
    assert known.keys() >= {"gpu_memory_utilization", "max_model_len", "kv_cache_memory_bytes", "enforce_eager"}
    assert known.keys() >= FACTS["vllm"].decided.keys()


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("fsdp", {"shard_size": 2, "offload": True}),
        ("fsdp", {"shard_size": None}),
        ("deepspeed", {"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 1}),
        ("megatron", {"sequence_parallel": True, "recompute_granularity": None, "recompute_modules": ["core_attn"]}),
        ("vllm", {"enforce_eager": True, "gpu_memory_utilization": 0.5}),
    ],
    ids=str,
)
def test_options_of_an_engine_pass(engine, options):
    needs(engine)
    check_options(engine, options, "policy")


@pytest.mark.parametrize(
    ("engine", "options", "said", "hint"),
    [
        ("fsdp", {"ofload": True}, "has no such option (did you mean `offload`?)", "shard_size"),
        ("fsdp", {"offload": 1}, "cannot be 1", "`bool`"),
        ("fsdp", {"shard_size": True}, "cannot be True", "int"),
        ("deepspeed", {"zero_optimization": "stage 2"}, "cannot be 'stage 2'", "dict"),
        ("megatron", {"sequence_paralel": True}, "did you mean `sequence_parallel`?", "TransformerConfig"),
        ("megatron", {"hidden_size": 64}, "decides this", "leave it out"),
        ("megatron", {"recompute_num_layers": 1.5}, "cannot be 1.5", "Optional"),
        ("vllm", {"max_model_length": 5}, "did you mean `max_model_len`?", "EngineArgs"),
        ("vllm", {"trust_remote_code": True}, "the engine `vllm` decides this", "leave it out"),
        ("vllm", {"max_num_seqs": 5}, "the recipe decides this", "`rollout.max_rows`"),
    ],
    ids=str,
)
def test_others_are_refused_with_the_key_and_the_word_meant(engine, options, said, hint):
    needs(engine)
    error = refusal(engine, options)
    assert error.message.startswith(f"`policy.engine_args.{next(iter(options))}`: ")
    assert said in error.message and hint in error.hint


@pytest.mark.parametrize("engine", FACTS)
def test_the_recipe_has_the_keys_that_decide(engine):
    for key in filter(None, FACTS[engine].decided.values()):
        kind: Any = RlRecipe
        for part in key.format(block="policy").split("."):
            kind = Grpo if kind is Any else kind  # the algorithm, whose block depends on its name
            kind = get_type_hints(kind)[part]


@pytest.mark.parametrize(
    ("engine", "config", "said"),
    [
        (
            "deepspeed",
            PolicyConfig(lora=LoraConfig(rank=8)),
            "`policy.lora.rank` is 8: the engine `deepspeed` trains all",
        ),
        ("deepspeed", PolicyConfig(parallel=ParallelConfig(tensor=2)), "`policy.parallel.tensor` is 2: the engine"),
        ("megatron", PolicyConfig(parallel=ParallelConfig(context=2)), "`policy.parallel.context` is 2: the engine"),
        ("fsdp", PolicyConfig(parallel=ParallelConfig(tensor=3)), "3, which does not divide 4 attention heads"),
        ("fsdp", PolicyConfig(parallel=ParallelConfig(expert=1, context=4)), "does not divide 2 key and value heads"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine, config, said):
    with pytest.raises(EngineError) as caught:
        check_abilities(engine, config, MODEL, "policy")
    assert said in caught.value.message and caught.value.hint


def test_engines_of_the_same_kind_that_can_are_named():
    with pytest.raises(EngineError) as caught:
        check_abilities("deepspeed", PolicyConfig(parallel=ParallelConfig(tensor=2)), MODEL, "policy")
    assert caught.value.hint == "set `policy.parallel.tensor: 1`; engines that do: fsdp, megatron"


def test_what_it_can_do_passes():
    check_abilities("fsdp", PolicyConfig(lora=LoraConfig(rank=8), parallel=ParallelConfig(tensor=2)), MODEL, "policy")
    check_abilities("megatron", PolicyConfig(parallel=ParallelConfig(tensor=2)), MODEL, "policy")
    # Of a model that is not known, such as one on the hub, nothing is said.
    check_abilities("megatron", PolicyConfig(workers=2, parallel=ParallelConfig(expert=2)), {}, "policy")


def test_an_engine_that_is_not_installed_is_told_with_the_command(monkeypatch):
    monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="needs `sglang`, which is not installed") as caught:
        facts.check_installed("sglang")
    assert "pip install 'rollcli[sglang]'" in caught.value.hint
