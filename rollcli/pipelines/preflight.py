"""What can be found wrong before anything is started: model, template, data, rewards, engines, disk.

Imports no torch and starts no process except, for a dry run, the reward's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from rollcli import registry
from rollcli.config.build import Builder, dotted, in_order
from rollcli.config.load import LoadedRecipe
from rollcli.config.locate import Path as KeyPath
from rollcli.config.locate import located
from rollcli.config.schema import (
    CriticConfig,
    ModelConfig,
    PolicyConfig,
    Recipe,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RlRecipe,
    TaskConfig,
)
from rollcli.data.carriers import Task
from rollcli.data.hub import settle_offline
from rollcli.data.stream import TaskSequence
from rollcli.data.templates import template_text
from rollcli.engines import facts
from rollcli.engines.gguf import ensure_converted
from rollcli.errors import ConfigError, EngineError, ModelNotFound, PluginError
from rollcli.rewards.asking import is_asking
from rollcli.rewards.base import STANDARD_FIELDS, argument_problem, check_signature
from rollcli.runs.locations import resolve_model
from rollcli.suggest import did_you_mean

DISTRIBUTIONS_GIB = 8.0


@dataclass
class DryRun:
    """What a run would do.

    Attributes:
        model: folder or hub id, and what its configuration says.
        batch: lines of batch arithmetic.
        prompt_text: the first problem as the model sees it, special tokens visible.
        prompt_tokens: its length.
        gold_rewards: score of each task's first right answer, by reward.
        plan: placement and memory.
        warnings: what is odd and does not stop a run.
    """

    model: dict[str, Any]
    batch: list[str]
    prompt_text: str
    prompt_tokens: int
    gold_rewards: dict[str, float]
    plan: Any
    warnings: list[str] = field(default_factory=list)


def check(loaded: LoadedRecipe) -> list[Task]:
    """Checks that everything a recipe names is there; returns the first problem of each task.

    Raises:
        RollError: the first thing that is not, with what to do about it.
    """
    try:
        check_models(loaded.recipe)
        if isinstance(loaded.recipe, RlRecipe):
            for index, model in enumerate(loaded.recipe.reward_models):
                _check_reward_model(model, f"reward_models[{index}]")
        return [_check_task(number, loaded) for number in range(len(loaded.recipe.tasks))]
    except (EngineError, PluginError, ModelNotFound, ConfigError) as error:
        if isinstance(error, ConfigError) and any(problem.source for problem in error.problems):
            raise
        raise located(error, loaded.places) from error


def check_models(recipe: Recipe) -> None:
    """Checks that the models are there, and what is passed to their engines.

    Raises:
        RollError: as `check`.
    """
    _check_model(recipe)
    if _has_critic(recipe) and recipe.critic.path is not None:
        _check_critic(recipe.critic.path)
    _check_engines(recipe)
    _check_distributions(recipe)


def dry_run(loaded: LoadedRecipe) -> DryRun:
    """Checks a recipe and shows one rendered prompt, the gold answer's reward, and the plan; writes nothing."""
    from rollcli.devices.facts import model_facts
    from rollcli.devices.hardware import this_machine
    from rollcli.devices.plan import plan
    from rollcli.engines.models import load_chat_formats

    recipe = loaded.recipe
    first = check(loaded)
    chat = load_chat_formats(recipe)[first[0].name]
    ids = chat.prompt(first[0].messages)
    scores, complaints = _gold_rewards(recipe, first, loaded.folder) if isinstance(recipe, RlRecipe) else ({}, [])
    layout = plan(recipe, this_machine(), model_facts(recipe.model))
    return DryRun(
        model={"path": resolve_model(recipe.model.path), **_model_config(recipe)},
        batch=layout.batch,
        prompt_text=chat.raw_text(ids),
        prompt_tokens=len(ids),
        gold_rewards=scores,
        plan=layout,
        warnings=[*warnings(recipe), *complaints],
    )


def _check_model(recipe: Recipe) -> None:
    templates = {task.chat_template or recipe.model.chat_template for task in recipe.tasks}
    _check_files(recipe.model, templates)


def _check_files(model: ModelConfig, templates: set[str | None]) -> None:
    """Checks that a model's folder holds what it must, or that its hub id may be asked for."""
    ensure_converted(model.path)
    path = resolve_model(model.path)
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") != 1 or _missing_offline(model):
            raise ModelNotFound(
                f"no model at `{model.path}`",
                hint="`model.path` is a local folder, a hub id (downloaded before, when offline), `embedded:NAME`, "
                "or `RUN@STEP`",
            )
        return
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise ModelNotFound(f"model folder `{path}` has no tokenizer", hint="put `tokenizer.json` beside `config.json`")
    if model.initialize is None and not _read(folder / "config.json"):
        raise ModelNotFound(f"model folder `{path}` has no `config.json`", hint="give a folder in the hub's layout")
    for template in templates:
        _check_template(template, folder)


