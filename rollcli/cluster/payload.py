"""Weights on their way from a training engine to a rollout engine, in a form that Ray ships without a copy.

A weight travels whole, as the elements that changed since the last time, or as a low-rank adapter to be added to a
weight that the other side holds. NumPy has no bfloat16, so a tensor is its bits and the name of its precision.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

WORTH = 0.5
"""Changed elements are sent by themselves where they are at most this share of the bytes."""
ADAPTER = " + adapter"
"""Follows a weight's name where its adapter is meant."""


@dataclass(frozen=True)
class Packed:
    """A tensor as bits `[*shape]` and the name of its precision."""

    bits: np.ndarray
    dtype: str


@dataclass(frozen=True)
class Changed:
    """The elements of a tensor that differ from what was sent before: flat indices `[C]` and their bits `[C]`."""

    indices: np.ndarray
    bits: np.ndarray


@dataclass(frozen=True)
class Adapter:
    """A low-rank change: the weight is the held one plus `scale` · b `[out, r]` · a `[r, in]`."""

    a: Packed
    b: Packed
    scale: float


Entry = Packed | Changed | Adapter


def packed(tensor: torch.Tensor) -> Packed:
    """Returns a tensor packed, on the host."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return Packed(tensor.numpy(), name)


def unpacked(value: Packed) -> torch.Tensor:
    """Returns a packed tensor, sharing its memory, which may be read-only."""
    import torch

    with warnings.catch_warnings():
        # Arrays from Ray's store are read-only; nothing writes to them.
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(value.bits)
    return tensor.view(torch.bfloat16) if value.dtype == "bfloat16" else tensor


def difference(before: Packed | None, now: Packed) -> Packed | Changed:
    """Returns what has to be sent of `now` to somebody who holds `before`: what changed, if that is less."""
    if before is None or before.dtype != now.dtype or before.bits.shape != now.bits.shape:
        return now
    unsigned = np.dtype(f"u{now.bits.dtype.itemsize}")
    old, new = before.bits.reshape(-1).view(unsigned), now.bits.reshape(-1).view(unsigned)
    indices = np.flatnonzero(old != new)
    narrow = indices.astype(np.uint32) if now.bits.size <= 2**32 else indices
    if len(indices) * (narrow.itemsize + unsigned.itemsize) > WORTH * now.bits.nbytes:
        return now
    return Changed(narrow, now.bits.reshape(-1)[indices])


def applied(held: Packed, change: Changed) -> Packed:
    """Returns what `difference` was taken of, from what its receiver held."""
    bits = held.bits.copy()
    bits.reshape(-1)[change.indices] = change.bits
    return Packed(bits, held.dtype)


def merged(held: Packed, adapter: Adapter) -> torch.Tensor:
    """Returns held + scale · b · a, as the trainer merges it."""
    from rollcli.engines import lora

    return lora.merge(unpacked(held), lora.LowRank(unpacked(adapter.a), unpacked(adapter.b), adapter.scale))


def entry_checksum(entry: Packed | Adapter) -> int:
    """Returns `storage.checksum` of a weight; of an adapter, one of everything it holds."""
    # Imported where it is wanted: it brings in libraries that a sync without checksums does not wait for.
    from rollcli.engines.storage import checksum

    if isinstance(entry, Packed):
        return checksum(unpacked(entry))
    return zlib.crc32(repr((entry_checksum(entry.a), entry_checksum(entry.b), entry.scale)).encode())


def size(entries: Mapping[str, Entry]) -> int:
    """Returns the bytes that travel."""
    total = 0
    for entry in entries.values():
        if isinstance(entry, Packed):
            total += entry.bits.nbytes
        elif isinstance(entry, Changed):
            total += entry.indices.nbytes + entry.bits.nbytes
        else:
            total += entry.a.bits.nbytes + entry.b.bits.nbytes
    return total
