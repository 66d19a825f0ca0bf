"""Gates: the numbers they promise, and how they grow."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from trtllm_mla.dtypes import DType
from trtllm_mla.validation.gates import coarsest, gates_for


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


def test_coarsest():
    assert coarsest(DType.FLOAT32, DType.FLOAT32) is DType.FLOAT32
    assert coarsest(DType.FLOAT32, DType.FLOAT16) is DType.FLOAT16
    assert coarsest(DType.BFLOAT16, DType.FLOAT16) is DType.BFLOAT16
