"""Whether a model can be cut into the parts that a recipe asks for; pure arithmetic on `config.json`.

It imports no engine, so a recipe is refused before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollcli.config.schema import ParallelConfig
from rollcli.errors import EngineError


def parallel_problems(
    model: Mapping[str, Any], parallel: ParallelConfig, vocabulary: bool = False, context_heads: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields `(field of parallel, message)` for every size that does not divide what it would cut.

    Args:
        model: the hub's configuration (`config.json`, or `model.config.to_dict()`).
        parallel: how one copy is spread.
        vocabulary: the engine does not pad the vocabulary, so that it must be divisible too.
        context_heads: in attention, each process that shares a sequence has whole rows of some of the heads.
    """
    heads = model.get("num_attention_heads")
    experts = number_of_experts(model)
    tensor = {
        "attention heads": heads,
        "key and value heads": model.get("num_key_value_heads") or heads,
        "inner channels (intermediate_size)": model.get("intermediate_size") if dense(model) else None,
        "words of the vocabulary": model.get("vocab_size") if vocabulary else None,
    }
    if experts and parallel.expert == 1:  # with expert parallelism experts stay whole
        tensor["inner channels of an expert"] = model.get("moe_intermediate_size") or model.get("intermediate_size")
    for what, count in tensor.items():
        yield from _problem("tensor", parallel.tensor, count, what)
    if context_heads and parallel.context > 1:
        for what in ("attention heads", "key and value heads"):
            # Where tensor parallelism does not divide them, that is said above.
            if tensor[what] and tensor[what] % parallel.tensor == 0:
                left = f"{what} of a process" if parallel.tensor > 1 else what
                yield from _problem("context", parallel.context, tensor[what] // parallel.tensor, left)
    yield from _problem("pipeline", parallel.pipeline, model.get("num_hidden_layers"), "layers")
    if parallel.expert > 1 and not experts:
        yield "expert", f"is {parallel.expert}, but a `{model.get('model_type')}` model has no experts"
    yield from _problem("expert", parallel.expert, experts, "experts")


def check_parallel_sizes(
    model: Mapping[str, Any],
    parallel: ParallelConfig,
    engine: str,
    vocabulary: bool = False,
    context_heads: bool = False,
) -> None:
    """Refuses sizes that do not divide the model.

    Raises:
        EngineError: with the arithmetic of every size that does not fit.
    """
    found = parallel_problems(model, parallel, vocabulary, context_heads)
    problems = [f"`parallel.{field}` {message}" for field, message in found]
    if problems:
        raise EngineError(
            f"the engine `{engine}` cannot spread this model: {'; '.join(problems)}",
            hint="choose sizes that divide evenly; 1 always does",
        )


def number_of_experts(model: Mapping[str, Any]) -> int | None:
    """Returns how many experts a mixture's layers have; None for a dense model."""
    return model.get("num_local_experts") or model.get("num_experts")


def dense(model: Mapping[str, Any]) -> bool:
    """Whether some layer has a dense block of `intermediate_size`."""
    return not number_of_experts(model) or "moe_intermediate_size" not in model


def _problem(field: str, size: int, count: int | None, what: str) -> Iterator[tuple[str, str]]:
    if size > 1 and count and count % size:
        yield (
            field,
            f"is {size}, which does not divide {count} {what} ({count} = {count // size} × {size} + "
            + (f"{count % size})"),
        )
