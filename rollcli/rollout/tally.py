"""What happened to the samples of one batch, counted, and when it is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollcli.data.carriers import Trajectory
from rollcli.errors import RolloutError

SHOWN_ERRORS = 3


@dataclass
class Tally:
    """Counts of one batch, or one evaluation; `refused_*` are the episodes of refused groups, and the failed ones."""

    groups_started: int = 0
    groups_kept: int = 0
    groups_refused: Counter[str] = field(default_factory=Counter)
    refused_failures: int = 0
    groups_aborted: int = 0
    refused_episodes: int = 0
    samples: int = 0
    episodes: int = 0
    episodes_restarted: int = 0
    longest: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def take(self, episode: Sequence[Trajectory]) -> None:
        """Counts one finished episode."""
        self.episodes += 1
        self.longest = max(self.longest, *(trajectory.response_tokens for trajectory in episode))
        for trajectory in [trajectory for trajectory in episode if not trajectory.usable][:1]:
            kind = trajectory.error_kind or "unknown"
            self.failures[kind] += 1
            message = f"{kind}: {trajectory.error}"
            self.messages[message] += 1
            self.examples.setdefault(message, f"{trajectory.task_id}, sample {trajectory.sample}")

    def cut(self) -> Tally:
        """Returns the counts so far and begins anew; samples under way are counted where they end."""
        before = replace(self)
        self.__init__(samples=self.samples - self.episodes)
        return before

    def commonest(self) -> str:
        """Returns the commonest errors, each with how often it came and one sample."""
        return "; ".join(
            f"{count} × {message} ({self.examples[message]})"
            for message, count in self.messages.most_common(SHOWN_ERRORS)
        )

    def metrics(self) -> dict[str, float]:
        """Returns the counts as metrics."""
        return {
            "groups_started": float(self.groups_started),
            "groups_rejected": float(self.groups_refused.total()),
            **{f"groups_rejected/{reason}": float(count) for reason, count in sorted(self.groups_refused.items())},
            "groups_aborted": float(self.groups_aborted),
            "episodes_restarted": float(self.episodes_restarted),
            "failed": float(self.failures.total()),
            **{f"failed/{kind}": float(count) for kind, count in sorted(self.failures.items())},
        }

    def check_failures(self, max_share: float, failed: int, episodes: int, ended: bool = True) -> None:
        """Raises when more than `max_share` of `episodes` failed, or will have whatever comes: not all have `ended`.

        Raises:
            RolloutError: with the commonest errors.
        """
        if failed > max_share * episodes:
            failed, episodes = (failed, episodes) if ended else (self.failures.total(), self.episodes)
            raise RolloutError(
                f"{failed} of {episodes} episodes failed; the commonest: {self.commonest()}",
                hint="mend the cause, or allow more with `rollout.max_failure_share`",
            )

    def check_attempts(self, needed: int, max_attempts: int) -> None:
        """Raises when more than `max_attempts` groups were tried for each of `needed` ones, or of those kept, if more.

        Raises:
            RolloutError: with the shares of why groups were refused.
        """
        refused = self.groups_refused
        if refused.total() <= max(needed, self.groups_kept) * (max_attempts - 1):
            return
        shares = ", ".join(f"{number / refused.total():.0%} {reason}" for reason, number in refused.most_common())
        raise RolloutError(
            f"{self.groups_started} groups were sampled for a batch of {needed} and too few are worth training on; of "
            f"the {refused.total()} refused: {shares}",
            hint="choose problems of other difficulty, raise `rollout.max_group_attempts`, or switch "
            "`algorithm.dynamic_sampling` off" + (f"; failures: {self.commonest()}" if self.messages else ""),
        )
