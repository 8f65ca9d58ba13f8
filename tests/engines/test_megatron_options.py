"""Options against the installed Megatron: its names, those that are decided elsewhere, and their types."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from rollcli.engines import megatron_options
from rollcli.engines.megatron_options import DECIDED, check_options, fields
from rollcli.errors import EngineError

INSTALLED = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not INSTALLED, reason="needs megatron-core")


@needs_megatron
def test_fields_read_from_the_source_are_those_of_the_class() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert set(fields()) == {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(fields()) >= DECIDED


@needs_megatron
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sequence_parallel": True},
        {"recompute_granularity": None, "recompute_num_layers": 2},
        {"moe_aux_loss_coeff": 0},
        {"recompute_modules": ["core_attn"]},
    ],
    ids=str,
)
def test_options_of_its_own_pass(options) -> None:
    check_options(options)


@needs_megatron
@pytest.mark.parametrize(
    ("options", "match", "hint"),
    [
        ({"sequence_paralel": True}, "no option `sequence_paralel`.*mean `sequence_parallel`", "fields of"),
        ({"zzz": 1}, "no option `zzz`$", "fields of"),
        ({"hidden_size": 64}, "decides `hidden_size`", "leave it out"),
        ({"sequence_parallel": 1}, "`sequence_parallel` .* cannot be 1", "bool"),
        ({"recompute_num_layers": "two"}, "cannot be 'two'", "Optional"),
        ({"recompute_num_layers": 1.5}, "cannot be 1.5", "Optional"),
    ],
    ids=str,
)
def test_others_are_refused(options, match: str, hint: str) -> None:
    with pytest.raises(EngineError, match=match) as raised:
        check_options(options)
    assert hint in raised.value.hint


def test_without_megatron_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_options.importlib.util, "find_spec", lambda name: None)
    fields.cache_clear()
    try:
        with pytest.raises(EngineError, match="not installed") as raised:
            check_options({})
        assert "pip install" in raised.value.hint
    finally:
        fields.cache_clear()
