"""A small model with rollcli's own trainer and rollout engine around it, in this process: what the calls of `subject`
that run a model are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
import transformers

from rollcli.algorithms.policy_gradient import PolicyGradient
from rollcli.config.schema import ModelConfig, OptimizerConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task
from rollcli.data.stream import derive_seed
from rollcli.engines.base import GenerateRequest, SamplingParams
from rollcli.engines.fsdp import FsdpEngine
from rollcli.engines.models import load_policy
from rollcli.engines.objectives import LogProbs
from rollcli.engines.transformers import TransformersEngine
from rollcli.rollout.recorder import TrajectoryRecorder

MODEL = ModelConfig("embedded:sums")
CPU = torch.device("cpu")
LEARNING_RATE = 1e-4
CERTAIN = 100.0
"""A logit beside which all others are nothing."""


@contextmanager
def engine(micro_batch_tokens: int = 1024, packing: bool = True) -> Iterator[FsdpEngine]:
    """Gives a training engine of one rank on the embedded model, float32, whose gradients are not clipped."""
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, max_grad_norm=1e9)
    config = PolicyConfig(micro_batch_tokens=micro_batch_tokens, packing=packing, optimizer=optimizer)
    with _one_rank():
        yield FsdpEngine(load_policy(MODEL, CPU, seed=0, training=True), config, dtype="float32")


def logprobs(trainer: FsdpEngine, batch: Batch, temperature: float) -> np.ndarray:
    """Returns the trainer's log-probability of each trained token, float32 `[T]`."""
    return trainer.forward(batch, LogProbs(temperature))


def update(
    trainer: FsdpEngine, batch: Batch, algorithm: PolicyGradient, temperature: float = 1.0
) -> tuple[dict[str, float], np.ndarray]:
    """Takes a step's first update, by the batch's advantages or else the algorithm's.

    Returns what it measured, and the log-probabilities it used, `[T]`.
    """
    algorithm.prepare(batch)
    if "advantages" not in batch.tokens:
        batch.tokens["advantages"] = algorithm.advantages(batch)
    batch.tokens["loss_weights"] = algorithm.loss_weights(batch)
    return trainer.update(batch, LogProbs(temperature, algorithm), LEARNING_RATE)


def last_gradient(trainer: FsdpEngine) -> list[float]:
    """Returns the last update's gradient in the final norm's weights, through which every token's gradient goes."""
    (weight,) = (p for name, p in trainer.model.named_parameters() if name == "model.norm.weight")
    # After one step of Adam the first moment is the gradient, times one minus the decay.
    return (_whole(trainer.optimizer.state[weight]["exp_avg"]) / (1 - trainer.config.optimizer.betas[0])).tolist()


def weights(trainer: FsdpEngine) -> dict[str, torch.Tensor]:
    """Returns a copy of every weight."""
    return {name: tensor.clone() for name, tensor in trainer.named_weights().items()}


def rollout(
    trainer: FsdpEngine, prompt: list[int], temperature: float, max_tokens: int, samples: int, seed: int
) -> Batch:
    """Returns answers to one prompt, sampled by a rollout engine that was brought to the trainer's weights."""
    sampler = TransformersEngine(load_policy(MODEL, CPU, seed=0))
    sampler.load_weights(trainer.named_weights(), version=1)
    sampling = SamplingParams(max_tokens, temperature, stop_token_ids=(int(sampler.model.config.eos_token_id),))
    return _answers(sampler, [prompt] * samples, sampling, seed)


def sampled(ids: list[int], end: int, budget: int) -> Batch:
    """Returns what the rollout engine makes of a model that goes through `ids` after a prompt of one token."""
    sampling = SamplingParams(budget, temperature=1.0, stop_token_ids=(end,))
    start = max(*ids, end) + 1
    return _answers(TransformersEngine(_chain([start, *ids])), [[start]], sampling, seed=0)


def _answers(sampler: TransformersEngine, prompts: list[list[int]], sampling: SamplingParams, seed: int) -> Batch:
    """Samples, and keeps what was sampled as an episode does."""
    task = Task("verify", 0, [], seed=seed)
    sampler.add([
        GenerateRequest(str(number), np.array(prompt, np.int32), derive_seed(task.seed, number, 0), sampling)
        for number, prompt in enumerate(prompts)
    ])  # fmt: skip
    done = []
    while sampler.pending:
        done += sampler.step()
    trajectories = []
    for completion in sorted(done, key=lambda each: int(each.id)):
        recorder = TrajectoryRecorder(task, int(completion.id))
        recorder.observe(np.array(prompts[recorder.sample], np.int32))
        recorder.take(completion)
        trajectories.append(recorder.trajectory(completion.stop_reason, "", ""))
    return Batch.from_groups([Group(task, trajectories)])


def _chain(ids: list[int]) -> transformers.PreTrainedModel:
    """Returns a model that follows each token by the one after its first place in `ids`, all but certainly."""
    size = 2 * (max(ids) // 2 + 1)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=size, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=len(ids) + 64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    following = dict(reversed(list(zip(ids, ids[1:]))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.norm.weight.fill_(1.0)
        for token, after in following.items():
            model.lm_head.weight[after, token] = CERTAIN
    return model


@contextmanager
def _one_rank() -> Iterator[None]:
    """Makes this process the only rank, unless it is one already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
