"""Small batches written as text, and tensors with a gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rollcli import registry
from rollcli.algorithms import BUILTIN
from rollcli.algorithms.base import Algorithm, TrainedTokens
from rollcli.data.batch import Batch

REWARDED = [name for name in BUILTIN if name != "sft"]
"""Every algorithm that learns from rewards."""


def batch_of(
    layouts: Sequence[str], rewards: Sequence[float] | None = None, groups: Sequence[int] | None = None, **columns: Any
) -> Batch:
    """Returns a batch of trajectories written as text: `..00.1` is a prompt of two tokens, a turn of two, and so on.

    `columns` take the place of the token and sample columns of the same names, whose values are plain ones.
    """
    count, text = len(layouts), "".join(layouts)
    turns = np.array([-1 if letter == "." else int(letter) for letter in text], dtype=np.int32)
    mask, length = turns >= 0, len(text)
    rewards = np.zeros(count) if rewards is None else np.array(rewards, dtype=np.float64)
    batch = Batch(
        np.concatenate([[0], np.cumsum([len(layout) for layout in layouts])]).astype(np.int64),
        {
            "ids": np.arange(length, dtype=np.int32),
            "loss_mask": mask,
            "rollout_logprobs": np.zeros(length, np.float32),
            "versions": np.where(mask, 0, -1).astype(np.int32),
            "turns": turns,
            "turn_rewards": np.zeros(length),
            "states": np.where(mask, 0, -1).astype(np.int64),
            "old_logprobs": np.zeros(length, np.float32),
            "reference_logprobs": np.zeros(length, np.float32),
            "values": np.zeros(length, np.float32),
        },
        {
            "group": np.zeros(count, np.int64) if groups is None else np.array(groups, dtype=np.int64),
            "sample": np.arange(count),
            "reward": rewards,
            "accuracy": rewards.copy(),
            "sampled": np.array([len(layout) - layout.count(".") for layout in layouts], dtype=np.int64),
            "budget": np.full(count, 100, dtype=np.int64),
            "truncated": np.zeros(count, dtype=bool),
            "greedy_reward": np.zeros(count),
        },
    )
    for name, column in columns.items():
        table = batch.tokens if name in batch.tokens else batch.samples
        table[name] = np.asarray(column, dtype=table[name].dtype)
    return batch


def made(name: str, **options: Any) -> Algorithm:
    """Returns the algorithm of that name."""
    return registry.resolve("algorithms", name)(**options)


def advantages(algorithm: Algorithm, batch: Batch) -> np.ndarray:
    """Returns what a step computes from a copy of a batch."""
    batch = batch.select(np.arange(len(batch)))
    algorithm.prepare(batch)
    return algorithm.advantages(batch)


def per_answer(algorithm: Algorithm, rewards: Sequence[float], groups: Sequence[int] | None = None, **more: Any):
    """Returns the advantage of each answer; all of its tokens have it, and its prompt has 0."""
    batch = batch_of([".0" + "0" * (index % 3) for index in range(len(rewards))], rewards, groups, **more)
    got = advantages(algorithm, batch)
    for index in range(len(batch)):
        own = got[batch.offsets[index] : batch.offsets[index + 1]]
        assert own[0] == 0 and (own[1:] == own[1]).all()
    return [float(value) for value in got[batch.offsets[:-1] + 1]]


def trained(logprobs: Sequence[float], old: Sequence[float] | None = None, **columns: Any) -> TrainedTokens:
    """Returns float64 tokens, those of `logprobs` with a gradient; the other policies are equal where not given."""

    def tensor(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float64)

    logprobs = tensor(logprobs).clone().requires_grad_()
    old = logprobs.detach().clone() if old is None else tensor(old)
    rows = columns.pop("rows", [0] * len(logprobs))
    given = {name: tensor(values) for name, values in columns.items()}
    given = {"rollout_logprobs": old, "advantages": tensor([1.0] * len(logprobs))} | given
    return TrainedTokens(logprobs=logprobs, old_logprobs=old, rows=torch.tensor(rows), **given)


def gradient(algorithm: Algorithm, tokens: TrainedTokens) -> list[float]:
    """Returns the gradient of the summed loss by each token's log-probability."""
    loss, _ = algorithm.loss(tokens)
    return torch.autograd.grad(loss.sum(), tokens.logprobs)[0].tolist()


def finite_differences(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> list[float]:
    """Returns the gradient of a function of a float64 tensor, by central differences."""
    step, at = 1e-6, at.detach()
    slopes = []
    for index in range(at.numel()):
        moved = torch.zeros(at.numel(), dtype=at.dtype)
        moved[index] = step
        moved = moved.reshape(at.shape)
        slopes.append(float((function(at + moved).sum() - function(at - moved).sum()) / (2 * step)))
    return slopes
