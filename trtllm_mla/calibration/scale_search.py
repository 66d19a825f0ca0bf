"""The search for a layer's outer scale: which one quantises the layer's latents with the least error?

An outer scale g divides the latents before they are quantised and multiplies what is read. Block scales follow the
size of the latents by themselves, so there is little left to gain where they do it well. Two things remain:

- nvfp4's block scales are E4M3. Below 2^-6 they lose their digits and below 2^-10 they are 0, above 448 they
  saturate: latents that are small or large as a whole need an outer scale. Inside that range a power of two changes
  nothing, so one is tried besides 1: the one in the middle of the range.
- fp8's block scales are powers of two, and nvfp4's have three bits behind the point. A fraction of an octave decides
  how much of the codes' range is used, so eighths of an octave are tried around the better of the two.

The objective is the squared error of the latents. Weighting an error's dimensions by what ``k_up`` and ``v_up`` make
of them was measured as well and tells a better scale from a worse one no more reliably; see docs/calibration.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.network.directory import MAX_LATENT_SCALE, MIN_LATENT_SCALE
from trtllm_mla.ops.row_codec import Float32Array, decode_rows, encode_rows

# The largest magnitude is brought into (2^4, 2^5]: nvfp4 has full precision from 6 * 2^-6 to 6 * 448, whose geometric
# mean is 16. Blocks 2^8 times smaller keep their digits then, and a text with latents 84 times larger fits.
CENTRE_EXPONENT = 5
# Eighths of an octave, half an octave to either side.
STEPS = tuple(step / 8 for step in (-4, -3, -2, -1, 1, 2, 3, 4))
# A scale has to lower the error by so much to be preferred. On the trained example, smaller gains come with better and
# worse logits alike (docs/calibration.md).
MARGIN = 0.02


@dataclass(frozen=True)
class ScaleChoice:
    """A layer's outer scale and what it is good for.

    Attributes:
        latent_scale: The scale, an fp32 number; 1 unless another is better by ``MARGIN``.
        amax: Largest magnitude of a latent's element.
        error_before: Relative RMS error of the latents with the scale 1, over the rows held back.
        error_after: The same with ``latent_scale``.
    """

    latent_scale: float
    amax: float
    error_before: float
    error_after: float


def choose_scale(latents: Float32Array, dtype: CacheDType) -> ScaleChoice:
    """Chooses an outer scale on the first half of the rows, and measures it on the second.

    Args:
        latents: fp32 [rows, kv_lora_rank], finite, two rows or more.
        dtype: The quantised cache's type.

    Raises:
        ValueError: There are fewer rows, or a value is not finite.
    """
    if len(latents) < 2 or not np.isfinite(latents).all():
        raise ValueError(f"found latents of shape {latents.shape}, expected two rows or more of finite values")
    searched, held_back = np.array_split(latents, 2)
    amax = float(np.abs(latents).max())
    best = _better(searched, dtype, 1.0, [_centring_scale(amax)])
    best = _better(searched, dtype, best, [_clamped(best * 2.0**step) for step in STEPS])
    before, after = (quantization_error(held_back, dtype, scale) for scale in (1.0, best))
    if not after < (1 - MARGIN) * before:
        best, after = 1.0, before
    return ScaleChoice(best, amax, before, after)


def quantization_error(latents: Float32Array, dtype: CacheDType, latent_scale: float) -> float:
    """Relative RMS error of quantised latents: the root of their squared error over their squares; 0 for zeros.

    Args:
        latents: fp32 [rows, kv_lora_rank].
        dtype: The quantised cache's type.
        latent_scale: The outer scale.
    """
    layout = dtype.layout(latents.shape[-1], rope_dim=0)
    stored = decode_rows(encode_rows(latents, layout, latent_scale), layout, latent_scale)
    # The tiniest latents' squares are beyond the range of fp32.
    values = latents.astype(np.float64)
    total = float((values**2).sum())
    return math.sqrt(float(((stored - values) ** 2).sum()) / total) if total else 0.0


def _better(latents: Float32Array, dtype: CacheDType, current: float, candidates: list[float]) -> float:
    """The best of the candidates if it is better than the current scale by the margin, else that one."""
    errors = {scale: quantization_error(latents, dtype, scale) for scale in candidates}
    best = min(candidates, key=errors.__getitem__)
    return best if errors[best] < (1 - MARGIN) * quantization_error(latents, dtype, current) else current


def _centring_scale(amax: float) -> float:
    """The power of two that brings ``amax`` into the middle of nvfp4's range."""
    return _clamped(2.0 ** (math.ceil(math.log2(amax)) - CENTRE_EXPONENT)) if amax else 1.0


def _clamped(scale: float) -> float:
    return float(np.float32(min(max(scale, MIN_LATENT_SCALE), MAX_LATENT_SCALE)))
