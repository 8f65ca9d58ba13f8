"""Distributions of lengths: moments against draws and by hand, groups that are alike, and wrong numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollcli.devices.lengths import (
    Fixed,
    LogNormal,
    draw_groups,
    long_tailed,
    longest_of,
    measured,
    parse_lengths,
)
from rollcli.errors import PlanError

NORMAL = np.random.default_rng(1).standard_normal(400_000)


@pytest.mark.parametrize("lengths", [LogNormal(1000, 1.0), LogNormal(1000, 1.3, 4096), LogNormal(3000, 1.3, 4096)])
def test_moments_of_a_lognormal_are_those_of_its_draws(lengths):
    drawn = lengths.at(NORMAL)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert (drawn**2).mean() / drawn.mean() == pytest.approx(lengths.size_biased, rel=0.02)
    assert drawn.max() <= lengths.cap


def test_the_spread_of_a_lognormal_is_as_asked():
    drawn = LogNormal(50, 0.5).at(NORMAL)
    assert drawn.std() / drawn.mean() == pytest.approx(0.5, rel=0.02)


def test_the_published_tail():
    drawn = long_tailed(1000).at(NORMAL)
    assert np.quantile(drawn, 0.99) / np.median(drawn) == pytest.approx(10, rel=0.03)


def test_measured_lengths_by_hand():
    lengths = measured([3, 1, 3, 5])
    assert (lengths.values, lengths.shares) == ((1, 3, 5), (0.25, 0.5, 0.25))
    assert lengths.mean == 3
    assert lengths.size_biased == pytest.approx((1 + 9 + 9 + 25) / 12)
    assert measured([1, 3, 5], counts=[1, 2, 1]) == lengths
    shares = [(lengths.at(NORMAL) == value).mean() for value in lengths.values]
    assert shares == pytest.approx(lengths.shares, abs=0.005)


def test_samples_of_a_group_are_as_alike_as_asked():
    luck = np.random.default_rng(0)
    for shared in (0.0, 0.5, 1.0):
        logs = np.log(draw_groups(LogNormal(100, 1.0), 20_000, 2, luck, shared))
        assert np.corrcoef(logs.T)[0, 1] == pytest.approx(shared, abs=0.02)


def test_few_stratified_draws_come_near_the_mean():
    lengths = long_tailed(1000, 8192)
    luck = np.random.default_rng(0)
    means = [draw_groups(lengths, 32, 16, luck).mean() for _ in range(30)]
    independent = [lengths.at(luck.standard_normal(512)).mean() for _ in range(30)]
    assert np.mean(means) == pytest.approx(1000, rel=0.03)
    assert np.std(means) < np.std(independent)


def test_the_longest_of_many():
    lengths = LogNormal(100, 1.0)
    luck = np.random.default_rng(0)
    longest = np.median(lengths.at(luck.standard_normal((500, 256))).max(axis=1))
    assert longest_of(lengths, 256) == pytest.approx(longest, rel=0.1)
    assert longest_of(LogNormal(100, 1.0, 120), 10**6) == 120
    assert longest_of(Fixed(7), 3) == 7


def test_lengths_are_read():
    assert parse_lengths("1024") == parse_lengths("fixed:1024") == Fixed(1024)
    assert parse_lengths("lognormal:1200,1.3") == LogNormal(1200, 1.3)
    assert parse_lengths(" lognormal:1200,1.3,8192 ") == LogNormal(1200, 1.3, 8192)
    assert parse_lengths("reasoning:1200,8192") == long_tailed(1200, 8192)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("long", "`long` are not numbers"),
        ("lognormal:a,1", "`a,1` are not numbers"),
        ("lognormal:1200", "1 numbers do not describe lognormal lengths"),
        ("normal:1,2", "unknown kind of lengths `normal`"),
        ("-5", "length -5 cannot be"),
        ("nan", "length nan cannot be"),
        ("lognormal:0,1", "mean length 0 cannot be"),
        ("lognormal:10,0", "coefficient of variation 0 cannot be"),
        ("reasoning:9000,8192", "lengths of mean 9000 cannot all be at most 8192"),
    ],
)
def test_lengths_that_cannot_be_are_refused(text, message):
    with pytest.raises(PlanError, match=message) as caught:
        parse_lengths(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("values", "counts"), [([], None), ([1, -1], None), ([1, math.nan], None), ([1], [1, 2]), ([1], [0]), ([1], [-1])]
)
def test_measurements_that_cannot_be_are_refused(values, counts):
    with pytest.raises(PlanError, match="measured lengths"):
        measured(values, counts)
