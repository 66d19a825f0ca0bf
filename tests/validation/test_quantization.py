"""Gates on quantised rows: exact conversions pass them, and each wrong conversion fails the one meant for it."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from tests.validation.stub_runner import SCENARIOS, StubRunner
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.row_codec import decode_rows, encode_rows
from trtllm_mla.validation.comparison import UNQUANTIZED_LOGITS, compare_runners
from trtllm_mla.validation.gates import gates_for
from trtllm_mla.validation.quantization import CachedKPe, CachedLatent, QuantizedCache

TOKENS = 60
ROPE_DIM = 24
QUANTIZED = [CacheDType.FP8, CacheDType.NVFP4]
# What the metrics of a cache are called by the gates they have.
GATES = {"relative_rms_error", "rms_ratio", "norm_ratio", "rounding", "nonfinite"}


def cache_of(dtype, kv_lora_rank=160, latent_scale=1.0):
    return QuantizedCache(dtype.layout(kv_lora_rank, ROPE_DIM), (latent_scale,))


def random_rows(cache, seed=0, size=1.0):
    shape = (TOKENS, cache.layout.kv_lora_rank + ROPE_DIM)
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def converted(cache, rows, change=lambda pool: pool):
    """The rows through the cache, with their bytes changed on the way."""
    pool = encode_rows(rows, cache.layout, cache.latent_scales[0])
    return decode_rows(change(pool.copy()), cache.layout, cache.latent_scales[0])


def failed_gates(cache, actual, reference, dtype=DType.FLOAT32):
    """Gates that rows fail, by output; other outputs are there and equal."""
    logits = np.random.default_rng(1).standard_normal((TOKENS, 7)).astype(np.float32)
    others = {"logits": logits, UNQUANTIZED_LOGITS: logits}
    ((*outputs,),) = compare_runners(
        StubRunner("actual", [others | cache.split(0, actual)]),
        StubRunner("reference", [others | cache.split(0, reference)]),
        SCENARIOS[:1],
        gates_for(dtype, 2),
        quantized=cache,
    )
    assert [output.output for output in outputs] == ["logits", UNQUANTIZED_LOGITS, "latent_0", "k_pe_0"]
    for output in outputs[2:]:
        assert {metric.name for metric in output.metrics if metric.gate} == GATES
    return {
        output.output: {metric.name for metric in output.metrics if not metric.passed}
        for output in outputs
        if not output.passed
    }


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("kv_lora_rank", [160, 512, 17])
@pytest.mark.parametrize(("size", "latent_scale"), [(1.0, 1.0), (1.0, 0.37), (40.0, 1.0), (1e-3, 2e-3), (1e4, 1e4)])
def test_exact_conversions_pass(dtype, kv_lora_rank, size, latent_scale):
    cache = cache_of(dtype, kv_lora_rank, latent_scale)
    rows = random_rows(cache, size=size)
    # The values that were rounded are those of the reference up to the arithmetic of float32.
    before = rows * (1 + 1e-7 * np.random.default_rng(3).standard_normal(rows.shape).astype(np.float32))
    assert failed_gates(cache, converted(cache, before), rows) == {}


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_values_off_by_the_arithmetic_of_bfloat16_pass_its_gates_only(dtype):
    cache = cache_of(dtype)
    rows = random_rows(cache)
    before = rows + 0.02 * np.random.default_rng(3).standard_normal(rows.shape).astype(np.float32)
    assert failed_gates(cache, converted(cache, before), rows, DType.BFLOAT16) == {}
    failed = failed_gates(cache, converted(cache, before), rows)
    assert failed["latent_0"] >= {"rounding", "rms_ratio"}
    assert failed["k_pe_0"] >= {"rounding", "rms_ratio", "relative_rms_error"}


@pytest.mark.parametrize(("dtype", "expected"), [(CacheDType.FP8, 0.026), (CacheDType.NVFP4, 0.087)])
def test_typical_errors(dtype, expected):
    """Those that the gates' description names."""
    cache = cache_of(dtype, 512)
    rows = random_rows(cache)
    parts = cache.split(0, rows)
    for part, typical in zip(cache.parts, (expected, 0.0017), strict=True):
        values = parts[part.output].astype(np.float64)
        error = math.sqrt(((part.round(parts[part.output]) - values) ** 2).sum() / (values**2).sum())
        assert error == pytest.approx(typical, rel=0.04)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_bounds_on_single_values_are_reached(dtype):
    """A bound that no right conversion comes near would let wrong ones pass."""
    cache = cache_of(dtype, 512)
    parts = cache.split(0, random_rows(cache))
    for part in cache.parts:
        values = parts[part.output]
        assert 0.97 < part.rounding(part.round(values), values, 1e-6) <= 1


