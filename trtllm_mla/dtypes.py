"""Data types of networks and latent caches, and their names in the formats this package reads and writes."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import onnx_ir

# Rows and columns of an FP8 weight that share a scale.
FP8_BLOCK_SIZE = 128


class DType(StrEnum):
    """Element type of a network's activations and weights, or of a latent cache.

    The value is the name used in Hugging Face configs and on the command line.
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return 4 if self is DType.FLOAT32 else 2

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; bfloat16 is ``ml_dtypes.bfloat16``."""
        return np.dtype(ml_dtypes.bfloat16 if self is DType.BFLOAT16 else self.value)

    @property
    def triton(self) -> str:
        """Name of the element type in a Triton signature and in a plugin config, for example ``bf16``."""
        return {DType.FLOAT32: "fp32", DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16"}[self]

    @property
    def safetensors(self) -> str:
        """Name of the element type in a safetensors header, for example ``BF16``."""
        return {DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16"}[self]

    @property
    def onnx(self) -> onnx_ir.DataType:
        """The ONNX element type."""
        import onnx_ir

        return onnx_ir.DataType[{DType.FLOAT32: "FLOAT", DType.FLOAT16: "FLOAT16", DType.BFLOAT16: "BFLOAT16"}[self]]


class ByteDType(StrEnum):
    """Element type of weights that are bound as the bytes they are encoded in."""

    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return 1

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype."""
        return np.dtype(np.int8)

    @property
    def onnx(self) -> onnx_ir.DataType:
        """The ONNX element type."""
        import onnx_ir

        return onnx_ir.DataType.INT8


WeightDType = DType | ByteDType
