"""What all training engines share: which part of a batch a rank gets, its passes, and buckets of weights.

The numbers of a pass are held against slow references engine by engine (test_train_contract.py, test_fsdp.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rollcli.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.engines import training
from rollcli.engines.training import TrainingEngine, adamw, buckets, present
from rollcli.errors import CheckpointError, EngineError


class Kept:
    """What dist is asked, with a world of so many ranks of which this is one."""

    def __init__(self, monkeypatch, rank: int, ranks: int) -> None:
        self.groups: list[list[int]] = []
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        monkeypatch.setattr(dist, "new_group", lambda members: self.groups.append(members) or tuple(members))


def made(rank: int, ranks: int, monkeypatch, **parallel: int) -> tuple[TrainingEngine, Kept]:
    kept = Kept(monkeypatch, rank, ranks)
    config = PolicyConfig(workers=1, parallel=ParallelConfig(**parallel))
    return TrainingEngine(config, torch.device("cpu"), frozen=True), kept


@pytest.mark.parametrize(
    ("rank", "place", "peers", "data_group"),
    [(0, 0, (0, 1), (0, 2, 4)), (1, 0, (0, 1), (1, 3, 5)), (2, 1, (2, 3), (0, 2, 4)), (5, 2, (4, 5), (1, 3, 5))],
)
def test_ranks_of_one_copy_are_consecutive_and_share_their_part_of_a_batch(monkeypatch, rank, place, peers, data_group):
    engine, kept = made(rank, 6, monkeypatch, tensor=2)
    assert (engine.data_rank, engine.data_ranks, engine.peers, engine.data_group) == (place, 3, peers, data_group)
    # Every rank makes every group, in the same order, or those who wait for each other never meet.
    assert kept.groups == [[0, 1], [2, 3], [4, 5], [0, 2, 4], [1, 3, 5]]


def test_alone_there_are_no_groups(monkeypatch):
    engine, kept = made(0, 1, monkeypatch)
    assert engine.peers is None and engine.data_group is None and kept.groups == []


def test_who_has_no_adapters_is_not_its_own_reference(monkeypatch):
    engine, _ = made(0, 1, monkeypatch)
    with pytest.raises(EngineError, match="no adapters"):
        engine.without_adapter()


class Sums(TrainingEngine):
    """Outputs are one parameter times the tokens' ids; the gradient is counted by hand."""

    def __init__(self, monkeypatch) -> None:
        Kept(monkeypatch, 0, 1)
        super().__init__(PolicyConfig(micro_batch_tokens=4), torch.device("cpu"), frozen=False)
        self.weight = torch.ones(1, requires_grad=True)
        self.steps: list[float] = []

    def predict(self, ids, positions, rows, columns):
        return (self.weight * ids[rows, columns].float())[:, None]

    def clip(self) -> float:
        return float(self.weight.grad.abs()) if self.weight.grad is not None else 0.0

    def optimize(self, learning_rate: float) -> None:
        self.steps.append(learning_rate)

    def zero_grad(self) -> None:
        self.weight.grad = None

    def named_weights(self):
        return {"weight": self.weight.detach()}


class Output:
    """The loss is the output itself."""

    factor = 1.0

    def column(self, tokens, outputs):
        return outputs[:, 0]

    def loss(self, tokens, outputs):
        return outputs[:, 0] * self.factor, {"tail_max": outputs[:, 0].detach()}, outputs[:, 0].detach()


def batch() -> Batch:
    made = Batch.from_sequences(
        [
            (np.array([1, 2, 3], np.int32), np.array([False, True, True])),
            (np.array([7, 5], np.int32), np.array([0, 1]) > 0),
        ]
    )
    made.tokens["loss_weights"] = np.array([0, 0.5, 0.25, 0, 2.0], np.float32)
    return made


def test_a_pass_weighs_what_each_position_predicts_and_returns_columns_at_their_tokens(monkeypatch):
    engine = Sums(monkeypatch)
    column = engine.forward(batch(), Output())
    # A token's output comes from the position before it: ids 1, 2 and 7.
    assert column.tolist() == [0, 1, 2, 0, 7]
    metrics, column = engine.update(batch(), Output(), 0.125)
    assert column.tolist() == [0, 1, 2, 0, 7] and engine.steps == [0.125]
    assert metrics["loss"] == metrics["grad_norm"] == 1 * 0.5 + 2 * 0.25 + 7 * 2.0
    assert (metrics["tokens"], metrics["tail_max"], metrics["skipped_updates"]) == (3, 7, 0)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing(monkeypatch, factor):
    engine, objective = Sums(monkeypatch), Output()
    objective.factor = factor
    metrics, _ = engine.update(batch(), objective, 0.1)
    assert metrics["skipped_updates"] == 1 and engine.steps == [] and engine.weight.grad is None


def test_a_minibatch_without_a_trained_token_moves_nothing(monkeypatch):
    engine = Sums(monkeypatch)
    empty = batch()
    empty.tokens["loss_mask"][:] = False
    metrics, column = engine.update(empty, Output(), 0.1)
    assert metrics["skipped_updates"] == 1 and engine.steps == [] and not column.any()


def test_buckets_hold_every_tensor_once_in_order_and_no_more_than_their_size():
    tensors = {name: torch.zeros(count) for name, count in (("a", 3), ("b", 2), ("c", 9), ("d", 1), ("e", 1))}
    found = [list(bucket) for bucket in buckets(tensors, 20)]
    assert found == [["a", "b"], ["c"], ["d", "e"]]  # 20 bytes; 36, alone; 8
    assert [list(bucket) for bucket in buckets({}, 20)] == [[]]


def test_a_rank_without_the_weights_takes_part_once(monkeypatch):
    engine = Sums(monkeypatch)
    assert [list(bucket) for bucket in engine.weight_buckets(10**6)] == [["weight"]]
    engine.named_weights = lambda: None
    assert list(engine.weight_buckets(10**6)) == [None]


def test_a_tensor_that_a_checkpoint_lacks_is_named():
    assert present({"x": torch.ones(1)}, "x", Path("f")).item() == 1
    with pytest.raises(CheckpointError, match="`f` has no tensor `y`"):
        present({}, "y", Path("f"))


def test_adamw_decays_matrices_alone_and_takes_what_is_trained():
    matrix, vector = torch.ones(2, 2, requires_grad=True), torch.ones(3, requires_grad=True)
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, betas=[0.8, 0.9], eps=1e-3)
    made = adamw([vector, torch.ones(4, 4), matrix], config)
    decays = {id(tensor): group["weight_decay"] for group in made.param_groups for tensor in group["params"]}
    assert decays == {id(matrix): 0.5, id(vector): 0.0}
    assert all((g["lr"], g["betas"], g["eps"]) == (0.1, (0.8, 0.9), 1e-3) for g in made.param_groups)


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [("auto", "cpu", torch.float32), ("auto", "cuda", torch.bfloat16), ("bfloat16", "cpu", torch.bfloat16),
     ("float32", "cuda", torch.float32)],
)  # fmt: skip
def test_the_forward_pass_is_in_bfloat16_where_the_recipe_or_a_gpu_says_so(monkeypatch, dtype, device, precision):
    engine, _ = made(0, 1, monkeypatch)
    engine.device = torch.device(device)
    assert engine.precision(dtype) is precision


def test_on_a_cpu_nothing_moves(monkeypatch):
    engine, _ = made(0, 1, monkeypatch)
    engine.offload()
    engine.onload()
    assert training.torch.device("cpu") == engine.device