def test_bounds_on_single_values_by_hand():
    # The scale is 1: the block's largest value is E4M3's. Steps are an eighth of a power of two, 2^-9 below 2^-6.
    part = CachedLatent(0, CacheDType.FP8.layout(5, ROPE_DIM), 1.0)
    values = np.array([[448.0, -1.0, 1.9, 2.0**-6, 1e-4]], np.float32)
    assert part.largest_errors(values, 0.0).tolist() == [[16.0, 2.0**-4, 2.0**-4, 2.0**-10, 2.0**-10]]
    # The scale is 1 or 1.5, a sixth or a quarter of the largest value. In scales, 6 begins the widest step of the
    # larger one, 5 is in that of the smaller one, and 2.5 in a step of one of the smaller or a half of the larger one.
    part = CachedLatent(0, CacheDType.NVFP4.layout(5, ROPE_DIM), 1.0)
    values = np.array([[6.0, -5.0, 2.5, 0.1, 0.0]], np.float32)
    assert part.largest_errors(values, 0.0).tolist() == [[1.5, 1.0, 0.5, 0.375, 0.375]]
    half = CachedLatent(0, CacheDType.NVFP4.layout(5, ROPE_DIM), 0.5)
    assert half.largest_errors(values / 2, 0.0).tolist() == [[0.75, 0.5, 0.25, 0.1875, 0.1875]]
    part = CachedKPe(0, CacheDType.NVFP4.layout(5, 3), 1.0)
    assert part.largest_errors(np.array([[1.0, -1.99, 2.0]]), 0.0).tolist() == [[2.0**-8, 2.0**-8, 2.0**-7]]


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_one_wrong_scale_fails_its_value(dtype):
    cache = cache_of(dtype)
    layout = cache.layout

    def change(pool):
        if dtype is CacheDType.FP8:
            scales = pool[7, layout.scale_offset :].view(np.float32)
            scales[0] *= 2
        else:
            pool[7, layout.scale_offset + 3] += 8  # a power of two
        return pool

    rows = random_rows(cache)
    assert "rounding" in failed_gates(cache, converted(cache, rows, change), rows)["latent_0"]


def test_swapped_nibbles_fail():
    cache = cache_of(CacheDType.NVFP4)

    def change(pool):
        codes = pool.view(np.uint8)[:, : cache.layout.code_bytes]
        codes[:] = codes << 4 | codes >> 4
        return pool

    rows = random_rows(cache)
    failed = failed_gates(cache, converted(cache, rows, change), rows)
    assert failed.keys() == {"latent_0"}
    assert failed["latent_0"] >= {"rounding", "rms_ratio", "relative_rms_error"}


