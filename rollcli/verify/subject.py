"""How rollcli answers: for each call of `properties` one function, from plain numbers through the code that trains.

Another project offers the calls it has, under the same names: rows are lists, flags 0 or 1, and the answer is a number
or a list. A call that is not there is not asked for. Calls that run a model (`rollcli.verify.model`) take a small one
of the subject's own; token ids are below 64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcli.algorithms import base
from rollcli.algorithms.cispo import Cispo
from rollcli.algorithms.correction import Correction
from rollcli.algorithms.dapo import Dapo
from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.masking import Masking
from rollcli.algorithms.policy_gradient import PolicyGradient
from rollcli.algorithms.ppo import Ppo
from rollcli.algorithms.reinforce import Reinforce
from rollcli.algorithms.rloo import Rloo
from rollcli.algorithms.shaping import Shaping
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group
from rollcli.data.packing import micro_batches
from rollcli.verify.rows import TASK, Rows, advantaged, advantages_of, make_batch, rewarded, rows_of, trajectories

if TYPE_CHECKING:
    from torch import Tensor

# --- which tokens count how much


def aggregate(
    losses: Rows,
    mask: Rows,
    mode: str,
    limit: int = 1,
    truncated: list[int] | None = None,
    parts: list[list[int]] | None = None,
) -> float:
    """The loss of a minibatch, from the loss of each token.

    `mode` is how token losses add up, `limit` the most tokens an answer may have. Answers flagged as `truncated` are
    left out. `parts` are the rows of each micro-batch, or rank; the answer is the loss of the whole minibatch.
    """
    batch = make_batch(mask, budget=limit, truncated=truncated)
    algorithm = Grpo(aggregation=mode, masking=Masking(truncated=truncated is not None))
    algorithm.prepare(batch)
    batch.tokens["loss"] = np.concatenate(losses)
    batch.tokens["loss_weights"] = algorithm.loss_weights(batch)
    total = 0.0
    for part in parts or [range(len(mask))]:
        columns = batch.select(np.array(part)).tokens
        trained = columns["loss_mask"]
        total += float((columns["loss"] * columns["loss_weights"])[trained].sum())
    return total


# --- advantages


def group_advantages(
    rewards: list[float], groups: list[int], baseline: str = "mean", scale: str = "group"
) -> list[float]:
    """The advantage of each answer; `baseline` is `mean` or `leave-one-out`, `scale` is `group` or `none`."""
    algorithm = Rloo(kl=KlPenalty()) if baseline == "leave-one-out" else Grpo(scale=scale, kl=KlPenalty())
    return advantages_of(algorithm, make_batch([[1]] * len(rewards), rewards, groups)).tolist()


def token_advantages(rewards: list[float], groups: list[int], mask: Rows) -> Rows:
    """The advantage of each token; mean and deviation of the group."""
    batch = make_batch(mask, rewards, groups)
    return rows_of(batch, advantages_of(Grpo(kl=KlPenalty()), batch))


def discounted_returns(rewards: Rows, mask: Rows, gamma: float) -> Rows:
    """What follows each trained token, itself included, from rewards of tokens."""
    batch = rewarded(rewards, mask)
    return rows_of(batch, advantages_of(Reinforce(returns_of="token", gamma=gamma), batch))


def gae(rewards: Rows, values: Rows, mask: Rows, gamma: float, lam: float) -> Rows:
    """Generalized advantage estimates, not whitened."""
    batch = rewarded(rewards, mask)
    batch.tokens["values"] = np.concatenate(values)
    return rows_of(batch, advantages_of(Ppo(gamma=gamma, lam=lam, whiten=False, kl=KlPenalty()), batch))


def whiten(values: Rows, mask: Rows) -> Rows:
    """Values with mean 0 and standard deviation 1 (with Bessel's correction) over all trained tokens; others 0."""
    batch = rewarded(values, mask)
    # Undiscounted to the utmost, a token's return is its own reward.
    return rows_of(batch, advantages_of(Reinforce(returns_of="token", gamma=0.0, whiten=True), batch))


def running_normalized(batches: Rows) -> Rows:
    """Rewards, batch after batch, by mean and deviation of all so far; a checkpoint is loaded between two batches."""
    scores, state = [], None
    for rewards in batches:
        algorithm = Reinforce(shaping=Shaping(mean="running", std="running"))
        if state is not None:
            algorithm.restore(state)
        batch = make_batch([[1]] * len(rewards), rewards)
        scores.append(advantages_of(algorithm, batch).tolist())
        state = algorithm.state()
    return scores


def group_kept(accuracies: list[float], rewards: list[float]) -> int:
    """Whether dynamic sampling keeps a group, from accuracies, and rewards as they were shaped."""
    return int(Dapo().keep_group(Group(TASK, trajectories([[1]] * len(rewards), rewards, accuracies))))


def weighted_reward(rewards: list[float], weights: list[float]) -> float:
    """What an answer earns under several rewards with weights."""
    from rollcli.config.schema import RewardConfig, TaskConfig
    from rollcli.rewards.base import RewardResult
    from rollcli.rollout.episode import apply_scores

    (trajectory,) = trajectories([[1]], [0], [0])
    configs = [RewardConfig(f"reward {number}", weight) for number, weight in enumerate(weights)]
    apply_scores(trajectory, TaskConfig("verify", None, configs), [RewardResult(reward) for reward in rewards])
    return trajectory.reward


def penalized_reward(
    reward: float, logprobs: list[float], reference_logprobs: list[float], coefficient: float
) -> float:
    """The reward of an answer less the KL penalty (k1) of its tokens."""
    batch = make_batch([[1] * len(logprobs)], [reward])
    batch.tokens["old_logprobs"] = np.array(logprobs)
    batch.tokens["reference_logprobs"] = np.array(reference_logprobs)
    penalty = KlPenalty(coefficient, estimator="k1", place="reward")
    return float(advantages_of(Reinforce(kl=penalty), batch)[0])


def reference_needed(coefficient: float) -> int:
    """Whether a run with this KL coefficient loads a reference model."""
    return int("reference" in Grpo(kl=KlPenalty(coefficient)).needs())


def overlong_penalty(lengths: list[int], limit: int, buffer: int) -> list[float]:
    """What answers lose that near the limit; the penalty is 1 at the limit, and grows over the `buffer` before it."""
    batch = make_batch([[1] * length for length in lengths], budget=limit)
    return advantages_of(Reinforce(shaping=Shaping(overlong_buffer=buffer)), batch)[batch.offsets[:-1]].tolist()


# --- settings and arrangement


SETTINGS = {
    "temperature": ("rollout", "sampling", "temperature"),
    "overlong_buffer": ("algorithm", "shaping", "overlong_buffer"),
}


def accepted(setting: str, value: float) -> int:
    """Whether a run of GRPO with this setting starts: `temperature`, `overlong_buffer`, `group_size`, or a typo."""
    from rollcli.config.load import rebuild
    from rollcli.errors import ConfigError

    task = {"name": "sums", "source": "sums", "rewards": [{"name": "math"}]}
    values: dict[str, Any] = {
        "model": {"path": "embedded:sums"}, "steps": 1, "tasks": [task], "algorithm": {"name": "grpo"},
    }  # fmt: skip
    *path, last = SETTINGS.get(setting, (setting,))
    block = values
    for key in path:
        block = block.setdefault(key, {})
    block[last] = value
    try:
        rebuild(values)
    except ConfigError:
        return 0
    return 1


def learning_rate(peak: float, step: int, total: int, warmup: int, schedule: str) -> float:
    """The learning rate of a step, counted from 0."""
    from rollcli.config.schema import OptimizerConfig
    from rollcli.engines import schedule as schedules

    config = OptimizerConfig(learning_rate=peak, warmup_steps=warmup, schedule=schedule)
    return schedules.learning_rate(config, step, total)


def times_trained(samples: int, ranks: int, per_batch: int) -> list[int]:
    """How often each sample is in a micro-batch of at most `per_batch` samples, on any rank."""
    batch = make_batch([[1, 1]] * samples)
    counts = np.zeros(samples, dtype=np.int64)
    for indices in batch.shards(ranks):
        mine = batch.select(indices)
        for micro in micro_batches(mine, token_budget=2 * per_batch, packing=False):
            np.add.at(counts, indices[np.unique(mine.rows[micro.source])], 1)
    return counts.tolist()


# --- losses of tokens, and their gradients in the log-probabilities


def kl_penalty(
    logprobs: list[float], reference_logprobs: list[float], estimator: str, coefficient: float
) -> list[float]:
    """What the KL penalty adds to the loss of each token; `estimator` is `k1`, `k2` or `k3`."""
    return _penalized(logprobs, reference_logprobs, estimator, coefficient)[0]


def kl_penalty_gradient(
    logprobs: list[float], reference_logprobs: list[float], estimator: str, coefficient: float
) -> list[float]:
    """The gradient of that, in the log-probability of each token."""
    return _penalized(logprobs, reference_logprobs, estimator, coefficient)[1]


def expected_kl_gradient(probabilities: list[float], reference: list[float]) -> list[float]:
    """The gradient, in the policy's logits, that an on-policy token's KL penalty has in expectation.

    Of the setting that promises the gradient of KL(policy ‖ reference).
    """
    import torch

    logits = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    policy = logits.log_softmax(-1)
    old = policy.detach()
    tokens = base.TrainedTokens(policy, old, old, torch.zeros_like(old), _tensor(reference).log())
    losses, _ = Grpo(kl=KlPenalty(1.0, "k3", unbiased_gradient=True)).loss(tokens)
    return _gradient((losses * old.exp()).sum(), logits)


def policy_loss(
    logprobs: list[float], old_logprobs: list[float], advantages: list[float], clip_low: float, clip_high: float
) -> list[float]:
    """The clipped surrogate loss of each token."""
    return _clipped(logprobs, old_logprobs, advantages, clip_low, clip_high)[0]


def policy_loss_gradient(
    logprobs: list[float], old_logprobs: list[float], advantages: list[float], clip_low: float, clip_high: float
) -> list[float]:
    """The gradient of that, in the log-probability of each token."""
    return _clipped(logprobs, old_logprobs, advantages, clip_low, clip_high)[1]


def cispo_weights(ratios: list[float], weight_max: float) -> list[float]:
    """The factor of each token's log-probability in CISPO's loss, whose lower bound is 0; the advantage is 1."""
    logprobs = [math.log(ratio) for ratio in ratios]
    algorithm = Cispo(weight_max=weight_max)
    gradient = _loss_and_gradient(algorithm, logprobs, [0.0] * len(ratios), [1.0] * len(ratios))[1]
    return [-each for each in gradient]


def correction_weights(
    old_logprobs: list[float], rollout_logprobs: list[float], mode: str, low: float, high: float
) -> list[float]:
    """The factor of each token's loss for the gap between trainer and engine; `mode` is `truncate` or `mask`."""
    old = _tensor(old_logprobs)
    tokens = base.TrainedTokens(old, old, _tensor(rollout_logprobs), old)
    return Correction(mode=mode, low=low, high=high).weights(tokens)[0].tolist()


def token_logprobs(logits: Rows, tokens: list[int], temperature: float) -> list[float]:
    """The log-probability of one token for each row of logits, as the trainer computes it."""
    import torch

    from rollcli.engines.objectives import LogProbs, TokenColumns

    ids = torch.tensor(tokens)
    columns = TokenColumns(lambda name: None, rows=torch.arange(len(ids)), ids=ids)
    return LogProbs(temperature).column(columns, torch.tensor(logits, dtype=torch.float32)).tolist()


def entropy(logits: Rows) -> list[float]:
    """The entropy of each row's distribution, in nats."""
    from rollcli.algorithms import entropy as entropies

    return entropies.entropy(_tensor(logits)).tolist()


# --- a model, its trainer and its engine


def answer_mask(ids: list[int], end: int, pad: int, budget: int) -> list[int]:
    """Which of the tokens a model would sample one after another are an answer, and trained.

    `end` ends an answer; rows that need padding are padded with `pad`; `budget` is the most tokens of an answer.
    """
    from rollcli.verify import model

    batch = model.sampled(ids, end, budget)
    mask = batch.tokens["loss_mask"][1:].astype(int).tolist()
    return mask + [0] * (len(ids) - len(mask))


def model_logprobs(rows: list[list[int]], mask: Rows, temperature: float, together: int) -> list[float]:
    """The trainer's log-probabilities of the trained tokens, rows one by one, or `together` in one micro-batch."""
    from rollcli.verify import model

    batch = make_batch(mask, ids=rows)
    with model.engine(micro_batch_tokens=1024 if together else 1, packing=False) as engine:
        return model.logprobs(engine, batch, temperature)[batch.tokens["loss_mask"]].tolist()


def model_trained_positions(rows: list[list[int]], mask: Rows) -> Rows:
    """Which tokens of a demonstration the trainer's loss takes in."""
    from rollcli.verify import model

    pairs = [(np.array(ids), np.array(flags)) for ids, flags in zip(rows, mask)]
    batch = Batch.from_sequences(pairs)
    with model.engine() as engine:
        return rows_of(batch, model.logprobs(engine, batch, 1.0) != 0)


def update_gradient(
    rows: list[list[int]], mask: Rows, advantages: Any, temperature: float, batch_tokens: int, packing: int
) -> list[float]:
    """The loss of a minibatch, and some fixed part of its gradient in the weights, of the clipped token-mean loss.

    `advantages` are of rows, or of tokens. A micro-batch has at most `batch_tokens` tokens; `packing` puts several rows
    into one.
    """
    from rollcli.verify import model

    batch = advantaged(rows, mask, advantages)
    with model.engine(micro_batch_tokens=batch_tokens, packing=bool(packing)) as engine:
        metrics, _ = model.update(engine, batch, Grpo(aggregation="token-mean", kl=KlPenalty()), temperature)
        return [metrics["loss"], *model.last_gradient(engine)]


def first_update_kl(
    rows: list[list[int]], mask: Rows, advantages: list[float], temperature: float, batch_tokens: int
) -> float:
    """The KL from the old policy that the first update of a step measures, before it changes anything."""
    from rollcli.verify import model

    batch = advantaged(rows, mask, advantages)
    with model.engine(micro_batch_tokens=batch_tokens) as engine:
        metrics, _ = model.update(engine, batch, Grpo(aggregation="token-mean", kl=KlPenalty()), temperature)
        return metrics["kl_old"]


def update_gap(
    rows: list[list[int]], mask: Rows, advantages: list[float], temperature: float, batch_tokens: int
) -> float:
    """The largest difference of log-probabilities between an update and the forward pass before it."""
    from rollcli.verify import model

    batch = advantaged(rows, mask, advantages)
    with model.engine(micro_batch_tokens=batch_tokens) as engine:
        before = model.logprobs(engine, batch, temperature)
        _, used = model.update(engine, batch, Grpo(aggregation="token-mean", kl=KlPenalty()), temperature)
    return float(np.abs(used - before).max())


def weight_change(rows: list[list[int]], mask: Rows, rewards: list[float], groups: list[int]) -> float:
    """The largest change of any weight in an update by GRPO."""
    from rollcli.verify import model

    batch = make_batch(mask, rewards, groups, ids=rows)
    with model.engine() as engine:
        before = model.weights(engine)
        model.update(engine, batch, Grpo(kl=KlPenalty()))
        return max(float((after - before[name]).abs().max()) for name, after in model.weights(engine).items())


def gains(rows: list[list[int]], mask: Rows, rewards: list[float], groups: list[int]) -> list[int]:
    """Whether an update by GRPO changed an answer's log-probability more (1) or less (-1) than the mean answer's."""
    from rollcli.verify import model

    batch = make_batch(mask, rewards, groups, ids=rows)
    with model.engine() as engine:
        before = model.logprobs(engine, batch, 1.0)
        model.update(engine, batch, Grpo(kl=KlPenalty()))
        change = np.bincount(batch.rows, weights=model.logprobs(engine, batch, 1.0) - before)
    return np.sign(change - change.mean()).astype(int).tolist()


def on_policy_ratios(
    prompt: list[int], temperature: float, max_tokens: int, samples: int, seed: int, updates: int
) -> list[float]:
    """Mean, smallest and largest ratio of the trainer's to the rollout engine's probability of sampled tokens.

    The policy is updated so often before; then the engine is brought to its weights.
    """
    from rollcli.verify import model

    with model.engine() as engine:
        for _ in range(updates):
            pairs = make_batch([[0, 1], [0, 1]], [1, 0], ids=[prompt[:2], prompt[1:3]])
            model.update(engine, pairs, Grpo(kl=KlPenalty()))
        batch = model.rollout(engine, prompt, temperature, max_tokens, samples, seed)
        gap = model.logprobs(engine, batch, temperature) - batch.tokens["rollout_logprobs"]
    ratios = np.exp(gap[batch.tokens["loss_mask"]].astype(np.float64))
    return [float(ratios.mean()), float(ratios.min()), float(ratios.max())]


def answers_differ(prompt: list[int], temperature: float, max_tokens: int, samples: int, seed: int) -> int:
    """Whether a group's answers to one prompt are not all the same, under a run's seed."""
    from rollcli.verify import model

    with model.engine() as engine:
        batch = model.rollout(engine, prompt, temperature, max_tokens, samples, seed)
    answers = {batch.select(np.array([row])).tokens["ids"].tobytes() for row in range(len(batch))}
    return int(len(answers) > 1)


# --- tensors


def _tensor(values: Any) -> Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float64)


