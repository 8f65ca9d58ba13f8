"""The training side of a weight sync: one rank's part in handing out the policy's weights, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcli.cluster.payload import Adapter, Entry, Packed, difference, packed, size
from rollcli.config.schema import SyncConfig

if TYPE_CHECKING:
    import torch

    from rollcli.cluster.collective import Collective

END = object()


@dataclass(frozen=True)
class BucketFacts:
    """What is known of a bucket without opening it.

    Attributes:
        checksums: of every weight as it must come out on the other side, where the recipe wants them compared;
            adapters have none.
        bytes: that travel.
    """

    checksums: dict[str, int]
    bytes: int


class WeightSender:
    """Hands out buckets. Every rank makes the same calls, for the engine gathers in them; rank 0 has the weights.

    Args:
        engine: the training engine.
        config: the recipe's `rollout.sync`.
        dtype: precision in which weights travel: that in which the replicas compute.
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
        whole = {name: self._packed(weight) for name, weight in bucket.items()}
        checksums = self._checksums(whole) if self.config.verify else {}
        entries = {name: self._reduced(name, entry) for name, entry in whole.items()}
        return entries, BucketFacts(checksums, size(entries))

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
        handles: dict[str, Any] = {name: self._packed(weight) for name, weight in bucket.items() if _is_adapter(weight)}
        whole = {name: weight for name, weight in bucket.items() if name not in handles}
        self._lent = [weight.to("cuda", self.dtype).contiguous() for weight in whole.values()]
        handles |= dict(zip(whole, map(reduce_tensor, self._lent)))
        checksums = self._checksums(dict(zip(whole, map(packed, self._lent)))) if self.config.verify else {}
        return handles, BucketFacts(checksums, sum(tensor.nbytes for tensor in self._lent))

    def broadcast(self, collective: Collective | None) -> None:
        """Sends every bucket to the other members; ranks other than 0 only take part in the gathering."""
        while True:
            entries, facts = self.next()
            if collective is not None:
                collective.send((entries, facts))
            if facts is None:
                return

    def _packed(self, weight: Any) -> Packed | Adapter:
        if _is_adapter(weight):
            return Adapter(packed(weight.a), packed(weight.b), weight.scale)
        return packed(weight.to(self.dtype) if weight.is_floating_point() else weight)

    def _reduced(self, name: str, entry: Packed | Adapter) -> Entry:
        if not self.config.changed_only or isinstance(entry, Adapter):
            return entry
        # A copy: on a CPU what was packed is the very memory that the next update changes.
        before, self._sent[name] = self._sent.get(name), Packed(entry.bits.copy(), entry.dtype)
        return difference(before, entry)

    @staticmethod
    def _checksums(entries: Mapping[str, Packed | Adapter]) -> dict[str, int]:
        from rollcli.cluster.payload import unpacked
        from rollcli.engines.storage import checksum

        return {name: checksum(unpacked(entry)) for name, entry in entries.items() if isinstance(entry, Packed)}


def _is_adapter(weight: Any) -> bool:
    """Whether a weight of a bucket is a `LowRank` (engines/lora.py), whose module takes torch to import."""
    return hasattr(weight, "scale")
