"""Context parallelism: every sequence is split over peers, each of which computes a stretch of every row.

Only attention looks beyond its own token. Around it, an all-to-all turns a stretch of all heads into whole rows of some
heads, and back (DeepSpeed-Ulysses, arXiv 2309.14509):

    [R, H, W/C, D]  ──▶  [R, H/C, W, D]  ──attention──▶  [R, W, H/C, D]  ──▶  [R, W/C, H, D]

So the model's own attention kernel runs as it is, with the mask of whole rows, packed ones included, and every peer has
equal work. What the peers put out at the places asked for is gathered, and each computes the same loss of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollcli.errors import EngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "rollcli_context"
"""Name of the attention in transformers' registry."""


class WholeRows:
    """What attention must know of the rows it sees a stretch of; travels through the model as a keyword.

    No dataclass: FSDP copies those, field by field, on their way through the model.

    Args:
        group: the peers.
        config: the model's configuration, with the attention it had before.
        positions: int64 `[R, W]` of whole rows.
    """

    def __init__(self, group: dist.ProcessGroup, config: PretrainedConfig, positions: torch.Tensor) -> None:
        self.group, self.config, self.positions = group, config, positions
        self.masks: dict[bool, Any] = {}

    def mask(self, windowed: bool, like: torch.Tensor) -> Any:
        """Returns the mask of whole rows, block-diagonal where they are packed, in the form that kernel wants."""
        if windowed not in self.masks:
            make = create_sliding_window_causal_mask if windowed else create_causal_mask
            rows, width = self.positions.shape
            embeddings = torch.empty((rows, width, 0), dtype=like.dtype, device=like.device)
            self.masks[windowed] = make(
                config=self.config, inputs_embeds=embeddings, attention_mask=None, past_key_values=None,
                position_ids=self.positions,
            )  # fmt: skip
        return self.masks[windowed]


@dataclass(frozen=True)
class Stretch:
    """One peer's part of a micro-batch.

    Attributes:
        ids, positions: int64 `[R, W/C]`.
        rows, columns: this peer's places among those asked for, in its own stretch.
        order: int64 `[N]`, where each place asked for comes out of the gathered outputs.
        most: places of the peer with the most.
        context: the keyword for the model.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: np.ndarray
    columns: np.ndarray
    order: np.ndarray
    most: int
    context: WholeRows


class ContextParallel:
    """Splits what goes into a model over `group`, and gathers what comes out.

    Args:
        model: its attention is replaced in place.
        group: the peers, each with the same micro-batches.

    Raises:
        EngineError: the model looks beyond a token in another way than by attention, or its heads cannot be split.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        text = model.config.get_text_config()
        _check_supported(model, text)
        self.config = copy.deepcopy(text)
        AttentionInterface.register(ATTENTION, attention)
        model.set_attn_implementation(ATTENTION)

    def split(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, columns: np.ndarray
    ) -> Stretch:  # fmt: skip
        """Returns this peer's stretch of ids `[R, W]`; the rows are filled up so that all stretches are equal."""
        lacking = -ids.shape[1] % self.size
        if lacking:
            # Another pseudo-sequence at the end of the row, which no loss looks at (data/packing.py).
            filling = torch.arange(lacking, device=ids.device).expand(len(ids), -1)
            ids = torch.cat([ids, torch.zeros_like(filling)], dim=1)
            positions = torch.cat([positions, filling], dim=1)
        width = ids.shape[1] // self.size
        part = slice(self.rank * width, (self.rank + 1) * width)
        owner = columns // width
        most = int(np.bincount(owner, minlength=self.size).max())
        order = np.zeros(len(columns), dtype=np.int64)
        for peer in range(self.size):
            order[owner == peer] = peer * most + np.arange((owner == peer).sum())
        mine = owner == self.rank
        context = WholeRows(self.group, self.config, positions)
        return Stretch(
            ids[:, part], positions[:, part], rows[mine], columns[mine] % width, order, most, context
        )  # fmt: skip

    def gather(self, stretch: Stretch, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the outputs `[N, K]` at all places asked for, on every peer, from this peer's `[n, K]`."""
        if stretch.most == 0:
            return outputs
        padded = torch.nn.functional.pad(outputs, (0, 0, 0, stretch.most - len(outputs)))
        return _Gather.apply(padded, self.group)[torch.from_numpy(stretch.order).to(outputs.device)]


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object,
    context: WholeRows, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attends over whole rows by the model's own kernel.

    Args:
        query: `[R, H, W/C, D]`; `key` and `value` alike, with as many or fewer heads.
        attention_mask: what the model made of a stretch; not used.

    Returns:
        `[R, W/C, H, D]`.
    """
    query, key, value = (_Exchange.apply(part, context.group, 1, 2) for part in (query, key, value))
    options |= {"position_ids": context.positions}
    mask = context.mask(options.get("sliding_window") is not None, query)
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(context.config._attn_implementation, None)
    output, _ = kernel(module, query, key, value, mask, **options)
    return _Exchange.apply(output, context.group, 1, 2), None


class _Exchange(torch.autograd.Function):
    """Cuts a tensor along one dimension into a part for each peer, and joins the peers' parts along another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, cut: int, join: int) -> torch.Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _exchange(tensor, group, cut, join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, ctx.group, ctx.join, ctx.cut), None, None, None


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup, cut: int, join: int) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), dim=cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)


class _Gather(torch.autograd.Function):
    """Stacks the peers' rows `[n, K]` to `[C * n, K]`.

    Every peer computes the same loss, so its own rows' gradient is whole already; it is multiplied by the number of
    peers because FSDP averages over them too.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, rows.contiguous(), group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(size)[rank] * size, None


def _check_supported(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Refuses models in which something else than attention looks beyond a token or at the row's length."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    rope = getattr(config, "rope_parameters", None) or {}
    if not model._supports_attention_backend:
        why = "its attention cannot be replaced"
    elif config._attn_implementation == "eager":
        why = "`attention: eager` is part of the model; use `sdpa`"
    elif kinds:
        why = f"it has layers of the kind {', '.join(sorted(kinds))}"
    elif rope.get("rope_type") in ("dynamic", "longrope"):
        why = "its positions depend on the longest row of the batch"
    else:
        return
    raise EngineError(
        f"`parallel.context` does not work with this `{config.model_type}` model: {why}",
        hint="set `parallel.context: 1`; `recompute_activations` and a smaller `micro_batch_tokens` save memory too",
    )
