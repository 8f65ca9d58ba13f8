"""The recipe's model: found by path, hub id, embedded name or checkpoint, with its tokenizer and chat format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcli.config.schema import ModelConfig
from rollcli.data.templates import ChatFormat
from rollcli.runs.locations import resolve_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_policy(config: ModelConfig, device: torch.device, seed: int, training: bool = False) -> PreTrainedModel:
    """Returns the recipe's model on `device`, with every dropout off.

    Its weights have the recipe's precision, or, for training, are float32 masters that the engine casts where it uses
    them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollcli.engines import loading

    dtype = "float32" if training else config.dtype
    if config.initialize is not None:
        torch.manual_seed(seed)
        settings = dict(config.initialize)
        architecture = AutoConfig.for_model(settings.pop("model_type"), **settings)
        loading.disable_dropout_fields(architecture)
        model = AutoModelForCausalLM.from_config(
            architecture, dtype=loading.torch_dtype(dtype, device), attn_implementation=config.attention
        )
        loading.disable_dropout_modules(model)
        return model.to(device).eval()
    return loading.load_causal_lm(
        resolve_model(config.path), dtype=dtype, device=device, revision=config.revision, attention=config.attention
    )


def load_policy_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Returns the recipe's tokenizer."""
    from rollcli.engines.loading import load_tokenizer

    return load_tokenizer(resolve_model(config.path), config.revision)


def load_chat_format(config: ModelConfig) -> ChatFormat:
    """Returns the recipe's tokenizer with its chat template and every token that ends a turn."""
    return ChatFormat(load_policy_tokenizer(config), config.chat_template, _generation_ends(config))


def _generation_ends(config: ModelConfig) -> list[int]:
    """Returns the end tokens of the model's generation settings.

    Chat models often end a turn with another token than the tokenizer's; these settings name both.
    """
    from transformers import GenerationConfig

    try:
        stop = GenerationConfig.from_pretrained(resolve_model(config.path), revision=config.revision).eos_token_id
    except OSError:
        return []  # the model has no such file
    return [stop] if isinstance(stop, int) else list(stop or [])