def _check_reward_model(config: RewardModelConfig, block: str) -> None:
    """Checks that a reward model is there, that it is what it is taken for, and that its engine can serve it.

    Raises:
        RollError: it is not; the message begins with the recipe's key.
    """
    model = config.model
    try:
        _check_files(model, {model.chat_template})
        values = model.initialize or _read(Path(resolve_model(model.path)) / "config.json")
    except (ConfigError, ModelNotFound) as error:
        raise type(error)(f"`{block}.model`: {error.message}", hint=error.hint) from error
    named = values.get("architectures") or []
    if config.kind == "judge":
        facts.check_installed(config.engine)
        facts.check_options(config.engine, config.engine_args, block)
        facts.check_parallel(config.engine, config.parallel, values, block)
    if model.initialize is None and named and (config.kind == "classifier") != _classifies(named):
        other = "judge" if config.kind == "classifier" else "classifier"
        raise ModelNotFound(
            f"`{block}.model.path`: `{model.path}` is no {config.kind}: its architecture is `{named[0]}`",
            hint=f"set `{block}.kind: {other}`, or give another model; a classifier is a "
            "`…ForSequenceClassification` of transformers",
        )


def _classifies(architectures: list[str]) -> bool:
    return architectures[0].endswith("ForSequenceClassification")


def _check_distributions(recipe: Recipe) -> None:
    """Checks that the reference's whole distributions, where they are wanted, have room in the driver's memory."""
    vocabulary = _model_config(recipe).get("vocab_size")
    if not isinstance(recipe, RlRecipe) or "reference_distribution" not in recipe.algorithm.needs() or not vocabulary:
        return
    tokens = recipe.rollout.sampling.max_tokens
    size = recipe.samples_per_step * tokens * vocabulary * 4 / 2**30
    if size > DISTRIBUTIONS_GIB:
        raise ConfigError(
            f"`algorithm.kl.estimator: full` moves {recipe.samples_per_step} samples × {tokens} tokens × {vocabulary} "
            f"words × 4 bytes = {size:.1f} GiB of the reference's distributions a step; at most {DISTRIBUTIONS_GIB:g} "
            "are allowed",
            hint="use `algorithm.kl.estimator=k3` or `k3+`, which move one number a token, or smaller steps",
        )


def _has_critic(recipe: Recipe) -> bool:
    return isinstance(recipe, RlRecipe) and "critic" in recipe.algorithm.needs()


def _check_critic(name: str) -> None:
    path = resolve_model(name)
    if path.startswith((".", "/", "~")) and not _read(Path(path) / "config.json"):
        raise ModelNotFound(
            f"no critic at `{name}`: no `config.json` there",
            hint="`critic.path` is a folder in the hub's layout, such as a checkpoint's `critic/model`; "
            "without it the critic starts from the policy's model",
        )


def _missing_offline(model: ModelConfig) -> bool:
    """True when the hub may not be asked and the model was never downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if not settle_offline():
        return False
    return not isinstance(try_to_load_from_cache(model.path, "config.json", revision=model.revision), str)


def _check_template(template: str | None, folder: Path) -> None:
    """Checks that the recipe's chat template, or else the model's own, is there."""
    if template is not None:
        template_text(template)
    elif not _read(folder / "tokenizer_config.json").get("chat_template"):
        if not (folder / "chat_template.jinja").is_file():
            raise ConfigError(
                f"the tokenizer of `{folder}` has no chat template",
                hint="set `model.chat_template` to a Jinja file, or to `plain` for a base model",
            )


def _read(file: Path) -> dict[str, Any]:
    """Returns a model folder's JSON file; one that is not there says nothing."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except (ValueError, TypeError) as error:
        raise ModelNotFound(f"`{file}` is not a JSON object: {error}", hint="copy the model's folder anew") from error


def _model_config(recipe: Recipe) -> dict[str, Any]:
    config = _read(Path(resolve_model(recipe.model.path)) / "config.json")
    keys = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    # A vision-language model says the sizes of its text part in a block of their own.
    config = {**config.get("text_config", {}), **config}
    return {key: config[key] for key in keys if key in config}


def _check_engines(recipe: Recipe) -> None:
    """Checks that engines are installed, take the options passed to them, and can spread and adapt the model."""
    model = recipe.model.initialize or _read(Path(resolve_model(recipe.model.path)) / "config.json")
    chosen: dict[str, PolicyConfig] = {"policy": recipe.policy}
    if _has_critic(recipe):
        chosen["critic"] = recipe.critic
    if isinstance(recipe, RlRecipe) and recipe.reference != ReferenceConfig():
        chosen["reference"] = recipe.reference_workers
    for block, config in chosen.items():
        facts.check_installed(config.engine)
        facts.check_options(config.engine, config.engine_args, block)
        path = config.path if isinstance(config, CriticConfig) else None
        own = _read(Path(resolve_model(path)) / "config.json") if path is not None else model
        facts.check_abilities(config.engine, config, own, block)
    if isinstance(recipe, RlRecipe):
        rollout = recipe.rollout
        facts.check_installed(rollout.engine)
        facts.check_options(rollout.engine, rollout.engine_args, "rollout")
        facts.check_parallel(rollout.engine, rollout.parallel, model, "rollout")


