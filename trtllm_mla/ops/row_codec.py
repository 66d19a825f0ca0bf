"""How latents and rotary keys become the rows of a latent cache, in numpy.

This is the plain statement of the arithmetic that ``AppendLatent`` does on the device and in its function body; an
executor reads its pools with it, and a calibration tries scales with it.

Values are ``latent / latent_scale`` in fp32. They are quantised in blocks that share a scale, rounded to the nearest
code, ties to the even code, and saturate:

fp8
    E4M3 codes in blocks of 128. The scale is the least power of two from 2^-64 to 2^7 with ``448 * scale >= amax``,
    where ``amax`` is the block's largest magnitude. A power of two costs no precision and is multiplied exactly.
nvfp4
    E2M1 codes in blocks of 16. Two scales are tried, ``amax / 6`` and ``amax / 4``, both rounded to E4M3: the first
    uses the whole range of E2M1, the second its finer half, where the largest values are not rounded from 5 to 4 or 6
    ("four over six", arXiv:2512.02010). The one with the smaller squared error is kept, the first of equals. Errors
    are summed in fp32 as a tree of halves (16, 8, 4, 2, 1 elements), so that every implementation sums alike.

A block with a value that is not finite gets the scale NaN: all of it reads as NaN, and a fault stays visible.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_mla.cache_rows import CacheDType, RowLayout

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

E4M3_MAX = 448.0
FP8_SCALE_EXPONENTS = range(-64, 8)
# Magnitudes between two neighbouring E2M1 values; at one of them, the code with an even number is nearest.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_DIVISORS = (6.0, 4.0)

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_NAN_SCALE_E4M3 = 0x7F


def encode_rows(rows: Array, layout: RowLayout, latent_scale: float = 1.0) -> Array:
    """Makes pool rows.

    Args:
        rows: [..., kv_lora_rank + rope_dim], converted to fp32: latents, then rotated rotary keys.
        layout: The cache's row.
        latent_scale: The layer's outer scale; 1 where the cache is not quantised.

    Returns:
        [..., layout.width] of ``layout.dtype.numpy``.
    """
    _check_scale(layout, latent_scale)
    values = np.asarray(rows, np.float32)
    if not layout.dtype.is_quantized:
        return values.astype(layout.dtype.numpy)
    latent = values[..., : layout.kv_lora_rank] / np.float32(latent_scale)
    blocks = np.zeros((*latent.shape[:-1], layout.num_scales * layout.block_size), np.float32)
    blocks[..., : layout.kv_lora_rank] = latent
    blocks = blocks.reshape(*latent.shape[:-1], layout.num_scales, layout.block_size)
    finite = np.asarray(np.isfinite(blocks).all(-1, keepdims=True))
    encode = _encode_fp8 if layout.dtype is CacheDType.FP8 else _encode_nvfp4
    with np.errstate(over="ignore"):  # squared errors of the largest fp32 numbers
        codes, scales = encode(np.where(finite, blocks, 0), finite)

    result = np.zeros((*latent.shape[:-1], layout.row_bytes), np.uint8)
    result[..., : layout.code_bytes] = codes.reshape(*latent.shape[:-1], -1)[..., : layout.code_bytes]
    scale_bytes = scales.view(np.uint8)
    result[..., layout.scale_offset : layout.scale_offset + scale_bytes.shape[-1]] = scale_bytes
    rope = np.ascontiguousarray(values[..., layout.kv_lora_rank :].astype(ml_dtypes.bfloat16)).view(np.uint16)
    # Bits of a NaN differ between conversions; a row has one kind.
    rope = np.where(np.isnan(values[..., layout.kv_lora_rank :]), np.uint16(0x7FFF), rope).view(np.uint8)
    result[..., layout.rope_offset : layout.rope_offset + rope.shape[-1]] = rope
    return result.view(np.int8)


def decode_rows(pool: Array, layout: RowLayout, latent_scale: float = 1.0) -> Float32Array:
    """Reads pool rows.

    Args:
        pool: [..., layout.width] of ``layout.dtype.numpy``.
        layout: The cache's row.
        latent_scale: The layer's outer scale; 1 where the cache is not quantised.

    Returns:
        fp32 [..., kv_lora_rank + rope_dim]: latents, then rotary keys.
    """
    _check_scale(layout, latent_scale)
    if not layout.dtype.is_quantized:
        return pool.astype(np.float32)
    data = np.ascontiguousarray(pool).view(np.uint8)
    codes = data[..., : layout.code_bytes]
    if layout.dtype is CacheDType.FP8:
        values = codes.view(_E4M3).astype(np.float32)
        scales = np.ascontiguousarray(data[..., layout.scale_offset :][..., : 4 * layout.num_scales]).view(np.float32)
    else:
        pairs = np.stack([codes & 0xF, codes >> 4], -1).reshape(*codes.shape[:-1], -1)[..., : layout.kv_lora_rank]
        values = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], np.float32)[pairs]
        scales = data[..., layout.scale_offset :][..., : layout.num_scales].view(_E4M3).astype(np.float32)
    latent = values * np.repeat(scales, layout.block_size, -1)[..., : layout.kv_lora_rank]
    rope = np.ascontiguousarray(data[..., layout.rope_offset :][..., : 2 * layout.rope_dim]).view(ml_dtypes.bfloat16)
    return np.concatenate([latent * np.float32(latent_scale), rope.astype(np.float32)], -1)


def _encode_fp8(blocks: Float32Array, finite: Array) -> tuple[Array, Array]:
    """Codes uint8 [..., blocks, 128] and scales fp32 [..., blocks]."""
    amax = np.abs(blocks).max(-1, keepdims=True)
    powers = np.exp2(np.array(FP8_SCALE_EXPONENTS, np.float32))
    too_small = np.float32(E4M3_MAX) * powers < amax
    scale = powers[np.minimum(too_small.sum(-1), len(powers) - 1)][..., None]
    codes = _signed(_e4m3(np.abs(blocks) / scale), blocks < 0, 0x80)
    return codes, np.where(finite, scale, np.float32(np.nan))[..., 0]


def _encode_nvfp4(blocks: Float32Array, finite: Array) -> tuple[Array, Array]:
    """Pairs of codes uint8 [..., 8 * blocks] and scales uint8 [..., blocks]."""
    magnitudes = np.abs(blocks)
    amax = magnitudes.max(-1, keepdims=True)
    candidates = []
    for divisor in NVFP4_DIVISORS:
        scale_code = _e4m3(amax / np.float32(divisor))
        scale = scale_code.view(_E4M3).astype(np.float32)
        codes = np.zeros(blocks.shape, np.uint8)
        if_even = (np.greater, np.greater_equal)
        for number, midpoint in enumerate(E2M1_MIDPOINTS):
            codes += if_even[number % 2](magnitudes, np.float32(midpoint) * scale) & (scale > 0)
        error = (np.array(E2M1_VALUES, np.float32)[codes] * scale - magnitudes) ** 2
        while error.shape[-1] > 1:
            error = error[..., : error.shape[-1] // 2] + error[..., error.shape[-1] // 2 :]
        candidates.append((codes, scale_code, error))
    (codes_6, scale_6, error_6), (codes_4, scale_4, error_4) = candidates
    finer = error_4 < error_6
    codes = _signed(np.where(finer, codes_4, codes_6), blocks < 0, 0x8)
    scales = np.where(finite, np.where(finer, scale_4, scale_6), np.uint8(_NAN_SCALE_E4M3))[..., 0]
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def _e4m3(magnitudes: Float32Array) -> npt.NDArray[np.uint8]:
    """The nearest E4M3 code of each magnitude, at most that of 448."""
    return np.minimum(magnitudes, np.float32(E4M3_MAX)).astype(_E4M3).view(np.uint8)


def _signed(codes: Array, negative: Array, sign_bit: int) -> npt.NDArray[np.uint8]:
    return np.where(negative, codes | sign_bit, codes).astype(np.uint8)


def _check_scale(layout: RowLayout, latent_scale: float) -> None:
    if not layout.dtype.is_quantized and latent_scale != 1.0:
        raise ValueError(f"found latent_scale {latent_scale} with a {layout.dtype} cache, expected 1")
