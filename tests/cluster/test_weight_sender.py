"""The sender's buckets: all ranks take part, the precision is the replicas', and only what changed goes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rollcli.cluster.payload import ADAPTER, Adapter, Changed, Packed, unpacked
from rollcli.cluster.weight_sender import BucketFacts, WeightSender
from rollcli.config.schema import SyncConfig
from rollcli.engines.lora import LowRank
from rollcli.engines.storage import checksum


class Engine:
    """Two buckets; rank 1 has none of the weights."""

    buffers: frozenset[str] = frozenset()

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.weights = {"a": torch.randn(20, 30), "b": torch.randn(7), "count": torch.tensor(3)}
        self.adapters = {"a": LowRank(torch.randn(2, 30), torch.randn(20, 2), 0.5)}
        self.asked: list[tuple] = []

    def weight_buckets(self, size: int, adapters_only: bool) -> Iterator[dict[str, Any] | None]:
        self.asked.append((size, adapters_only))
        parts: list[dict[str, Any]] = [self.adapters]
        if not adapters_only:
            parts = [{"a": self.weights["a"]}, {name: self.weights[name] for name in ("b", "count")}, self.adapters]
        yield from [None] * len(parts) if self.rank else parts


def all_of(sender: WeightSender, whole: bool = True) -> list[tuple[dict | None, BucketFacts]]:
    sender.begin(whole)
    found = []
    while (bucket := sender.next())[1] is not None:
        found.append(bucket)
    return found


def test_weights_go_in_the_precision_of_the_replicas_and_numbers_stay_what_they_are():
    engine = Engine()
    (first, _), (second, _), (third, _) = all_of(WeightSender(engine, SyncConfig(bucket_mib=3), torch.bfloat16))
    assert engine.asked == [(3 * 2**20, False)]
    assert torch.equal(unpacked(first["a"]), engine.weights["a"].bfloat16())
    assert unpacked(second["count"]).dtype is torch.int64 and unpacked(second["b"]).dtype is torch.bfloat16
    assert isinstance(third["a"], Adapter) and third["a"].scale == 0.5
    assert torch.equal(unpacked(third["a"].b), engine.adapters["a"].b)


def test_a_buffer_keeps_its_precision_and_is_not_compared():
    """No forward pass casts it; in bfloat16 a router's correction would choose other experts than the trainer's."""
    engine = Engine()
    engine.buffers = frozenset({"b"})
    _, (second, facts), _ = all_of(WeightSender(engine, SyncConfig(verify=True), torch.bfloat16))
    assert torch.equal(unpacked(second["b"]), engine.weights["b"]) and facts.checksums.keys() == {"count"}


def test_other_ranks_go_through_as_many_buckets():
    found = all_of(WeightSender(Engine(rank=1), SyncConfig(), torch.float32))
    assert found == [(None, BucketFacts({}, 0))] * 3


def test_facts_tell_bytes_and_on_request_checksums():
    engine = Engine()
    (_, plain), *_ = all_of(WeightSender(engine, SyncConfig(), torch.float32))
    assert plain == BucketFacts({}, 2400)
    (_, facts), (_, more), (_, adapters) = all_of(WeightSender(engine, SyncConfig(verify=True), torch.bfloat16))
    assert facts.checksums == {"a": checksum(engine.weights["a"].bfloat16())} and facts.bytes == 1200
    assert more.checksums.keys() == {"b", "count"} and adapters.checksums.keys() == {f"a{ADAPTER}"}


def test_only_what_changed_goes_out_although_the_engine_changes_its_own_memory():
    engine = Engine()
    sender = WeightSender(engine, SyncConfig(changed_only=True), torch.float32)
    assert all(isinstance(entry, Packed) for bucket, _ in all_of(sender)[:2] for entry in bucket.values())
    with torch.no_grad():
        engine.weights["a"].view(-1)[[5, 9]] += 1
    sender.begin(False)
    sender._buckets = engine.weight_buckets(0, False)
    (sent, facts), (rest, _) = sender.next(), sender.next()
    assert isinstance(sent["a"], Changed) and sent["a"].indices.tolist() == [5, 9] and facts.bytes == 16
    assert all(isinstance(entry, Changed) and not len(entry.indices) for entry in rest.values())


def test_a_whole_sync_forgets_what_was_sent():
    sender = WeightSender(Engine(), SyncConfig(changed_only=True), torch.float32)
    all_of(sender)
    assert all(isinstance(entry, Packed) for bucket, _ in all_of(sender)[:2] for entry in bucket.values())


def test_after_the_first_time_only_adapters_are_asked_for():
    engine = Engine()
    sender = WeightSender(engine, SyncConfig(), torch.float32)
    all_of(sender)
    ((found, _),) = all_of(sender, whole=False)
    assert isinstance(found["a"], Adapter) and [only for _, only in engine.asked] == [False, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_broadcast_ends_with_the_last_bucket(rank):
    class Kept:
        def __init__(self) -> None:
            self.values: list = []

        def send(self, value: Any) -> None:
            self.values.append(value)

    kept = Kept()
    sender = WeightSender(Engine(rank), SyncConfig(), torch.float32)
    sender.begin(True)
    sender.broadcast(kept if rank == 0 else None)
    assert len(kept.values) == (4 if rank == 0 else 0)
    assert sender.next() == (None, None)
    if rank == 0:
        assert kept.values[-1] == (None, None)


def test_after_a_member_has_died_the_rank_that_sends_gathers_on_as_the_others_do():
    class Broken:
        def send(self, value: Any) -> None:
            raise RuntimeError("connection reset by peer")

    class Gathers(Engine):
        gathered = 0

        def weight_buckets(self, size: int, adapters_only: bool) -> Iterator[dict[str, Any] | None]:
            for bucket in super().weight_buckets(size, adapters_only):
                self.gathered += 1
                yield bucket

    engine, other = Gathers(), Gathers(rank=1)
    for each, collective in ((engine, Broken()), (other, None)):
        sender = WeightSender(each, SyncConfig(), torch.float32)
        sender.begin(True)
        with pytest.raises(RuntimeError, match="reset") if collective else nullcontext():
            sender.broadcast(collective)
    assert engine.gathered == other.gathered == 3


def test_facts_tell_what_is_of_no_use_by_itself():
    sender = WeightSender(Engine(), SyncConfig(changed_only=True), torch.float32)
    assert [facts.on_top for _, facts in all_of(sender)] == [False, False, True]
    sender.begin(False)
    sender._buckets = sender.engine.weight_buckets(0, False)
    assert sender.next()[1].on_top
