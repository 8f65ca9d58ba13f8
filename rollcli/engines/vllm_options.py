"""What vLLM is started with: what the recipe says elsewhere, defaults of ours, and the recipe's own `engine_args`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import transformers

from rollcli.engines import loading
from rollcli.runs.locations import resolve_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rollcli.config.schema import ModelConfig, ParallelConfig

BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU."""
CACHE_SHARE = 1 / 8
"""Most of a machine's memory that the KV cache of one replica takes on a CPU, unless the recipe says how much."""


def engine_options(
    config: ModelConfig, hub_config: PretrainedConfig, device: torch.device, seed: int, max_rows: int,
    parallel: ParallelConfig,
) -> dict[str, Any]:  # fmt: skip
    """Returns the options of vLLM that follow from the recipe, and the defaults of those it may set itself."""
    dtype = loading.torch_dtype(config.dtype, device)
    processes = parallel.tensor * parallel.pipeline
    options = {
        "dtype": str(dtype).removeprefix("torch."), "seed": seed, "max_num_seqs": max_rows,
        "tensor_parallel_size": parallel.tensor, "pipeline_parallel_size": parallel.pipeline,
        "enable_expert_parallel": parallel.expert > 1,
        "distributed_executor_backend": "uni" if processes == 1 else "mp",
        "revision": config.revision, "load_format": "dummy" if config.initialize is not None else "auto",
        "skip_tokenizer_init": True, "async_scheduling": False, "disable_log_stats": True, "use_tqdm_on_load": False,
        "enable_prefix_caching": True,
        "worker_extension_cls": "rollcli.engines.vllm_worker.WorkerExtension",
        "logits_processors": ["rollcli.engines.vllm_worker:Rows"],
    }  # fmt: skip
    if device.type == "cpu":
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes(hub_config, max_rows, dtype.itemsize)}
    else:
        options["enable_sleep_mode"] = True
    return options


def cache_bytes(config: PretrainedConfig, max_rows: int, itemsize: int) -> int:
    """Returns the size of a KV cache in which `max_rows` whole contexts fit, within a share of the machine's memory."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    blocks = -(-config.max_position_embeddings // BLOCK) + 1
    context = 2 * config.num_hidden_layers * heads * width * itemsize * BLOCK * blocks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(max_rows * context, int(memory * CACHE_SHARE)), 2 * context)


@contextmanager
def model_folder(config: ModelConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields the folder or hub id that vLLM reads the model from, and its configuration.

    A model that starts from random weights gets a folder that holds a configuration alone, for as long as vLLM reads.
    """
    if config.initialize is None:
        path = resolve_model(config.path)
        yield path, transformers.AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=False)
        return
    settings = deepcopy(config.initialize)
    hub_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    if not hub_config.architectures:
        hub_config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(hub_config)].__name__]
    with tempfile.TemporaryDirectory() as folder:
        hub_config.save_pretrained(folder)
        yield folder, hub_config
