"""What a simulated run consists of, and what is kept of it: plain numbers, no recipe and no device."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollcli.devices.lengths import Distribution, Fixed


@dataclass(frozen=True)
class Work:
    """What is sampled and trained in a step.

    Attributes:
        prompts: groups of a step.
        group_size: samples of a group.
        prompt_tokens: of one prompt, computed once for its group.
        answers: tokens sampled in a turn.
        turns: of an episode; rounded, at least 1.
        observation_tokens: that the environment adds after a turn.
        environment_s: that it takes for that.
        reward_s: that scoring a finished episode takes.
        refused: share of finished groups that are not trained on, and replaced.
        shared: see `lengths.draw_groups`.
        longest: a length that one sample of every `prompts` groups is given, in place of the longest drawn; 0: none.
    """

    prompts: int
    group_size: int
    prompt_tokens: float
    answers: Distribution
    turns: Distribution = field(default_factory=lambda: Fixed(1))
    observation_tokens: float = 0.0
    environment_s: Distribution = field(default_factory=lambda: Fixed(0))
    reward_s: Distribution = field(default_factory=lambda: Fixed(0))
    refused: float = 0.0
    shared: float = 0.5
    longest: float = 0.0


@dataclass(frozen=True)
class Stage:
    """A stage of training, whose time grows with the batch.

    Attributes:
        fixed_s: whatever the batch.
        token_s: for every token.
        square_s: for every squared token of a sequence: attention.
    """

    name: str
    fixed_s: float
    token_s: float = 0.0
    square_s: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """What the devices take.

    Attributes:
        step_s: seconds of a decode step with 0, 1, … rows; beyond the last, in proportion.
        prefill_s: seconds of a prompt's or an observation's token.
        stages: of training, in order.
        sync_s: new weights, during which replicas and trainer stand.
        switch_s: handing colocated devices over, there and back.
    """

    step_s: tuple[float, ...]
    prefill_s: float = 0.0
    stages: tuple[Stage, ...] = ()
    sync_s: float = 0.0
    switch_s: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """In what order, and where.

    Attributes:
        replicas: rollout replicas.
        max_rows: samples at most on one of them.
        colocated: sampling stands while training runs, on the same devices.
        max_staleness, extra_groups: as in a recipe.
        warmup: steps that are not counted: with staleness, those that fill the pipeline.
        steps: that are counted.
        seed: of all that is drawn.
    """

    replicas: int
    max_rows: int
    colocated: bool = False
    max_staleness: int = 0
    extra_groups: int | None = None
    warmup: int = 0
    steps: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Segment:
    """A span of time in which a group of devices does one thing; seconds since the counted steps began."""

    devices: str
    name: str
    start: float
    end: float


@dataclass
class Trace:
    """What happened in the counted steps.

    Attributes:
        ends: seconds at which each ended, since the counted steps began.
        seconds: stage to seconds in all, on the trainer's side: rollout is how long it waited.
        decoding_s: of all replicas together.
        sampled, trained: tokens: decoded on replicas, and of the trained sequences with their prompts.
        rows: mean rows on a replica that decodes.
        episodes, requests, groups: that ended: samples, turns, groups.
        staleness: mean versions between a group's admission and its training.
        segments: of the last counted step.
    """

    ends: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    decoding_s: float = 0.0
    sampled: float = 0.0
    trained: float = 0.0
    rows: float = 0.0
    episodes: int = 0
    requests: int = 0
    groups: int = 0
    staleness: float = 0.0
    segments: list[Segment] = field(default_factory=list)
