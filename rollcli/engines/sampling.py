"""Draws one token per row from logits, so that a draw depends on its request and position alone.

Randomness is a counter: the uniform number for answer position `p` of a request is a hash of (seed, p), and the token
is the one whose slice of the cumulative distribution holds it. No generator state, so nothing to save and nothing that
another request could advance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Draws:
    """How each row is drawn, as columns of one row each.

    Attributes:
        uniforms: float64 `[R]` in (0, 1).
        temperature: float32 `[R]`; 0 is greedy.
        top_p: float32 `[R]`.
        top_k: int64 `[R]`; 0 keeps all.
        barred: tokens that may not be drawn, as int64 columns (row, token) of one pair each; None where there are none.
    """

    uniforms: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    barred: tuple[np.ndarray, np.ndarray] | None = None


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns one float64 in (0, 1) for each (seed, position), by splitmix64 (Steele, Lea and Flood, 2014)."""
    counters = positions.astype(np.uint64)
    bits = _mix(_mix(seeds.astype(np.uint64)) + GOLDEN * (counters + np.uint64(1)))
    # 48 bits and a half: never 0 or 1, even after a multiplication by a total that is a little below 1.
    return ((bits >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row of `logits` `[R, V]`.

    The log-probability is of the distribution after temperature and before what keeps tokens out (min_tokens, top-p,
    top-k); at temperature 0 it is that of temperature 1. It is NaN or infinite where the row's logits are NaN or reach
    infinity.

    Returns:
        Tokens, int64 `[R]`, and their log-probabilities, float32 `[R]`, on the device of the logits.
    """
    device = logits.device
    greedy = draws.temperature == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), draws.temperature)).to(device)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)  # [R, V]
    probabilities = logprobs.exp()
    candidates = logprobs
    if draws.barred is not None:
        known = draws.barred[1] < logits.shape[-1]
        rows, barred = (torch.from_numpy(column[known]).to(device) for column in draws.barred)
        candidates = logprobs.index_put((rows, barred), logprobs.new_tensor(-torch.inf))
        probabilities[rows] = torch.softmax(candidates[rows], dim=-1)
    filtered = ~greedy & ((draws.top_p < 1) | (draws.top_k > 0))
    if filtered.any():
        rows = torch.from_numpy(np.flatnonzero(filtered)).to(device)
        top_p = torch.from_numpy(draws.top_p[filtered]).to(device)
        top_k = torch.from_numpy(draws.top_k[filtered]).to(device)
        probabilities[rows] = _filter(probabilities[rows], top_p, top_k)
    # float64: in float32 the sum over a large vocabulary would lose its unlikely tokens.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(draws.uniforms).to(device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)  # [R, 1]
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device)[:, None], candidates.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def sample(logits: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `draw` does, as NumPy arrays on the host."""
    tokens, logprobs = draw(logits, draws)
    # One tensor, one wait for the device; float64 holds every token id exactly.
    host = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()
    return host[0].astype(np.int64), host[1].astype(np.float32)


def _filter(probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zeroes what top-p and top-k leave out; the most probable token always stays."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered  # probability of all that rank higher
    keep = (before < top_p[:, None]) | (top_p[:, None] >= 1) | (ranks == 0)
    keep &= (ranks < top_k[:, None]) | (top_k[:, None] == 0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered * keep)
