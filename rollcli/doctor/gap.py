"""How far the rollout engine's log-probabilities are from the trainer's, measured on a recipe's own problems.

    recipe's prompts ──rollout engine──▶ answers, their log-probabilities ─┐
                               the same token ids ──training engine──▶ theirs ─┴─▶ Gap

Both engines run in this process, one after the other, without Ray; as in a run, the trainer's weights are handed to
the rollout engine first. Engines are known by the protocols of `engines/base.py` alone.

**What is too much.** Two correct float32 engines differ in the order of additions only: `transformers` against `fsdp`,
16 answers on a CPU, mean 2e-8 and max 9e-7 with `embedded:sums` (0.5M parameters), 3e-6 and 2e-5 with `smollm2` (135M).
In bfloat16 it depends on the model: 4e-4 and 4e-2 with the one, 5e-2 and 3e-1 with the other. So the limit there is
measured as well: what bfloat16 changes in the trainer itself (5e-4 and 2e-2, 4e-2 and 2e-1), times a factor.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcli import registry
from rollcli.config.find import find_recipe, recipe_files
from rollcli.config.load import LoadedRecipe, load_recipe
from rollcli.config.schema import PolicyConfig, Recipe, RlRecipe, RolloutConfig
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task, Trajectory
from rollcli.data.sources.base import Problem, Split
from rollcli.data.stream import TaskStream, derive_seed
from rollcli.data.templates import ChatFormat
from rollcli.devices.hardware import available_cores
from rollcli.engines.base import Completion, GenerateRequest, InferEngine, SamplingParams, TrainEngine
from rollcli.errors import EngineError, RunNotFound
from rollcli.pipelines import metrics, preflight
from rollcli.runs.listing import find_run

if TYPE_CHECKING:
    import torch

BARE_MODEL = Path(__file__).with_name("model.yaml")
BFLOAT16_MEAN, BFLOAT16_MAX = 3.0, 4.0
"""A gap in bfloat16 may be this many times what bfloat16 changes in the trainer; two engines err independently."""


@dataclass(frozen=True)
class Limit:
    """The largest mean and the largest single difference that `why` explains."""

    mean: float
    max: float
    why: str


FLOAT32 = Limit(1e-4, 1e-2, "float32 rounding")


@dataclass(frozen=True)
class Gap:
    """Differences of log-probabilities, trainer minus rollout, summed up as training logs them.

    Attributes:
        mean: of the absolute differences.
        max: of the absolute differences.
        kl: KL(rollout ‖ trainer) estimated by k3.
        effective_samples: effective sample size of importance weights, as a share.
        tokens: how many were compared.
    """

    mean: float
    max: float
    kl: float
    effective_samples: float
    tokens: int

    @classmethod
    def between(cls, trainer: np.ndarray, rollout: np.ndarray) -> Gap:
        """Returns the gap of two columns `[N]`."""
        count = len(trainer)
        columns = {
            "loss_mask": np.ones(count, bool), "versions": np.zeros(count, np.int32),
            "updated_policy": trainer, "rollout_logprobs": rollout,
        }  # fmt: skip
        found = metrics.of_gap([Batch(np.array([0, count]), columns)], 0, None)
        if not found:
            raise EngineError("no token was sampled, so there is nothing to compare")
        names = ("rollout_gap_mean", "rollout_gap_max", "rollout_kl", "rollout_ess")
        return cls(*(found[name] for name in names), tokens=count)

    def within(self, limit: Limit) -> bool:
        """Returns whether the limit's reason explains it; NaN is never explained."""
        return self.mean <= limit.mean and self.max <= limit.max


