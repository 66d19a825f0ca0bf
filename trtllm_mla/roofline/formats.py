"""What a row of the latent cache takes in each format, and what reading it costs beside memory."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError


@dataclass(frozen=True)
class RowFormat:
    """How a cached row is stored and read.

    Attributes:
        dtype: Type of the cache.
        compute_dtype: Type of the products that attention takes of it; quantised latents are converted to it.
        dequantisation_cycles: Cycles in which one multiprocessor converts an element of the latent; an estimate, made
            for Hopper.
    """

    dtype: CacheDType
    compute_dtype: DType
    dequantisation_cycles: float = 0.0

    @property
    def name(self) -> str:
        """As ``kv_cache_dtype`` in a plugin config."""
        return self.dtype.value

    def row_bytes(self, spec: ModelSpec) -> int:
        """Bytes of a row."""
        return self.dtype.layout(spec.kv_lora_rank, spec.qk_rope_head_dim).row_bytes


FORMATS = {
    item.name: item
    for item in (
        RowFormat(CacheDType.BF16, DType.BFLOAT16),
        RowFormat(CacheDType.FP16, DType.FLOAT16),
        RowFormat(CacheDType.FP32, DType.FLOAT32),
        # FlashMLA's authors give about 50 cycles to convert 512 elements of E4M3 on Hopper (their text on its FP8
        # kernel, in docs/ of https://github.com/deepseek-ai/FlashMLA).
        RowFormat(CacheDType.FP8, DType.BFLOAT16, 50 / 512),
        # Bit operations and a multiplication are estimated at 10 to 15 cycles for 512 elements; this is the larger,
        # and has not been measured.
        RowFormat(CacheDType.NVFP4, DType.BFLOAT16, 15 / 512),
    )
}


def get_format(name: str) -> RowFormat:
    """Looks a format up by name.

    Raises:
        UserError: The name is not one of ``FORMATS``.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise UserError(f"--kv-cache-dtype: found '{name:.40}', expected some of {', '.join(FORMATS)}.") from None


def default_formats(spec: ModelSpec) -> tuple[RowFormat, ...]:
    """The model's own type and the quantised formats."""
    own = next(item for item in FORMATS.values() if item.dtype is CacheDType.of(spec.dtype))
    return own, *(item for item in FORMATS.values() if item.dtype.is_quantized)
