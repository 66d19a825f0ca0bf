"""What a quantised cache may differ by from the rows it was made from.

A quantised row is right if each of its values is one that the format has nearest to what was to be cached. Whether the
format is good enough for the model is another question, which perplexity answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.ops.row_codec import (
    E2M1_VALUES,
    E4M3_MAX,
    FP8_SCALE_EXPONENTS,
    NVFP4_DIVISORS,
    decode_rows,
    encode_rows,
)
from trtllm_mla.validation import metrics

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

LATENT_PREFIX = "latent_"
K_PE_PREFIX = "k_pe_"

_BFLOAT16_ROUNDOFF = 2.0**-8


@dataclass(frozen=True)
class CachedPart(ABC):
    """A part of the rows of one layer.

    Attributes:
        layer: The layer, from 0.
        layout: A whole row.
        latent_scale: Outer scale of the layer's latents.
    """

    layer: int
    layout: RowLayout
    latent_scale: float

    @property
    @abstractmethod
    def output(self) -> str:
        """Name of the part among a runner's outputs."""

    @property
    @abstractmethod
    def roundoff(self) -> float:
        """Largest error of a value in the format's normal range, relative to the value."""

    @abstractmethod
    def round(self, values: Array) -> Array:
        """What an exact conversion would cache of ``values``, [tokens, width of the part]."""

    @abstractmethod
    def largest_errors(self, values: Array, slack: float) -> Float64Array:
        """Largest error that rounding to the nearest can make of each value.

        Args:
            values: [tokens, width of the part], what was to be cached.
            slack: How far the values that were rounded may have been from them.
        """

    def rounding(self, actual: Array, reference: Array, slack: float) -> float:
        """Largest error in units of what rounding can make; at most 1 where every value was rounded to the nearest.

        Args:
            actual: [tokens, width of the part], what was cached.
            reference: The same shape, what was to be cached.
            slack: How far the values that were rounded may have been from the reference.
        """
        if metrics.nonfinite_count(actual, reference):
            return float("nan")
        error = np.maximum(np.abs(actual.astype(np.float64) - reference) - slack, 0)
        allowed = self.largest_errors(reference, slack)
        # An error where none is allowed is infinitely large.
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(error == 0, 0, error / allowed).max(initial=0))

    def same_codes(self, actual: Array, reference: Array) -> float:
        """Share of the values that are those of an exact conversion of the reference, bit by bit."""
        return float((actual == self.round(reference)).mean()) if actual.size else 1.0


class CachedLatent(CachedPart):
    """The latents of a layer, in blocks that share a scale."""

    @property
    def output(self) -> str:
        """Name of the part among a runner's outputs."""
        return f"{LATENT_PREFIX}{self.layer}"

    @property
    def roundoff(self) -> float:
        """For fp8 half of E4M3's step at 1; for nvfp4 a fifth: 5 becomes 4 or 6, and 2.5 becomes 2 or 3."""
        return 2.0**-4 if self.layout.dtype is CacheDType.FP8 else 0.2

    def round(self, values: Array) -> Array:
        """What an exact conversion would cache of the latents."""
        rows = encode_rows(np.pad(values, ((0, 0), (0, self.layout.rope_dim))), self.layout, self.latent_scale)
        return decode_rows(rows, self.layout, self.latent_scale)[:, : self.layout.kv_lora_rank]

    def largest_errors(self, values: Array, slack: float) -> Float64Array:
        """Half of the step between codes, times the largest scale that the format might choose for the block."""
        scale = self.latent_scale
        magnitudes = np.abs(values.astype(np.float64)) / scale
        largest = _by_block(magnitudes, self.layout)
        bound = _fp8_errors if self.layout.dtype is CacheDType.FP8 else _nvfp4_errors
        return bound(magnitudes, largest, slack / scale) * scale


class CachedKPe(CachedPart):
    """The rotary keys of a layer, in bfloat16."""

    @property
    def output(self) -> str:
        """Name of the part among a runner's outputs."""
        return f"{K_PE_PREFIX}{self.layer}"

    @property
    def roundoff(self) -> float:
        """Half of bfloat16's step at 1."""
        return _BFLOAT16_ROUNDOFF

    def round(self, values: Array) -> Array:
        """What an exact conversion would cache of the rotary keys."""
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)

    def largest_errors(self, values: Array, slack: float) -> Float64Array:
        """Half of the step between two bfloat16 values, where they are furthest apart."""
        magnitudes = np.abs(values.astype(np.float64)) + slack
        return np.exp2(np.floor(np.log2(np.maximum(magnitudes, 2.0**-126)))) * _BFLOAT16_ROUNDOFF


@dataclass(frozen=True)
class QuantizedCache:
    """A network's quantised latent cache.

    Attributes:
        layout: Its rows.
        latent_scales: Outer scale of each layer's latents.
    """

    layout: RowLayout
    latent_scales: tuple[float, ...]

    @property
    def parts(self) -> tuple[CachedPart, ...]:
        """Latents and rotary keys of each layer."""
        return tuple(
            part(layer, self.layout, scale)
            for layer, scale in enumerate(self.latent_scales)
            for part in (CachedLatent, CachedKPe)
        )

    def split(self, layer: int, rows: Array) -> dict[str, Array]:
        """The rows of a layer as outputs of their own, by name."""
        latent, k_pe = np.split(rows, [self.layout.kv_lora_rank], axis=-1)
        return {f"{LATENT_PREFIX}{layer}": latent, f"{K_PE_PREFIX}{layer}": k_pe}


def _by_block(magnitudes: Float64Array, layout: RowLayout) -> Float64Array:
    """For each element the largest magnitude in its block."""
    starts = np.arange(0, layout.kv_lora_rank, layout.block_size)
    largest: Float64Array = np.maximum.reduceat(magnitudes, starts, axis=-1)
    return np.repeat(largest, layout.block_size, axis=-1)[:, : layout.kv_lora_rank]


def _fp8_errors(magnitudes: Float64Array, largest: Float64Array, slack: float) -> Float64Array:
    """E4M3's steps are 2^-3 of a power of two, and 2^-9 of the scale below it; the scale is the least that fits."""
    lowest, highest = (2.0**exponent for exponent in (FP8_SCALE_EXPONENTS[0], FP8_SCALE_EXPONENTS[-1]))
    scales = np.exp2(np.ceil(np.log2(np.maximum((largest + slack) / E4M3_MAX, lowest))))
    scales = np.minimum(scales, highest)
    steps = np.exp2(np.floor(np.log2(np.maximum(magnitudes + slack, scales * 2.0**-6)))) * 2.0**-3
    return steps / 2


def _nvfp4_errors(magnitudes: Float64Array, largest: Float64Array, slack: float) -> Float64Array:
    """E2M1's steps are a half, one and two scales; which candidate is the scale cannot be told from outside."""
    values = np.array(E2M1_VALUES)
    half_steps = np.diff(values) / 2
    result = np.zeros_like(magnitudes)
    for divisor in NVFP4_DIVISORS:
        for shift in (-slack, slack):
            ideal = np.clip((largest + shift) / divisor, 0, E4M3_MAX)
            scales = ideal.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            with np.errstate(divide="ignore", invalid="ignore"):
                units = np.where(scales > 0, (magnitudes + slack) / scales, np.inf)
            step = np.searchsorted(values, units, side="right") - 1
            inside = half_steps[np.minimum(step, len(half_steps) - 1)] * scales
            result = np.maximum(result, np.where(step < len(half_steps), inside, magnitudes - values[-1] * scales))
    return result
