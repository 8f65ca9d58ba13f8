"""Cuts of Megatron's weights, worked out element by element from what a head, a row and an expert is."""

from __future__ import annotations

import pytest
import torch

from rollcli.engines.megatron_weights import Layout, Place, place_of
from rollcli.errors import EngineError

LAYOUT = Layout(groups=4, queries=2, head=3, vocabulary=7, parts=2)
HIDDEN = 5


def labelled(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


PLACES = {
    "whole": (Place(("norm",), "whole"), [labelled(HIDDEN)]),
    "rows": (Place(("embed",), "rows"), [labelled(7, HIDDEN)]),
    "columns": (Place(("down",), "columns"), [labelled(HIDDEN, 6)]),
    "qkv": (
        Place(("q", "k", "v"), "qkv"),
        [labelled(24, HIDDEN), labelled(12, HIDDEN, start=1000), labelled(12, HIDDEN, start=2000)],
    ),
    "bias": (Place(("q", "k", "v"), "qkv"), [labelled(24), labelled(12, start=1000), labelled(12, start=2000)]),
    "gate_up": (Place(("gate", "up"), "gate_up"), [labelled(8, HIDDEN), labelled(8, HIDDEN, start=100)]),
    "fused": (Place(("gate_up",), "fused_gate_up", expert=1), [labelled(16, HIDDEN)]),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", PLACES)
def test_parts_make_the_whole_again(name: str, parts: int) -> None:
    place, whole = PLACES[name]
    layout = Layout(4, 2, 3, 7, parts)
    held = [layout.part(place, whole, rank, parts) for rank in range(parts)]
    assert len({part.shape for part in held}) == 1
    made = layout.whole(place, held)
    assert len(made) == len(place.memory)
    for first, second in zip(made, whole):
        assert torch.equal(first, second)


def test_a_rank_holds_whole_heads_beside_the_key_and_value_they_share() -> None:
    place, (q, k, v) = PLACES["qkv"]
    second = LAYOUT.part(place, [q, k, v], 1, 2).reshape(2, 4, 3, HIDDEN)  # groups, heads of a group, channels
    for group in range(2):
        for query in range(2):
            head = (2 + group) * 2 + query
            assert torch.equal(second[group, query], q[3 * head : 3 * head + 3])
        assert torch.equal(second[group, 2], k[3 * (2 + group) : 3 * (3 + group)])
        assert torch.equal(second[group, 3], v[3 * (2 + group) : 3 * (3 + group)])


def test_a_rank_holds_its_gate_rows_then_its_up_rows() -> None:
    place, (gate, up) = PLACES["gate_up"]
    assert torch.equal(LAYOUT.part(place, [gate, up], 1, 2), torch.cat([gate[4:], up[4:]]))
    fused, (both,) = PLACES["fused"]
    assert torch.equal(LAYOUT.part(fused, [both], 0, 2), torch.cat([both[:4], both[8:12]]))


def test_rows_are_padded_with_zeros_until_they_divide() -> None:
    place, (embedding,) = PLACES["rows"]
    assert LAYOUT.padded_vocabulary == 8 and Layout(4, 2, 3, 8, 2).padded_vocabulary == 8
    last = LAYOUT.part(place, [embedding], 1, 2)
    assert torch.equal(last[:3], embedding[4:]) and not last[3].any()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("embedding.word_embeddings.weight", Place(("model.embed_tokens.weight",), "rows")),
        (
            "decoder.layers.11.self_attention.linear_qkv.bias",
            Place(tuple(f"model.layers.11.self_attn.{which}_proj.bias" for which in "qkv"), "qkv"),
        ),
        (
            "decoder.layers.0.self_attention.k_layernorm.weight",
            Place(("model.layers.0.self_attn.k_norm.weight",), "whole", on_heads=True),
        ),
        (
            "decoder.layers.0.pre_mlp_layernorm.weight",
            Place(("model.layers.0.post_attention_layernorm.weight",), "whole", on_tokens=True),
        ),
        (
            "decoder.layers.3.mlp.router.weight",
            Place(("model.layers.3.mlp.gate.weight",), "whole", on_tokens=True),
        ),
        (
            "decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight",
            Place(("model.layers.3.mlp.experts.down_proj",), "columns", expert=5),
        ),
        ("head.bias", Place(("score.bias",), "whole")),
    ],
)  # fmt: skip
def test_names_stand_for_the_weights_of_transformers(name: str, place: Place) -> None:
    assert place_of(name, first_expert=4) == place


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.bias", "x"]
)
def test_a_weight_that_stands_for_none_is_named(name: str) -> None:
    with pytest.raises(EngineError, match=name):
        place_of(name)
