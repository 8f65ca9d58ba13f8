"""Families' defaults are transformers'."""

from __future__ import annotations

import pytest

from rollcli.devices.families import FAMILIES


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_of_a_family_are_those_of_transformers(model_type):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type)
    tied = theirs.tie_word_embeddings
    text = theirs.get_text_config()
    for key, value in FAMILIES[model_type].defaults.items():
        assert getattr(text, key) == value, key
    assert bool(tied) == FAMILIES[model_type].defaults.get("tie_word_embeddings", False)
