"""Why trainer and rollout engine disagree: each suspicion is tested by measuring again as if it were true.

A cause is one small function that yields `Trial`s: what was assumed, and the gap that remained. They run from the
cheap to the dear; the first whose assumption brings the gap within what precision explains is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcli.doctor.gap import BFLOAT16_MEAN, Gap, Measurement, bfloat16_limit, compare

if TYPE_CHECKING:
    import torch

PARTLY = 0.2
"""A trial that leaves less than this share of the mean gap is the likely cause, though not all of it."""
TEMPERATURES = tuple(round(0.05 * step, 2) for step in range(2, 41))
USUAL_TOP_K = (5, 10, 20, 40, 50, 64, 100)
USUAL_TOP_P = (0.8, 0.9, 0.95, 0.99)
SPECIAL_TOKENS = 8


@dataclass(frozen=True)
class Trial:
    """One assumption and the gap under it.

    Attributes:
        cause: one or two words.
        assumed: what was changed for the trial.
        gap: what remained.
        finding: the cause in a sentence, should the trial explain the gap.
        advice: what to do then.
        explains: the trial explains the gap by more than the gap that remained: precision.
    """

    cause: str
    assumed: str
    gap: Gap
    finding: str
    advice: str
    explains: bool = False


@dataclass
class Diagnosis:
    """What was tried, and the trial that explains the gap: wholly, in part, or None."""

    trials: list[Trial] = field(default_factory=list)
    cause: Trial | None = None
    whole: bool = False


Cause = Callable[[Measurement], Iterator[Trial]]


def diagnose(found: Measurement, progress: Callable[[str], None] = lambda stage: None) -> Diagnosis:
    """Tests one suspicion after another until one explains the gap."""
    result = Diagnosis()
    for name, cause in CAUSES.items():
        progress(f"testing: {name}")
        trials = sorted(cause(found), key=_remaining)
        result.trials += trials[:1]
        if trials and (trials[0].explains or trials[0].gap.within(found.limit)):
            result.cause, result.whole = trials[0], True
            return result
    best = min(result.trials, key=_remaining, default=None)
    if best is not None and best.gap.mean <= PARTLY * found.gap.mean:
        result.cause = best
    return result


def _remaining(trial: Trial) -> tuple[bool, float]:
    """Returns what trials are ordered by; a gap that is NaN comes last."""
    return not trial.explains, trial.gap.mean if trial.gap.mean == trial.gap.mean else float("inf")


def order(found: Measurement) -> Iterator[Trial]:
    """The engine gives a token the log-probability of its neighbor, or an answer those of another answer."""
    ours, theirs, answers = found.logprobs, found.rollout_logprobs, found.answers
    same = answers[1:] == answers[:-1]
    advice = "correct the engine: `Completion.logprobs[i]` is of `Completion.tokens[i]`"
    if same.any():
        for name, trainer, rollout in (("previous", ours[:-1], theirs[1:]), ("next", ours[1:], theirs[:-1])):
            yield Trial(
                "order",
                f"each log-probability taken for the {name} token",
                Gap.between(trainer[same], rollout[same]),
                f"the engine's log-probabilities are shifted by one: each is that of the {name} token",
                advice,
            )
    rows = [np.flatnonzero(answers == answer) for answer in np.unique(answers)]
    nearest = [
        min((o for o in rows if len(o) == len(row)), key=lambda o: _distance(ours[row], theirs[o])) for row in rows
    ]
    if any(row[0] != other[0] for row, other in zip(rows, nearest, strict=True)):
        yield Trial(
            "order",
            "each answer compared with the answer that fits best",
            Gap.between(ours, theirs[np.concatenate(nearest)]),
            "the engine's log-probabilities belong to other answers than the tokens they came with",
            advice,
        )


def _distance(trainer: np.ndarray, rollout: np.ndarray) -> float:
    return float(np.abs(trainer - rollout).mean())


def sampling_settings(found: Measurement) -> Iterator[Trial]:
    """The engine reports log-probabilities of another distribution than `after temperature, before top-p and top-k`."""
    import torch

    from rollcli.engines.objectives import Distribution

    temperature = found.bench.temperature
    assumed = _settings(found)
    parts: dict[tuple[float, int, float], list[np.ndarray]] = {setting: [] for setting in assumed}
    for row in range(len(found.batch)):
        # One answer at a time: a distribution over a large vocabulary at every token of a batch would not fit.
        one = found.batch.select(np.array([row]))
        mask = one.tokens["loss_mask"]
        distribution = torch.from_numpy(found.trainer.forward(one, Distribution(1.0))[mask])
        tokens = torch.from_numpy(one.tokens["ids"][mask].astype(np.int64))
        for setting, part in parts.items():
            part.append(processed(distribution, tokens, *setting).numpy())
    for (at, top_k, top_p), part in parts.items():
        gap = Gap.between(np.concatenate(part), found.rollout_logprobs)
        kept = " and ".join([*([f"top-k {top_k}"] if top_k else []), *([f"top-p {top_p:g}"] if top_p < 1 else [])])
        if kept:
            yield Trial(
                "processed log-probabilities",
                f"rescored at temperature {at:g}, renormalized over {kept}",
                gap,
                f"the engine reports log-probabilities after {kept}, not of the whole distribution",
                "have the engine report them before top-p and top-k, or set `rollout.sampling.top_p=1` and "
                "`rollout.sampling.top_k=0`; an engine may take its own from the model's generation_config.json",
            )
        else:
            raw = " (raw log-probabilities)" if at == 1 else ""
            yield Trial(
                "temperature",
                f"rescored at temperature {at:g}",
                gap,
                f"the engine reports log-probabilities at temperature {at:g}{raw}, and was asked for {temperature:g}",
                "have the engine report them after temperature (vLLM: `logprobs_mode=processed_logprobs`), or sample "
                f"at {at:g}: `rollout.sampling.temperature={at:g}`",
            )


def _settings(found: Measurement) -> list[tuple[float, int, float]]:
    """Returns the (temperature, top-k, top-p) to try beside the one that was asked for."""
    sampling, generation = found.bench.rollout.sampling, _generation_settings(found)
    temperature = sampling.temperature
    hot = [1.0, temperature**2, 1 / temperature, generation.get("temperature") or 1.0, *TEMPERATURES]
    tried = [(each, 0, 1.0) for each in hot]
    top_k, top_p = generation.get("top_k") or 0, generation.get("top_p") or 1.0
    kept = [(sampling.top_k, sampling.top_p), (sampling.top_k, 1.0), (0, sampling.top_p), (top_k, top_p), (top_k, 1.0)]
    kept += [(0, top_p), *((k, 1.0) for k in USUAL_TOP_K), *((0, p) for p in USUAL_TOP_P)]
    tried += [(at, *each) for each in kept for at in (temperature, 1.0)]
    return [each for each in dict.fromkeys(tried) if each != (temperature, 0, 1.0)]


def _generation_settings(found: Measurement) -> dict[str, Any]:
    """Returns the model's own generation settings, which some engines take without being asked."""
    from transformers import GenerationConfig

    from rollcli.runs.locations import resolve_model

    model = found.bench.recipe.model
    try:
        config = GenerationConfig.from_pretrained(resolve_model(model.path), revision=model.revision)
    except OSError:
        return {}
    return {name: getattr(config, name, None) for name in ("temperature", "top_k", "top_p")}


