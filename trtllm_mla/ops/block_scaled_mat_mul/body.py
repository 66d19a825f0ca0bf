"""ONNX function body of BlockScaledMatMul."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import build_body_function, size
from trtllm_mla.ops.quantized_bodies import blocks_of, dequantize_weight

if TYPE_CHECKING:
    import onnx_ir

# Legend: M rows, N out_features, K in_features, P scale_rows, Q scale_columns


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: dequantise the whole weight in fp32, and multiply in fp32.

    Neither ONNX Runtime nor TensorRT reinterprets bytes, so that a table of all 256 numbers decodes them.

    Args:
        types: Types of network and cache.
        attributes: None.
    """
    import onnx_ir

    def trace(op: Any, x_MK: Any, weight_NK: Any, scale_PQ: Any) -> Any:
        fp32 = onnx_ir.DataType.FLOAT
        weight_fp32_NK = dequantize_weight(op, weight_NK, scale_PQ, blocks_of(op, size(op, weight_NK, 0)))
        output_MN = op.Gemm(op.Cast(x_MK, to=fp32), weight_fp32_NK, transB=1)
        return op.Cast(output_MN, to=types.model_dtype.onnx)

    return build_body_function(
        "BlockScaledMatMul",
        trace,
        {"x": types.model_dtype, "weight": "int8", "scale": "float32"},
        attributes,
    )