@dataclass
class Chats:
    """A few chats to ask a model that no recipe goes with."""

    questions: tuple[str, ...] = (
        "What is 17 + 25?",
        "Name three colors of the rainbow.",
        "Write one sentence about the sea.",
        "12 * 3 - 4",
        "Translate `good morning` into French.",
        "Why is the sky blue?",
        "List the prime numbers below 20.",
        "Finish the sentence: once upon a time",
    )
    """What is asked, again from the start when there is more to ask."""

    def open(self, split: Split, seed: int) -> Chats:
        """Returns itself: the same questions whatever the split."""
        return self

    @property
    def fingerprint(self) -> str:
        """Never changes."""
        return "chats"

    @property
    def size(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def __getitem__(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": self.questions[index]}], {"answer": ""})


def load_subject(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Returns the recipe to measure by: the one named, that of a run (`RUN`, `RUN@STEP`), or one made for a model.

    Raises:
        RollError: there is nothing of that name, or it does not validate.
    """
    if Path(name).suffix in (".yaml", ".yml") or name in recipe_files():
        return load_recipe(name, overrides)
    try:
        run = find_run(name.rpartition("@")[0] or name)
    except RunNotFound:
        if ":" not in name and "/" not in name and "@" not in name and not Path(name).expanduser().is_dir():
            find_recipe(name)  # not there either, and its error says what is
        loaded = load_recipe(str(BARE_MODEL), [f"model.path={name}", *overrides])
    else:
        _, at, step = name.rpartition("@")
        path = f"{run.id}{at}{step}" if at else run.id
        path = name if Path(name).expanduser().is_dir() else path
        loaded = load_recipe(str(run.config), [f"model.path={path}", *overrides])
    loaded.name = name
    return loaded


@dataclass
class Bench:
    """A recipe's engines in this process: each measurement opens what it needs and lets go of it.

    Attributes:
        recipe: what is measured.
        folder: where its plug-in files are looked for.
        device: where the engines run.
        chat: tokenizer and template.
        requests: what the rollout engine is asked, in order.
        skipped: why requests took no part, if any.
    """

    recipe: Recipe
    folder: Path | None
    device: torch.device
    chat: ChatFormat
    requests: list[GenerateRequest]
    skipped: list[str] = field(default_factory=list)

    @property
    def rollout(self) -> RolloutConfig:
        """The recipe's rollout block; the default one for a pipeline that samples nothing."""
        return self.recipe.rollout if isinstance(self.recipe, RlRecipe) else RolloutConfig()

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.rollout.sampling.temperature

    @property
    def precision(self) -> str:
        """Precision of the forward passes: `float32` or `bfloat16`."""
        from rollcli.engines.loading import torch_dtype

        return str(torch_dtype(self.recipe.model.dtype, self.device)).removeprefix("torch.")

    def open_rollout(self, dtype: str | None = None) -> InferEngine:
        """Returns the recipe's rollout engine, its weights read from the model's folder."""
        rollout = self.rollout
        engine = registry.resolve("infer_engines", rollout.engine, self.folder)
        return engine.load(
            dataclasses.replace(self.recipe.model, dtype=dtype or self.recipe.model.dtype), device=self.device,
            seed=self.recipe.seed, max_rows=rollout.max_rows, parallel=rollout.parallel, **rollout.engine_args,
        )  # fmt: skip

    def open_trainer(
        self, dtype: str | None = None, attention: str | None = None, packing: bool | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> TrainEngine:  # fmt: skip
        """Returns the recipe's training engine without an optimizer; what is given replaces what the recipe says."""
        from rollcli.engines import naming
        from rollcli.engines.models import load_policy

        config: PolicyConfig = self.recipe.policy
        engine = registry.resolve("train_engines", config.engine, self.folder)
        asked = dataclasses.replace(self.recipe.model, attention=attention or self.recipe.model.attention)
        model = load_policy(asked, self.device, self.recipe.seed, training=True)
        if weights is not None:
            model.load_state_dict(naming.from_hub(model, dict(weights)), strict=False)
        policy = config if packing is None else dataclasses.replace(config, packing=packing)
        return engine(model, policy, frozen=True, dtype=dtype or asked.dtype, **config.engine_args)

    def sample(self, engine: InferEngine, one_by_one: bool = False) -> tuple[list[GenerateRequest], list[Completion]]:
        """Samples the answers; returns the requests that were answered, and their completions in the same order.

        Raises:
            EngineError: none was answered.
        """
        done: dict[str, Completion] = {}
        for part in [[request] for request in self.requests] if one_by_one else [self.requests]:
            engine.add(part)
            while engine.pending:
                done |= {completion.id: completion for completion in engine.step()}
        answered = [r for r in self.requests if r.id in done and len(done[r.id].tokens) and done[r.id].error is None]
        self.skipped = [
            done[r.id].error or "nothing was sampled" if r.id in done else "the engine never answered"
            for r in self.requests
            if r not in answered
        ]
        if not answered:
            raise EngineError(
                f"the rollout engine `{self.rollout.engine}` answered none of {len(self.requests)} requests: "
                f"{self.skipped[0]}",
                hint="try fewer tokens, for example `--max-tokens 8`",
            )
        return answered, [done[request.id] for request in answered]

    def score(self, trainer: TrainEngine, batch: Batch) -> np.ndarray:
        """Returns the trainer's log-probability of each sampled token, float32 `[N]`."""
        from rollcli.engines.objectives import LogProbs

        return trainer.forward(batch, LogProbs(self.temperature))[batch.tokens["loss_mask"]]


@dataclass
class Measurement:
    """One comparison of a rollout engine with a trainer.

    Attributes:
        bench: how it was made, and how to make another.
        engine: the rollout engine.
        trainer: the training engine.
        prompts: of the answers, int32 `[P_i]` each.
        completions: the answers.
        batch: both, as one batch.
        logprobs: the trainer's, float32 `[N]`.
        gap: how far they are apart.
        limit: what precision explains.
    """

    bench: Bench
    engine: InferEngine
    trainer: TrainEngine
    prompts: list[np.ndarray]
    completions: list[Completion]
    batch: Batch
    logprobs: np.ndarray
    gap: Gap
    limit: Limit = FLOAT32

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """The rollout engine's, float32 `[N]`."""
        return self.batch.tokens["rollout_logprobs"][self.batch.tokens["loss_mask"]]

    @property
    def explained(self) -> bool:
        """Whether precision explains the gap."""
        return self.gap.within(self.limit)

    @property
    def answers(self) -> np.ndarray:
        """Which answer each sampled token belongs to, int64 `[N]`."""
        return self.batch.rows[self.batch.tokens["loss_mask"]]

    def rescored(self, trainer: TrainEngine, prompts: Sequence[np.ndarray] | None = None) -> Gap:
        """Returns the gap of the same answers to another trainer, or after other prompts."""
        batch = self.batch if prompts is None else to_batch(prompts, self.completions)
        return Gap.between(self.bench.score(trainer, batch), self.rollout_logprobs)

    def resampled(self, engine: InferEngine, one_by_one: bool = False) -> Gap:
        """Returns the gap of answers that another rollout engine samples to the same requests."""
        return compare(self.bench, engine, self.trainer, one_by_one).gap

    def largest(self) -> dict[str, Any]:
        """Returns the token with the largest difference: where it stands, what it is, and both log-probabilities."""
        place = int(np.argmax(np.abs(self.logprobs - self.rollout_logprobs)))
        answer = int(self.answers[place])
        token = int(self.batch.tokens["ids"][self.batch.tokens["loss_mask"]][place])
        return {
            "answer": answer,
            "position": place - int(np.flatnonzero(self.answers == answer)[0]),
            "token": token,
            "text": self.bench.chat.raw_text(np.array([token])),
            "rollout": float(self.rollout_logprobs[place]),
            "trainer": float(self.logprobs[place]),
        }


def compare(bench: Bench, engine: InferEngine, trainer: TrainEngine, one_by_one: bool = False) -> Measurement:
    """Samples with one engine and scores with the other."""
    requests, completions = bench.sample(engine, one_by_one)
    prompts = [request.prompt for request in requests]
    batch = to_batch(prompts, completions)
    logprobs = bench.score(trainer, batch)
    rollout = batch.tokens["rollout_logprobs"][batch.tokens["loss_mask"]]
    return Measurement(bench, engine, trainer, prompts, completions, batch, logprobs, Gap.between(logprobs, rollout))


def to_batch(prompts: Sequence[np.ndarray], completions: Sequence[Completion]) -> Batch:
    """Returns prompts and answers as the batch that training would make of them."""
    groups = []
    for number, (prompt, answer) in enumerate(zip(prompts, completions, strict=True)):
        before = len(prompt)
        trajectory = Trajectory(
            task_id=str(number),
            sample=0,
            tokens=np.concatenate([prompt, answer.tokens]).astype(np.int32),
            loss_mask=np.arange(before + len(answer.tokens)) >= before,
            logprobs=np.concatenate([np.zeros(before, np.float32), answer.logprobs]),
            versions=np.concatenate([np.full(before, -1, np.int32), answer.versions]),
            stop_reason=answer.stop_reason or "",
        )
        groups.append(Group(Task("doctor", number, []), [trajectory]))
    return Batch.from_groups(groups)


@contextmanager
def bench_of(loaded: LoadedRecipe, samples: int, max_tokens: int) -> Iterator[Bench]:
    """Prepares what a measurement needs: prompts as token ids, a process group of one, the machine's threads.

    Raises:
        RollError: the model, the data or an engine is not there.
    """
    preflight.check(loaded)
    import torch
    import torch.distributed as dist

    from rollcli.engines.models import load_chat_format

    recipe = loaded.recipe
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    chat = load_chat_format(recipe.model)
    bench = Bench(recipe, loaded.folder, device, chat, [])
    sampling = bench.rollout.sampling
    params = SamplingParams(
        max_tokens=min(max_tokens, sampling.max_tokens), temperature=sampling.temperature, top_p=sampling.top_p,
        top_k=sampling.top_k, stop_token_ids=chat.stop_token_ids,
    )  # fmt: skip
    bench.requests = [
        GenerateRequest(f"answer {number}", chat.prompt(messages), derive_seed(recipe.seed, "doctor", number), params)
        for number, messages in enumerate(_chats(recipe, samples))
    ]
    threads = torch.get_num_threads()
    ours = not dist.is_initialized()
    torch.set_num_threads(recipe.policy.threads or available_cores())
    if ours:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield bench
    finally:
        if ours:
            dist.destroy_process_group()
        torch.set_num_threads(threads)


def _chats(recipe: Recipe, count: int) -> list[list[dict[str, str]]]:
    """Returns the chats that open the recipe's first training episodes."""
    stream = TaskStream(recipe.tasks, recipe.seed)
    environments = {task.name: task.environment for task in recipe.tasks}

    async def opened() -> list[list[dict[str, str]]]:
        found = []
        for task in (stream.draw() for _ in range(count)):
            environment = dataclasses.replace(environments[task.name])
            found.append(await environment.reset(task))
            await environment.close()
        return found

    return asyncio.run(opened())


def measure(bench: Bench, progress: Callable[[str], None] = lambda stage: None) -> Measurement:
    """Measures a recipe's gap as a run would have it in its first step."""
    progress(f"loading the trainer ({bench.recipe.policy.engine})")
    trainer = bench.open_trainer()
    progress(f"loading the rollout engine ({bench.rollout.engine})")
    engine = bench.open_rollout()
    engine.load_weights(trainer.named_weights(), 0)
    progress(f"sampling {len(bench.requests)} answers, scoring them again")
    found = compare(bench, engine, trainer)
    if bench.precision == "bfloat16":
        progress("measuring what bfloat16 costs this model")
        exact = bench.score(bench.open_trainer(dtype="float32"), found.batch)
        found.limit = bfloat16_limit(Gap.between(exact, found.logprobs))
    return found


def bfloat16_limit(cost: Gap) -> Limit:
    """Returns how large a gap bfloat16 explains with a model in whose trainer it changes this much."""
    mean, most = max(BFLOAT16_MEAN * cost.mean, FLOAT32.mean), max(BFLOAT16_MAX * cost.max, FLOAT32.max)
    return Limit(mean, most, "bfloat16 rounding, as measured with this model")
