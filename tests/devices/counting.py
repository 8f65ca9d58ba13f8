"""The slow reference of parameter counts: transformers' own modules on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VISION = ("visual", "vision_tower", "multi_modal_projector")


def by_part(values: Mapping[str, Any], layers: int | None = None) -> dict[str, int]:
    """Counts the parameters of transformers' own module, by part, from their names.

    Args:
        values: the hub's configuration.
        layers: decoder layers in place of the configuration's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = dict(values)
    kind = AutoModelForImageTextToText if settings.get("vision_config") else AutoModelForCausalLM
    architecture = AutoConfig.for_model(settings.pop("model_type"), **nested(settings))
    if layers is not None:
        text = architecture.get_text_config()
        text.num_hidden_layers = layers
        for key in ("layer_types", "mlp_layer_types"):
            if getattr(text, key, None):
                setattr(text, key, getattr(text, key)[:layers])
    with torch.device("meta"):
        model = kind.from_config(architecture)
    counted = dict.fromkeys(("embeddings", "attention", "mlp", "norms", "head"), 0)
    if kind is AutoModelForImageTextToText:
        counted["vision"] = 0
    for name, parameter in model.named_parameters():
        part = (
            "vision" if any(word in name for word in VISION)
            else "norms" if "norm" in name else "attention" if "self_attn" in name else "mlp" if "mlp" in name
            else "embeddings" if "embed_tokens" in name else "head"
        )  # fmt: skip
        counted[part] += parameter.numel()
    return counted


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings as transformers nests them: beside `vision_config` the decoder's stand in `text_config`."""
    if not settings.get("vision_config") or "text_config" in settings:
        return settings
    apart = ("vision_config", "tie_word_embeddings")
    text = {key: value for key, value in settings.items() if key not in apart}
    return {key: settings[key] for key in apart if key in settings} | {"text_config": text}
