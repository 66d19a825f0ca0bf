"""Metrics against their formulas, and against values that must never pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trtllm_mla.validation import metrics

METRICS = (
    metrics.cosine,
    metrics.norm_ratio,
    metrics.max_abs_error,
    metrics.mean_abs_error,
    metrics.relative_max_error,
    metrics.relative_mean_error,
    metrics.relative_l2_error,
    metrics.greedy_agreement,
)


def test_known_values():
    actual, reference = np.array([[3.0, 4.0, 0.0]]), np.array([[4.0, 3.0, 12.0]])
    assert metrics.cosine(actual, reference) == pytest.approx(24 / 65)
    assert metrics.norm_ratio(actual, reference) == pytest.approx(5 / 13)
    assert metrics.max_abs_error(actual, reference) == 12
    assert metrics.mean_abs_error(actual, reference) == pytest.approx(14 / 3)
    assert metrics.root_mean_square(reference) == pytest.approx(13 / math.sqrt(3))
    assert metrics.relative_max_error(actual, reference) == pytest.approx(12 * math.sqrt(3) / 13)
    assert metrics.relative_mean_error(actual, reference) == pytest.approx(14 / math.sqrt(3) / 13)
    assert metrics.relative_l2_error(actual, reference) == pytest.approx(math.sqrt(146) / 13)


def test_the_norm_ratio_sees_a_wrong_scale():
    reference = np.random.default_rng(0).standard_normal((5, 7))
    assert metrics.norm_ratio(1.874 * reference, reference) == pytest.approx(1.874)


def test_greedy_agreement_counts_rows():
    reference = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    actual = reference.copy()
    actual[2] = [9.0, 1.0]
    assert metrics.greedy_agreement(actual, reference) == 0.75
    assert math.isnan(metrics.greedy_agreement(np.zeros((0, 3)), np.zeros((0, 3))))
    with pytest.raises(ValueError, match="vocab_size"):
        metrics.greedy_agreement(np.zeros(3), np.zeros(3))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["actual", "reference", "both"])
@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_make_every_metric_nan(metric, poison, side):
    pair = {name: np.ones((2, 3)) for name in ("actual", "reference")}
    for name, array in pair.items():
        if side in (name, "both"):
            array[1, 2] = poison
    assert math.isnan(metric(**pair))
    assert metrics.nonfinite_count(**pair) == (2 if side == "both" else 1)


@pytest.mark.parametrize("metric", [*METRICS, metrics.nonfinite_count])
def test_shapes_must_be_equal(metric):
    with pytest.raises(ValueError, match="expected them to be equal"):
        metric(np.zeros((2, 3)), np.zeros((3, 2)))


def test_zero_vectors():
    zero, one = np.zeros((1, 4)), np.ones((1, 4))
    assert metrics.norm_ratio(zero, zero) == 1
    assert metrics.norm_ratio(zero, one) == 0
    assert metrics.norm_ratio(one, zero) == math.inf
    assert metrics.relative_max_error(zero, zero) == 0
    assert metrics.relative_max_error(one, zero) == math.inf


def test_sums_are_taken_in_float64():
    reference = np.full(10**6, 1e-4, dtype=np.float32)
    reference[0] = 1e4
    expected = np.linalg.norm(reference.astype(np.float64))
    assert metrics.root_mean_square(reference) * 1e3 == pytest.approx(expected, rel=1e-14)
    half = np.full(4, 60000, dtype=np.float16)
    assert metrics.norm_ratio(half, half) == 1


@given(
    arrays(np.float64, (3, 5), elements=st.floats(-1e6, 1e6)),
    arrays(np.float64, (3, 5), elements=st.floats(-1e6, 1e6)),
)
def test_bounds_that_always_hold(actual, reference):
    assert 0 <= metrics.mean_abs_error(actual, reference) <= metrics.max_abs_error(actual, reference) * (1 + 1e-12)
    assert metrics.max_abs_error(actual, reference) == np.abs(actual - reference).max()
    assert 0 <= metrics.greedy_agreement(actual, reference) <= 1
