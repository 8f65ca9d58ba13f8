"""The recipe's model: found by path, hub id, embedded name or checkpoint, with its tokenizer and chat format."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollcli.config.schema import ModelConfig, Recipe
from rollcli.data.images import VisionFormat
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
    from rollcli.engines import loading

    options = {"dtype": "float32" if training else config.dtype, "device": device, "attention": config.attention}
    if config.initialize is not None:
        return loading.initialize(config.initialize, seed=seed, **options)
    return loading.load_causal_lm(resolve_model(config.path), revision=config.revision, **options)


def load_critic(config: ModelConfig, path: str | None, device: torch.device, seed: int) -> PreTrainedModel:
    """Returns a model with one value for each position, float32: that at `path`, or the policy's with a new head.

    A new head is all zeros, so an untrained critic values every state at 0.
    """
    from rollcli.engines import loading

    options = {"dtype": "float32", "device": device, "attention": config.attention, "critic": True}
    if path is None and config.initialize is not None:
        return loading.initialize(config.initialize, seed=seed, **options)
    revision = config.revision if path is None else None
    return loading.load_causal_lm(resolve_model(path or config.path), revision=revision, **options)


def load_policy_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Returns the recipe's tokenizer.

    Raises:
        EngineError: it has tokens that the model does not embed.
    """
    from rollcli.engines import loading

    path = resolve_model(config.path)
    tokenizer = loading.load_tokenizer(path, config.revision)
    vocabulary = loading.vocabulary_size(path, config.revision, config.initialize)
    loading.check_tokens(f"the tokenizer of `{config.path}`", tokenizer.get_vocab(), vocabulary)
    ends = {f"end of a turn, {number}": number for number in _generation_ends(config)}
    loading.check_tokens(f"`generation_config.json` of `{config.path}`", ends, vocabulary)
    return tokenizer


def load_chat_format(config: ModelConfig) -> ChatFormat:
    """Returns the recipe's tokenizer with its chat template and every token that ends a turn."""
    tokenizer = load_policy_tokenizer(config)
    return ChatFormat(tokenizer, config.chat_template, _generation_ends(config), load_vision_format(config))


def load_chat_formats(recipe: Recipe) -> dict[str, ChatFormat]:
    """Returns the chat format of each task, by its name; tasks with the same template share one."""
    formats: dict[str | None, ChatFormat] = {}
    for task in recipe.tasks:
        if task.chat_template not in formats:
            model = replace(recipe.model, chat_template=task.chat_template or recipe.model.chat_template)
            formats[task.chat_template] = load_chat_format(model)
    return {task.name: formats[task.chat_template] for task in recipe.tasks}


def load_vision_format(config: ModelConfig) -> VisionFormat | None:
    """Returns how the recipe's model is shown images; None for one that sees none.

    Raises:
        ModelNotFound: a vision-language model comes without settings of its image processor.
    """
    from rollcli.engines import loading, vision

    path = resolve_model(config.path)
    model = loading.load_config(path, config.revision, config.initialize)
    if not vision.sees(model):
        return None
    vision.check_family(model)
    return VisionFormat(
        loading.load_image_processor(path, config.revision), model.image_token_id, [model.video_token_id]
    )


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
