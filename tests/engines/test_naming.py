"""Names of the hub: those that transformers itself writes, there and back, a group at a time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollcli.engines import naming
from rollcli.errors import EngineError, WeightSyncError

spec = importlib.util.spec_from_file_location("weights_ranks", Path(__file__).with_name("weights_ranks.py"))
shared = sys.modules.setdefault("weights_ranks", importlib.util.module_from_spec(spec))
if not hasattr(shared, "make_model"):
    spec.loader.exec_module(shared)
make_model, KINDS, MIXTURES, SIZES = shared.make_model, shared.KINDS, shared.MIXTURES, shared.SIZES

MORE = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
             "eos_token_id": 2},
    "deepseek_v3": {**SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                    "v_head_dim": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
                    "num_key_value_heads": 4},
    "jamba": {**SIZES, "num_experts": 4, "mamba_d_state": 8},
}  # fmt: skip
"""Tied through another name, a trained-by-nobody buffer, and a hybrid."""


def saved(model: transformers.PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_names_are_those_that_transformers_saves_and_the_way_back_is_exact(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, **MORE.get(kind, {}))
    tensors = naming.tensors_of(model)
    hub = naming.to_hub(model, tensors)
    assert same(hub, saved(model, tmp_path))
    assert same(naming.from_hub(model, hub), tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in hub.items()}
    assert naming.hub_shapes(model) == naming.hub_shapes(model.config) == shapes
    naming.of(model).check(hub)


@pytest.mark.parametrize("kind", MIXTURES)
def test_each_group_converts_by_itself(kind: str) -> None:
    """As a sync in buckets does; an expert's matrix is one number's part of the fused tensor."""
    model = make_model(kind)
    tensors, hub = naming.tensors_of(model), {}
    assert sorted(name for group in naming.groups(model) for name in group.memory) == sorted(tensors)
    for group in naming.groups(model):
        made = naming.to_hub(model, {name: tensors[name] for name in group.memory})
        assert tuple(made) == group.hub
        assert same(naming.from_hub(model, made), {name: tensors[name] for name in group.memory})
        hub |= made
    assert same(hub, naming.to_hub(model, tensors))
    gate, up = ("w1", "w3") if kind == "mixtral" else ("gate_proj", "up_proj")
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    fused = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    parts = [hub[f"model.layers.1.{block}.experts.3.{name}.weight"] for name in (gate, up)]
    assert torch.equal(torch.cat(parts), fused[3])


def test_a_model_without_conversions_keeps_its_tensors_and_their_names() -> None:
    model = make_model("llama")
    tensors = naming.tensors_of(model)
    assert all(group.plain and group.memory == group.hub for group in naming.groups(model))
    assert all(naming.to_hub(model, tensors)[name] is tensor for name, tensor in tensors.items())
    assert naming.of(model) is naming.of(model)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float64])
def test_what_lies_beside_a_weight_converts_like_it(precision: torch.dtype) -> None:
    """Moments: in their own precision, and on the meta device too."""
    model = make_model("mixtral")
    moments = {name: torch.randn(weight.shape).to(precision) for name, weight in naming.tensors_of(model).items()}
    hub = naming.to_hub(model, moments)
    assert {tensor.dtype for tensor in hub.values()} == {precision}
    assert same(naming.from_hub(model, hub), moments)
    ones = naming.to_hub(model, {name: moment * 0 + 1 for name, moment in moments.items()})
    assert all(bool((one == 1).all()) for one in ones.values())


def test_how_a_model_was_loaded_does_not_change_its_names(tmp_path: Path) -> None:
    """A checkpoint with the names that transformers has in memory loads too; what is sent on is the hub's."""
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    hub = naming.to_hub(loaded, naming.tensors_of(loaded))
    assert same(hub, naming.to_hub(model, naming.tensors_of(model)))


def test_tied_weights_have_one_name_and_aliases() -> None:
    names = naming.of(make_model("qwen2"))
    assert names.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in names.shapes and names.tied[0].hub == ("lm_head.weight",)


def test_buffers_count_but_may_be_missing() -> None:
    model = make_model("deepseek_v3", **MORE["deepseek_v3"])
    names = naming.of(model)
    assert names.buffers == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    hub = names.to_hub(naming.tensors_of(model))
    del hub["model.layers.1.mlp.gate.e_score_correction_bias"]
    names.check(hub)


def test_a_part_of_a_group_and_a_stranger_are_refused() -> None:
    model = make_model("mixtral")
    hub = naming.to_hub(model, naming.tensors_of(model))
    lost = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    part = {name: tensor for name, tensor in hub.items() if name != lost}
    with pytest.raises(WeightSyncError, match=f"missing: {lost}"):
        naming.from_hub(model, part)
    with pytest.raises(WeightSyncError, match=f"missing: {lost}"):
        naming.of(model).check(part)
    for convert in (naming.to_hub, naming.from_hub):
        with pytest.raises(WeightSyncError, match=r"unknown: model\.extra"):
            convert(model, {"model.extra": torch.zeros(1)})
    with pytest.raises(WeightSyncError, match=r"another shape: lm_head\.weight \(3,\), not \(61, 32\)"):
        naming.of(model).check({**hub, "lm_head.weight": torch.zeros(3)})


def test_tied_weights_that_differ_are_refused() -> None:
    model = make_model("qwen2")
    hub = naming.to_hub(model, naming.tensors_of(model))
    naming.of(model).check({**hub, "lm_head.weight": hub["model.embed_tokens.weight"].clone()})
    alone = {("lm_head.weight" if name == "model.embed_tokens.weight" else name): hub[name] for name in hub}
    naming.of(model).check(alone)
    with pytest.raises(WeightSyncError, match="tied weights differ"):
        naming.of(model).check({**hub, "lm_head.weight": hub["model.embed_tokens.weight"] + 1})


def test_many_wrong_names_are_counted() -> None:
    with pytest.raises(WeightSyncError, match=r"unknown: a0, a1, a2, a3, a4 and 3 more; the old weights stay"):
        naming.check_shapes({"b": (1,)}, {f"a{number}": (1,) for number in range(8)})


def test_a_conversion_without_a_way_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were transformers to lose one, nothing would notice until a checkpoint does not load."""
    from transformers.core_model_loading import WeightRenaming

    class OneWay(WeightRenaming):
        def reverse_transform(self) -> WeightRenaming:
            return WeightRenaming(r"\.mlp\.", ".feed_forward.")

    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model, **_: [OneWay(r"\.ffn\.", ".mlp.")])
    with pytest.raises(EngineError, match=r"`llama` model's .* becomes .*feed_forward.* on the hub"):
        naming.Naming(make_model("llama"))
