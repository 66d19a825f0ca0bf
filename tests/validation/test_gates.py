"""Gates: the numbers they promise, and how they grow."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.validation.gates import cache_gates, coarsest, gates_for


def test_float32_of_two_layers():
    gates = gates_for(DType.FLOAT32, 2)
    assert gates.max_abs_error is None
    assert 4 * gates.max_relative_max_error < 2e-4
    assert gates.min_greedy_agreement == 1.0
    assert gates.max_relative_mean_error == pytest.approx(2.4e-6, rel=0.01)
    assert gates.max_relative_max_error == pytest.approx(4.8e-5, rel=0.01)
    assert 1 - gates.min_cosine == pytest.approx(1.1e-11, rel=0.1)
    assert gates.max_norm_deviation == gates.max_relative_mean_error


@pytest.mark.parametrize("num_layers", [1, 2, 12])
def test_gates_widen_with_fewer_digits(num_layers):
    tight, half, coarse = (gates_for(dtype, num_layers) for dtype in DType)
    for name in (
        "max_norm_deviation",
        "max_relative_max_error",
        "max_relative_mean_error",
        "max_perplexity_deviation",
    ):
        assert getattr(tight, name) < getattr(half, name) < getattr(coarse, name)
    assert tight.min_cosine > half.min_cosine > coarse.min_cosine
    for gates in (half, coarse):
        assert gates.min_greedy_agreement is None


def test_gates_widen_with_depth_up_to_a_limit():
    two, four = (gates_for(DType.FLOAT32, num_layers).max_relative_mean_error for num_layers in (2, 4))
    assert four == 2 * two
    deep = [gates_for(DType.BFLOAT16, num_layers) for num_layers in (5, 61, 10**6)]
    assert len({astuple(gates) for gates in deep}) == 1
    assert deep[0].max_relative_mean_error == 0.1
    assert deep[0].min_cosine == pytest.approx(0.98)


@pytest.mark.parametrize("dtype", list(DType))
def test_a_quantised_cache_may_cost_perplexity_and_changes_no_other_gate(dtype):
    plain = gates_for(dtype, 3)
    assert all(gates_for(dtype, 3, CacheDType.of(other)) == plain for other in DType)
    for cache_dtype, deviation in ((CacheDType.FP8, 0.005), (CacheDType.NVFP4, 0.03)):
        gates = gates_for(dtype, 3, cache_dtype)
        assert gates.max_perplexity_deviation == pytest.approx(plain.max_perplexity_deviation + deviation)
        assert replace(gates, max_perplexity_deviation=plain.max_perplexity_deviation) == plain


def test_gates_on_quantised_rows_widen_with_the_arithmetic_alone():
    tight, half, coarse = (cache_gates(gates_for(dtype, 2)) for dtype in DType)
    for name in ("arithmetic_rms", "arithmetic_max", "max_norm_deviation"):
        assert getattr(tight, name) < getattr(half, name) < getattr(coarse, name)
    assert tight.max_norm_deviation == pytest.approx(1e-3, rel=0.01)
    for gates in (tight, half, coarse):
        assert (gates.max_rms_ratio, gates.max_rounding) == (1.001, 1)


def test_coarsest():
    assert coarsest(DType.FLOAT32, DType.FLOAT32) is DType.FLOAT32
    assert coarsest(DType.FLOAT32, DType.FLOAT16) is DType.FLOAT16
    assert coarsest(DType.BFLOAT16, DType.FLOAT16) is DType.BFLOAT16
