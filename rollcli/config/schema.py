"""What a recipe may say: plain dataclasses, one docstring per field.

A field whose metadata names a registry (`plugin("algorithms")`) holds `{name: …, options…}` in the recipe and an
instance of that plug-in's own class here, so every plug-in's options are checked against its own fields. A field with
`target` in its metadata names a function as `./file.py:function`; the file is found from the recipe's folder. A class
may define `problems()`, which yields `(field, message)` for values that have the right type and make no sense.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollcli.suggest import did_you_mean

Problems = Iterator[tuple[str, str]]
FORWARD_PASSES = frozenset({"old", "reference", "reference_distribution", "critic"})
"""Passes beside the update's own that an algorithm may need.

`old`: the policy's log-probabilities before the step's first update; `reference`: the reference model's, and
`reference_distribution` those of the whole vocabulary; `critic`: values.
"""
ASKED_KINDS = {"judge": "judge", "reward_model": "classifier"}
"""Kind of reward model that each reward of this name asks."""


def plugin(kind: str, default: str | None = None) -> Any:
    """Declares a field filled by a plug-in of `kind`, by default the one called `default`."""
    metadata = {"plugin": kind, "default": default}
    return field(metadata=metadata) if default is None else field(default=None, metadata=metadata)


def positive(instance: object, *names: str) -> Problems:
    """Yields a problem for each named field that is not greater than zero, or infinite."""
    for name in names:
        value = getattr(instance, name)
        if value is not None and not 0 < value < math.inf:
            yield name, f"must be greater than 0{' and finite' * (value == math.inf)}, is {value}"


def not_negative(instance: object, *names: str) -> Problems:
    """Yields a problem for each named field that is below zero, or infinite."""
    for name in names:
        value = getattr(instance, name)
        if value is not None and not 0 <= value < math.inf:
            yield name, f"must not be {'infinite' if value == math.inf else 'negative'}, is {value}"


def in_unit_interval(instance: object, *names: str) -> Problems:
    """Yields a problem for each named field that is not in [0, 1]."""
    for name in names:
        value = getattr(instance, name)
        if value is not None and not 0 <= value <= 1:
            yield name, f"must be in [0, 1], is {value}"


def finite(instance: object, *names: str) -> Problems:
    """Yields a problem for each named field that is infinite or not a number."""
    for name in names:
        if not math.isfinite(getattr(instance, name)):
            yield name, f"must be finite, is {getattr(instance, name)}"


@dataclass
class ModelConfig:
    """The language model that is trained."""

    path: str
    """Hub id, local folder, checkpoint (`RUN@STEP`), or `embedded:NAME` for a model that ships with rollcli."""
    revision: str | None = None
    """Hub revision: a commit hash, tag or branch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; `auto` is float32 on CPU and bfloat16 on GPU. Master weights are float32."""
    attention: str | None = None
    """Attention implementation as `transformers` names it (`sdpa`, `flash_attention_2`, …); null lets it choose."""
    chat_template: str | None = None
    """Path of a Jinja chat template, or `plain`, for a base model that has none or to replace its own."""
    initialize: dict[str, Any] | None = None
    """Hub configuration values (`model_type`, `hidden_size`, …) of a model to start from random weights; `path` then
    only has to hold a tokenizer."""

    def problems(self) -> Problems:
        if not self.path:
            yield "path", "must not be empty"


@dataclass
class RewardConfig:
    """One reward function of a task."""

    name: str = field(metadata={"names": "rewards"})
    """Registered name, `./file.py:function`, or `module:function`."""
    weight: float = 1.0
    """Factor of this reward in the total."""
    timeout_s: float = 10.0
    """Hard limit for one call, in seconds; a call that exceeds it is killed."""
    retries: int = 0
    """Times a failed call is made again before it counts as failed; a call that exceeds its limit is not."""
    per_turn: bool = False
    """Score every turn of the model by itself, with the chat up to it, and reward it there; the component is the sum.
    False scores an episode once, at its end."""
    on_error: Literal["drop", "drop_group", "zero", "fail"] = "drop"
    """What a failed call means: `drop` takes the sample out of the update, `drop_group` its whole group, `zero` scores
    0, `fail` stops the run."""
    args: dict[str, Any] = field(default_factory=dict)
    """Values passed by name, in place of a column of the same name: `{min_words: 30}`."""
    label: str | None = None
    """What results and metrics call it; null is its name. One function may stand in a task several times by labels."""

    @property
    def title(self) -> str:
        """What results and metrics call it."""
        return self.label or self.name

    @property
    def asks(self) -> str | None:
        """Name of the recipe's reward model that it asks, if any."""
        model = self.args.get("model") if self.name in ASKED_KINDS and "endpoint" not in self.args else None
        return model if isinstance(model, str) else None

    def problems(self) -> Problems:
        yield from positive(self, "timeout_s")
        yield from not_negative(self, "retries")
        if self.label is not None and ("/" in self.label or not self.label):
            yield "label", f"must be a word without `/`, is `{self.label}`"


