"""Options of vLLM by name, the size of its cache, and where a model of random weights is read from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from rollcli.config.schema import ModelConfig, ParallelConfig
from rollcli.engines.vllm_options import cache_bytes, engine_options, model_folder


def test_the_cache_holds_the_rows_or_a_share_of_the_memory() -> None:
    config = transformers.Qwen2Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256
    )
    context = 2 * 2 * 1 * 32 * 4 * 384  # keys and values, layers, heads, width, bytes, three blocks
    assert cache_bytes(config, 4, 4) == 4 * context
    assert 2 * context < cache_bytes(config, 10**9, 4) < 10**9 * context


def test_a_model_of_random_weights_is_a_folder_with_a_configuration_alone() -> None:
    settings = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = ModelConfig(path="none", initialize=settings)
    with model_folder(config) as (folder, hub_config):
        assert [file.name for file in Path(folder).iterdir()] == ["config.json"]
        said = json.loads((Path(folder) / "config.json").read_text())
        assert said["architectures"] == ["Qwen2ForCausalLM"] and said["hidden_size"] == 64
        options = engine_options(config, hub_config, torch.device("cpu"), 3, 8, ParallelConfig())
    assert not Path(folder).exists() and settings["model_type"] == "qwen2"
    assert (options["load_format"], options["dtype"], options["max_num_seqs"]) == ("dummy", "float32", 8)
    assert options["distributed_executor_backend"] == "uni"


def test_several_devices_are_several_processes() -> None:
    hub_config = transformers.Qwen2Config(num_hidden_layers=1)
    config, parallel = ModelConfig(path="x"), ParallelConfig(tensor=2, pipeline=3)
    options = engine_options(config, hub_config, torch.device("cuda"), 0, 8, parallel)
    assert (options["tensor_parallel_size"], options["pipeline_parallel_size"]) == (2, 3)
    assert options["distributed_executor_backend"] == "mp" and options["dtype"] == "bfloat16"
    assert options["enable_sleep_mode"] and "kv_cache_memory_bytes" not in options
