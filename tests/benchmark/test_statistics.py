from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_mla.benchmark.statistics import Percentiles


def test_percentiles_are_those_of_trtllm_bench():
    """Sample number int(n p) of the sorted ones."""
    result = Percentiles.of(list(range(100, 0, -1)))
    assert (result.p50, result.p90, result.p95, result.p99) == (51, 91, 96, 100)
    assert (result.minimum, result.maximum, result.average, result.median) == (1, 100, 50.5, 50.5)


def test_one_sample():
    result = Percentiles.of([3.5])
    assert {result.p50, result.p99, result.minimum, result.maximum, result.average, result.median} == {3.5}


def test_no_samples():
    with pytest.raises(ValueError, match="no samples"):
        Percentiles.of([])


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_order(samples):
    result = Percentiles.of(samples)
    assert result.minimum <= result.median <= result.p50 <= result.p90 <= result.p95 <= result.p99 <= result.maximum
    assert result.average == pytest.approx(statistics.fmean(samples))
