"""The training side of a weight sync: one rank's part in handing out the policy's weights, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcli.cluster.payload import ADAPTER, Adapter, Entry, Packed, difference, entry_checksum, packed, size
from rollcli.config.schema import SyncConfig

if TYPE_CHECKING:
    import torch

    from rollcli.cluster.collective import Collective

END = object()


@dataclass(frozen=True)
class BucketFacts:
    """What is known of a bucket without opening it.

    Attributes:
        checksums: of every weight as it must come out on the other side, where the recipe wants them compared, and
            of adapters, under names that end in `ADAPTER`; buffers have none.
        bytes: that travel.
        on_top: some of it is of use only on top of what came before: changes, adapters.
    """

    checksums: dict[str, int]
    bytes: int
    on_top: bool = False


class WeightSender:
    """Hands out buckets. Every rank makes the same calls, for the engine gathers in them; rank 0 has the weights.

    Args:
        engine: the training engine.
        config: the recipe's `rollout.sync`.
        dtype: precision in which weights travel: that in which the replicas compute. Buffers keep their own: no
            forward pass casts them (a router's correction of its scores), and each engine knows in what it holds them.
    """

    def __init__(self, engine: Any, config: SyncConfig, dtype: torch.dtype) -> None:
        self.engine = engine
        self.config = config
        self.dtype = dtype
        self._buckets: Iterator[Mapping[str, Any] | None] = iter(())
        self._sent: dict[str, Packed] = {}
        self._lent: list[Any] = []

    def begin(self, whole: bool) -> None:
        """Starts a sync; `whole` where the receivers hold nothing to which a change could be applied."""
        if whole:
            self._sent.clear()
        self._buckets = self.engine.weight_buckets(self.config.bucket_mib * 2**20, adapters_only=not whole)

    def next(self) -> tuple[dict[str, Entry] | None, BucketFacts | None]:
        """Returns the next bucket, None on ranks other than 0, and its facts, None after the last bucket."""
        bucket = next(self._buckets, END)
        if bucket is END:
            return None, None
        if bucket is None:
            return None, BucketFacts({}, 0)
        whole = {name: self._packed(name, weight) for name, weight in bucket.items()}
        checksums = self._checksums(whole) if self.config.verify else {}
        entries = {name: self._reduced(name, entry) for name, entry in whole.items()}
        on_top = not all(isinstance(entry, Packed) for entry in entries.values())
        return entries, BucketFacts(checksums, size(entries), on_top)

    def lend(self) -> tuple[dict[str, Any] | None, BucketFacts | None]:
        """Returns the next bucket as handles on this GPU's memory, which stays as it is until the next call.

        For a receiver on the same GPU (CUDA IPC). Not run on the machines this was written on.
        """
        from torch.multiprocessing.reductions import reduce_tensor

        self._lent = []
        bucket = next(self._buckets, END)
        if bucket is END:
            return None, None
        if bucket is None:
            return None, BucketFacts({}, 0)
        # Adapters are small, and travel as they do otherwise.
        handles: dict[str, Any] = {n: self._packed(n, weight) for n, weight in bucket.items() if _is_adapter(weight)}
        whole = {name: weight for name, weight in bucket.items() if name not in handles}
        self._lent = [self._cast(name, weight).to("cuda").contiguous() for name, weight in whole.items()]
        counted = {**handles, **dict(zip(whole, map(packed, self._lent)))} if self.config.verify else {}
        handles |= dict(zip(whole, map(reduce_tensor, self._lent)))
        return handles, BucketFacts(self._checksums(counted), sum(tensor.nbytes for tensor in self._lent))

    def broadcast(self, collective: Collective | None) -> None:
        """Sends every bucket to the other members; ranks other than 0 only take part in the gathering."""
        try:
            while True:
                entries, facts = self.next()
                if collective is not None:
                    collective.send((entries, facts))
                if facts is None:
                    return
        finally:
            # Where a member has died the other ranks, who do not know, gather on to the last bucket: without this one
            # they would wait for it, and then meet it in the next sync at another bucket than its own.
            for _ in self._buckets:
                pass

    def _packed(self, name: str, weight: Any) -> Packed | Adapter:
        if _is_adapter(weight):
            return Adapter(packed(weight.a), packed(weight.b), weight.scale)
        return packed(self._cast(name, weight))

    def _cast(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        kept = name in self.engine.buffers or not weight.is_floating_point()
        return weight if kept else weight.to(self.dtype)

    def _reduced(self, name: str, entry: Packed | Adapter) -> Entry:
        if not self.config.changed_only or isinstance(entry, Adapter):
            return entry
        # A copy: on a CPU what was packed is the very memory that the next update changes.
        before, self._sent[name] = self._sent.get(name), Packed(entry.bits.copy(), entry.dtype)
        return difference(before, entry)

    def _checksums(self, entries: Mapping[str, Packed | Adapter]) -> dict[str, int]:
        compared = {name: entry for name, entry in entries.items() if name not in self.engine.buffers}
        return {n + ADAPTER * isinstance(e, Adapter): entry_checksum(e) for n, e in compared.items()}


def _is_adapter(weight: Any) -> bool:
    """Whether a weight of a bucket is a `LowRank` (engines/lora.py), whose module takes torch to import."""
    return hasattr(weight, "scale")
