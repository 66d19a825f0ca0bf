"""ONNX function body of BlockScaledRoutedExperts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import build_body_function, size
from trtllm_mla.ops.quantized_bodies import blocks_of, dequantize_weight
from trtllm_mla.ops.routed_experts.body import weighted_experts

if TYPE_CHECKING:
    import onnx_ir

# Legend: T tokens, K top_k, X experts, E hidden_size, I intermediate_size, U = 2 * I, P and Q blocks of E and I


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: dequantise all experts in fp32, multiply in fp32, and go on as RoutedExperts does.

    Args:
        types: Types of network and cache.
        attributes: ``first_expert``.
    """
    import onnx_ir

    def trace(
        op: Any,
        hidden_TE: Any,
        gate_up_proj_XUE: Any,
        gate_up_scale_X2QP: Any,
        down_proj_XEI: Any,
        down_scale_XPQ: Any,
        expert_ids_TK: Any,
        expert_weights_TK: Any,
    ) -> Any:
        def multiply(weight: Any, columns: Any) -> Any:
            return op.MatMul(weight, op.Cast(columns, to=onnx_ir.DataType.FLOAT))

        gate_I = blocks_of(op, size(op, down_proj_XEI, 2))
        gate_up_U = op.Concat(gate_I, op.Add(gate_I, size(op, down_scale_XPQ, 2)), axis=0)
        down_E = blocks_of(op, size(op, down_proj_XEI, 1))
        weights = (
            dequantize_weight(op, gate_up_proj_XUE, gate_up_scale_X2QP, gate_up_U),
            dequantize_weight(op, down_proj_XEI, down_scale_XPQ, down_E),
        )
        return weighted_experts(op, hidden_TE, *weights, expert_ids_TK, expert_weights_TK, multiply, types.model_dtype)

    return build_body_function(
        "BlockScaledRoutedExperts",
        trace,
        {
            "hidden": types.model_dtype,
            "gate_up_proj": "int8",
            "gate_up_scale": "float32",
            "down_proj": "int8",
            "down_scale": "float32",
            "expert_ids": "int32",
            "expert_weights": "float32",
        },
        attributes,
    )
