"""The catalogue of shapes against transformers and published totals, and where a configuration is found."""

from __future__ import annotations

import json

import pytest

from rollcli.config.schema import ModelConfig
from rollcli.devices.facts import facts_from_config, model_facts
from rollcli.devices.shapes import catalogue, find_config
from rollcli.errors import PlanError
from tests.devices.counting import by_part

# Totals as the hub's model cards show them (safetensors metadata, without what transformers does not load).
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6738415616,
    "meta-llama/Llama-2-13b-hf": 13015864320,
    "meta-llama/Llama-2-70b-hf": 68976648192,
    "meta-llama/Llama-3.1-70B": 70553706496,
    "meta-llama/Llama-3.1-405B": 405853388800,
    "meta-llama/Llama-3.2-1B": 1235814400,
    "meta-llama/Llama-3.2-3B": 3212749824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1100048384,
    "HuggingFaceTB/SmolLM2-360M": 361821120,
    "HuggingFaceTB/SmolLM2-1.7B": 1711376384,
    "HuggingFaceTB/SmolLM3-3B": 3075098624,
    "mistralai/Mistral-7B-v0.1": 7241732096,
    "mistralai/Mistral-Nemo-Base-2407": 12247782400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23572403200,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140630071296,
    "Qwen/Qwen2.5-1.5B-Instruct": 1543714304,
    "Qwen/Qwen2.5-3B": 3085938688,
    "Qwen/Qwen2.5-14B": 14770033664,
    "Qwen/Qwen2.5-32B": 32763876352,
    "Qwen/Qwen2.5-72B": 72706203648,
    "Qwen/Qwen3-1.7B": 1720574976,
    "Qwen/Qwen3-4B": 4022468096,
    "Qwen/Qwen3-14B": 14768307200,
    "Qwen/Qwen3-32B": 32762123264,
    "Qwen/Qwen3-235B-A22B": 235093634560,
    "deepseek-ai/DeepSeek-V2-Lite": 15706484224,
    "deepseek-ai/DeepSeek-V2": 235741434880,
    "deepseek-ai/DeepSeek-V3": 671026404352,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1777088000,
    "google/gemma-2-2b": 2614341888,
    "google/gemma-2-9b": 9241705984,
    "google/gemma-2-27b": 27227128320,
    "google/gemma-3-1b-it": 999885952,
    "google/gemma-3-4b-it": 4300079472,
    "google/gemma-3-12b-it": 12187325040,
    "google/gemma-3-27b-it": 27432406640,
    "microsoft/phi-2": 2779683840,
    "microsoft/Phi-3-mini-4k-instruct": 3821079552,
    "microsoft/Phi-4-mini-instruct": 3836021760,
    "microsoft/phi-4": 14659507200,
    "Qwen/Qwen2-VL-2B-Instruct": 2208985600,
    "Qwen/Qwen2-VL-7B-Instruct": 8291375616,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3754622976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8292166656,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73410777344,
    "Qwen/Qwen3-VL-2B-Instruct": 2127532032,
    "Qwen/Qwen3-VL-4B-Instruct": 4437815808,
    "Qwen/Qwen3-VL-8B-Instruct": 8767123696,
    "zai-org/GLM-4.5-Air": 106852245504,
    "openai/gpt-oss-20b": 20914757184,
    "openai/gpt-oss-120b": 116829156672,
}
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8,
    "num_hidden_layers": 2, "vocab_size": 99,
}  # fmt: skip


def distinct():
    """Returns one hub id of all that differ in their context alone."""
    found = {}
    for name, values in catalogue().items():
        key = json.dumps({k: v for k, v in values.items() if k != "max_position_embeddings"}, sort_keys=True)
        found.setdefault(key, name)
    return list(found.values())


def shortened(values, layers):
    if "text_config" in values:
        return {**values, "text_config": {**values["text_config"], "num_hidden_layers": layers}}
    return {**values, "num_hidden_layers": layers}


@pytest.mark.parametrize("name", distinct())
def test_shapes_count_as_transformers_counts_them(name):
    """Few layers stand for all: one more adds the same by both counts, and the layers that differ come first."""
    values = catalogue()[name]
    first = values.get("first_k_dense_replace", 0) + 1
    ours = [facts_from_config(shortened(values, layers), name).parameters for layers in (first, first + 1)]
    assert ours == [by_part(values, layers) for layers in (first, first + 1)]
    whole = facts_from_config(values, name)
    more = {part: count - ours[0][part] for part, count in ours[1].items()}
    assert whole.parameters == {part: count + (whole.layers - first) * more[part] for part, count in ours[0].items()}


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
def test_whole_models_count_as_transformers_counts_them(name):
    assert facts_from_config(catalogue()[name], name).parameters == by_part(catalogue()[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name):
    assert facts_from_config(catalogue()[name], name).total == PUBLISHED[name]


def test_every_entry_is_exact_and_has_a_context():
    for name, values in catalogue().items():
        facts = facts_from_config(values, name)
        assert facts.approximate == () and facts.context >= 2048 and facts.active <= facts.total, name


def write(folder, values=TINY):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_is_found_in_the_cache_before_the_catalogue(cache):
    repository = cache / "models--Qwen--Qwen2.5-0.5B"
    write(repository / "snapshots" / "abc")
    assert find_config("Qwen/Qwen2.5-0.5B") is None
    assert model_facts("Qwen/Qwen2.5-0.5B").layers == 24
    assert find_config("Qwen/Qwen2.5-0.5B", "abc").parent.name == "abc"
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    facts = model_facts("Qwen/Qwen2.5-0.5B")
    assert facts.layers == 2 and facts.origin == "its `config.json`"


def test_the_catalogue_serves_without_network_and_says_so(cache):
    facts = model_facts("Qwen/Qwen2.5-1.5B-Instruct")
    assert (facts.total, facts.origin) == (1_543_714_304, "the catalogue of shapes (devices/models.yaml)")
    with pytest.raises(PlanError):  # another revision may have other shapes
        model_facts(ModelConfig("Qwen/Qwen2.5-1.5B-Instruct", revision="v2"))


def test_what_is_nowhere_here_is_fetched(cache, tmp_path):
    asked = []

    def fetch(name, revision):
        asked.append((name, revision))
        return write(tmp_path / "fetched") / "config.json"

    assert model_facts(ModelConfig("some/model", revision="v1"), fetch).layers == 2
    assert model_facts("Qwen/Qwen2.5-0.5B", fetch).layers == 24
    assert asked == [("some/model", "v1")]


def test_a_model_that_is_not_here_says_how_to_get_its_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for fetch in (None, lambda name, revision: None):
        with pytest.raises(PlanError, match="the shapes of `some/model` are not known here") as caught:
            model_facts("some/model", fetch)
        assert "hf download some/model config.json" in caught.value.hint
        assert "model.path=" in caught.value.hint


def test_a_near_miss_names_what_the_catalogue_has(cache):
    with pytest.raises(PlanError) as caught:
        model_facts("Qwen/Qwen2.5-1.5B-Instrct")
    assert caught.value.hint.endswith("the catalogue has `Qwen/Qwen2.5-1.5B-Instruct`")


def test_the_recipes_own_configuration_comes_first(cache):
    facts = model_facts(ModelConfig("Qwen/Qwen2.5-0.5B", initialize=TINY))
    assert (facts.layers, facts.origin) == (2, "`model.initialize`")
