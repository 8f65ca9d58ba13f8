"""Vision towers against transformers' own, small."""

from __future__ import annotations

import pytest

from rollcli.devices.facts import facts_from_config
from rollcli.devices.vision_facts import vision_parameters
from tests.devices.counting import by_part

TEXT = {
    "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "num_hidden_layers": 1, "vocab_size": 99,
}  # fmt: skip
TOWERS = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 3, "patch_size": 6},
    "qwen2_5_vl": {"depth": 2, "hidden_size": 32, "intermediate_size": 72, "num_heads": 4, "out_hidden_size": 64},
    "qwen3_vl": {
        "depth": 4, "hidden_size": 32, "intermediate_size": 72, "num_heads": 4, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 49, "spatial_merge_size": 3,
    },
    "gemma3": {
        "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
        "patch_size": 14,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", TOWERS)
def test_towers_equal_transformers_to_the_last_parameter(kind):
    settings = {"model_type": kind, "vision_config": TOWERS[kind], "tie_word_embeddings": True, **TEXT}
    if kind == "gemma3":
        settings = {"model_type": kind, "vision_config": TOWERS[kind], "text_config": TEXT}
    facts = facts_from_config(settings, kind)
    assert facts.parameters == by_part(settings)
    assert facts.vision > 0 and facts.approximate == ()


def test_a_plain_tower_by_hand():
    # 2 x 2 patches of 3 x 4 numbers; one block of width 2 and 3; a norm; a projection to 5 and its norm.
    block = 2 * 2 * 2 + 4 * (2 * 2 + 2) + (2 * 3 + 3) + (3 * 2 + 2)
    values = {"hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 1, "image_size": 4, "patch_size": 2}
    values["vision_use_head"] = False
    assert vision_parameters("siglip", values, 5) == (3 * 4 * 2 + 2) + 4 * 2 + block + 2 * 2 + 2 * 5 + 2
