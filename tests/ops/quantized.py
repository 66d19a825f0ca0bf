"""Latents and rotary keys that are hard to quantise, and pools of quantised rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from trtllm_mla.cache_rows import CacheDType, RowLayout

QUANTIZED = (CacheDType.FP8, CacheDType.NVFP4)
# With whole blocks of both types, with a short last block of fp8, of both, and with an odd number of elements.
RANKS = (512, 448, 40, 17)
# What an unused pool is filled with: as scales and rotary keys it is NaN.
POISON = -1
_NUMBERS = {
    CacheDType.FP8: np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    CacheDType.NVFP4: np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn),
}


def hard_latents(layout: RowLayout, count: int, rng: np.random.Generator, latent_scale: float = 1.0) -> np.ndarray:
    """fp32 [count, kv_lora_rank], each row of one of nine kinds, times the outer scale."""
    shape = (count, layout.kv_lora_rank)
    numbers = _NUMBERS[layout.dtype].astype(np.float64)
    code = rng.integers(0, len(numbers) - 1, shape)
    power = np.exp2(rng.integers(-40 if layout.dtype is CacheDType.FP8 else -9, 8, (count, 1)))
    sign = rng.choice([-1.0, 1.0], shape)
    normal = rng.standard_normal(shape)
    kinds = [
        normal,
        # Rows of all magnitudes of fp32, its subnormal numbers included; and all magnitudes within a row.
        normal * np.exp2(rng.uniform(-149, 126, (count, 1))),
        normal * np.exp2(rng.uniform(-149, 126, shape)),
        # Codes times a power of two, and what is in the middle between two codes. Element 0 makes the power the scale.
        sign * numbers[code] * power,
        sign * (numbers[code] + numbers[code + 1]) / 2 * power,
        # Blocks around the smallest scales.
        normal * (2.0**-64 if layout.dtype is CacheDType.FP8 else 2.0**-9),
        # Near the largest ones, and beyond.
        normal * np.exp2(rng.uniform(10, 20, (count, 1))),
        np.resize(equal_errors(shape[0] * shape[1] // 16 + 1, rng), shape),
        np.resize(scales_near_midpoints(shape[0] * shape[1] // 16 + 1, rng), shape),
    ]
    for kind in kinds[3:5]:
        kind[:, 0] = numbers[-1] * power[:, 0]
    rows = np.choose(np.arange(count)[:, None] % len(kinds), kinds)
    rows[rng.random(shape) < 0.03] = 0.0
    rows[rng.random(shape) < 0.03] = -0.0
    rows[count // 2 :: 11] = rng.choice([0.0, -0.0], shape)[count // 2 :: 11]
    rows[count // 3 :: 11, rng.integers(layout.kv_lora_rank)] = rng.choice([np.nan, np.inf, -np.inf])
    # Sums of these are beyond fp32, although they are not.
    rows[count // 4 :: 11] = 3.4e38
    rows *= latent_scale
    return np.clip(rows, -3.4e38, 3.4e38, where=np.isfinite(rows), out=rows).astype(np.float32)


def equal_errors(count: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [count, 16] with nearly the same squared error for nvfp4's two scales, in every order of rounding.

    The difference of the two errors is linear in an element while its codes stay: that element is moved to its zero.
    """
    found = np.empty((0, 16))
    while len(found) < count:
        blocks = rng.standard_normal((20 * count, 16)).astype(np.float32).astype(np.float64)
        rows = np.arange(len(blocks))
        errors, values = zip(*(_error_and_values(blocks, divisor) for divisor in (6, 4)), strict=True)
        distance = np.where(np.abs(blocks) < np.abs(blocks).max(1, keepdims=True), values[0] - values[1], 0)
        moved = np.abs(distance).argmax(1)
        blocks[rows, moved] -= (errors[1] - errors[0]) / (2 * distance[rows, moved])
        blocks = (blocks * (1 + rng.integers(-3, 4, blocks.shape) * 2.0**-24)).astype(np.float32).astype(np.float64)
        errors = [_error_and_values(blocks, divisor)[0] for divisor in (6, 4)]
        found = np.concatenate([found, blocks[np.abs(errors[0] - errors[1]) < 1e-6 * errors[0]]])
    return found[:count]


def scales_near_midpoints(count: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [count, 16] whose largest magnitude over 6 is within two fp32 steps of the middle of two E4M3 numbers."""
    numbers = _NUMBERS[CacheDType.FP8].astype(np.float64)
    code = rng.integers(0, len(numbers) - 1, count)
    amax = 3 * (numbers[code] + numbers[code + 1]) * (1 + rng.integers(-2, 3, count) * 2.0**-23)
    blocks = amax[:, None] * rng.uniform(-1, 1, (count, 16))
    blocks[:, 0] = amax
    return blocks


def _error_and_values(blocks: np.ndarray, divisor: int) -> tuple[np.ndarray, np.ndarray]:
    scale = (np.abs(blocks).max(1, keepdims=True).astype(np.float32) / np.float32(divisor)).astype(
        ml_dtypes.float8_e4m3fn
    )
    scale = scale.astype(np.float64)
    values = (blocks / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale
    return ((values - blocks) ** 2).sum(1), values


def hard_rotary_keys(layout: RowLayout, count: int, rng: np.random.Generator) -> np.ndarray:
    """fp32 [count, rope_dim] of all magnitudes, with zeros of both signs and values that are not finite."""
    keys = rng.standard_normal((count, layout.rope_dim)) * np.exp2(rng.uniform(-149, 126, (count, 1)))
    keys = keys.astype(np.float32)
    special = rng.choice([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, np.nan, np.inf, -np.inf], keys.shape)
    return np.where(rng.random(keys.shape) < 0.1, special, keys).astype(np.float32)


def rotated(keys: np.ndarray, cos_sin: np.ndarray, *, interleave: bool) -> np.ndarray:
    """Keys [n, rope_dim] rotated by the angles in [n, rope_dim], in fp32 with a rounding for each operation."""
    half = keys.shape[1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleave else (slice(0, half), slice(half, None))
    cos, sin = cos_sin[:, :half], cos_sin[:, half:]
    result = np.empty_like(keys)
    with np.errstate(over="ignore", invalid="ignore"):
        result[:, first] = keys[:, first] * cos - keys[:, second] * sin
        result[:, second] = keys[:, second] * cos + keys[:, first] * sin
    return result


def poisoned_pool(layout: RowLayout, pages: int, page_size: int) -> torch.Tensor:
    return torch.full((pages, page_size, layout.row_bytes), POISON, dtype=torch.int8)