def _gradient(loss: Tensor, leaf: Tensor) -> list[float]:
    import torch

    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient.tolist()


def _loss_and_gradient(
    algorithm: PolicyGradient,
    logprobs: list[float],
    old_logprobs: list[float],
    advantages: list[float],
    reference_logprobs: list[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Returns the loss of each token, and its gradient in the token's log-probability."""
    leaf, old = _tensor(logprobs).requires_grad_(), _tensor(old_logprobs)
    reference = None if reference_logprobs is None else _tensor(reference_logprobs)
    losses, _ = algorithm.loss(base.TrainedTokens(leaf, old, old, _tensor(advantages), reference))
    return losses.tolist(), _gradient(losses.sum(), leaf)


def _penalized(
    logprobs: list[float], reference_logprobs: list[float], estimator: str, coefficient: float
) -> tuple[list[float], list[float]]:
    algorithm = Grpo(kl=KlPenalty(coefficient, estimator))
    return _loss_and_gradient(algorithm, logprobs, logprobs, [0.0] * len(logprobs), reference_logprobs)


def _clipped(
    logprobs: list[float], old_logprobs: list[float], advantages: list[float], clip_low: float, clip_high: float
) -> tuple[list[float], list[float]]:
    algorithm = Grpo(clip_low=clip_low, clip_high=clip_high, kl=KlPenalty())
    return _loss_and_gradient(algorithm, logprobs, old_logprobs, advantages)
