"""Batch arithmetic: from what a recipe says (prompts, answers, minibatches, a token budget) to micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from rollcli.config.schema import Recipe, RlRecipe
from rollcli.devices.facts import ModelFacts
from rollcli.errors import PlanError

ASSUMED_PROMPT = 1024
"""Prompt tokens planned with when neither the recipe nor the model's context bounds them closer."""


@dataclass(frozen=True)
class Arithmetic:
    """Sizes of one step. A sequence is a prompt and its answer, at their longest.

    Attributes:
        samples: sequences of one step.
        minibatches: optimizer steps they are split into, in each epoch.
        epochs: passes over them.
        answers: sampled in one step: samples, and with a greedy baseline one more for each prompt.
        samples_per_worker: most sequences of one minibatch that one policy worker has.
        prompt, answer, sequence: tokens; an SFT recipe bounds neither part, so its sequence is the whole context.
        micro_tokens: most tokens of one forward and backward pass, which shorter sequences fill up to the budget.
        micro_width: tokens of its longest row.
        micro_batches: passes of one worker in one minibatch when every sequence is at its longest.
        rows: sequences one rollout replica decodes at once; 0 in an SFT recipe.
        lines: all of this as text.
        assumption: what had to be assumed, if anything.
    """

    samples: int
    minibatches: int
    epochs: int
    answers: int
    samples_per_worker: int
    prompt: int
    answer: int
    sequence: int
    micro_tokens: int
    micro_width: int
    micro_batches: int
    rows: int
    lines: tuple[str, ...]
    assumption: str | None = None


def arithmetic(recipe: Recipe, facts: ModelFacts) -> Arithmetic:
    """Returns the sizes of one step of `recipe`.

    Raises:
        PlanError: prompt and answer do not fit the model's context; shows the sum.
    """
    if isinstance(recipe, RlRecipe):
        prompt, answer, assumption = _longest(recipe, facts)
        sequence, samples = prompt + answer, recipe.samples_per_step
        minibatches, epochs, answers = recipe.minibatches, recipe.epochs, samples + _greedy(recipe)
    else:
        samples, minibatches, epochs, answers, assumption = recipe.sequences_per_step, 1, 1, 0, None
        sequence = facts.context or recipe.policy.micro_batch_tokens
        prompt, answer = 0, sequence
    workers, budget = recipe.policy.workers, recipe.policy.micro_batch_tokens
    per_minibatch = -(-samples // minibatches)
    mine = -(-per_minibatch // workers)
    # Demonstrations are far shorter than the context, which would otherwise count as the width of every row.
    width = sequence if isinstance(recipe, RlRecipe) else min(sequence, budget)
    fitting = min(max(budget // width, 1), mine)
    rows = 0
    if isinstance(recipe, RlRecipe):
        rows = min(recipe.rollout.max_rows, -(-answers // recipe.rollout.replicas))
    micro_tokens = min(max(budget, width), mine * sequence)
    passes = -(-mine // fitting)
    counts = (samples, minibatches, epochs, answers, mine)
    sizes = (*counts, prompt, answer, sequence, micro_tokens, width, passes, rows)
    return Arithmetic(*sizes, _lines(recipe, per_minibatch, mine, fitting, width, passes), assumption)


def _greedy(recipe: RlRecipe) -> int:
    """Returns how many greedy answers a step samples beside those it trains on."""
    return recipe.prompts_per_step * getattr(recipe.algorithm, "greedy_baseline", False)


def _longest(recipe: RlRecipe, facts: ModelFacts) -> tuple[int, int, str | None]:
    """Returns the longest prompt and answer, in tokens, and what had to be assumed."""
    answer, prompt, context = recipe.rollout.sampling.max_tokens, recipe.rollout.max_prompt_tokens, facts.context
    room = context - answer
    if context and room < (prompt or 1):
        asked = f"{prompt:,} prompt (`rollout.max_prompt_tokens`) + " if prompt else ""
        total = f" = {prompt + answer:,}" if prompt else ""
        raise PlanError(
            f"`rollout.sampling.max_tokens`: {asked}{answer:,} answer{total} tokens, "
            f"the model's context is {context:,}",
            hint=f"lower it, for example `rollout.sampling.max_tokens={max((context - (prompt or 0)) // 2, 1)}`",
        )
    if prompt is not None:
        return prompt, answer, None
    if context and room <= ASSUMED_PROMPT:
        return room, answer, None
    bound = f"up to {room:,} tokens, what the context leaves" if context else "of any length"
    return (
        ASSUMED_PROMPT,
        answer,
        f"prompts may be {bound}; planned with {ASSUMED_PROMPT:,} (`rollout.max_prompt_tokens` bounds them)",
    )


def _lines(
    recipe: Recipe, per_minibatch: int, mine: int, fitting: int, width: int, micro_batches: int
) -> tuple[str, ...]:
    policy = recipe.policy
    passes = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    shared = f" ÷ {policy.workers} policy workers = {mine:,} each" if policy.workers > 1 else ""
    uneven = "≤ " if per_minibatch % policy.workers and shared else ""
    if isinstance(recipe, RlRecipe):
        samples, parts = recipe.samples_per_step, recipe.minibatches
        split = (
            "1 minibatch" if parts == 1 else f"{parts} minibatches × {'≤ ' * bool(samples % parts)}{per_minibatch:,}"
        )
        product = f"{recipe.prompts_per_step:,} prompts × {recipe.group_size:,} answers"
        first = f"{product} = {samples:,} samples a step = {split}"
        if recipe.epochs > 1:
            first += f", {recipe.epochs} epochs = {recipe.epochs * parts} optimizer steps"
        if greedy := _greedy(recipe):
            first += f"; beside them {greedy:,} greedy answers"
        what = f"{per_minibatch:,} samples"
    else:
        first = f"{recipe.sequences_per_step:,} demonstrations a step = 1 optimizer step"
        what = f"{per_minibatch:,} demonstrations"
    second = f"{what}{shared.replace('= ', '= ' + uneven)}, in at most {passes} of {fitting} × {width:,} tokens"
    return first, second