def processed(
    distribution: torch.Tensor, tokens: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Returns log-probabilities `[N]` of tokens under log-probabilities `[N, V]` after temperature, top-k and top-p.

    A token that top-k or top-p leaves out has minus infinity.
    """
    import torch

    logprobs = (distribution / temperature).log_softmax(-1)
    if top_k or top_p < 1:
        ordered, places = logprobs.sort(dim=-1, descending=True, stable=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        dropped = before >= top_p
        if top_k:
            dropped[:, top_k:] = True
        dropped[:, 0] = False
        logprobs = logprobs.masked_fill(torch.zeros_like(dropped).scatter_(-1, places, dropped), -torch.inf)
        logprobs = logprobs.log_softmax(-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0]


def prompt_ids(found: Measurement) -> Iterator[Trial]:
    """The engine reads other prompt ids than it was given: one special token more, or one token less."""
    chat = found.bench.chat
    special = dict.fromkeys([*found.bench.chat.tokenizer.all_special_ids, *chat.stop_token_ids])
    advice = "hand the engine token ids, not text, and turn off its own special tokens (`add_special_tokens=False`)"
    for token in list(special)[:SPECIAL_TOKENS]:
        extra = np.array([token], dtype=np.int32)
        name = f"`{chat.raw_text(extra)}`"
        yield Trial(
            "prompt ids",
            f"{name} put before every prompt",
            found.rescored(found.trainer, [np.concatenate([extra, prompt]) for prompt in found.prompts]),
            f"the engine reads {name} before the prompt, which the chat template did not put there",
            advice,
        )
    if min(map(len, found.prompts)) > 1:
        for name, part in (("first", slice(1, None)), ("last", slice(None, -1))):
            yield Trial(
                "prompt ids",
                f"the {name} token of every prompt left out",
                found.rescored(found.trainer, [prompt[part] for prompt in found.prompts]),
                f"the engine leaves out the {name} token of every prompt",
                advice,
            )


def weights(found: Measurement) -> Iterator[Trial]:
    """The engine has other weights than the trainer handed it."""
    theirs = engine_weights(found.engine)
    advice = "correct the engine's `load_weights`: it must replace every tensor and drop what it derived from old ones"
    differing = first_difference(found.trainer.named_weights() or {}, theirs)
    if differing is not None:
        name, by = differing
        yield Trial(
            "weights",
            "rescored by a trainer with the engine's own weights",
            found.rescored(found.bench.open_trainer(weights=theirs)),
            f"the engine's weights are not the trainer's: the first that differs is `{name}`, by up to {by:.2g}",
            advice,
        )
    yield Trial(
        "weights",
        "a rollout engine straight from the model's folder, no weights handed over",
        found.resampled(found.bench.open_rollout()),
        "the engine is right as loaded and wrong once the trainer's weights were handed to it",
        advice,
    )


def engine_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Returns an engine's weights by name where it lets them be read (the protocol does not ask for that)."""
    model = getattr(engine, "model", None)
    named = getattr(model, "named_parameters", None)
    return {name: parameter.detach() for name, parameter in named()} if named is not None else {}


def first_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[str, float] | None:
    """Returns the first tensor of the engine's that is not the trainer's rounded to its precision, and by how much."""
    for name, tensor in theirs.items():
        if name not in ours:
            continue
        expected = ours[name].to(tensor.device, tensor.dtype)
        if expected.shape != tensor.shape:
            return name, float("inf")
        largest = float((expected.float() - tensor.float()).abs().max())
        if largest != 0:
            return name, largest
    return None


def batching(found: Measurement) -> Iterator[Trial]:
    """What the engine computes for a request depends on what else it is doing: padding, cache, shared prefixes."""
    engine = found.bench.open_rollout()
    engine.load_weights(found.trainer.named_weights(), 0)
    yield Trial(
        "batching",
        "one request at a time",
        found.resampled(engine, one_by_one=True),
        "the engine is right for a request alone and wrong for several at once",
        "suspect the engine's padding, prefix cache or attention mask; `rollout.max_rows=1` avoids it, slowly",
    )


def packing(found: Measurement) -> Iterator[Trial]:
    """The trainer's packed sequences see each other."""
    if found.bench.recipe.policy.packing:
        yield Trial(
            "packing",
            "rescored without packing",
            found.rescored(found.bench.open_trainer(packing=False)),
            "sequences packed into one row see each other in the trainer",
            "set `policy.packing=false`, or another `model.attention`",
        )


def attention(found: Measurement) -> Iterator[Trial]:
    """The trainer's attention implementation is wrong for this model."""
    if found.bench.recipe.model.attention != "eager":
        yield Trial(
            "attention",
            "rescored with eager attention",
            found.rescored(found.bench.open_trainer(attention="eager")),
            "the trainer's attention implementation computes something else than the engine's",
            "set `model.attention=eager`, or `sdpa` where a kernel of its own is set",
        )


def precision(found: Measurement) -> Iterator[Trial]:
    """One of the two computes in bfloat16 where float32 was asked for, or bfloat16 costs more than usual."""
    bench = found.bench
    if bench.precision == "float32":
        half = bench.score(bench.open_trainer(dtype="bfloat16"), found.batch)
        cost = Gap.between(half, found.logprobs)
        limit = bfloat16_limit(cost)
        yield Trial(
            "precision",
            f"rescored in bfloat16, which moves the trainer itself by mean {cost.mean:.2g}, max {cost.max:.2g}",
            Gap.between(half, found.rollout_logprobs),
            "the gap is what bfloat16 makes of float32 with this model (mean up to "
            f"{limit.mean:.2g}, max up to {limit.max:.2g}): the engine computes in bfloat16, or in less than float32",
            "have the engine load the model in float32, or train in its precision too: `model.dtype=bfloat16`",
            # Two engines in bfloat16 err independently: rescoring in it does not close such a gap, so its size decides.
            explains=found.gap.within(limit) and found.gap.mean * BFLOAT16_MEAN**2 >= limit.mean,
        )
        return
    engine = bench.open_rollout(dtype="float32")
    engine.load_weights(found.trainer.named_weights(), 0)
    yield Trial(
        "precision",
        "both engines in float32",
        compare(bench, engine, bench.open_trainer(dtype="float32")).gap,
        "bfloat16 costs one of the engines far more than the other",
        "set `model.dtype=float32`, or correct for the difference with the algorithm's rollout correction",
    )


CAUSES: dict[str, Cause] = {
    "order": order,
    "temperature, top-k and top-p": sampling_settings,
    "prompt ids": prompt_ids,
    "weights": weights,
    "batching": batching,
    "packing": packing,
    "attention": attention,
    "precision": precision,
}
