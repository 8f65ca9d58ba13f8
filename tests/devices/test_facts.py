"""Parameter counts against transformers on the meta device, and where a configuration is found."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rollcli.config.schema import ModelConfig
from rollcli.devices.facts import facts_from_config, model_facts
from rollcli.errors import ModelNotFound, PlanError
from tests.devices.counting import by_part

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
STORIES = DATA / "stories260K" / "hf"


def config(model_type, hidden, intermediate, heads, kv_heads, layers, vocab, tied=False, **more):
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers, "vocab_size": vocab,
        "tie_word_embeddings": tied, **more,
    }  # fmt: skip


# Shapes of the published configurations; totals where the model card or the paper gives them.
REAL = {
    "Llama-3.1-8B": (config("llama", 4096, 14336, 32, 8, 32, 128256), 8_030_261_248),
    "SmolLM2-135M": (config("llama", 576, 1536, 9, 3, 30, 49152, tied=True), 134_515_008),
    "Mistral-7B": (config("mistral", 4096, 14336, 32, 8, 32, 32768), 7_248_023_552),
    "Qwen2.5-0.5B": (config("qwen2", 896, 4864, 14, 2, 24, 151936, tied=True), 494_032_768),
    "Qwen2.5-7B": (config("qwen2", 3584, 18944, 28, 4, 28, 152064), 7_615_616_512),
    "Qwen3-0.6B": (config("qwen3", 1024, 3072, 16, 8, 28, 151936, tied=True, head_dim=128), 596_049_920),
    "Qwen3-8B": (config("qwen3", 4096, 12288, 32, 8, 36, 151936, head_dim=128), 8_190_735_360),
    "Mixtral-8x7B": (
        config("mixtral", 4096, 14336, 32, 8, 32, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        config(
            "qwen3_moe", 2048, 6144, 32, 4, 48, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        30_532_122_624,
    ),
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
    "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
TINY = {
    "llama with biases": config("llama", 64, 172, 8, 4, 2, 99, attention_bias=True, mlp_bias=True),
    "llama with wide heads": config("llama", 64, 172, 8, 2, 2, 99, tied=True, head_dim=24),
    "llama, keys left out": {k: v for k, v in config("llama", 64, 172, 8, 4, 2, 99).items() if "key_value" not in k},
    "mistral, heads left out": {
        k: v for k, v in config("mistral", 64, 172, 8, 4, 2, 99).items() if "key_value" not in k
    },
    "qwen3 with biases": config("qwen3", 64, 172, 8, 4, 2, 99, tied=True, head_dim=16, attention_bias=True),
    "qwen3, head size left out": config("qwen3", 64, 172, 8, 4, 2, 99),
    "qwen3_moe, some layers dense": config(
        "qwen3_moe", 64, 172, 8, 4, 6, 99, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        mlp_only_layers=[3], decoder_sparse_step=2,
    ),
    "qwen3_moe, experts left out": config("qwen3_moe", 64, 172, 8, 4, 2, 99),
    "mixtral, experts left out": config("mixtral", 64, 172, 8, 4, 2, 99),
    "qwen2_moe, shared expert": config(
        "qwen2_moe", 64, 172, 8, 4, 3, 99, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        shared_expert_intermediate_size=80, mlp_only_layers=[0],
    ),
    "deepseek_v3 with biases": config("deepseek_v3", 64, 172, 8, 8, 4, 99, attention_bias=True, **LATENT),
    "deepseek_v2, queries whole": config("deepseek_v2", 64, 172, 8, 8, 3, 99, **{**LATENT, "q_lora_rank": None}),
    "deepseek_v3, keys left out": config("deepseek_v3", 64, 172, 8, 8, 4, 99),
    "glm4_moe with norms": config(
        "glm4_moe", 64, 172, 8, 4, 3, 99, head_dim=16, use_qk_norm=True, attention_bias=True, n_routed_experts=4,
        n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=48, first_k_dense_replace=1,
    ),
    "gpt_oss": config("gpt_oss", 64, 48, 8, 4, 2, 99, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "gemma2, heads of their own width": config("gemma2", 64, 172, 8, 4, 2, 99, tied=True, head_dim=24),
    "gemma": config("gemma", 64, 172, 8, 4, 2, 99, tied=True),
    "phi": {k: v for k, v in config("phi", 64, 172, 8, 8, 2, 99).items() if "key_value" not in k},
    "smollm3": config("smollm3", 64, 172, 8, 4, 2, 128256, tied=True),
}  # fmt: skip
CASES = {**{name: values for name, (values, _) in REAL.items()}, **TINY}


@pytest.mark.parametrize("name", CASES)
def test_counts_equal_transformers_to_the_last_parameter(name):
    facts = facts_from_config(CASES[name], name)
    counted = by_part(CASES[name])
    assert facts.parameters == counted
    assert facts.total == sum(counted.values())
    assert facts.approximate == ()


@pytest.mark.parametrize("name", REAL)
def test_counts_equal_the_published_ones(name):
    values, published = REAL[name]
    assert facts_from_config(values, name).total == published


@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared models are not on this machine")
def test_a_real_folder_is_read(tiny):
    assert model_facts(str(STORIES)) == replace(tiny, name=str(STORIES))


def test_stories260k_counts_by_hand(tiny):
    facts = tiny
    attention = 5 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
    mlp = 5 * 3 * 64 * 172
    norms = 5 * 2 * 64 + 64
    assert facts.parameters == {
        "embeddings": 512 * 64, "attention": attention, "mlp": mlp, "norms": norms, "head": 0
    }  # fmt: skip
    assert facts.total == facts.active == 260_032
    assert facts.context == 512
    assert facts.largest_block * 5 + facts.outside_blocks == facts.total


def test_active_parameters_of_a_mixture():
    facts = facts_from_config(CASES["Qwen3-30B-A3B"], "Qwen3-30B-A3B")
    expert = 3 * 2048 * 768
    assert facts.total - facts.active == 48 * (128 - 8) * expert
    assert 3.2e9 < facts.active < 3.4e9  # "A3B"


def test_an_unknown_architecture_is_counted_from_its_shapes_and_says_so():
    known = facts_from_config(config("llama", 64, 172, 8, 4, 2, 99), "x")
    unknown = facts_from_config(config("novel", 64, 172, 8, 4, 2, 99), "x")
    assert unknown.total == known.total
    assert unknown.approximate == ("architecture `novel` counted as a plain decoder of its shapes",)


def test_missing_shapes_are_named():
    with pytest.raises(PlanError, match="unknown architecture `gpt2` lacks `num_hidden_layers`, `hidden_size`"):
        facts_from_config({"model_type": "gpt2", "n_embd": 768, "vocab_size": 1}, "x")


def test_parts_that_shapes_do_not_tell_are_refused():
    with pytest.raises(PlanError, match="`kv_lora_rank`"):
        facts_from_config(config("novel", 64, 172, 8, 4, 2, 99, kv_lora_rank=16), "x")


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_impossible_shapes_are_refused(key, value):
    with pytest.raises(PlanError, match="must be at least 1"):
        facts_from_config({**config("llama", 64, 172, 8, 4, 2, 99), key: value}, "x")


def test_initialize_stands_for_a_configuration():
    settings = config("llama", 64, 172, 8, 4, 2, 99)
    assert model_facts(ModelConfig("somewhere", initialize=settings)).total == facts_from_config(settings, "x").total
    with pytest.raises(PlanError, match=r"`model\.initialize` lacks `vocab_size`"):
        model_facts(ModelConfig("somewhere", initialize={k: v for k, v in settings.items() if k != "vocab_size"}))


def write(folder, values):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_a_checkpoint_folder_holds_its_model_in_a_folder(tmp_path):
    write(tmp_path / "step_000001" / "model", TINY["llama with biases"])
    assert model_facts(str(tmp_path / "step_000001")).layers == 2


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_configuration_is_refused(tmp_path, text):
    folder = write(tmp_path / "model", text)
    with pytest.raises(PlanError, match=r"config\.json"):
        model_facts(str(folder))


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"there is no `config\.json`"):
        model_facts(str(tmp_path))


def test_an_unknown_embedded_model_is_refused():
    with pytest.raises(ModelNotFound):
        model_facts("embedded:nosuch")


def test_of_an_unknown_vision_language_model_the_text_part_is_counted_and_it_says_so():
    text = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    values = {"text_config": text | {"vocab_size": 10, "model_type": "novel_text"}, "vision_config": {"depth": 2}}
    facts = facts_from_config(values | {"model_type": "novel_vl", "tie_word_embeddings": True}, "mine")
    assert (facts.model_type, facts.layers, facts.tied) == ("novel_vl", 2, True)
    assert facts.approximate[-1] == "the vision part is not counted"


def test_latent_attention_caches_little_where_it_is_compressed():
    facts = facts_from_config(config("deepseek_v3", 64, 172, 8, 8, 4, 99, **LATENT), "x")
    assert facts.cache_width() == 16 + 8
    assert facts.cache_width(compressed=False) == 8 * (12 + 8) + 8 * 20
    assert (facts.head_dim, facts.query_width, facts.value_width) == (20, 160, 160)
    plain = facts_from_config(CASES["Qwen2.5-7B"], "x")
    assert plain.cache_width() == plain.cache_width(compressed=False) == 2 * 4 * 128


def test_what_tensor_parallelism_leaves_whole_and_what_experts_split_by_hand():
    facts = facts_from_config(config("deepseek_v3", 64, 172, 8, 8, 4, 99, **LATENT), "x")
    expert = 3 * 64 * 48
    assert facts.routed == 3 * 4 * expert and facts.routed_layer == 4 * expert
    norms, down, router = 2 * 64 + 24 + 16, 64 * (24 + 16 + 8), 64 * 4
    assert facts.unsplit == 4 * (norms + down) + 3 * router + 64
    dense = facts_from_config(TINY["llama with biases"], "x")
    assert dense.unsplit == 2 * (2 * 64 + 2 * 64) + 64  # two norms, two biases after a sum, and the last norm
    assert dense.routed == dense.routed_layer == 0


def test_shared_experts_are_active():
    facts = facts_from_config(config("deepseek_v3", 64, 172, 8, 8, 4, 99, **LATENT), "x")
    assert facts.total - facts.active == 3 * (4 - 2) * 3 * 64 * 48
    assert facts.feed_forward == 4 * 48  # two routed and two shared, wider together than a dense layer's 172
