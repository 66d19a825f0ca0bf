"""Cosines and sines of rotary position embeddings, as the runtime feeds them to a network.

The formulas and the order of the fp32 operations are those of transformers' ``modeling_rope_utils`` (default, linear),
``_compute_yarn_parameters`` (YaRN, https://arxiv.org/abs/2309.00071) and ``_compute_longrope_parameters`` (LongRoPE,
https://arxiv.org/abs/2402.13753).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trtllm_mla.checkpoint.spec import RopeSpec

MAX_POSITIONS = 1 << 24  # every whole number below is exact in fp32

_Float32 = np.ndarray[Any, np.dtype[np.float32]]


def inverse_frequencies(rope: RopeSpec) -> _Float32:
    """Radians per position of each rotary pair, scaling included.

    Powers are computed in fp64 and rounded once. PyTorch's fp32 powers, which differ between devices, lie within one
    unit in the last place of these; at the usual bases and widths they are the same.

    Returns:
        fp32 [dim / 2], fastest first.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    powers = (np.float64(np.float32(rope.theta)) ** exponents.astype(np.float64)).astype(np.float32)
    one, factor = np.float32(1), np.float32(rope.factor)
    frequencies = one / powers
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / factor
    if rope.rope_type == "longrope":
        return one / (np.asarray(rope.frequency_factors, np.float32) * powers)
    keep = one - _yarn_ramp(rope)
    return one / (factor * powers) * (one - keep) + frequencies * keep


def _yarn_ramp(rope: RopeSpec) -> _Float32:
    """How far each pair's frequency is divided by the factor: 0 for the fastest, 1 for the slowest; fp32 [dim / 2]."""
    positions = rope.original_max_position_embeddings
    if positions is None:
        raise ValueError("original_max_position_embeddings: YaRN needs it")

    def pair_with(rotations: float) -> float:
        """The (fractional) dimension that turns ``rotations`` times over the original positions."""
        return rope.dim * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(rope.dim // 2, dtype=np.float32)
    ramp: _Float32 = np.clip((pairs - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    return ramp


def rotary_cos_sin(rope: RopeSpec, positions: int) -> _Float32:
    """The table that a network's input ``rotary_cos_sin`` takes.

    An angle is the fp32 product of position and frequency, as in transformers; its cosine and sine are computed in
    fp64, rounded, and multiplied by ``attention_factor`` in fp32.

    Args:
        rope: The rotary embedding.
        positions: Rows wanted, for the positions 0 to ``positions - 1``.

    Returns:
        fp32 [positions, dim]: cosines of the ``dim / 2`` angles, then their sines.
    """
    if not 0 <= positions <= MAX_POSITIONS:
        raise ValueError(f"positions: found {positions}, expected 0 to {MAX_POSITIONS}")
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(rope)
    exact = angles.astype(np.float64)
    table = np.empty((positions, rope.dim), np.float32)
    half = rope.dim // 2
    table[:, :half] = np.cos(exact)
    table[:, half:] = np.sin(exact)
    table *= np.float32(rope.attention_factor)
    return table
