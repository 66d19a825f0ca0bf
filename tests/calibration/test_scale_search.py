"""The search for an outer scale, against errors that are computed here from the formats' definitions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.calibration.scale_search import choose_scale, quantization_error

FP8, NVFP4 = CacheDType.FP8, CacheDType.NVFP4
WIDTH = 160  # a block of fp8 and a quarter, ten of nvfp4


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(29)


def relative_rms(stored: np.ndarray, latents: np.ndarray) -> float:
    values = latents.astype(np.float64)
    return float(np.linalg.norm(stored - values) / np.linalg.norm(values))


def fp8_error(latents: np.ndarray, scale: float) -> float:
    """E4M3 with a power of two as the block's scale, in float64 and written from the format's definition."""
    stored = np.empty(latents.shape)
    for row, values in enumerate(latents.astype(np.float64) / scale):
        for start in range(0, WIDTH, 128):
            block = values[start : start + 128]
            power = 2.0 ** np.ceil(np.log2(np.abs(block).max() / 448))
            stored[row, start : start + 128] = (block / power).astype(ml_dtypes.float8_e4m3fn).astype(float) * power
    return relative_rms(stored * scale, latents)


def nvfp4_error(latents: np.ndarray, scale: float) -> float:
    """E2M1 with the better of two E4M3 scales, likewise."""
    stored = np.empty(latents.shape)
    for row, values in enumerate(latents.astype(np.float64) / scale):
        for start in range(0, WIDTH, 16):
            block = values[start : start + 16]
            candidates = []
            for divisor in (6, 4):
                step = min(np.abs(block).max() / divisor, 448.0)
                step = np.float64(np.array(step, ml_dtypes.float8_e4m3fn))
                codes = np.clip(block / step, -6, 6).astype(ml_dtypes.float4_e2m1fn) if step else np.zeros(16)
                candidates.append(codes.astype(float) * step)
            stored[row, start : start + 16] = min(candidates, key=lambda item: ((item - block) ** 2).sum())
    return relative_rms(stored * scale, latents)


@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0**-9])
@pytest.mark.parametrize(("dtype", "expected"), [(FP8, fp8_error), (NVFP4, nvfp4_error)])
def test_the_error_is_that_of_the_format(rng, dtype, expected, scale):
    latents = rng.normal(size=(40, WIDTH)).astype(np.float32)
    assert quantization_error(latents, dtype, scale) == pytest.approx(expected(latents, scale), rel=1e-3)


def test_nvfp4_loses_latents_of_a_thousandth_and_calibration_rescues_them(rng):
    latents = (1e-3 * rng.normal(size=(400, WIDTH))).astype(np.float32)
    assert nvfp4_error(latents[200:], 1.0) > 0.5
    choice = choose_scale(latents, NVFP4)
    assert choice.error_before == pytest.approx(nvfp4_error(latents[200:], 1.0), rel=1e-3)
    assert choice.error_after == pytest.approx(nvfp4_error(latents[200:], choice.latent_scale), rel=1e-3)
    # No more than latents of an ordinary size lose: 9.0 % of a Gaussian.
    assert choice.error_after < 0.09
    assert choice.amax == np.abs(latents).max()
    assert np.float32(choice.latent_scale) == choice.latent_scale


@pytest.mark.parametrize("size", [1e-12, 1e-5, 1e4, 1e12])
def test_nvfp4_latents_of_every_size_are_rescued(rng, size):
    latents = (size * rng.normal(size=(200, WIDTH))).astype(np.float32)
    choice = choose_scale(latents, NVFP4)
    assert choice.error_before > 0.5
    assert choice.error_after < 0.09


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e3])
def test_fp8_needs_no_power_of_two(rng, size):
    """Its block scales are powers of two from 2^-64: one more changes nothing, bit for bit."""
    latents = (size * rng.normal(size=(100, WIDTH))).astype(np.float32)
    at_one = quantization_error(latents, FP8, 1.0)
    assert at_one < 0.04
    for exponent in (-3, 1, 5):
        assert quantization_error(latents, FP8, 2.0**exponent) == at_one


def test_fp8_gains_by_a_fraction_of_an_octave(rng):
    """Largest values just above 448 * 2^k waste half of the codes' range."""
    signs = rng.choice([-1, 1], size=(300, WIDTH))
    latents = (signs * rng.uniform(0.9, 1.1, size=(300, WIDTH)) * 448 * 1.12).astype(np.float32)
    choice = choose_scale(latents, FP8)
    assert np.log2(choice.latent_scale) % 1 != 0
    assert choice.error_after == pytest.approx(fp8_error(latents[150:], choice.latent_scale), rel=1e-3)
    grid = [fp8_error(latents[:150], float(np.float32(2.0 ** (step / 8)))) for step in range(8)]
    assert fp8_error(latents[:150], choice.latent_scale) == pytest.approx(min(grid), rel=1e-3)


