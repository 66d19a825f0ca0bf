"""What a row of the latent cache takes in each format, and what reading it costs beside memory.

A row is the latent, its scales if it is quantised, and the rotary key, which is never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import KvCacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError


@dataclass(frozen=True)
class RowFormat:
    """How a cached row is stored.

    Attributes:
        name: As ``kv_cache_dtype`` in a plugin config.
        compute_dtype: Type of the products that attention takes of it; quantised latents are converted to it.
        latent_bits: Bits of an element of the latent.
        block_size: Elements of the latent that share a scale; 0 without scales.
        scale_bytes: Bytes of a scale.
        rope_bytes: Bytes of an element of the rotary key.
        dequantisation_cycles: Cycles in which one multiprocessor converts an element of the latent; an estimate, made
            for Hopper.
    """

    name: str
    compute_dtype: DType
    latent_bits: int
    block_size: int
    scale_bytes: int
    rope_bytes: int
    dequantisation_cycles: float

    @property
    def planned(self) -> bool:
        """Whether no network can be made with this cache so far."""
        return self.name not in get_args(KvCacheDType)

    def row_bytes(self, spec: ModelSpec) -> int:
        """Bytes of a row; a last byte or block that is not full counts whole."""
        latent = -(-spec.kv_lora_rank * self.latent_bits // 8)
        scales = -(-spec.kv_lora_rank // self.block_size) * self.scale_bytes if self.block_size else 0
        return latent + scales + spec.qk_rope_head_dim * self.rope_bytes


FORMATS = {
    item.name: item
    for item in (
        RowFormat("bf16", DType.BFLOAT16, 16, 0, 0, 2, 0),
        RowFormat("fp16", DType.FLOAT16, 16, 0, 0, 2, 0),
        RowFormat("fp32", DType.FLOAT32, 32, 0, 0, 4, 0),
        # E4M3 with an fp32 scale for 128 elements: the row that FlashMLA made for DeepSeek-V3.2. Its authors give
        # about 50 cycles to convert 512 elements on Hopper (their text on its FP8 kernel, in docs/ of
        # https://github.com/deepseek-ai/FlashMLA).
        RowFormat("fp8", DType.BFLOAT16, 8, 128, 4, 2, 50 / 512),
        # Pairs of E2M1 with an E4M3 scale for 16 elements. Bit operations and a multiplication are estimated at 10 to
        # 15 cycles for 512 elements; this is the larger, and has not been measured.
        RowFormat("nvfp4", DType.BFLOAT16, 4, 16, 1, 2, 15 / 512),
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
    own = next(item for item in FORMATS.values() if not item.block_size and item.compute_dtype is spec.dtype)
    return own, *(item for item in FORMATS.values() if item.block_size)
