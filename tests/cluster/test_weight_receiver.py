"""What is staged is loaded as a whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollcli.cluster.payload import Adapter, Changed, packed
from rollcli.cluster.weight_receiver import WeightReceiver
from rollcli.cluster.weight_sender import BucketFacts
from rollcli.engines.storage import checksum
from rollcli.errors import WeightSyncError

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4)
NONE = BucketFacts({}, 0)
ADAPTER = Adapter(packed(torch.ones(1, 3)), packed(torch.tensor([[1.0], [2.0]])), 0.5)


def changed(index: int, value: float) -> Changed:
    return Changed(np.array([index], np.uint32), np.array([value], np.float32))


def holding(**weights: torch.Tensor) -> WeightReceiver:
    receiver = WeightReceiver()
    receiver.begin()
    receiver.stage({name: packed(weight) for name, weight in weights.items()}, NONE)
    receiver.loaded()
    return receiver


def equal(found: dict[str, torch.Tensor], **expected: torch.Tensor) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_buckets_add_up():
    receiver = WeightReceiver()
    receiver.begin()
    receiver.stage({"a": packed(A)}, NONE)
    receiver.stage({"b": packed(B)}, NONE)
    equal(receiver.whole(), a=A, b=B)


def test_what_a_whole_set_lacks_is_not_made_up_from_the_last_one():
    receiver = holding(a=A, b=B)
    receiver.begin()
    receiver.stage({"a": packed(A + 1)}, NONE)
    equal(receiver.whole(), a=A + 1)


def test_a_sync_that_breaks_off_leaves_nothing():
    receiver = holding(a=A)
    receiver.begin()
    receiver.stage({"a": packed(A + 1), "b": packed(B)}, NONE)
    receiver.begin()
    receiver.stage({"a": packed(A + 2)}, NONE)
    equal(receiver.whole(), a=A + 2)


def test_changes_are_applied_to_what_is_held_and_leave_it_as_it_is():
    receiver = holding(a=A, b=B)
    receiver.begin()
    receiver.stage({"a": changed(2, 9.0), "b": changed(0, 3.0)}, NONE)
    equal(receiver.whole(), a=torch.tensor([[0.0, 1, 9], [3, 4, 5]]), b=torch.tensor([3.0, 1, 1, 1]))
    receiver.begin()
    receiver.stage({"a": changed(0, 7.0), "b": changed(0, 1.0)}, NONE)
    equal(receiver.whole(), a=torch.tensor([[7.0, 1, 2], [3, 4, 5]]), b=B)


def test_a_chain_of_changes_is_applied_one_upon_the_other():
    receiver = WeightReceiver()
    receiver.begin()
    for entry in (packed(A), changed(0, 1.0), changed(1, 2.0)):
        receiver.stage({"a": entry}, NONE)
    equal(receiver.whole(), a=torch.tensor([[1.0, 2, 2], [3, 4, 5]]))


def test_a_change_of_what_is_not_held_is_refused():
    receiver = holding(a=A)
    receiver.begin()
    with pytest.raises(WeightSyncError, match=r"a change came of `b`.*the old weights stay"):
        receiver.stage({"b": changed(0, 1.0)}, NONE)


def test_adapters_are_merged_anew_each_time():
    receiver = holding(a=A, b=B)
    for _ in range(2):  # a second time the sum is the same: the base stays what it was
        receiver.begin()
        receiver.stage({"a": ADAPTER}, NONE)
        equal(receiver.whole(), a=A + 0.5 * torch.tensor([[1.0, 1, 1], [2, 2, 2]]), b=B)
        receiver.loaded()


def test_a_weight_that_did_not_arrive_as_it_was_sent_is_refused():
    receiver = WeightReceiver()
    receiver.begin()
    receiver.stage({"a": packed(A)}, BucketFacts({"a": checksum(A)}, 0))
    with pytest.raises(WeightSyncError, match="`b` did not arrive"):
        receiver.stage({"b": packed(B)}, BucketFacts({"b": checksum(B + 1)}, 0))


def test_checksums_of_merged_weights_are_those_the_engine_is_to_compute_with():
    receiver = WeightReceiver()
    receiver.begin()
    receiver.stage({"a": packed(A), "b": packed(B)}, BucketFacts({"a": checksum(A), "b": checksum(B)}, 0))
    receiver.stage({"a": ADAPTER}, NONE)
    assert receiver.checksums == {"a": checksum(receiver.whole()["a"]), "b": checksum(B)}


def test_a_copy_makes_another_replica_equal():
    receiver = holding(a=A, b=B)
    receiver.begin()
    receiver.stage({"a": ADAPTER}, NONE)
    whole = receiver.whole()
    receiver.loaded()
    other = WeightReceiver()
    other.take_copy(receiver.copy())
    equal(other.whole(), **whole)
    other.loaded()
    other.begin()
    other.stage({"a": ADAPTER}, NONE)
    equal(other.whole(), **whole)
