"""ONNX function body of RoutedExperts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import arange, build_body_function, int_attribute, size

if TYPE_CHECKING:
    import onnx_ir

# Legend: T tokens, K top_k, X experts, E hidden_size, I intermediate_size, U = 2 * I


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: every expert for every token, of which those that were not chosen are dropped.

    Tokens are columns of the products, so that weights are read as they are stored. The products are of the model's
    type, as those of other linear layers; activation and sum are fp32.

    Args:
        types: Types of network and cache.
        attributes: ``first_expert``.
    """
    import onnx_ir

    def trace(
        op: Any, hidden_TE: Any, gate_up_proj_XUE: Any, down_proj_XEI: Any, expert_ids_TK: Any, expert_weights_TK: Any
    ) -> Any:
        def multiply(weight: Any, columns: Any) -> Any:
            return op.Cast(op.MatMul(weight, columns), to=onnx_ir.DataType.FLOAT)

        weights = (gate_up_proj_XUE, down_proj_XEI)
        return weighted_experts(op, hidden_TE, *weights, expert_ids_TK, expert_weights_TK, multiply, types.model_dtype)

    return build_body_function(
        "RoutedExperts",
        trace,
        {
            "hidden": types.model_dtype,
            "gate_up_proj": types.model_dtype,
            "down_proj": types.model_dtype,
            "expert_ids": "int32",
            "expert_weights": "float32",
        },
        attributes,
    )


def weighted_experts(
    op: Any,
    hidden_TE: Any,
    gate_up_proj_XUE: Any,
    down_proj_XEI: Any,
    expert_ids_TK: Any,
    expert_weights_TK: Any,
    multiply: Callable[[Any, Any], Any],
    dtype: DType,
) -> Any:
    """What every body of routed experts has in common, from the weights on: the output [T, E].

    Args:
        op: Operator builder.
        hidden_TE: The tokens, of the model's type.
        gate_up_proj_XUE: Weights that ``multiply`` takes.
        down_proj_XEI: The same.
        expert_ids_TK: int32.
        expert_weights_TK: fp32.
        multiply: The fp32 product of a weight and columns of the model's type.
        dtype: The model's type.
    """
    import onnx_ir

    fp32, int64, model = onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64, dtype.onnx
    intermediate_size = size(op, down_proj_XEI, 2)
    gate_up_XUT = multiply(gate_up_proj_XUE, op.Transpose(hidden_TE, perm=[1, 0]))
    halves = op.Concat(intermediate_size, intermediate_size, axis=0)
    gate_XIT, up_XIT = op.Split(gate_up_XUT, halves, axis=1, _outputs=2)
    gated_XIT = op.Cast(op.Mul(op.Mul(gate_XIT, op.Sigmoid(gate_XIT)), up_XIT), to=model)
    down_XET = multiply(down_proj_XEI, gated_XIT)

    expert_X = op.Add(arange(op, size(op, down_proj_XEI, 0)), int_attribute(op, "first_expert"))
    expert_X11 = op.Unsqueeze(expert_X, [1, 2])
    is_choice_XTK = op.Equal(op.Cast(expert_ids_TK, to=int64), expert_X11)
    is_chosen_XT = op.ReduceMax(op.Cast(is_choice_XTK, to=fp32), [2], keepdims=0)
    weight_XT = op.ReduceSum(op.Where(is_choice_XTK, expert_weights_TK, 0.0), [2], keepdims=0)
    # An expert that was not chosen may give anything, NaN included.
    chosen_XET = op.Where(op.Unsqueeze(op.Greater(is_chosen_XT, 0.5), [1]), down_XET, 0.0)
    output_ET = op.ReduceSum(op.Mul(chosen_XET, op.Unsqueeze(weight_XT, [1])), [0], keepdims=0)
    return op.Cast(op.Transpose(output_ET, perm=[1, 0]), to=model)
