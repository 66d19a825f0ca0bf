"""The absorption check: that it is right, and that it notices what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from trtllm_mla.dtypes import DType
from trtllm_mla.validation import absorption
from trtllm_mla.validation.absorption import AbsorptionSizes, check_absorption
from trtllm_mla.validation.metrics import relative_l2_error

SIZES = AbsorptionSizes(
    num_attention_heads=19,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    kv_lora_rank=56,
    v_head_dim=20,
    keys=301,
    queries=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_deepseek_v3_sizes(dtype):
    """128 heads, 128/512/64, 2048 keys: 85 GFLOP, ten seconds on one busy core."""
    result = check_absorption(dtype)
    assert result.passed
    assert result.sizes == AbsorptionSizes(128, 128, 64, 512, 128, 2048, 4)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("seed", range(4))
def test_errors_are_within_bounds_that_are_not_slack(dtype, seed):
    result = check_absorption(dtype, SIZES, seed=seed)
    assert result.passed
    assert len(result.errors) == 8
    # Products of 16-bit arguments are exact in float64, so float64 has less to round there.
    for error in result.errors[0 if dtype is DType.FLOAT32 else 2 :]:
        assert 0 < error.relative_l2 <= error.bound < 50 * error.relative_l2, error


@pytest.mark.parametrize("sizes", [replace(SIZES, queries=1), replace(SIZES, keys=1), replace(SIZES, v_head_dim=1)])
def test_small_sizes(sizes):
    assert check_absorption(DType.FLOAT32, sizes).passed


@pytest.mark.parametrize("form", [absorption.absorbed_attention, absorption.decompressed_attention])
def test_forms_equal_attention_written_head_by_head(form):
    problem = absorption._random_problem(SIZES, 0.2, seed=5).map(lambda array: array.astype(np.float64))
    result = form(problem, lambda array: array)
    for head in range(SIZES.num_attention_heads):
        k = np.concatenate([problem.latent @ problem.k_up[head].T, problem.k_pe], axis=1)
        v = problem.latent @ problem.v_up[head].T
        for query in range(SIZES.queries):
            q = np.concatenate([problem.q_nope[head, query], problem.q_pe[head, query]])
            scores = np.array([0.2 * sum(q * key) for key in k])
            weights = np.exp(scores) / sum(math.exp(score) for score in scores)
            np.testing.assert_allclose(result.scores[head, query], scores, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(result.output[head, query], weights @ v, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize(
    "fault",
    [
        lambda problem: replace(problem, softmax_scale=problem.softmax_scale * 1.874),
        lambda problem: replace(problem, softmax_scale=problem.softmax_scale * 1.02),
        lambda problem: replace(problem, q_pe=problem.q_pe[..., ::-1]),
        lambda problem: replace(problem, k_up=problem.k_up[::-1]),
        lambda problem: replace(problem, v_up=problem.v_up[:, ::-1]),
        lambda problem: replace(problem, latent=np.roll(problem.latent, 1, axis=0)),
    ],
    ids=["yarn scale", "scale off by 2 %", "rotary order", "key heads", "value rows", "latents shifted by a token"],
)
def test_a_wrong_absorbed_form_fails(monkeypatch, dtype, fault):
    right = absorption.absorbed_attention
    monkeypatch.setattr(absorption, "absorbed_attention", lambda problem, rounding: right(fault(problem), rounding))
    result = check_absorption(dtype, SIZES)
    assert not result.passed
    assert not any(
        error.passed for error in result.errors if (error.form, error.quantity) == ("absorbed float64", "output")
    )


def test_rounding_to_bfloat16_fails_the_float32_check(monkeypatch):
    right = absorption.absorbed_attention
    rounding = absorption._rounding(DType.BFLOAT16)
    monkeypatch.setattr(
        absorption,
        "absorbed_attention",
        lambda problem, given: right(problem, given if problem.latent.dtype == np.float64 else rounding),
    )
    failed = {
        (error.form, error.against) for error in check_absorption(DType.FLOAT32, SIZES).errors if not error.passed
    }
    assert failed == {("absorbed", "float64"), ("absorbed", "decompressed")}


def test_values_that_are_not_finite_fail(monkeypatch):
    right = absorption.decompressed_attention

    def poisoned(problem, rounding):
        result = right(problem, rounding)
        result.output[0, 0, 0] = np.nan
        return result

    monkeypatch.setattr(absorption, "decompressed_attention", poisoned)
    assert not check_absorption(DType.FLOAT32, SIZES).passed


def test_flops():
    """Per query, key and head 2176 absorbed and 640 decompressed; per key and head 262144 to decompress."""
    sizes = AbsorptionSizes(num_attention_heads=1, keys=1000, queries=7)
    assert sizes.decompressed_flops == 1000 * 262144 + 7 * 1000 * 640
    assert sizes.absorbed_flops == 7 * 262144 + 7 * 1000 * 2176
    assert sizes.break_even_queries == pytest.approx(170.67, abs=0.01)
    many = replace(sizes, keys=10**6)
    assert replace(many, queries=170).absorbed_flops < replace(many, queries=170).decompressed_flops
    assert replace(many, queries=171).absorbed_flops > replace(many, queries=171).decompressed_flops


def test_softmax_scale_is_used():
    small, large = (
        absorption.absorbed_attention(absorption._random_problem(SIZES, scale, 0), lambda array: array).scores
        for scale in (0.1, 0.4)
    )
    # Queries are scaled so that scores keep their spread.
    assert relative_l2_error(small, large) < 1e-5
