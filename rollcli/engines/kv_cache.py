"""Keys and values of the running rows, and the attention that reads them.

Row `i` of the batch owns row `i` of every layer's tensors, `[rows, heads, length, width]`. A new token is written at
its row's own position, so rows of any length share a batch; a finished row is overwritten by the last one, so running
rows stay contiguous and a step reads a plain slice. `length` follows the longest row in blocks: attention over a slice
of a larger buffer was measured at half the speed of attention over a tight one.

Attention is arranged so that a row's numbers do not depend on the rest of the batch: keys are padded to whole blocks
that add exact zeros, values are multiplied in chunks short enough for one pass of the matrix product, and the query
heads that share a key head form one small product instead of copies of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from rollcli.errors import EngineError

BLOCK = 64
CHUNK = 128  # MKL sums few terms (up to 192 where measured) in one order, more in an order that depends on how many
ATTENTION = "rollcli_rows"


def round_up(count: int, multiple: int) -> int:
    """Returns the smallest multiple that holds `count`."""
    return -(-count // multiple) * multiple


class RowCache(Cache):
    """Cache of all layers; `begin` says which positions the next forward pass of one token per row writes."""

    def __init__(self, layers: int, device: torch.device) -> None:
        super().__init__(layers=[RowLayer(self) for _ in range(layers)])
        self.device = device
        self.rows = 0
        self.length = 0
        self.row_index = torch.zeros(0, dtype=torch.int64, device=device)
        self.positions = self.row_index

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` rows of `length` tokens, and gives room back once rows became half as long."""
        length = round_up(length, BLOCK)
        if self.length // 2 < length < self.length:
            length = self.length
        rows = self.rows if rows <= self.rows else max(rows, self.rows * 2)
        if (rows, length) != (self.rows, self.length):
            self.rows, self.length = rows, length
            for layer in self.layers:
                layer.resize(rows, length)

    def begin(self, positions: torch.Tensor) -> torch.Tensor:
        """Sets where the next token of each row goes, `[R]`; returns the attention mask to add, `[R, 1, 1, length]`."""
        self.positions = positions
        if len(self.row_index) != len(positions):
            self.row_index = torch.arange(len(positions), device=self.device)
        future = torch.arange(self.length, device=self.device) > positions[:, None]
        return torch.zeros(future.shape, device=self.device).masked_fill_(future, -torch.inf)[:, None, None]

    def write(self, prefix: DynamicCache, source: Sequence[int], rows: Sequence[int]) -> None:
        """Copies row `source[i]` of a prefilled cache to row `rows[i]`."""
        from_rows = torch.tensor(source, device=self.device)
        to_rows = torch.tensor(rows, device=self.device)
        for layer, filled in zip(self.layers, prefix.layers):
            layer.write(filled.keys, filled.values, from_rows, to_rows)

    def move(self, source: np.ndarray, rows: np.ndarray) -> None:
        """Overwrites `rows` by the rows `source`."""
        from_rows = torch.from_numpy(source).to(self.device)
        to_rows = torch.from_numpy(rows).to(self.device)
        for layer in self.layers:
            layer.write(layer.keys, layer.values, from_rows, to_rows)

    def clear(self, rows: np.ndarray) -> None:
        """Zeroes rows that may hold NaN, which no mask keeps from their next owner."""
        for layer in self.layers:
            layer.keys[rows] = 0
            layer.values[rows] = 0


class RowLayer(CacheLayerMixin):
    """One layer of a `RowCache`, allocated when the first keys show their shape."""

    is_sliding = False

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates zeros: what is masked is still multiplied, so it must be finite."""
        shape = (self.cache.rows, key_states.shape[1], self.cache.length)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token per row at `cache.positions` and returns those rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions = self.cache.row_index, self.cache.positions
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[: len(rows)], self.values[: len(rows)]

    def write(self, keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies rows of `keys` and `values`, as far as this layer is long, to `rows`."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        length = min(self.cache.length, keys.shape[2])
        self.keys[rows, :, :length] = keys[source, :, :length]
        self.values[rows, :, :length] = values[source, :, :length]

    def resize(self, rows: int, length: int) -> None:
        """Moves what fits into new tensors."""
        if self.is_initialized:
            self.keys = _resized(self.keys, rows, length)
            self.values = _resized(self.values, rows, length)

    def get_seq_length(self) -> int:
        """Length of the buffers; the mask says how much of it each row uses."""
        return self.cache.length

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a query sees."""
        return self.cache.length, 0


def _resized(tensor: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    resized = tensor.new_empty(rows, tensor.shape[1], length, tensor.shape[3])
    kept_rows, kept_length = min(rows, len(tensor)), min(length, tensor.shape[2])
    resized[:kept_rows, :, :kept_length] = tensor[:kept_rows, :, :kept_length]
    resized[kept_rows:] = 0
    resized[:, :, kept_length:] = 0
    return resized


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of many tokens of whole prompts (no mask), or of one token per row against a `RowCache` (mask)."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise EngineError(f"the rollout engine `transformers` has no attention with `{unknown[0]}`")
    rows, heads, queries, width = query.shape
    if queries > 1:
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1]
        )
        return output.transpose(1, 2).contiguous(), None
    grouped = query.reshape(rows, key.shape[1], -1, width)  # heads that share a key head, as queries
    if query.device.type == "cpu":
        output = _attend_in_chunks(grouped, key, value, attention_mask, width**-0.5 if scaling is None else scaling)
    else:
        mask = attention_mask.to(query.dtype).expand(-1, -1, grouped.shape[2], -1)
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, 1, heads, -1), None


def _attend_in_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = torch.matmul(query * scale, key.transpose(2, 3)).float().add_(mask)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    output = torch.matmul(weights[..., :CHUNK], value[:, :, :CHUNK])
    for start in range(CHUNK, key.shape[2], CHUNK):
        output += torch.matmul(weights[..., start : start + CHUNK], value[:, :, start : start + CHUNK])
    return output


AttentionInterface.register(ATTENTION, attend)
