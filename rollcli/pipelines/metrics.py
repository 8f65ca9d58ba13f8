"""What a step is summed up to. Every number is measured; times and speeds are added by the recorder."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from rollcli.algorithms import kl
from rollcli.algorithms.advantages import EQUAL
from rollcli.algorithms.base import METRIC_MAX
from rollcli.algorithms.correction import Correction
from rollcli.algorithms.surrogates import LOG_RATIO_LIMIT
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Trajectory
from rollcli.rollout.episode import REWARD_FAILED


def of_rollout(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Returns rewards, lengths and staleness of a step's groups; `version` is the policy about to be updated."""
    usable = [trajectory for group in groups for trajectory in group.usable]
    if not usable:
        return {}
    lengths = np.array([trajectory.response_tokens for trajectory in usable])
    # How far behind a trajectory is, is how far its first token is.
    staleness = np.array([version - t.versions[t.loss_mask][0] for t in usable if t.response_tokens])
    result = {
        "reward": _mean(trajectory.reward for trajectory in usable),
        "accuracy": _mean(trajectory.accuracy for trajectory in usable),
        "length": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": _mean(trajectory.stop_reason == "length" for trajectory in usable),
        "groups_equal": _mean(_equal(group) for group in groups),
        "sampled_tokens": float(lengths.sum()),
        "staleness_max": float(staleness.max(initial=0)),
    }
    greedy = [baseline.reward for group in groups for baseline in group.greedy]
    if greedy:
        result["greedy_reward"] = _mean(greedy)
    for age in np.unique(staleness):
        result[f"staleness/{int(age)}"] = float((staleness == age).mean())
    # What a reward or an environment reports takes no name of ours.
    reported = _reported(groups)
    result |= _per_task(groups)
    return result | {name if name not in result else f"reported/{name}": value for name, value in reported.items()}


def of_gap(minibatches: Sequence[Batch], version: int, correction: Correction | None) -> dict[str, float]:
    """Returns how far the trainer's log-probabilities are from the rollout engine's, over all and by staleness.

    `rollout_gap_mean` and `_max` are of the absolute difference; `rollout_kl` estimates KL(rollout ‖ trainer) by k3;
    `rollout_ess` is the effective sample size of importance weights, as a share; `rollout_clipped` the share of tokens
    whose weight is outside the correction's bounds.
    """
    parts = [_differences(batch, number == 0, version, correction) for number, batch in enumerate(minibatches)]
    parts = [part for part in parts if part is not None]
    if not parts or not sum(len(part[0]) for part in parts):
        return {}
    difference, ages, outside = (np.concatenate(column) for column in zip(*parts, strict=True))
    result = _gap(difference, outside)
    found = np.unique(ages)
    for age in found if len(found) > 1 else ():
        aged = ages == age
        result |= {f"{name}/{int(age)}": value for name, value in _gap(difference[aged], outside[aged]).items()}
    return result


def of_reference(minibatches: Sequence[Batch]) -> dict[str, float]:
    """Returns the KL of a step's samples to the reference under the policy as it was before its updates, by k3."""
    parts = []
    for number, batch in enumerate(minibatches):
        trainer, mask = batch.tokens.get("updated_policy" if number == 0 else "old_logprobs"), batch.tokens["loss_mask"]
        if trainer is not None and "reference_logprobs" in batch.tokens:
            parts.append((trainer[mask] - batch.tokens["reference_logprobs"][mask]).astype(np.float64))
    difference = np.concatenate(parts) if parts else np.zeros(0)
    return {"kl_reference": float(kl.k3(difference).mean())} if len(difference) else {}


def of_critic(batch: Batch) -> dict[str, float]:
    """Returns the share of the returns' variance that the critic's values explain, before its updates."""
    if not len(batch):
        return {}
    mask = batch.tokens["loss_mask"]
    returns, values = batch.tokens["returns"][mask], batch.tokens["values"][mask]
    if not len(returns) or np.ptp(returns) < EQUAL:
        return {}
    return {"critic/explained_variance": float(1 - np.var(returns - values) / np.var(returns))}


def _differences(
    batch: Batch, first: bool, version: int, correction: Correction | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns trainer minus rollout log-probability, age, and whether it is out of bounds, of each trained token."""
    trainer = batch.tokens.get("updated_policy" if first else "old_logprobs")
    if trainer is None:
        return None
    mask = batch.tokens["loss_mask"]
    difference = (trainer[mask] - batch.tokens["rollout_logprobs"][mask]).astype(np.float64)
    outside = (
        np.zeros(len(difference), bool) if correction is None else correction.outside(difference, batch.rows[mask])
    )
    return difference, version - batch.tokens["versions"][mask], outside


def _gap(difference: np.ndarray, outside: np.ndarray) -> dict[str, float]:
    weights = np.exp(np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return {
        "rollout_gap_mean": float(np.abs(difference).mean()),
        "rollout_gap_max": float(np.abs(difference).max()),
        "rollout_kl": float((weights - 1 - difference).mean()),
        "rollout_ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "rollout_clipped": float(outside.mean()),
    }


def of_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the step's training metrics: token-weighted means over its updates, maxima, last learning rate.

    An update that was skipped, because a gradient was not finite, is counted; its numbers say nothing.
    """
    skipped = sum(update.get("skipped_updates", 0.0) for update in updates)
    result: dict[str, float] = {"optimizer_steps": float(len(updates)), "skipped_updates": float(skipped)}
    updates = [update for update in updates if not update.get("skipped_updates")] or updates
    tokens = np.array([update["tokens"] for update in updates])
    result["trained_tokens"] = float(tokens.sum())
    names = dict.fromkeys(name for update in updates for name in update)
    for name in [name for name in names if name not in ("tokens", "skipped_updates")]:
        values = np.array([update.get(name, 0.0) for update in updates])
        if name.endswith(METRIC_MAX):
            result[name] = float(values.max())
        elif name == "learning_rate":
            result[name] = float(values[-1])
        elif name in ("loss", "grad_norm"):
            result[name] = float(values.mean())
        else:
            result[name] = float(np.average(values, weights=tokens)) if tokens.sum() else 0.0
    return result


def _reported(groups: Sequence[Group]) -> dict[str, float]:
    """Returns means of what environments and rewards reported, and how many calls of each reward failed."""
    found: dict[str, list[float]] = defaultdict(list)
    failed: Counter[str] = Counter()
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        for name, value in trajectory.metrics.items():
            if name.startswith(REWARD_FAILED):
                failed[name] += int(value)
            elif trajectory.usable:
                found[name].append(value)
    return {name: _mean(values) for name, values in sorted(found.items())} | {n: float(c) for n, c in failed.items()}


def _per_task(groups: Sequence[Group]) -> dict[str, float]:
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        for trajectory in group.usable:
            by_task[group.task.name].append(trajectory)
    result = {}
    for name, members in sorted(by_task.items()):
        result[f"reward/{name}"] = _mean(member.reward for member in members)
        result[f"accuracy/{name}"] = _mean(member.accuracy for member in members)
        result[f"length/{name}"] = _mean(member.response_tokens for member in members)
    return result


def _equal(group: Group) -> bool:
    rewards = [trajectory.reward for trajectory in group.usable]
    return max(rewards, default=0.0) == min(rewards, default=0.0)


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]
