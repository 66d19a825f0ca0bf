"""The numpy codec of cache rows against one that goes through rows block after block."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import reference
from tests.ops.quantized import QUANTIZED, RANKS, hard_latents, hard_rotary_keys
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.ops.row_codec import decode_rows, encode_rows

ROPE = 6


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("latent_scale", [1.0, 0.37])
@pytest.mark.parametrize("kv_lora_rank", RANKS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_rows_are_those_of_the_reference(dtype: CacheDType, kv_lora_rank: int, latent_scale: float) -> None:
    layout = dtype.layout(kv_lora_rank, ROPE)
    rng = np.random.default_rng(kv_lora_rank)
    rows = np.concatenate([hard_latents(layout, 49, rng, latent_scale), hard_rotary_keys(layout, 49, rng)], 1)
    found = encode_rows(rows, layout, latent_scale)
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found.view(np.uint8), reference.quantize_rows(rows, layout, latent_scale))

    values = reference.dequantize_rows(found, layout).astype(np.float32)
    values[:, :kv_lora_rank] *= np.float32(latent_scale)
    np.testing.assert_array_equal(decode_rows(found, layout, latent_scale), values)
    assert np.isnan(values).any(), "no block with a value that is not finite"


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_values_that_have_codes_keep_their_value(dtype: CacheDType) -> None:
    layout = dtype.layout(512, ROPE)
    latents = hard_latents(layout, 180, np.random.default_rng(0))[3::9]
    latents = latents[(np.abs(latents) < 1e30).all(1)]
    assert len(latents) >= 10
    rows = np.concatenate([latents, np.ones((len(latents), ROPE), np.float32)], 1)
    found = decode_rows(encode_rows(rows, layout), layout)
    # Their first block has the largest code.
    np.testing.assert_array_equal(found[:, : layout.block_size], rows[:, : layout.block_size])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_poison_reads_as_nan(dtype: CacheDType) -> None:
    layout = dtype.layout(448, ROPE)
    assert np.isnan(decode_rows(np.full((2, 3, layout.row_bytes), -1, np.int8), layout)).all()


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_value_that_is_not_finite_shows_in_its_block_alone(dtype: CacheDType) -> None:
    layout = dtype.layout(512, ROPE)
    rows = np.random.default_rng(0).standard_normal((3, 512 + ROPE)).astype(np.float32)
    rows[0, 130], rows[1, 130], rows[2, 130] = np.nan, np.inf, -np.inf
    values = decode_rows(encode_rows(rows, layout), layout)
    block = 130 // layout.block_size * layout.block_size
    expected = np.zeros((3, 512 + ROPE), bool)
    expected[:, block : block + layout.block_size] = True
    np.testing.assert_array_equal(np.isnan(values), expected)


def relative_rms(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected.astype(np.float64) ** 2).mean()))


def test_error_of_a_gaussian_latent() -> None:
    """With amax / 6 alone, which uses all of E2M1's range, nvfp4 loses half a percentage point more."""
    latents = np.random.default_rng(0).standard_normal((400, 512)).astype(np.float32)
    rows = np.concatenate([latents, np.zeros((400, ROPE), np.float32)], 1)
    errors = {}
    for dtype in QUANTIZED:
        layout = dtype.layout(512, ROPE)
        errors[dtype] = relative_rms(decode_rows(encode_rows(rows, layout), layout)[:, :512], latents)
    blocks = latents.reshape(-1, 16)
    errors["amax / 6"] = relative_rms(
        np.concatenate([reference.round_nvfp4(block, divisor=6) for block in blocks[:4000]]),
        blocks[:4000].reshape(-1),
    )
    assert errors[CacheDType.FP8] <= 0.027
    assert errors[CacheDType.NVFP4] <= 0.09
    assert 0.093 <= errors["amax / 6"] <= 0.097
