"""Where each of Megatron's weights comes from in a `transformers` model, and how it is cut for tensor parallelism.

Megatron keeps some matrices together that transformers keeps apart, and cuts them so that each rank has whole heads:

    linear_qkv   per key-value head: its query heads, its key, its value      rank r: heads r·n/t … (r+1)·n/t
    linear_fc1   gate rows, then up rows                                      rank r: its gate rows, then its up rows
    linear_proj, linear_fc2                                                   rank r: its columns
    embedding, output layer      rows, padded with zeros until they divide    rank r: its rows
    experts.local_experts.E.…    one by one; transformers keeps a layer's in one tensor `[experts, …]`

Everything here is linear, so it holds for gradients and optimizer moments as it does for weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rollcli.errors import EngineError


@dataclass(frozen=True)
class Place:
    """Where one of Megatron's weights comes from.

    Attributes:
        memory: names of the tensors it is made of, as transformers holds them (engines/naming.py has the hub's).
        cut: how ranks share it; `whole` is on every rank.
        expert: index in the first dimension of those tensors; None where a weight is no expert's.
        on_tokens: every rank of a tensor-parallel group applies it to other tokens when those run sequence-parallel.
        on_heads: every rank of a tensor-parallel group applies it to other heads.
    """

    memory: tuple[str, ...]
    cut: Literal["whole", "rows", "columns", "qkv", "gate_up", "fused_gate_up"]
    expert: int | None = None
    on_tokens: bool = False
    on_heads: bool = False


@dataclass(frozen=True)
class Layout:
    """Sizes that the cuts depend on.

    Attributes:
        groups: key-value heads of the model.
        queries: query heads that share one of them.
        head: channels of a head.
        vocabulary: words, without padding.
        parts: ranks that share a matrix.
        first_expert: index of this rank's first expert.
    """

    groups: int
    queries: int
    head: int
    vocabulary: int
    parts: int
    first_expert: int = 0

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding, a multiple of `parts`."""
        return -(-self.vocabulary // self.parts) * self.parts

    def part(self, place: Place, whole: Sequence[torch.Tensor], rank: int, parts: int) -> torch.Tensor:
        """Returns what rank `rank` of `parts` holds of the tensors `whole`, a view where that is possible."""
        if place.cut == "whole":
            return whole[0]
        if place.cut == "columns":
            return whole[0].chunk(parts, dim=1)[rank]
        if place.cut == "rows":
            missing = self.padded_vocabulary - whole[0].shape[0]
            padded = torch.cat([whole[0], whole[0].new_zeros(missing, *whole[0].shape[1:])]) if missing else whole[0]
            return padded.chunk(parts)[rank]
        if place.cut == "qkv":
            grouped = [tensor.reshape(self.groups, -1, self.head, *tensor.shape[1:]) for tensor in whole]
            joined = torch.cat([tensor.chunk(parts)[rank] for tensor in grouped], dim=1)
            return joined.reshape(-1, *whole[0].shape[1:])
        halves = whole[0].chunk(2) if place.cut == "fused_gate_up" else whole
        return torch.cat([half.chunk(parts)[rank] for half in halves])

    def whole(self, place: Place, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors that every rank holds parts of, in the order of `place.memory`."""
        if place.cut == "whole":
            return [parts[0]]
        if place.cut == "columns":
            return [torch.cat(list(parts), dim=1)]
        if place.cut == "rows":
            return [torch.cat(list(parts))[: self.vocabulary]]
        if place.cut == "qkv":
            rest = parts[0].shape[1:]
            grouped = torch.cat([part.reshape(-1, self.queries + 2, self.head, *rest) for part in parts])
            split = grouped.split([self.queries, 1, 1], dim=1)
            return [tensor.reshape(-1, *rest) for tensor in split]
        halves = [torch.cat(list(half)) for half in zip(*(part.chunk(2) for part in parts))]
        return [torch.cat(halves)] if place.cut == "fused_gate_up" else halves


_LAYER = {
    r"input_layernorm.weight": (("input_layernorm.weight",), "whole"),
    r"pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "whole"),
    r"self_attention.linear_qkv.(weight|bias)": (
        tuple(f"self_attn.{which}_proj.{{0}}" for which in "qkv"), "qkv",
    ),
    r"self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "columns"),
    r"self_attention.([qk])_layernorm.weight": (("self_attn.{0}_norm.weight",), "whole"),
    r"mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    r"mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "columns"),
    r"mlp.router.weight": (("mlp.gate.weight",), "whole"),
    r"mlp.experts.local_experts.(\d+).linear_fc1.weight": (("mlp.experts.gate_up_proj",), "fused_gate_up"),
    r"mlp.experts.local_experts.(\d+).linear_fc2.weight": (("mlp.experts.down_proj",), "columns"),
}  # fmt: skip
_OUTSIDE = {
    "embedding.word_embeddings.weight": Place(("model.embed_tokens.weight",), "rows"),
    "decoder.final_layernorm.weight": Place(("model.norm.weight",), "whole", on_tokens=True),
    "output_layer.weight": Place(("lm_head.weight",), "rows"),
    "head.weight": Place(("score.weight",), "whole"),
    "head.bias": Place(("score.bias",), "whole"),
}


def place_of(name: str, first_expert: int = 0) -> Place:
    """Returns where the weight that Megatron calls `name` comes from.

    Raises:
        EngineError: no architecture that is known has it, so the model was built otherwise than this module expects.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    for pattern, (parts, cut) in _LAYER.items() if layer else ():
        found = re.fullmatch(pattern.replace(".", r"\.").replace(r"\.+", ".+"), layer[2])
        if found:
            names = tuple(f"model.layers.{layer[1]}.{part.format(*found.groups())}" for part in parts)
            of_expert = ".experts." in name
            on_heads = "self_attention" in name and cut == "whole"
            return Place(
                names, cut, first_expert + int(found[1]) if of_expert else None,
                on_tokens=cut == "whole" and not on_heads, on_heads=on_heads,
            )  # fmt: skip
    raise EngineError(
        f"Megatron has a weight `{name}` that stands for none of the model's",
        hint="an option in `engine_args` changes the architecture: leave it out",
    )
