"""Spread and intervals of the median, against enumeration and simulation."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from trtllm_mla.benchmark.spread import CONFIDENCE, MedianInterval, Spread


def test_spread_of_known_samples():
    samples = [9.0, 1.0, 5.0, 2.0, 8.0, 3.0, 7.0, 4.0, 6.0, 10.0]
    assert Spread.of(samples) == Spread(median=5.5, p10=2.0, p90=10.0, minimum=1.0, maximum=10.0, count=10)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 3.0, 1)


@pytest.mark.parametrize("size", range(1, 15))
def test_confidence_is_the_share_of_sign_patterns_that_enclose_the_median(size):
    """Every sample is above or below the true median with equal chance: all patterns are enumerated."""
    interval = MedianInterval.of([float(index) for index in range(size)])
    rank = int(interval.low)
    assert interval.high == size - 1 - rank
    enclosed = sum(
        rank < sum(below) < size - rank for below in itertools.product((False, True), repeat=size)
    )  # more than `rank` samples on each side
    assert interval.confidence == pytest.approx(enclosed / 2**size)
    if size >= 6:
        assert interval.confidence >= CONFIDENCE
        narrower = sum(
            rank + 1 < sum(below) < size - rank - 1 for below in itertools.product((False, True), repeat=size)
        )
        assert narrower / 2**size < CONFIDENCE
    else:
        assert (interval.low, interval.high) == (0, size - 1)


def test_coverage_of_a_skewed_distribution():
    generator = np.random.default_rng(7)
    true_median = np.exp(0.3)
    draws = np.exp(generator.normal(0.3, 1.5, size=(4000, 10)))
    intervals = [MedianInterval.of(row.tolist()) for row in draws]
    covered = np.mean([item.low <= true_median <= item.high for item in intervals])
    assert covered == pytest.approx(intervals[0].confidence, abs=0.01)
    assert intervals[0].median == statistics.median(draws[0])


@pytest.mark.parametrize(
    ("samples", "side"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1),
        ([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], -1),
        ([1.0, 2.0, 3.0, 4.0, 5.0, -0.1], 0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0),  # five samples cannot say it with 95 %
        ([0.0] * 8, 0),
    ],
)
def test_side_of_zero(samples, side):
    assert MedianInterval.of(samples).side_of(0.0) == side


@pytest.mark.parametrize("summary", [Spread.of, MedianInterval.of])
def test_no_samples(summary):
    with pytest.raises(ValueError, match="no samples"):
        summary([])
