"""ONNX function body of BlockScaledMatMul."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from trtllm_mla.dtypes import FP8_BLOCK_SIZE
from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import arange, build_body_function, size

if TYPE_CHECKING:
    import onnx_ir

# Legend: M rows, N out_features, K in_features, P scale_rows, Q scale_columns

_E4M3_OF_BYTE = np.arange(-128, 128).astype(np.int8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: dequantise the whole weight in fp32, and multiply in fp32.

    Neither ONNX Runtime nor TensorRT reinterprets bytes, so that a table of all 256 numbers decodes them.

    Args:
        types: Types of network and cache.
        attributes: None.
    """
    import onnx_ir

    def trace(op: Any, x_MK: Any, weight_NK: Any, scale_PQ: Any) -> Any:
        fp32, int32 = onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT32

        def block_of(axis: int) -> Any:
            return op.Div(arange(op, size(op, weight_NK, axis)), op.Constant(value_ints=[FP8_BLOCK_SIZE]))

        table = op.Constant(value=onnx_ir.tensor(_E4M3_OF_BYTE))
        first = op.Constant(value=onnx_ir.tensor(np.array(-128, np.int32)))
        values_NK = op.Gather(table, op.Sub(op.Cast(weight_NK, to=int32), first))
        scale_NK = op.Gather(op.Gather(scale_PQ, block_of(0), axis=0), block_of(1), axis=1)
        output_MN = op.Gemm(op.Cast(x_MK, to=fp32), op.Mul(values_NK, scale_NK), transB=1)
        return op.Cast(output_MN, to=types.model_dtype.onnx)

    return build_body_function(
        "BlockScaledMatMul",
        trace,
        {"x": types.model_dtype, "weight": "int8", "scale": "float32"},
        attributes,
    )
