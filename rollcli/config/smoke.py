"""`--smoke`: any recipe made so small that a laptop runs all its parts in a minute.

    what the recipe says < what is here < the recipe's own `smoke:` block < overrides

The model becomes a random one of a few thousand weights, the engines the built-in ones; sizes shrink, and parts (roles,
environments, rewards, the algorithm and its options) stay. What shrinking by rule cannot do, such as other data, the
recipe's `smoke:` block says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MODEL = {
    "model_type": "llama", "vocab_size": 102, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 5, "pad_token_id": 0,
}  # fmt: skip
"""A random model for the tokenizer of `embedded:sums`; heads of 32 suit every engine."""
MOST = {
    "steps": 2, "prompts_per_step": 2, "group_size": 2, "minibatches": 2, "epochs": 1, "sequences_per_step": 4,
    "rollout.sampling.max_tokens": 32, "rollout.environment_workers": 1, "rollout.reward_workers": 1,
    "rollout.max_rows": 16, "evaluation.problems_per_task": 2, "evaluation.samples": 1, "evaluation.max_tokens": 32,
    "rollout.sampling.min_tokens": 0, "policy.micro_batch_tokens": 8192, "critic.micro_batch_tokens": 8192,
    "critic.warmup_steps": 0, "policy.lora.rank": 2,
}  # fmt: skip
"""Upper bounds; what is smaller stays."""
ONE_PROCESS = ("policy", "critic", "reference", "rollout")


def smoke_overrides(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields keys and values that shrink a recipe of plain `values`, its own `smoke:` block last."""
    yield "model", {"path": "embedded:sums", "initialize": MODEL}
    for key, most in MOST.items():
        found = _at(values, key)
        if isinstance(found, (int, float)) and not isinstance(found, bool) and found > most:
            yield key, most
    supervised = values.get("pipeline") == "sft"
    for key in () if supervised else ("prompts_per_step", "group_size", "rollout.sampling.max_tokens"):
        if _at(values, key) is None:  # the schema's default is larger
            yield key, MOST[key]
    if supervised and _at(values, "sequences_per_step") is None:
        yield "sequences_per_step", MOST["sequences_per_step"]
    for role in ONE_PROCESS:
        block = values.get(role)
        if not isinstance(block, Mapping):
            continue
        workers = "replicas" if role == "rollout" else "workers"
        for key, value in ((workers, 1), ("parallel", {}), ("engine_args", {}), ("threads", None)):
            if key in block:
                yield f"{role}.{key}", value
        if "engine" in block:
            yield f"{role}.engine", "transformers" if role == "rollout" else "fsdp"
    if not supervised:
        yield "rollout.max_prompt_tokens", None
        yield "evaluation.every", 1
        if _at(values, "evaluation.problems_per_task") is None:
            yield "evaluation.problems_per_task", MOST["evaluation.problems_per_task"]
    yield "placement", "auto"
    yield "checkpoints.every", 1
    for place, task in enumerate(values.get("tasks") or ()):
        for key in ("group_size", "reward_workers", "sampling", "evaluation"):
            if isinstance(task, Mapping) and key in task:
                yield f"tasks[{place}].{key}", {} if key in ("sampling", "evaluation") else None
    yield from _reward_models(values)
    own = values.get("smoke")
    yield from own.items() if isinstance(own, Mapping) else ()


def _reward_models(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Makes reward models small and random, too; what such a judge writes is no verdict, which then scores 0."""
    for place, model in enumerate(values.get("reward_models") or ()):
        if not isinstance(model, Mapping):
            continue
        classifies = model.get("kind") == "classifier"
        small = {**MODEL, "num_labels": 1} if classifies else MODEL
        yield f"reward_models[{place}].model", {"path": "embedded:sums", "initialize": small}
        for key, value in (("engine", "transformers"), ("replicas", 1), ("parallel", {}), ("engine_args", {})):
            if key in model:
                yield f"reward_models[{place}].{key}", value
    for number, task in enumerate(values.get("tasks") or ()):
        for place, reward in enumerate((task.get("rewards") or ()) if isinstance(task, Mapping) else ()):
            if isinstance(reward, Mapping) and reward.get("name") in ("judge", "reward_model"):
                yield f"tasks[{number}].rewards[{place}].on_error", "zero"
                if reward["name"] == "judge":
                    yield f"tasks[{number}].rewards[{place}].args.max_tokens", MOST["rollout.sampling.max_tokens"]


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
