"""Rewards that score every turn by itself: asked turn by turn, summed, and put where they were earned."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Trajectory
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure
from rollcli.rollout.conversation import Conversation, EpisodeContext, Scores


def divided(config: TaskConfig) -> tuple[TaskConfig, TaskConfig]:
    """Returns the task with the rewards of an episode's end, and with those of every turn."""
    ends = [reward for reward in config.rewards if not reward.per_turn]
    turns = [reward for reward in config.rewards if reward.per_turn]
    return dataclasses.replace(config, rewards=ends), dataclasses.replace(config, rewards=turns)


async def score_turns(
    context: EpisodeContext, config: TaskConfig, chat: Conversation, common: Mapping[str, Any]
) -> list[Scores]:
    """Returns the scores of each turn of a chat; `turn` is a field with its number.

    Raises:
        EpisodeFailure: a message has no text.
    """
    if not config.rewards:
        return []
    asked = [{**common, **chat.fields(turn), "turn": turn} for turn in range(len(chat.responses))]
    return list(await asyncio.gather(*(context.score(config, fields) for fields in asked)))


def merged(config: TaskConfig, ends: Scores, turns: Sequence[Scores]) -> Scores:
    """Returns a score for each reward of the task in order: that of the end, or the sum over the turns.

    Metrics and accuracy of a reward that scores every turn are means. One failed turn fails the reward.
    """
    at_end, by_turn = iter(ends), iter(zip(*turns, strict=True))
    return [_summed(next(by_turn)) if reward.per_turn else next(at_end) for reward in config.rewards]


def earn(trajectory: Trajectory, config: TaskConfig, turns: Sequence[Scores]) -> None:
    """Adds what each turn was scored to its reward; the total, which `apply_scores` wrote, has it already."""
    failed = [any(isinstance(score, RewardFailure) for score in each) for each in zip(*turns, strict=True)]
    for number, scores in enumerate(turns):
        trajectory.turn_rewards[number] += sum(
            reward.weight * score.score
            for reward, score, lost in zip(config.rewards, scores, failed, strict=True)
            if not lost
        )


def _summed(scores: Sequence[RewardResult | RewardFailure]) -> RewardResult | RewardFailure:
    for score in scores:
        if isinstance(score, RewardFailure):
            return score
    names = dict.fromkeys(name for score in scores for name in score.metrics)
    metrics = {name: fmean(score.metrics[name] for score in scores if name in score.metrics) for name in names}
    accuracy = fmean(score.score if score.accuracy is None else score.accuracy for score in scores)
    return RewardResult(sum(score.score for score in scores), metrics, accuracy)
