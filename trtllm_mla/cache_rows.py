"""Types of the latent cache, and how the row of a cached token is laid out in each.

A row is the token's latent, the scales of its blocks if it is quantised, and its rotary key. In a quantised row each
of these sections starts at a multiple of 16 bytes, so that kernels read all of it in 16-byte accesses; bytes between
sections are 0. The rotary key is bfloat16 then, whatever the network's type: it reaches values that a block scale
shared with its neighbours would drown (SnapMLA, arXiv:2602.10718).

With a latent of 512 and a rotary key of 64 elements:

======  ======================  ============================  ==================  =====
type    latent                  scales                        rotary key          bytes
======  ======================  ============================  ==================  =====
bf16    512 bfloat16            none                          64 bfloat16         1152
fp8     512 E4M3                4 fp32, one for 128 elements  64 bfloat16         656
nvfp4   256 pairs of E2M1       32 E4M3, one for 16 elements  64 bfloat16         416
======  ======================  ============================  ==================  =====

The fp8 row is the one that FlashMLA made for DeepSeek-V3.2 (https://github.com/deepseek-ai/FlashMLA).
``trtllm_mla.ops.row_codec`` states how values become codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_mla.dtypes import DType

if TYPE_CHECKING:
    import onnx_ir

ROW_ALIGNMENT = 16
_ROPE_ITEMSIZE = DType.BFLOAT16.itemsize


class CacheDType(StrEnum):
    """Type of a latent cache's rows. The value is the name in a plugin config."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"

    @classmethod
    def of(cls, dtype: DType) -> CacheDType:
        """The type whose rows hold elements of ``dtype``."""
        return cls(dtype.triton)

    @property
    def element(self) -> DType | None:
        """Type of a row's elements, or None where a row is quantised."""
        return next((dtype for dtype in DType if dtype.triton == self.value), None)

    @property
    def is_quantized(self) -> bool:
        """Whether rows hold codes and scales."""
        return self.element is None

    @property
    def storage(self) -> str:
        """Name of the pool tensor's element type in numpy, torch and ONNX; quantised rows are ``int8`` bytes.

        TensorRT refuses unsigned bytes as an engine's output.
        """
        return self.element.value if self.element else "int8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the pool tensor."""
        return self.element.itemsize if self.element else 1

    @property
    def numpy(self) -> np.dtype[Any]:
        """The pool tensor's numpy dtype."""
        return self.element.numpy if self.element else np.dtype(np.int8)

    @property
    def triton(self) -> str:
        """Name of the pool tensor's element type in a Triton signature."""
        return self.element.triton if self.element else "i8"

    @property
    def onnx(self) -> onnx_ir.DataType:
        """The pool tensor's ONNX element type."""
        import onnx_ir

        return self.element.onnx if self.element else onnx_ir.DataType.INT8

    def layout(self, kv_lora_rank: int, rope_dim: int) -> RowLayout:
        """The row of a model with these widths."""
        return RowLayout(self, kv_lora_rank, rope_dim)


# Bits of a latent element, elements that share a scale, bytes of a scale.
_QUANTIZED = {CacheDType.FP8: (8, 128, 4), CacheDType.NVFP4: (4, 16, 1)}


@dataclass(frozen=True)
class RowLayout:
    """Where the parts of a cached row lie.

    Attributes:
        dtype: Type of the cache.
        kv_lora_rank: Elements of the latent.
        rope_dim: Elements of the rotary key.
    """

    dtype: CacheDType
    kv_lora_rank: int
    rope_dim: int

    @property
    def width(self) -> int:
        """Elements of the pool tensor in a row: latent and rotary key, or bytes where the row is quantised."""
        return self.row_bytes if self.dtype.is_quantized else self.kv_lora_rank + self.rope_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        if not self.dtype.is_quantized:
            return (self.kv_lora_rank + self.rope_dim) * self.dtype.itemsize
        return _aligned(self.rope_offset + self.rope_dim * _ROPE_ITEMSIZE)

    @property
    def block_size(self) -> int:
        """Elements of the latent that share a scale; 0 without scales."""
        return _QUANTIZED[self.dtype][1] if self.dtype.is_quantized else 0

    @property
    def num_scales(self) -> int:
        """Scales of a row; the last block may be shorter than the others."""
        return -(-self.kv_lora_rank // self.block_size) if self.dtype.is_quantized else 0

    @property
    def code_bytes(self) -> int:
        """Bytes that hold the latent's codes, or its elements."""
        if not self.dtype.is_quantized:
            return self.kv_lora_rank * self.dtype.itemsize
        return -(-self.kv_lora_rank * _QUANTIZED[self.dtype][0] // 8)

    @property
    def scale_offset(self) -> int:
        """First byte of the scales; without scales, that of the rotary key."""
        return _aligned(self.code_bytes) if self.dtype.is_quantized else self.code_bytes

    @property
    def rope_offset(self) -> int:
        """First byte of the rotary key."""
        if not self.dtype.is_quantized:
            return self.code_bytes
        return _aligned(self.scale_offset + self.num_scales * _QUANTIZED[self.dtype][2])


def tile_bytes(tile_s: int, num_stages: int, row_bytes: int) -> int:
    """Shared memory that the tiles in flight take: ``tile_s`` rows for each of ``num_stages`` stages."""
    return tile_s * num_stages * row_bytes


def _aligned(size: int) -> int:
    return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
