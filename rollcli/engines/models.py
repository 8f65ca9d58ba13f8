"""The recipe's model: found by path, hub id, embedded name or checkpoint, with its tokenizer and chat format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollcli.config.schema import ModelConfig
from rollcli.data.templates import ChatFormat
from rollcli.runs.locations import resolve_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_policy(config: ModelConfig, device: torch.device, seed: int) -> PreTrainedModel:
    """Returns the recipe's model on `device`: float32 master weights for training, on a GPU cast where it is used."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollcli.engines.loading import load_causal_lm

    if config.initialize is not None:
        torch.manual_seed(seed)
        settings = dict(config.initialize)
        architecture = AutoConfig.for_model(settings.pop("model_type"), **settings)
        return AutoModelForCausalLM.from_config(architecture, dtype=torch.float32).to(device)
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return load_causal_lm(
        resolve_model(config.path), dtype=dtype, device=device, revision=config.revision, attention=config.attention
    )


def load_policy_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Returns the recipe's tokenizer."""
    from rollcli.engines.loading import load_tokenizer

    return load_tokenizer(resolve_model(config.path), config.revision)


def load_chat_format(config: ModelConfig) -> ChatFormat:
    """Returns the recipe's tokenizer with its chat template and every token that ends a turn."""
    import json

    ends: list[int] = []
    generation = Path(resolve_model(config.path)) / "generation_config.json"
    if generation.is_file():
        # Chat models often end a turn with another token than the tokenizer's; the generation settings name both.
        stop = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        ends = [stop] if isinstance(stop, int) else list(stop or [])
    return ChatFormat(load_policy_tokenizer(config), config.chat_template, ends)