def warnings(recipe: Recipe) -> list[str]:
    """Returns what is odd about a recipe and does not stop a run."""
    if not isinstance(recipe, RlRecipe):
        return []
    found = []
    sampling = recipe.rollout.sampling
    if sampling.top_p < 1 or sampling.top_k > 0:
        found.append(
            "top_p and top_k narrow what is sampled, but log-probabilities and training are of the whole distribution: "
            "the update is slightly off-policy; `top_p: 1` and `top_k: 0` are exact"
        )
    if recipe.critic != CriticConfig() and not _has_critic(recipe):
        found.append(f"the block `critic` changes nothing: `{recipe.algorithm.name}` has no critic")
    return found


def _check_environment(task: TaskConfig) -> None:
    """Checks that a task's environment is one."""
    needed = ("play", "close") if hasattr(task.environment, "play") else ("reset", "step", "close")
    missing = [name for name in needed if not callable(getattr(task.environment, name, None))]
    if missing:
        raise PluginError(
            f"environment `{task.environment.name}` of task `{task.name}` lacks {', '.join(f'`{m}`' for m in missing)}",
            hint="an environment has the asynchronous methods reset, step and close, or play and close",
        )


def _check_task(number: int, loaded: LoadedRecipe) -> Task:
    """Opens both splits a run reads, and has every reward's arguments checked against the first problem."""
    recipe = loaded.recipe
    task = recipe.tasks[number]
    first = TaskSequence(task, "train", recipe.seed)[0]
    if not isinstance(recipe, RlRecipe):
        if "response" not in first.payload:
            raise ConfigError(
                f"task `{task.name}` has no demonstrations to learn from",
                hint="name the column with `source.response`, or use a source that demonstrates",
            )
        return first
    TaskSequence(task, "test", recipe.seed)
    _check_environment(task)
    for place, reward in enumerate(task.rewards):
        known = {*STANDARD_FIELDS, *first.payload, *(["turn"] if reward.per_turn else [])}
        _check_reward(reward, ("tasks", number, "rewards", place, "args"), known, loaded)
    return first


def _check_reward(reward: RewardConfig, at: KeyPath, fields: set[str], loaded: LoadedRecipe) -> None:
    """Checks a reward's options, and that a sample of the task, whose fields these are, answers what it asks for."""
    target = registry.resolve("rewards", reward.name, loaded.folder)
    if not is_asking(target):
        if wrong := argument_problem(target, reward.args):
            raise PluginError(f"`{dotted((*at, wrong[0]))}`: {wrong[1]}")
        check_signature(target, {*fields, *reward.args})
        return
    if ":" in reward.name or not is_dataclass(target):
        raise PluginError(
            f"reward `{reward.name}` asks a model, for which it must be a dataclass with a registered name",
            hint="offer it by an entry point `rollcli.rewards`, or write a function that asks",
        )
    builder = Builder(loaded.places, loaded.folder)
    made = builder.dataclass(target, reward.args, at)
    if builder.found:
        raise ConfigError(in_order(builder.found))
    if lacking := next((name for name in made.wants() if name not in fields), None):
        meant = did_you_mean(lacking, sorted(fields))
        raise PluginError(
            f"`{dotted(at)}`: reward `{reward.title}` asks for `{lacking}`, which no sample has"
            + (f" (did you mean `{meant}`?)" if meant else f"; fields: {', '.join(sorted(fields))}"),
            hint="add the column to the task, or choose another template",
        )


def _gold_rewards(recipe: RlRecipe, first: list[Task], folder: Path | None) -> tuple[dict[str, float], list[str]]:
    """Scores each task's right answer as if the model had given it; returns the scores and what is wrong with any."""
    from rollcli.rewards.isolation import IsolatedCaller, RewardFailure

    scores, complaints = {}, []
    with IsolatedCaller() as caller:
        for task, problem in zip(recipe.tasks, first, strict=True):
            answer = problem.payload.get("answer")
            accepted = answer[0] if isinstance(answer, list) and answer else answer  # one of several will do
            gold = str(accepted or problem.payload.get("response", ""))
            fields = {**problem.payload, "prompt": "", "response": gold, "messages": problem.messages, "turn": 0}
            for reward in task.rewards:
                if is_asking(registry.resolve("rewards", reward.name, folder)):
                    continue  # the model it asks is not started
                given = {**fields, **reward.args}
                result = caller.call(registry.absolute(reward.name, folder), given, reward.timeout_s)
                failed = isinstance(result, RewardFailure)
                scores[f"{task.name}/{reward.title}"] = float("nan") if failed else result.score
                if failed:
                    complaints.append(f"the right answer cannot be scored: {result.message}")
    return scores, complaints