@pytest.mark.parametrize("dtype", [FP8, NVFP4])
def test_gaussian_latents_keep_the_scale_1(rng, dtype):
    latents = rng.normal(size=(400, 512)).astype(np.float32)
    choice = choose_scale(latents, dtype)
    assert choice.latent_scale == 1
    assert choice.error_after == choice.error_before < {FP8: 0.03, NVFP4: 0.09}[dtype]


def test_a_gain_that_the_other_half_does_not_show_is_no_gain(rng):
    """The first half asks for a scale that the second gains nothing by, and the second decides."""
    small, ordinary = (size * rng.normal(size=(150, WIDTH)) for size in (2e-3, 8.0))
    tight = np.concatenate([small, ordinary]).astype(np.float32)
    choice = choose_scale(tight, NVFP4)
    assert choose_scale(small.astype(np.float32), NVFP4).latent_scale != 1
    assert choice.latent_scale == 1
    assert choice.error_after == choice.error_before


def test_small_latents_in_nvfp4_gain_by_a_fraction_of_an_octave_too(rng):
    signs = rng.choice([-1, 1], size=(100, WIDTH))
    latents = (signs * rng.uniform(0.98, 1, size=(100, WIDTH)) * 1.5 * 2.0**-10).astype(np.float32)
    choice = choose_scale(latents, NVFP4)
    assert np.log2(choice.latent_scale) % 1 != 0
    grid = [nvfp4_error(latents[:50], float(np.float32(2.0 ** (step / 8 - 13)))) for step in range(8)]
    assert nvfp4_error(latents[:50], choice.latent_scale) == pytest.approx(min(grid), rel=1e-3)


@pytest.mark.parametrize(("dtype", "error"), [(FP8, fp8_error), (NVFP4, nvfp4_error)])
def test_a_scale_is_taken_that_gains_two_percent_on_both_halves(dtype, error):
    rng = np.random.default_rng(31)
    steps = [float(np.float32(2.0 ** (step / 8))) for step in range(-4, 5)]
    taken = []
    for octave in range(16):
        size = 2.0 ** (octave / 16) * rng.choice([-1, 1], size=(12, WIDTH))
        latents = (size * rng.uniform((0.4, 0.9)[octave % 2], 1, size=(12, WIDTH))).astype(np.float32)
        first, second = latents[:6], latents[6:]
        best = min(steps, key=lambda scale: error(first, scale))
        gains = [1 - error(half, best) / error(half, 1.0) for half in (first, second)]
        choice = choose_scale(latents, dtype)
        taken.append(min(gains) > 0.02)
        assert (choice.latent_scale != 1) == taken[-1], gains
        if taken[-1]:
            assert error(first, choice.latent_scale) == pytest.approx(error(first, best), rel=1e-3)
    assert {*taken} == {True, False}


def test_latents_of_zeros_keep_the_scale_1():
    choice = choose_scale(np.zeros((6, WIDTH), np.float32), NVFP4)
    assert (choice.latent_scale, choice.amax, choice.error_before, choice.error_after) == (1, 0, 0, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value):
    latents = np.ones((4, WIDTH), np.float32)
    latents[3, 7] = value
    with pytest.raises(ValueError, match="finite"):
        choose_scale(latents, FP8)


def test_one_row_is_refused():
    with pytest.raises(ValueError, match="two rows"):
        choose_scale(np.ones((1, WIDTH), np.float32), FP8)
