"""Batch arithmetic, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollcli.devices.arithmetic import arithmetic
from rollcli.errors import PlanError


def test_a_step_by_hand(rl, qwen):
    sizes = arithmetic(rl(workers=4, replicas=2, prompt=1024, answer=4096), qwen)
    assert (sizes.samples, sizes.minibatches, sizes.samples_per_worker) == (512, 4, 32)
    assert (sizes.prompt, sizes.answer, sizes.sequence) == (1024, 4096, 5120)
    # 16,384 tokens hold 3 sequences of 5,120; 32 sequences take 11 passes.
    assert (sizes.micro_tokens, sizes.micro_width, sizes.micro_batches) == (16384, 5120, 11)
    assert sizes.rows == 256  # 512 samples ÷ 2 replicas
    assert sizes.assumption is None
    assert sizes.lines == (
        "64 prompts × 8 answers = 512 samples a step = 4 minibatches × 128",
        "128 samples ÷ 4 policy workers = 32 each, in at most 11 micro-batches of 3 × 5,120 tokens",
    )


def test_every_epoch_takes_its_optimizer_steps(rl, qwen):
    once, twice = arithmetic(rl(), qwen), arithmetic(rl(epochs=2), qwen)
    assert (
        twice.lines[0]
        == "64 prompts × 8 answers = 512 samples a step = 4 minibatches × 128, 2 epochs = 8 optimizer steps"
    )
    assert twice.lines[1] == once.lines[1]
    assert (twice.epochs, twice.minibatches, twice.samples_per_worker) == (2, 4, once.samples_per_worker)


def test_greedy_answers_are_sampled_and_not_trained(rl, qwen):
    sizes = arithmetic(rl(prompts=4, group=2, minibatches=1, greedy=True), qwen)
    assert (sizes.samples, sizes.answers, sizes.rows) == (8, 12, 12)
    assert sizes.lines[0] == "4 prompts × 2 answers = 8 samples a step = 1 minibatch; beside them 4 greedy answers"


def test_what_does_not_divide_is_a_bound(rl, qwen):
    sizes = arithmetic(rl(workers=3, prompts=5, group=3, minibatches=2), qwen)
    assert sizes.samples_per_worker == 3
    assert sizes.lines == (
        "5 prompts × 3 answers = 15 samples a step = 2 minibatches × ≤ 8",
        "8 samples ÷ 3 policy workers = ≤ 3 each, in at most 1 micro-batch of 3 × 384 tokens",
    )


def test_a_sequence_longer_than_the_budget_is_never_cut(rl, qwen):
    sizes = arithmetic(rl(tokens=512, prompt=100, answer=1000), qwen)
    assert (sizes.micro_tokens, sizes.micro_batches) == (1100, 128)


def test_few_samples_do_not_fill_the_budget(rl, qwen):
    sizes = arithmetic(rl(prompts=1, group=2, minibatches=1, prompt=10, answer=10), qwen)
    assert sizes.micro_tokens == 40
    assert sizes.rows == 2


def test_an_unbounded_prompt_has_what_a_small_context_leaves(rl, tiny):
    sizes = arithmetic(rl(prompt=None, answer=200), tiny)
    assert (sizes.prompt, sizes.sequence, sizes.assumption) == (312, 512, None)


def test_an_unbounded_prompt_in_a_large_context_is_assumed_and_says_so(rl, qwen):
    sizes = arithmetic(rl(prompt=None, answer=200), qwen)
    assert sizes.prompt == 1024
    assert sizes.assumption == (
        "prompts may be up to 32,568 tokens, what the context leaves; planned with 1,024 "
        "(`rollout.max_prompt_tokens` bounds them)"
    )
    assert "of any length" in arithmetic(rl(prompt=None), replace(qwen, context=0)).assumption


def test_prompt_and_answer_beyond_the_context_show_the_sum(rl, tiny):
    with pytest.raises(PlanError) as caught:
        arithmetic(rl(prompt=300, answer=256), tiny)
    assert str(caught.value) == (
        "`rollout.sampling.max_tokens`: 300 prompt (`rollout.max_prompt_tokens`) + 256 answer = 556 tokens, "
        "the model's context is 512"
    )
    assert "rollout.sampling.max_tokens=106" in caught.value.hint


def test_an_answer_that_fills_the_context_is_refused(rl, tiny):
    with pytest.raises(PlanError, match="512 answer tokens, the model's context is 512"):
        arithmetic(rl(prompt=None, answer=512), tiny)


def test_demonstrations(sft, tiny):
    sizes = arithmetic(sft(workers=2, tokens=4096), tiny)
    assert (sizes.samples, sizes.minibatches, sizes.samples_per_worker, sizes.rows) == (64, 1, 32, 0)
    assert (sizes.sequence, sizes.micro_tokens, sizes.micro_batches) == (512, 4096, 4)
    assert sizes.lines == (
        "64 demonstrations a step = 1 optimizer step",
        "64 demonstrations ÷ 2 policy workers = 32 each, in at most 4 micro-batches of 8 × 512 tokens",
    )


def test_demonstrations_in_a_large_context_are_bounded_by_the_budget(sft, qwen):
    assert arithmetic(sft(tokens=4096), qwen).micro_tokens == 4096
