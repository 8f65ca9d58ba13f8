"""Parameters of the vision towers beside a decoder, counted from `vision_config` as transformers builds them.

The projector into the decoder counts here too. Defaults are transformers' own of the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vision_parameters(kind: str, values: Mapping[str, Any], hidden: int) -> int:
    """Returns the parameters of a tower.

    Args:
        kind: `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl` or `siglip`.
        values: the configuration's `vision_config`.
        hidden: the decoder's width.
    """
    count = {"qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "siglip": _siglip}[kind]
    return count(values, hidden)


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _pixels(values: Mapping[str, Any], patch: int) -> int:
    """Numbers in one patch: channels, and frames where patches span time."""
    patch = values.get("patch_size", patch)
    return values.get("in_channels", 3) * values.get("temporal_patch_size", 2) * patch * patch


def _attention(width: int) -> int:
    return _linear(width, 3 * width) + _linear(width, width)


def _qwen2_vl(values: Mapping[str, Any], hidden: int) -> int:
    width, merged = values.get("embed_dim", 1280), values.get("spatial_merge_size", 2) ** 2
    inner = int(width * values.get("mlp_ratio", 4))
    block = 4 * width + _attention(width) + _linear(width, inner) + _linear(inner, width)
    merger = 2 * width + _linear(merged * width, merged * width)
    out = values.get("hidden_size", 3584)
    return _pixels(values, 14) * width + values.get("depth", 32) * block + merger + _linear(merged * width, out)


def _qwen2_5_vl(values: Mapping[str, Any], hidden: int) -> int:
    width, merged = values.get("hidden_size", 3584), values.get("spatial_merge_size", 2) ** 2
    inner = values.get("intermediate_size", 3420)
    block = 2 * width + _attention(width) + 2 * _linear(width, inner) + _linear(inner, width)
    merger = width + _linear(merged * width, merged * width)
    out = values.get("out_hidden_size", 3584)
    return _pixels(values, 14) * width + values.get("depth", 32) * block + merger + _linear(merged * width, out)


def _qwen3_vl(values: Mapping[str, Any], hidden: int) -> int:
    width, merged = values.get("hidden_size", 1152), values.get("spatial_merge_size", 2) ** 2
    inner = values.get("intermediate_size", 4304)
    block = 4 * width + _attention(width) + _linear(width, inner) + _linear(inner, width)
    wide = merged * width
    merger = _linear(wide, wide) + _linear(wide, values.get("out_hidden_size", 3584))
    deep = len(values.get("deepstack_visual_indexes", (8, 16, 24)))  # their norms come after the merge, hence wider
    patches = _linear(_pixels(values, 16), width) + values.get("num_position_embeddings", 2304) * width
    return patches + values.get("depth", 27) * block + 2 * width + merger + deep * (2 * wide + merger)


def _siglip(values: Mapping[str, Any], hidden: int) -> int:
    width, inner = values.get("hidden_size", 768), values.get("intermediate_size", 3072)
    patch = values.get("patch_size", 16)
    places = (values.get("image_size", 224) // patch) ** 2
    block = 4 * width + 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    patches = _linear(values.get("num_channels", 3) * patch * patch, width) + places * width
    pooling = width + 4 * _linear(width, width) + 2 * width + _linear(width, inner) + _linear(inner, width)
    head = pooling if values.get("vision_use_head", True) else 0
    return patches + values.get("num_hidden_layers", 12) * block + 2 * width + head + width * hidden + width
