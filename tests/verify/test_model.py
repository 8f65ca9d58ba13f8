"""The small model of the suite, its trainer and its engine."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.engines.models import load_policy
from rollcli.verify import model
from rollcli.verify.rows import make_batch

IDS, MASK = [[8, 20, 31, 22, 9], [8, 21, 9]], [[0, 0, 1, 1, 1], [0, 1, 1]]


def test_log_probabilities_are_the_models():
    batch = make_batch(MASK, ids=IDS)
    with model.engine() as engine:
        got = model.logprobs(engine, batch, 0.7)
    plain = load_policy(model.MODEL, model.CPU, 0)
    logits = plain(torch.tensor([IDS[0]])).logits[0, 1:4] / 0.7
    right = logits.log_softmax(-1)[range(3), IDS[0][2:]].detach().numpy()
    np.testing.assert_allclose(got[2:5], right, atol=1e-4)


def test_the_gradient_is_the_models():
    batch = make_batch(MASK, [1, 0], ids=IDS)
    batch.tokens["advantages"] = np.array([1, 1, 1, 1, 1, -1, -1, -1], np.float32)
    with model.engine(micro_batch_tokens=4, packing=False) as engine:
        metrics, column = model.update(engine, batch, Grpo(aggregation="token-mean", kl=KlPenalty()), 0.7)
        got = model.last_gradient(engine)
    plain = load_policy(model.MODEL, model.CPU, 0, training=True)
    total = 0.0
    for ids, mask, advantage in zip(IDS, MASK, (1, -1)):
        logprobs = (plain(torch.tensor([ids])).logits[0, :-1] / 0.7).log_softmax(-1)
        picked = logprobs[range(len(ids) - 1), ids[1:]][torch.tensor(mask[1:], dtype=bool)]
        total = total - (advantage * picked).sum() / 5
    total.backward()
    np.testing.assert_allclose(got, plain.model.norm.weight.grad.numpy(), atol=1e-4)
    assert metrics["tokens"] == 5
    assert (column != 0).tolist() == [False, False, True, True, True, False, True, True]


def test_a_chain_samples_its_tokens():
    batch = model.sampled([5, 6, 5, 6, 3], end=9, budget=4)
    assert batch.tokens["ids"].tolist() == [10, 5, 6, 5, 6]
    assert batch.tokens["loss_mask"].tolist() == [False, True, True, True, True]
    assert batch.samples["truncated"].tolist() == [True]


def test_answers_come_in_order_and_end_by_themselves():
    with model.engine() as engine:
        first = model.rollout(engine, [8, 20, 31], 1.0, max_tokens=6, samples=3, seed=1)
        again = model.rollout(engine, [8, 20, 31], 1.0, max_tokens=6, samples=3, seed=1)
    assert first.samples["sample"].tolist() == [0, 1, 2]
    assert first.tokens["ids"].tolist() == again.tokens["ids"].tolist()


def test_a_process_group_that_is_there_is_used_and_kept():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with model.engine():
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
