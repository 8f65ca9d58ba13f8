"""What travels between the stages: a task, the trajectories sampled for it, and the group they form.

    Task ──episode──▶ Trajectory ─┐
    Task ──episode──▶ Trajectory ─┼─▶ Group ─▶ Batch (data/batch.py)
    Task ──episode──▶ Trajectory ─┘

Tokens go in and tokens come out: what the model sampled is kept as sampled and never decoded and tokenized again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollcli.data.images import Images

Message = dict[str, Any]
"""`role`, and `content`: a text, or parts of text and images (data/images.py)."""


@dataclass(frozen=True)
class Task:
    """One problem instance: a pure function of (run seed, task name, index), so a cursor of one integer restores it.

    Attributes:
        name: the task's name in the recipe's `tasks:` list.
        index: which item of the task's endless, shuffled sequence this is.
        messages: the chat that opens the episode.
        payload: what rewards and environments may ask for by name (`answer`, metadata columns).
        seed: seed of everything random about this instance; shared by the whole group.
        split: `train` or `test`.
        row: which item of its source it is: the same problem, drawn again, has another index and the same row.
    """

    name: str
    index: int
    messages: list[Message]
    payload: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    split: str = "train"
    row: int = 0

    @property
    def id(self) -> str:
        """Explicit identity of the instance; ties the trajectories of a group together."""
        return f"{self.name}/{self.index}" if self.split == "train" else f"{self.name}/{self.split}/{self.index}"


@dataclass
class Trajectory:
    """One sampled episode as tokens.

    Attributes:
        task_id: `Task.id` of the problem.
        sample: the episode's position in the group, 0 … G-1; with the task's seed it determines every random draw.
        tokens: int32 `[T]`, prompt, sampled and observed tokens in order.
        loss_mask: bool `[T]`, True exactly on sampled tokens.
        logprobs: float32 `[T]`, the rollout engine's log-probability under the sampling temperature; 0 elsewhere.
        versions: int32 `[T]`, policy version that sampled the token; -1 elsewhere.
        agent: whose turns were sampled, in an episode of several players; empty where there is one.
        turns: `(start, end)` of each sampled turn.
        turn_rewards: reward of each turn as the environment gave it.
        chat: what was said, as people read it: `role`, `content`, and of what was sampled the number of its `turn`.
        state_keys: identity of the state each turn was taken in; equal states have equal keys.
        budget: the most tokens the model might have sampled.
        rewards: score by reward function, before weights.
        reward: weighted total; what advantages are computed from.
        accuracy: the task's own notion of success in [0, 1], unshaped; dynamic sampling and evaluation use it.
        stop_reason: of the last turn: `stop` (the model ended it), `length` (budget or context exhausted), `abort`; or
            `error`.
        error: why the episode failed, or None. A failed episode is counted and takes no part in the update.
        error_kind: one word for counting failures: `environment`, `reward`, `judge`, `reward_model`, `image`,
            `prompt_too_long`, `timeout`, `engine`.
        spoils_group: the failure takes the whole group out of the update.
        metrics: numbers worth averaging that an environment or reward reported.
        images: what the placeholder tokens stand for; None without images.
    """

    task_id: str
    sample: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    agent: str = ""
    chat: list[Message] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    state_keys: list[str] = field(default_factory=list)
    budget: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    accuracy: float = 0.0
    stop_reason: str = ""
    error: str | None = None
    error_kind: str | None = None
    spoils_group: bool = False
    prompt_text: str = ""
    response_text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    images: Images | None = None

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.loss_mask.sum())

    @property
    def usable(self) -> bool:
        """True when the episode may take part in an update."""
        return self.error is None

    @classmethod
    def failed(cls, task: Task, sample: int, kind: str, error: str) -> Trajectory:
        """Returns an episode that produced nothing but the reason why."""
        empty = np.zeros(0, dtype=np.int32)
        return cls(
            task_id=task.id,
            sample=sample,
            tokens=empty,
            loss_mask=np.zeros(0, dtype=bool),
            logprobs=np.zeros(0, dtype=np.float32),
            versions=empty,
            stop_reason="error",
            error=error,
            error_kind=kind,
        )


@dataclass
class Group:
    """The trajectories of one task instance, tied by `task.id` and sorted by sample.

    An episode gives one, or several: of several players, or of a chat that was rewritten on the way. `greedy` are those
    of one more episode, sampled greedily as a baseline (ReMax) and never trained on.
    """

    task: Task
    trajectories: list[Trajectory]
    greedy: list[Trajectory] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Identity of the task instance."""
        return self.task.id

    def greedy_reward(self, agent: str = "") -> float:
        """Returns the reward of an agent's greedy answer; NaN without one."""
        return next((baseline.reward for baseline in self.greedy if baseline.agent == agent), float("nan"))

    @property
    def failed_episodes(self) -> int:
        """Episodes with a trajectory that cannot be trained on."""
        return len({trajectory.sample for trajectory in self.trajectories if not trajectory.usable})

    def by_episode(self) -> list[list[Trajectory]]:
        """Returns the trajectories of each episode, the greedy one left out."""
        episodes: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            episodes.setdefault(trajectory.sample, []).append(trajectory)
        return list(episodes.values())

    def by_agent(self) -> list[Group]:
        """Returns the trajectories of each agent as a group of its own: only those are compared with each other."""
        agents = dict.fromkeys(trajectory.agent for trajectory in self.trajectories)
        if len(agents) < 2:
            return [self]
        return [
            Group(
                self.task,
                [trajectory for trajectory in self.trajectories if trajectory.agent == agent],
                [baseline for baseline in self.greedy if baseline.agent == agent],
            )
            for agent in agents
        ]

    @property
    def usable(self) -> list[Trajectory]:
        """Trajectories that may take part in an update."""
        return [trajectory for trajectory in self.trajectories if trajectory.usable]
