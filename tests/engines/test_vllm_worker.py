"""The rows of vLLM's batch and the draws for them, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollcli.engines.sampling import Draws, sample, uniforms

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from rollcli.engines.vllm_worker import CounterSampler, Rows, _readable


def params(seed: int, **changes: object) -> SimpleNamespace:
    extra = {"seed": seed, "drawn": 0, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0} | changes
    return SimpleNamespace(extra_args=extra, stop_token_ids=[3, 4])


def update(rows: Rows, added: list = (), removed: list = (), moved: list = ()) -> None:
    rows.update_state(BatchUpdate(batch_size=9, removed=removed, added=added, moved=moved))


def test_rows_follow_their_requests() -> None:
    rows, sampled = Rows(None, torch.device("cpu"), False), [[], [7], [8, 9]]
    update(rows, added=[(row, params(row, drawn=10 * row), [1], sampled[row]) for row in range(3)])
    expected = uniforms(np.array([0, 1, 2]), np.array([0, 11, 22]))
    assert rows.draws(3).uniforms.tolist() == expected.tolist()
    sampled[0].append(5)  # the list is vLLM's own
    assert rows.draws(1).uniforms.tolist() == uniforms(np.array([0]), np.array([1])).tolist()
    update(rows, moved=[(0, 1, MoveDirectionality.SWAP)])
    assert rows.draws(2).uniforms.tolist() == uniforms(np.array([1, 0]), np.array([11, 1])).tolist()
    update(rows, removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert rows.draws(2).uniforms.tolist() == uniforms(np.array([2, 0]), np.array([22, 1])).tolist()


def test_stop_tokens_are_barred_below_the_minimum() -> None:
    rows = Rows(None, torch.device("cpu"), False)
    update(rows, added=[(0, params(0, min_tokens=1), [1], [5]), (1, params(1, min_tokens=2), [1], [5])])
    assert [column.tolist() for column in rows.draws(2).barred] == [[1, 1], [3, 4]]
    assert rows.draws(1).barred is None


def test_the_sampler_draws_as_the_other_engine_does() -> None:
    rows, count = Rows(None, torch.device("cpu"), False), 6
    changes = [{"temperature": 0.5}, {"top_p": 0.6}, {"top_k": 2}, {"temperature": 0.0}, {}, {"temperature": 2.0}]
    update(rows, added=[(row, params(row, **changes[row]), [1], []) for row in range(count)])
    logits = torch.randn(count, 20, generator=torch.Generator().manual_seed(0)) * 3
    metadata = SimpleNamespace(logitsprocs=SimpleNamespace(all=[object(), rows]))
    output = CounterSampler()(logits, metadata)
    column = {
        name: np.array([each.get(name, default) for each in changes])
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0))
    }
    tokens, logprobs = sample(
        logits,
        Draws(
            uniforms(np.arange(count), np.zeros(count)), column["temperature"].astype(np.float32),
            column["top_p"].astype(np.float32), column["top_k"].astype(np.int64),
        ),
    )  # fmt: skip
    assert output.sampled_token_ids[:, 0].tolist() == tokens.tolist()
    assert output.logprobs_tensors.logprobs[:, 0].tolist() == logprobs.tolist()


def test_a_packed_weight_is_read_through_its_product() -> None:
    weight = torch.randn(5, 3)
    linear = torch.nn.Linear(3, 5)
    linear.weight = torch.nn.Parameter(torch.empty(0))
    linear.cpu_linear = lambda inputs, _, bias: inputs @ weight.T
    assert torch.equal(_readable(linear, "weight", (5, 3)), weight)
    assert _readable(linear, "bias", (5,)) is linear.bias
    assert _readable(torch.nn.Linear(3, 5), "weight", (5, 4)) is None
