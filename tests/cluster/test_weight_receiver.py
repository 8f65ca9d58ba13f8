"""What is staged is loaded as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from rollcli.cluster.payload import ADAPTER, Adapter, Changed, entry_checksum, packed
from rollcli.cluster.weight_receiver import WeightReceiver
from rollcli.cluster.weight_sender import BucketFacts, WeightSender
from rollcli.config.schema import SyncConfig
from rollcli.engines import loading, naming
from rollcli.engines.storage import checksum
from rollcli.engines.training import buckets
from rollcli.engines.transformers import TransformersEngine
from rollcli.errors import WeightSyncError

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4)
NONE = BucketFacts({}, 0)
ADAPTED = Adapter(packed(torch.ones(1, 3)), packed(torch.tensor([[1.0], [2.0]])), 0.5)


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


def test_nothing_is_no_new_version():
    receiver = holding(a=A)
    receiver.begin()
    with pytest.raises(WeightSyncError, match="no weight came"):
        receiver.whole()


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
        receiver.stage({"a": ADAPTED}, NONE)
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
    receiver.stage({"a": ADAPTED}, NONE)
    merged = receiver.whole()["a"]
    assert receiver.checksums == {"a": checksum(merged), "b": checksum(B)}


def test_where_adapters_come_alone_every_weight_is_compared_all_the_same():
    receiver = WeightReceiver()
    receiver.begin()
    receiver.stage({"a": packed(A), "b": packed(B)}, BucketFacts({"a": checksum(A), "b": checksum(B)}, 0))
    receiver.loaded()
    receiver.begin()
    receiver.stage({"a": ADAPTED}, BucketFacts({f"a{ADAPTER}": entry_checksum(ADAPTED)}, 0))
    merged = receiver.whole()["a"]
    assert not torch.equal(merged, A) and receiver.checksums == {"a": checksum(merged), "b": checksum(B)}
    receiver.begin()
    with pytest.raises(WeightSyncError, match=r"`a . adapter` did not arrive"):
        receiver.stage({"a": ADAPTED}, BucketFacts({f"a{ADAPTER}": entry_checksum(ADAPTED) + 1}, 0))


class Trainer:
    """Float32 weights of a mixture whose replica, in bfloat16, keeps a router's correction in float32."""

    def __init__(self) -> None:
        self.model = mixture("float32")
        self.buffers = frozenset(naming.of(self.model).buffers)

    def weight_buckets(self, size: int, adapters_only: bool) -> Iterator[dict[str, torch.Tensor]]:
        yield from buckets(naming.to_hub(self.model, naming.tensors_of(self.model)), 5000)


def mixture(dtype: str) -> transformers.PreTrainedModel:
    settings = {
        "model_type": "glm4_moe", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "pad_token_id": 0,
    }  # fmt: skip
    return loading.initialize(settings, seed=0, dtype=dtype, device=torch.device("cpu"), attention=None)


@pytest.mark.parametrize("changed_only", [False, True])
def test_a_hundred_syncs_in_half_precision_leave_what_the_trainer_has(changed_only: bool):
    trainer, receiver = Trainer(), WeightReceiver()
    engine = TransformersEngine(mixture("bfloat16"), max_rows=2)
    sender = WeightSender(trainer, SyncConfig(verify=True, changed_only=changed_only), torch.bfloat16)
    (correction,) = trainer.buffers
    for version in range(100):
        with torch.no_grad():
            for tensor in naming.tensors_of(trainer.model).values():
                tensor.view(-1)[version::101] += 0.37  # that of -0.0 included, which some kernels lose
                tensor.view(-1)[version + 1 :: 101] = -0.0
        sender.begin(version == 0)
        receiver.begin()
        while (bucket := sender.next())[1] is not None:
            receiver.stage(*bucket)
        engine.load_weights(receiver.whole(), version)
        receiver.loaded()
        held, sent = engine.checksums(), receiver.checksums
        assert sent.keys() == held.keys() - {correction} and all(held[name] == sent[name] for name in sent)
        for name, tensor in naming.to_hub(trainer.model, naming.tensors_of(trainer.model)).items():
            assert held[name] == checksum(tensor if name == correction else tensor.bfloat16())


def test_a_copy_makes_another_replica_equal():
    receiver = holding(a=A, b=B)
    receiver.begin()
    receiver.stage({"a": ADAPTED}, NONE)
    whole = receiver.whole()
    receiver.loaded()
    other = WeightReceiver()
    other.take_copy(receiver.copy())
    equal(other.whole(), **whole)
    other.loaded()
    other.begin()
    other.stage({"a": ADAPTED}, NONE)
    equal(other.whole(), **whole)
