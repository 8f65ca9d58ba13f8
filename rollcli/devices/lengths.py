"""How long answers are, how many turns an episode has, how long an environment takes: distributions to draw from.

All are drawn through a standard normal number, so that one rule makes the samples of a group alike (`shared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollcli.errors import PlanError

Floats = NDArray[np.float64]
_GRID = np.linspace(-8.0, 8.0, 3201)
_PHI = np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in _GRID])
P99 = 2.3263478740408408
TAIL_RATIO = 10.0
"""99th percentile over median of trajectory lengths in reasoning and agentic post-training (Laminar, arXiv 2510.12633,
introduction; as the summary at papers.lunadong.com/paper/14617 gives it)."""


class Distribution(Protocol):
    """Lengths in tokens, or times in seconds; never negative."""

    @property
    def mean(self) -> float:
        """Mean of what is drawn."""

    @property
    def size_biased(self) -> float:
        """E[x²] / E[x]: the mean length of the answer that a random token belongs to."""

    def at(self, normal: Floats) -> Floats:
        """Returns the values at standard normal numbers, any shape: the quantile function after the normal's CDF."""


@dataclass(frozen=True)
class Fixed:
    """Always the same.

    Raises:
        PlanError: the value is negative or not a number.
    """

    value: float

    def __post_init__(self) -> None:
        _check("length", self.value, zero=True)

    @property
    def mean(self) -> float:
        """The value."""
        return self.value

    @property
    def size_biased(self) -> float:
        """The value."""
        return self.value

    def at(self, normal: Floats) -> Floats:
        """Returns the value, as often as asked."""
        return np.full(np.shape(normal), float(self.value))


@dataclass(frozen=True)
class LogNormal:
    """min(exp(μ + σZ), cap), with μ such that the mean, after the cap, is `mean`.

    Attributes:
        mean: of what is drawn.
        cv: standard deviation over mean of the distribution before the cap: σ² = ln(1 + cv²).
        cap: the longest there is, as of `max_tokens`.

    Raises:
        PlanError: a number is not positive, or the mean is not below the cap.
    """

    mean: float
    cv: float
    cap: float = math.inf

    def __post_init__(self) -> None:
        _check("mean length", self.mean)
        _check("coefficient of variation", self.cv)
        if not self.cap > self.mean:
            raise PlanError(
                f"lengths of mean {self.mean:g} cannot all be at most {self.cap:g}", hint="give a cap above the mean"
            )

    @property
    def sigma(self) -> float:
        """σ of the logarithm."""
        return math.sqrt(math.log1p(self.cv**2))

    @cached_property
    def mu(self) -> float:
        """μ of the logarithm; found by bisection, since the mean after the cap rises with it."""
        low = math.log(self.mean) - self.sigma**2 / 2
        if math.isinf(self.cap):
            return low
        high = low + 1.0
        while self._moment(high, 1) < self.mean and high < low + 64:
            high += 2.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._moment(middle, 1) < self.mean else (low, middle)
        return (low + high) / 2

    @property
    def size_biased(self) -> float:
        """E[x²] / E[x], in closed form."""
        return self._moment(self.mu, 2) / self.mean

    def at(self, normal: Floats) -> Floats:
        """Returns the capped exponentials."""
        return np.minimum(np.exp(self.mu + self.sigma * np.asarray(normal)), self.cap)

    def _moment(self, mu: float, power: int) -> float:
        """E[min(X, cap)^k] = exp(kμ + k²σ²/2) Φ((ln cap - μ)/σ - kσ) + cap^k (1 - Φ((ln cap - μ)/σ))."""
        whole = math.exp(power * mu + (power * self.sigma) ** 2 / 2)
        if math.isinf(self.cap):
            return whole
        edge = (math.log(self.cap) - mu) / self.sigma
        return whole * _phi(edge - power * self.sigma) + self.cap**power * (1 - _phi(edge))


@dataclass(frozen=True)
class Empirical:
    """What was measured: values of a run's rollouts, or a histogram of them.

    Attributes:
        values: ascending.
        shares: of each value; together 1.
    """

    values: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return float(np.dot(self.values, self.shares))

    @property
    def size_biased(self) -> float:
        """E[x²] / E[x]."""
        return float(np.dot(np.square(self.values), self.shares)) / self.mean if self.mean else 0.0

    def at(self, normal: Floats) -> Floats:
        """Returns the value whose cumulative share first reaches Φ(z)."""
        place = np.searchsorted(np.cumsum(self.shares), np.interp(normal, _GRID, _PHI))
        return np.asarray(self.values)[np.minimum(place, len(self.values) - 1)]


