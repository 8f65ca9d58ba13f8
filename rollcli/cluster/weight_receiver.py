"""The replica's side of a weight sync: buckets are staged in main memory, and loaded when all are there.

So a sync is all or nothing: until `taken` hands the whole set to the engine, the old weights serve; what breaks off
half-way leaves them. What was loaded last is kept: changes and adapters are applied to it, and a replica that starts
late gets it. From Ray's store it is mapped, not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollcli.cluster.payload import (
    ADAPTER,
    Adapter,
    Changed,
    Entry,
    Packed,
    applied,
    entry_checksum,
    merged,
    packed,
    unpacked,
)
from rollcli.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

    from rollcli.cluster.weight_sender import BucketFacts


class WeightReceiver:
    """Stages what arrives.

    Attributes:
        held: what was loaded last, without adapters.
        adapters: what was loaded last on top of it.
        checksums: of what `whole` returned last, as far as the sender counts any.
    """

    def __init__(self) -> None:
        self.held: dict[str, Packed] = {}
        self.adapters: dict[str, Adapter] = {}
        self.checksums: dict[str, int] = {}
        self._staged: dict[str, Packed] = {}
        self._adapters: dict[str, Adapter] = {}
        self._sums: dict[str, int] = {}
        self._staged_sums: dict[str, int] = {}

    def begin(self) -> None:
        """Forgets what was staged by a sync that broke off."""
        self._staged, self._adapters, self._staged_sums, self.checksums = {}, {}, {}, {}

    def stage(self, entries: Mapping[str, Entry], facts: BucketFacts) -> None:
        """Takes a bucket in.

        Raises:
            WeightSyncError: a weight did not arrive as it was sent, or a change is to one that is not held.
        """
        for name, entry in entries.items():
            # Staged before held: a replica that starts late is sent changes on top of what they were taken from.
            base = self._staged.get(name, self.held.get(name))
            if isinstance(entry, Packed):
                self._staged[name] = entry
            elif base is None:
                raise WeightSyncError(f"a change came of `{name}`, which is not held here; the old weights stay")
            elif isinstance(entry, Changed):
                self._staged[name] = applied(base, entry)
            else:
                self._adapters[name] = entry
        for name, expected in facts.checksums.items():
            adapter = name.endswith(ADAPTER)
            came = self._adapters[name.removesuffix(ADAPTER)] if adapter else self._staged[name]
            if entry_checksum(came) != expected:
                raise WeightSyncError(f"`{name}` did not arrive as it was sent; the old weights stay")
        self._staged_sums |= facts.checksums

    def stage_lent(self, handles: Mapping[str, Any], facts: BucketFacts) -> None:
        """Takes a bucket in from the memory of a GPU that this process shares with the sender (CUDA IPC)."""
        lent = {name: handle for name, handle in handles.items() if not isinstance(handle, Adapter)}
        self.stage({**handles, **{name: packed(rebuild(*given)) for name, (rebuild, given) in lent.items()}}, facts)

    def whole(self) -> dict[str, torch.Tensor]:
        """Returns the weights that the staged buckets lead to.

        Raises:
            WeightSyncError: nothing was staged.
        """
        if not self._staged and not self._adapters:
            raise WeightSyncError("no weight came; the old weights stay")
        # All of them, or adapters alone: what is missing must not be made up by what was held before.
        base = self._staged or self.held
        weights = {name: unpacked(entry) for name, entry in base.items()}
        for name, adapter in self._adapters.items():
            weights[name] = merged(base[name], adapter)
        if self._staged_sums:
            # Of adapters the engine has the sum; the rest is as it came, in an earlier sync where they come alone.
            sums = {name: entry_checksum(packed(weights[name])) for name in self._adapters}
            self.checksums = (self._staged_sums if self._staged else self._sums) | sums
        return weights

    def loaded(self) -> None:
        """Keeps what was staged, now that the engine has it."""
        if self._staged:
            self.held, self._sums = self._staged, self._staged_sums
        self.adapters = self._adapters
        self._staged, self._adapters, self._staged_sums = {}, {}, {}

    def copy(self) -> dict[str, Entry]:
        """Returns everything held, for a replica that starts late: weights, and adapters under names of their own."""
        return {**self.held, **{f"{name}{ADAPTER}": adapter for name, adapter in self.adapters.items()}}

    def take_copy(self, entries: Mapping[str, Entry]) -> None:
        """Stages what another replica's `copy` returned."""
        self.begin()
        for name, entry in entries.items():
            if isinstance(entry, Adapter):
                self._adapters[name.removesuffix(ADAPTER)] = entry
            else:
                self._staged[name] = entry
