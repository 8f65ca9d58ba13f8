"""Sampling against hand-computed probabilities and the frequencies they imply."""

import math

import numpy as np
import pytest
import torch

from rollcli.engines.sampling import Draws, sample, uniforms

MASK = 2**64 - 1


def draws(uniform: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Draws:
    rows = len(uniform)
    return Draws(
        np.array(uniform),
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, top_p, dtype=np.float32),
        np.full(rows, top_k, dtype=np.int64),
    )


def splitmix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_uniforms_equal_splitmix64_in_plain_integers() -> None:
    seeds, positions = np.array([0, 1, MASK], dtype=np.uint64), np.array([0, 5, 70000])
    expected = [
        ((splitmix((splitmix(int(seed)) + 0x9E3779B97F4A7C15 * (int(position) + 1)) & MASK) >> 16) + 0.5) / 2**48
        for seed, position in zip(seeds, positions)
    ]
    assert uniforms(seeds, positions).tolist() == expected


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    by_position = uniforms(np.full(40_000, 7, dtype=np.uint64), np.arange(40_000))
    by_seed = uniforms(np.arange(40_000, dtype=np.uint64), np.zeros(40_000, dtype=np.int64))
    for values in (by_position, by_seed):
        assert values.min() > 0 and values.max() < 1
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 44  # chi-square, 19 degrees of freedom: exceeded once in 1,000
    assert abs(np.corrcoef(by_position[:-1], by_position[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.4076), (0.5, -0.1429), (2.0, -0.6803)])
def test_logprob_is_of_the_distribution_after_temperature(temperature: float, expected: float) -> None:
    tokens, logprobs = sample(torch.tensor([[2.0, 1.0, 0.0]]), draws([0.01], temperature))
    assert tokens.tolist() == [0]
    assert logprobs[0] == pytest.approx(expected, abs=1e-4)


def test_greedy_takes_the_largest_and_reports_temperature_one() -> None:
    tokens, logprobs = sample(torch.tensor([[0.0, 1.0, 2.0]]), draws([0.01], temperature=0))
    assert tokens.tolist() == [2]
    assert logprobs[0] == pytest.approx(-0.4076, abs=1e-4)


def test_token_is_the_one_whose_slice_of_the_distribution_holds_the_uniform() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(6, -1)
    tokens, _ = sample(logits, draws([0.001, 0.499, 0.501, 0.749, 0.751, 0.999]))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]


def test_frequencies_match_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    uniform = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.int64)).tolist()
    tokens, _ = sample(logits.expand(20_000, -1), draws(uniform, temperature=0.7))
    weights = [math.exp(logit / 0.7) for logit in logits.tolist()]
    expected = np.array(weights) / sum(weights)
    assert np.abs(np.bincount(tokens, minlength=4) / 20_000 - expected).max() < 0.012


def test_top_k_keeps_the_most_probable_and_leaves_the_logprob() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(100, -1)
    uniform = ((np.arange(100) + 0.5) / 100).tolist()
    tokens, logprobs = sample(logits, draws(uniform, top_k=2))
    # Of what is left, 0.3 : 0.4, so three sevenths of the uniforms give token 2.
    assert np.bincount(tokens, minlength=4).tolist() == [0, 0, 43, 57]
    assert logprobs[tokens == 3] == pytest.approx(math.log(0.4), abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {3}), (0.45, {2, 3}), (0.75, {1, 2, 3}), (0.95, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.2, 0.28, 0.42]).log().expand(200, -1)
    tokens, _ = sample(logits, draws(((np.arange(200) + 0.5) / 200).tolist(), top_p=top_p))
    assert set(tokens.tolist()) == kept


def test_filters_of_one_row_leave_the_others_alone() -> None:
    logits = torch.zeros(2, 10)
    mixed = draws([0.95, 0.95])
    mixed.top_k[0] = 1
    tokens, _ = sample(logits, mixed)
    assert tokens.tolist() == [0, 9]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logprob_is_not_finite_where_the_logits_are_not(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    tokens, logprobs = sample(logits, draws([0.5, 0.5, 0.5]))
    assert np.isfinite(logprobs).tolist() == [True, False, True]
    assert tokens[1] in range(4)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]] * 2)
    tokens, logprobs = sample(logits, draws([2.0**-49, 1 - 2.0**-49]))
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == [0.0, 0.0]