def measured(values: Iterable[float], counts: Iterable[float] | None = None) -> Empirical:
    """Returns the distribution of measured values, or of a histogram when there are counts.

    Raises:
        PlanError: there are none, or one is negative or not a number, or values and counts differ in number.
    """
    found = np.asarray(list(values), dtype=float)
    weights = np.ones(len(found)) if counts is None else np.asarray(list(counts), dtype=float)
    if len(found) == 0 or len(found) != len(weights):
        raise PlanError(
            f"measured lengths: {len(found)} values with {len(weights)} counts",
            hint="give at least one value, and as many counts as values",
        )
    for what, numbers in (("length", found), ("count", weights)):
        wrong = numbers[~(np.isfinite(numbers) & (numbers >= 0))]
        if len(wrong):
            raise PlanError(f"measured lengths: {what} {wrong[0]:g} cannot be", hint="lengths and counts start at 0")
    if weights.sum() == 0:
        raise PlanError("measured lengths: all counts are 0", hint="leave values out that were not seen")
    unique, place = np.unique(found, return_inverse=True)
    shares = np.bincount(place, weights=weights) / weights.sum()
    return Empirical(tuple(unique.tolist()), tuple(shares.tolist()))


def long_tailed(mean: float, cap: float = math.inf) -> LogNormal:
    """Returns lengths with the published tail of reasoning models: `TAIL_RATIO` between 99th percentile and median."""
    sigma = math.log(TAIL_RATIO) / P99
    return LogNormal(mean, math.sqrt(math.expm1(sigma**2)), cap)


def parse_lengths(text: str) -> Distribution:
    """Returns the lengths that `1024`, `lognormal:1200,1.3`, `lognormal:1200,1.3,8192` or `reasoning:1200,8192` name.

    Raises:
        PlanError: it is none of these; says what is wrong.
    """
    kind, _, rest = text.strip().rpartition(":")
    try:
        numbers = [float(number) for number in rest.split(",")]
    except ValueError:
        raise PlanError(f"`{text}`: `{rest}` are not numbers", hint=_FORMS) from None
    counts = {"": (1,), "fixed": (1,), "lognormal": (2, 3), "reasoning": (1, 2)}.get(kind)
    if counts is None:
        raise PlanError(f"`{text}`: unknown kind of lengths `{kind}`", hint=_FORMS)
    if len(numbers) not in counts:
        raise PlanError(f"`{text}`: {len(numbers)} numbers do not describe {kind or 'fixed'} lengths", hint=_FORMS)
    if kind == "lognormal":
        return LogNormal(*numbers)
    return long_tailed(*numbers) if kind == "reasoning" else Fixed(numbers[0])


_FORMS = "write a number, `lognormal:MEAN,CV[,CAP]` or `reasoning:MEAN[,CAP]`, for example `reasoning:1200,8192`"


def draw_groups(
    lengths: Distribution, groups: int, size: int, luck: np.random.Generator, shared: float = 0.5
) -> Floats:
    """Returns lengths of the samples of groups, [groups, size].

    Problems and answers are drawn stratified, one from each part of equal probability: unbiased like independent draws,
    and a few of them come near the mean that many have.

    Args:
        shared: share of the normal number's variance that is the problem's, so the same for its whole group.
    """
    problem = _stratified(groups, luck)[:, None]
    answer = _stratified(groups * size, luck).reshape(groups, size)
    return lengths.at(math.sqrt(shared) * problem + math.sqrt(1 - shared) * answer)


def _stratified(count: int, luck: np.random.Generator) -> Floats:
    """Standard normal numbers, one from each of `count` parts of equal probability, in random order."""
    return np.interp((luck.permutation(count) + luck.random(count)) / count, _PHI, _GRID)


def longest_of(lengths: Distribution, count: int) -> float:
    """Returns about the median of the longest of `count` independent draws: the quantile at 0.5^(1/count)."""
    return float(lengths.at(np.interp(0.5 ** (1 / max(count, 1)), _PHI, _GRID)))


def _phi(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def _check(what: str, value: float, zero: bool = False) -> None:
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise PlanError(f"{what} {value:g} cannot be", hint=f"give a number {'from' if zero else 'above'} 0")