def test_a_scale_for_six_alone_fails_the_mean():
    """Single values are where rounding may leave them; only their sum tells that the finer scale was never taken."""
    cache = cache_of(CacheDType.NVFP4)
    rows = random_rows(cache)
    latent = rows[:, :160].reshape(TOKENS, -1, 16)
    scale = (np.abs(latent).max(-1, keepdims=True) / 6).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nearest = (latent / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    actual = np.concatenate([nearest.reshape(TOKENS, -1), converted(cache, rows)[:, 160:]], axis=1)
    assert failed_gates(cache, actual, rows) == {"latent_0": {"rms_ratio"}}


def test_truncated_codes_fail():
    cache = cache_of(CacheDType.FP8)
    rows = random_rows(cache)
    toward_zero = rows * np.float32(1 - 2.0**-4)
    failed = failed_gates(cache, converted(cache, toward_zero), rows)
    assert failed["latent_0"] >= {"rounding", "rms_ratio", "norm_ratio"}


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_truncated_rotary_key_fails(dtype):
    cache = cache_of(dtype)
    rows = random_rows(cache)
    actual = converted(cache, rows)
    actual[:, 160:] = (rows[:, 160:].view(np.uint32) & 0xFFFF0000).view(np.float32)
    failed = failed_gates(cache, actual, rows)
    assert failed.keys() == {"k_pe_0"}
    assert failed["k_pe_0"] >= {"rounding", "rms_ratio", "norm_ratio"}


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_latent_scale_that_is_ignored_fails(dtype):
    cache = cache_of(dtype, latent_scale=0.37)
    rows = random_rows(cache)
    actual = converted(cache_of(dtype), rows)
    actual[:, :160] *= np.float32(0.37)
    assert failed_gates(cache, actual, rows)["latent_0"] >= {"rounding", "rms_ratio", "norm_ratio"}


@pytest.mark.parametrize("network", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_scale_that_is_off_by_a_tenth_fails(dtype, network):
    cache = cache_of(dtype)
    rows = random_rows(cache)
    actual = converted(cache, rows)
    actual[:, :160] *= np.float32(1.1)
    assert "norm_ratio" in failed_gates(cache, actual, rows, network)["latent_0"]


@pytest.mark.parametrize(("size", "latent_scale"), [(1e-3, 1.0), (1e4, 1.0)])
def test_latents_beyond_the_range_of_nvfp4_fail(size, latent_scale):
    """The conversion is the best there is, and of no use: the outer scale has to change."""
    cache = cache_of(CacheDType.NVFP4, latent_scale=latent_scale)
    rows = random_rows(cache, size=size)
    assert failed_gates(cache, converted(cache, rows), rows) == {"latent_0": {"relative_rms_error"}}


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize(("column", "output"), [(3, "latent_0"), (-1, "k_pe_0")])
def test_a_value_that_is_not_finite_fails(dtype, column, output):
    cache = cache_of(dtype)
    rows = random_rows(cache)
    spoiled = rows.copy()
    spoiled[5, column] = np.nan
    assert failed_gates(cache, converted(cache, spoiled), rows) == {output: GATES}
    assert failed_gates(cache, converted(cache, rows), spoiled) == {output: GATES}


def test_the_distance_to_an_unquantised_reference_is_reported_and_not_gated():
    cache = cache_of(CacheDType.FP8)
    rows = cache.split(0, converted(cache, random_rows(cache)))
    logits = np.random.default_rng(1).standard_normal((TOKENS, 7)).astype(np.float32)
    ((plain, unquantized, *_),) = compare_runners(
        StubRunner("actual", [{"logits": logits, UNQUANTIZED_LOGITS: logits, **rows}]),
        StubRunner("reference", [{"logits": logits, UNQUANTIZED_LOGITS: 1.2 * logits + 0.5, **rows}]),
        SCENARIOS[:1],
        gates_for(DType.FLOAT32, 2),
        quantized=cache,
    )
    assert plain.passed
    assert unquantized.passed
    assert {metric.name for metric in unquantized.metrics if metric.gate} == {"nonfinite"}
    assert 0.5 < unquantized.value("cosine") < 0.99
    assert unquantized.value("max_abs_error") == pytest.approx(np.abs(0.2 * logits + 0.5).max(), rel=1e-5)