@dataclass
class TaskSamplingConfig:
    """What a task says of its answers; what is null is as in `rollout.sampling`.

    The temperature is the same for all tasks: the trainer divides by it too.
    """

    max_tokens: int | None = None
    """Most tokens the model may sample in one episode."""
    min_tokens: int | None = None
    """Tokens of an answer before which nothing ends it."""
    stop: list[str] | None = None
    """Texts that end an answer, which keeps them."""

    def problems(self) -> Problems:
        yield from positive(self, "max_tokens")
        yield from not_negative(self, "min_tokens")
        if self.stop is not None and "" in self.stop:
            yield "stop", "must not hold an empty text, which would end every answer at once"


@dataclass
class TaskEvaluationConfig:
    """How a task is evaluated; what is null is as in `evaluation`."""

    count: int | None = None
    """Held-out problems; 0 leaves the task out."""
    samples: int | None = None
    """Answers to each problem."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = None
    """Keep the most probable tokens up to this probability."""
    max_tokens: int | None = None
    """Most tokens of one episode; null is the task's own."""

    def problems(self) -> Problems:
        yield from not_negative(self, "count", "temperature")
        yield from positive(self, "samples", "max_tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield "top_p", f"must be in (0, 1], is {self.top_p}"


@dataclass
class TaskConfig:
    """One kind of problem in the mix: where problems come from, where they are acted out, and how they are scored."""

    name: str
    """Short name; metrics carry it."""
    source: Any = plugin("sources")
    """Where problems come from."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward functions; the total is their weighted sum, and the first one decides accuracy."""
    environment: Any = plugin("environments", "single_turn")
    """Where an episode plays; `single_turn` ends it after one answer."""
    weight: float = 1.0
    """Share of this task in the mix, relative to the other tasks' weights; 0 only evaluates it."""
    system: str | None = None
    """System message put before the problem."""
    sampler: Literal["uniform", "difficulty", "curriculum"] = "uniform"
    """Which problem comes next: each once an epoch; by preference one that is sometimes solved; or easy ones first."""
    chat_template: str | None = None
    """As `model.chat_template`, for this task alone."""
    group_size: int | None = None
    """Answers sampled to each problem; null is the recipe's."""
    sampling: TaskSamplingConfig = field(default_factory=TaskSamplingConfig)
    """How its answers are sampled."""
    evaluation: TaskEvaluationConfig = field(default_factory=TaskEvaluationConfig)
    """How it is evaluated."""
    reward_workers: int | None = None
    """Processes that score this task alone; null shares `rollout.reward_workers` with the other tasks."""

    def problems(self) -> Problems:
        yield from not_negative(self, "weight")
        yield from positive(self, "reward_workers", "group_size")
        if "/" in self.name or not self.name:
            yield "name", f"must be a word without `/`, is `{self.name}`"
        titles = [reward.title for reward in self.rewards]
        for place, title in enumerate(titles):
            if title in titles[:place]:
                # Results are kept by label: the second would take the place of the first.
                yield (
                    f"rewards.{place}.{'name' if self.rewards[place].label is None else 'label'}",
                    f"reward `{title}` stands twice in this task; give one of them both weights, or a `label` of its "
                    "own",
                )


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over the run's steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    def problems(self) -> Problems:
        yield from positive(self, "learning_rate", "eps")
        if not self.max_grad_norm > 0:  # infinity limits nothing
            yield "max_grad_norm", f"must be greater than 0, is {self.max_grad_norm}"
        yield from not_negative(self, "weight_decay", "warmup_steps")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield "betas", f"must be two numbers in [0, 1), is {self.betas}"


@dataclass
class ParallelConfig:
    """How one copy of a model is spread over several processes."""

    tensor: int = 1
    """Processes that share every matrix product."""
    context: int = 1
    """Processes that share every sequence; training only."""
    pipeline: int = 1
    """Processes that share the layers."""
    expert: int = 1
    """Processes, out of all of the role, that share the experts of a mixture."""

    @property
    def processes(self) -> int:
        """Processes of one copy."""
        return self.tensor * self.context * self.pipeline

    def problems(self) -> Problems:
        yield from positive(self, "tensor", "context", "pipeline", "expert")


@dataclass
class LoraConfig:
    """Low-rank adapters in place of all weights (LoRA, arXiv 2106.09685)."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 32.0
    """The adapter's product is scaled by `alpha / rank`."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the layers that get one; `all-linear` is every linear layer but the output head."""

    def problems(self) -> Problems:
        yield from not_negative(self, "rank")
        yield from positive(self, "alpha")
        if not self.targets:
            yield "targets", "must name at least one layer, or `all-linear`"


@dataclass
class PolicyConfig:
    """The workers that train the policy."""

    engine: str = field(default="fsdp", metadata={"names": "train_engines"})
    """Training engine."""
    workers: int = 1
    """Data-parallel workers; each is as many processes as `parallel` says."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How each data-parallel worker is spread over processes."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that are trained in place of all weights."""
    micro_batch_tokens: int = 16384
    """Most tokens, padding included, in one forward and backward pass of one worker."""
    packing: bool = True
    """Put several sequences into one row, each attending only to itself; false gives each its own padded row."""
    recompute_activations: bool = False
    """Recompute activations in the backward pass instead of keeping them: slower, less memory."""
    threads: int | None = None
    """CPU threads of one worker; null shares the machine's cores among the workers."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Options passed to the engine as they are."""

    @property
    def processes(self) -> int:
        """Worker processes in all."""
        return self.workers * self.parallel.processes

    def problems(self) -> Problems:
        yield from positive(self, "workers", "micro_batch_tokens", "threads")
        if self.parallel.expert > 0 and self.processes % self.parallel.expert:
            yield (
                "parallel.expert",
                f"{self.workers} workers × {self.parallel.processes} processes each = {self.processes} processes "
                f"cannot be split into {self.parallel.expert}",
            )


@dataclass
class CriticConfig(PolicyConfig):
    """The workers that train the critic, where the algorithm needs one."""

    path: str | None = None
    """Model it starts from: hub id, folder or `embedded:NAME`; null is the policy's."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    """Optimizer and schedule."""
    warmup_steps: int = 0
    """First steps in which the critic alone is trained."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield from not_negative(self, "warmup_steps")


@dataclass
class ReferenceConfig:
    """The workers of the reference model, where the algorithm needs one; what is null is as in `policy`."""

    engine: str | None = field(default=None, metadata={"names": "train_engines"})
    """Training engine, of which only the forward pass is used."""
    workers: int | None = None
    """Data-parallel workers."""
    parallel: ParallelConfig | None = None
    """How each data-parallel worker is spread over processes."""
    engine_args: dict[str, Any] | None = None
    """Options passed to the engine as they are; null is the policy's where the engine is too, else none."""

    def problems(self) -> Problems:
        yield from positive(self, "workers")


@dataclass
class SyncConfig:
    """How the policy's weights reach the rollout replicas."""

    transport: Literal["auto", "object_store", "broadcast", "cuda_ipc"] = "auto"
    """`object_store` goes through main memory, shared between the processes of a host; `broadcast` is a collective
    (gloo, NCCL); `cuda_ipc` maps the memory of a GPU that trainer and replica share. `auto` looks where they are."""
    bucket_mib: int = 256
    """Tensors are gathered and sent in buckets of about this size."""
    changed_only: bool = False
    """Send only the elements that differ from what was sent last; worth it in bfloat16, where few do."""
    verify: bool = False
    """Compare a checksum of every tensor on both sides after each sync."""

    def problems(self) -> Problems:
        yield from positive(self, "bucket_mib")


@dataclass
class SamplingConfig:
    """How answers are sampled."""

    max_tokens: int = 1024
    """Most tokens the model may sample in one episode."""
    min_tokens: int = 0
    """Tokens of an answer before which nothing ends it."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, which keeps them."""
    temperature: float = 1.0
    """Divides the logits, in rollout and trainer alike."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 keeps all."""

    def problems(self) -> Problems:
        yield from positive(self, "max_tokens")
        yield from not_negative(self, "top_k", "min_tokens")
        if self.min_tokens > self.max_tokens:
            yield "min_tokens", f"is {self.min_tokens}, above max_tokens, {self.max_tokens}"
        if "" in self.stop:
            yield "stop", "must not hold an empty text, which would end every answer at once"
        if not 0 < self.temperature < math.inf:
            yield "temperature", f"must be greater than 0 to train, is {self.temperature}"
        if not 0 < self.top_p <= 1:
            yield "top_p", f"must be in (0, 1], is {self.top_p}"


@dataclass
class RolloutConfig:
    """The workers that produce samples, and the limits of an episode."""

    engine: str = field(default="transformers", metadata={"names": "infer_engines"})
    """Rollout engine."""
    replicas: int = 1
    """Copies of the engine, each in its own process."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How each replica is spread over devices."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """How the policy's weights reach the replicas."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How answers are sampled."""
    max_rows: int = 256
    """Most sequences one replica decodes at once."""
    max_prompt_tokens: int | None = None
    """Longer prompts are counted and take no part; null allows what the context leaves beside `sampling.max_tokens`."""
    environment_workers: int = 1
    """Processes that run episodes, many each."""
    reward_workers: int = 1
    """Processes that score."""
    episode_timeout_s: float = 600.0
    """An episode that takes longer is failed."""
    max_group_attempts: int = 8
    """Groups started per group needed before the search for groups worth keeping is given up."""
    max_failure_share: float = 0.5
    """Share of failed episodes in one step above which the run stops."""
    max_staleness: int = 0
    """Versions that the policy may be ahead of the one that sampled a trajectory's first token, when it is trained on.
    0 samples and trains in turn; above, sampling goes on while the policy is trained."""
    extra_groups: int | None = None
    """Groups under way beyond those of the next batch. With `max_staleness: 0` the slowest are given up when the batch
    is full, and their problems come again; above, they go on, and null starts as many as the staleness allows."""
    max_restarts_per_hour: int = 20
    """Dead or hung workers that are replaced before the run stops."""
    worker_timeout_s: float = 300.0
    """A worker that answers nothing for so long, or whose engine takes no step, is replaced."""
    threads: int | None = None
    """CPU threads of one replica; null shares the machine's cores among the workers."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Options passed to the engine as they are."""

    def problems(self) -> Problems:
        yield from positive(
            self, "replicas", "max_rows", "max_prompt_tokens", "environment_workers", "reward_workers",
            "episode_timeout_s", "max_group_attempts", "threads", "worker_timeout_s",
        )  # fmt: skip
        yield from not_negative(self, "max_staleness", "extra_groups", "max_restarts_per_hour")
        yield from in_unit_interval(self, "max_failure_share")


@dataclass
class RewardModelConfig:
    """A model that rewards ask by name, on workers of its own; nothing trains it."""

    name: str
    """Short name, by which a reward's `args.model` chooses it."""
    model: ModelConfig
    """The model, as the recipe's `model`."""
    kind: Literal["judge", "classifier"] = "judge"
    """`judge` writes a verdict (reward `judge`); `classifier` gives a number (reward `reward_model`): a sequence
    classifier of `transformers`."""
    engine: str = field(default="transformers", metadata={"names": "infer_engines"})
    """Rollout engine that serves a judge."""
    replicas: int = 1
    """Copies of the model, each in its own process."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How each copy of a judge is spread over devices."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Options passed to a judge's engine as they are."""
    max_rows: int = 64
    """Most conversations that one copy takes at once."""

    @property
    def role(self) -> str:
        """What its workers are called, in `placement` too."""
        return f"{'judge' if self.kind == 'judge' else 'reward_model'}.{self.name}"

    def problems(self) -> Problems:
        yield from positive(self, "replicas", "max_rows")
        if not re.fullmatch(r"[\w-]+", self.name):
            yield "name", f"must be of letters, digits, `_` and `-`, is `{self.name}`"
        if self.kind == "classifier":
            if self.engine != "transformers":
                yield "engine", f"is `{self.engine}`, but a classifier runs on `transformers` alone"
            if self.parallel.processes > 1:
                yield "parallel", "a classifier is not spread; more `replicas` share its work"
            if self.engine_args:
                yield "engine_args", "are a judge's; a classifier has none"


@dataclass
class EvaluationConfig:
    """Held-out evaluation, on the tasks' `test` split."""

    every: int = 0
    """Evaluate after every this many steps; 0 only at the start and the end."""
    problems_per_task: int = 64
    """Held-out problems of each task; data sets with fewer give all they have."""
    samples: int = 1
    """Answers to each problem."""
    temperature: float | None = None
    """Sampling temperature; null is the rollout's, 0 is greedy."""
    top_p: float | None = None
    """Keep the most probable tokens up to this probability; null is the rollout's."""
    max_tokens: int | None = None
    """Most tokens of one episode; null is the rollout's, or the task's own."""
    at_start: bool = True
    """Evaluate before the first update."""

    def problems(self) -> Problems:
        yield from positive(self, "problems_per_task", "samples", "max_tokens")
        yield from not_negative(self, "every", "temperature")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield "top_p", f"must be in (0, 1], is {self.top_p}"


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = 20
    """Write one after every this many steps; the last step always writes one."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are kept for good; 0 keeps none beyond `keep_last`."""

    def problems(self) -> Problems:
        yield from positive(self, "every", "keep_last")
        yield from not_negative(self, "keep_every")


@dataclass
class TrackerConfig:
    """One mirror of the metrics; files in the run directory are always written."""

    name: str = field(metadata={"names": "trackers"})
    """Registered name of the tracker."""
    mode: Literal["offline", "local", "online"] = "offline"
    """`offline` and `local` need neither network nor login."""
    project: str = "rollcli"
    """Project the run appears under."""


@dataclass
class Recipe:
    """What every pipeline's recipe has."""

    model: ModelConfig
    """The model."""
    tasks: list[TaskConfig]
    """What the model practices; mixed by weight."""
    steps: int
    """Steps of the whole run."""
    pipeline: Literal["rl", "sft"] = "rl"
    """Which pipeline runs the recipe."""
    description: str = ""
    """One line for `roll recipes ls`."""
    seed: int = 0
    """Seed of everything random."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Training workers."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    trackers: list[TrackerConfig] = field(default_factory=list)
    """Where metrics are mirrored."""
    placement: str | dict[str, str | int] = "auto"
    """`auto`, or devices of each role: `{policy: 0-3, rollout: 4-7}`."""
    smoke: dict[str, Any] = field(default_factory=dict)
    """Keys that `--smoke` sets in this recipe, beside making everything small: `{tasks[0].source.path: …}`."""

    def problems(self) -> Problems:
        yield from positive(self, "steps")
        yield from not_negative(self, "seed")
        if self.seed >= 2**63:
            yield "seed", f"must be below 2^63, is {self.seed}"
        if not self.tasks:
            yield "tasks", "must name at least one task"
        if self.tasks and not any(task.weight > 0 for task in self.tasks):
            yield "tasks.0.weight", "every task has weight 0: there is nothing to train on"
        names = [task.name for task in self.tasks]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"tasks.{index}.name", f"`{name}` is already the name of another task"


@dataclass
class RlRecipe(Recipe):
    """Reinforcement learning: sample, score, update."""

    algorithm: Any = plugin("algorithms", "grpo")
    """The algorithm; its name narrows this block to its own options."""
    prompts_per_step: int = 64
    """Problems (groups) of one step."""
    group_size: int = 8
    """Answers sampled to each problem."""
    minibatches: int = 1
    """Optimizer steps the samples of one step are split into."""
    epochs: int = 1
    """Passes over the samples of one step, each split anew."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The reference model's workers, for algorithms that have one."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic's workers, for algorithms that have one."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling workers."""
    reward_models: list[RewardModelConfig] = field(default_factory=list)
    """Models that rewards ask: `judge` and `reward_model`."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Held-out evaluation."""

    @property
    def reference_workers(self) -> PolicyConfig:
        """The reference's workers, with what the policy's say where the recipe is silent; it has no adapters."""
        wanted = self.reference
        same = wanted.engine in (None, self.policy.engine)
        return replace(
            self.policy,
            engine=wanted.engine or self.policy.engine,
            workers=wanted.workers or self.policy.workers,
            parallel=wanted.parallel or self.policy.parallel,
            engine_args=(self.policy.engine_args if same else {}) if wanted.engine_args is None else wanted.engine_args,
            lora=LoraConfig(),
        )

    @property
    def is_own_reference(self) -> bool:
        """Whether the policy computes the reference's passes too, with its adapters switched off."""
        return self.policy.lora.rank > 0 and self.reference == ReferenceConfig()

    @property
    def samples_per_step(self) -> int:
        """Episodes of one step; where tasks have group sizes of their own, of the mean step."""
        total = sum(task.weight for task in self.tasks) or 1.0
        mean = sum(task.weight / total * (task.group_size or self.group_size) for task in self.tasks)
        return math.ceil(self.prompts_per_step * mean - 1e-9) or self.prompts_per_step * self.group_size

    def problems(self) -> Problems:
        yield from super().problems()
        yield from positive(self, "prompts_per_step", "group_size", "minibatches", "epochs")
        if self.minibatches > self.samples_per_step > 0:
            product = f"{self.prompts_per_step} prompts_per_step × {self.group_size} group_size"
            samples = f"{product} = {self.samples_per_step} samples"
            yield "minibatches", f"{samples} cannot be split into {self.minibatches} minibatches"
        ahead = self.rollout.max_staleness * self.prompts_per_step
        if self.rollout.max_staleness == 0 and (self.rollout.extra_groups or 0) > self.prompts_per_step:
            yield (
                "rollout.extra_groups",
                f"is {self.rollout.extra_groups}, above prompts_per_step, {self.prompts_per_step}: groups given up are "
                "waited for when they come again, so more of them than a batch holds would end no step sooner",
            )
        if self.rollout.max_staleness > 0 and (self.rollout.extra_groups or 0) > ahead:
            yield (
                "rollout.extra_groups",
                f"is {self.rollout.extra_groups}, but {self.rollout.max_staleness} max_staleness × "
                f"{self.prompts_per_step} prompts_per_step = {ahead} groups are the most that may be under way beyond "
                "the next batch, or some would be too old when they are trained",
            )
        if self.reference != ReferenceConfig() and "parallel.expert" not in dict(self.policy.problems()):
            merged = dict(self.reference_workers.problems())
            if "parallel.expert" in merged:  # of its own workers and the policy's sizes, or the other way round
                yield "reference.parallel.expert", merged["parallel.expert"]
        if self.algorithm is not None:
            yield from self._algorithm_problems(self.algorithm)
        yield from self._reward_model_problems()
        for index, task in enumerate(self.tasks):
            budget = self.rollout.sampling.max_tokens
            if (task.sampling.max_tokens or 0) > budget:
                message = f"is {task.sampling.max_tokens}, above `rollout.sampling.max_tokens`, {budget}"
                yield f"tasks.{index}.sampling.max_tokens", f"{message}, which memory and context are planned for"
            if (task.sampling.min_tokens or 0) > (task.sampling.max_tokens or budget):
                message = f"is {task.sampling.min_tokens}, above max_tokens, {task.sampling.max_tokens or budget}"
                yield f"tasks.{index}.sampling.min_tokens", message
            if not task.rewards:
                yield f"tasks.{index}.rewards", f"task `{task.name}` has no reward: nothing would be learned"

    def _reward_model_problems(self) -> Problems:
        kinds = {model.name: model.kind for model in self.reward_models}
        names, asked = [model.name for model in self.reward_models], set[str]()
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"reward_models.{index}.name", f"`{name}` is already the name of another reward model"
        for index, task in enumerate(self.tasks):
            for place, reward in enumerate(task.rewards):
                if "model" in reward.args and "endpoint" not in reward.args:
                    asked.add(str(reward.args["model"]))
                if (name := reward.asks) is None:
                    continue
                at, wanted = f"tasks.{index}.rewards.{place}.args.model", ASKED_KINDS[reward.name]
                meant = did_you_mean(name, names)
                known = f"; there are {', '.join(names)}" if names else "; the recipe names none"
                if name not in kinds:
                    yield at, f"no reward model `{name}`" + (f" (did you mean `{meant}`?)" if meant else known)
                elif kinds[name] != wanted:
                    yield at, f"`{name}` is a {kinds[name]}; `{reward.name}` asks a {wanted}"
        for index, name in enumerate(names):
            if name not in asked and asked <= {*names}:  # a name that was mistyped is told above
                yield f"reward_models.{index}.name", f"no reward asks `{name}`: name it in a reward's `args.model`"

    def _algorithm_problems(self, algorithm: Any) -> Problems:
        methods = (
            "needs",
            "prepare",
            "advantages",
            "loss_weights",
            "loss",
            "keep_group",
            "observe",
            "state",
            "restore",
        )
        if lacking := [name for name in (*methods, "compares_group", "demonstrations") if not hasattr(algorithm, name)]:
            yield "algorithm", f"lacks {', '.join(lacking)}: derive its class from `rollcli.algorithms.base.Algorithm`"
            return
        if algorithm.demonstrations:
            yield "algorithm", f"`{algorithm.name}` learns from demonstrations; it needs `pipeline: sft`"
        sizes = {"group_size": self.group_size} | {
            f"tasks.{index}.group_size": task.group_size for index, task in enumerate(self.tasks) if task.group_size
        }
        if 1 in sizes.values() and algorithm.compares_group():
            place = next(place for place, size in sizes.items() if size == 1)
            message = f"is 1, but `{algorithm.name}` compares the answers of a group"
            yield place, f"{message}: with one answer every advantage is 0 and nothing is learned"
        needs = algorithm.needs()
        if unknown := needs - FORWARD_PASSES:
            yield "algorithm", f"`{algorithm.name}` needs {', '.join(sorted(unknown))}, which there is no role for"
        if "critic" in needs and self.critic.warmup_steps >= self.steps > 0:
            yield "critic.warmup_steps", f"is {self.critic.warmup_steps} of {self.steps} steps: no policy is trained"
        # An algorithm of one's own may well call its penalty so.
        if (penalty := getattr(algorithm, "kl_coefficient", 0)) and "reference" not in needs:
            yield "algorithm", f"`{algorithm.name}` has a KL coefficient, {penalty:g}, but `needs` names no reference"
        yield from algorithm.recipe_problems(self)


@dataclass
class SftRecipe(Recipe):
    """Supervised fine-tuning on demonstrations."""

    algorithm: Any = plugin("algorithms", "sft")
    """The loss."""
    sequences_per_step: int = 64
    """Demonstrations of one optimizer step."""
    loss_on: Literal["answer", "turns"] = "answer"
    """Learn the last answer of each demonstration, or every turn of the model in its chat."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield from positive(self, "sequences_per_step")
        if not getattr(self.algorithm, "demonstrations", True):
            yield "algorithm", f"`{self.algorithm.name}` learns from rewards; it needs `pipeline: rl`"


PIPELINES: dict[str, type[Recipe]] = {"rl": RlRecipe, "sft": SftRecipe}
