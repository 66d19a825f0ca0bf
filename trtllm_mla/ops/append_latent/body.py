"""ONNX function body of AppendLatent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import arange, build_body_function, float_attribute, int_attribute, size, slot_index
from trtllm_mla.ops.quantized_bodies import encode_rows

if TYPE_CHECKING:
    import onnx_ir

# Legend: T tokens, H heads, R rope_dim, P pages, S page_size, W width of a cached row


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: fp32 rotation, conversion to the cache's type, one scatter into the pool.

    ONNX Runtime's scatter writes in place where one buffer is bound as past and present. What a quantised row holds of
    a key is rotated with single operators, each of which rounds: ONNX Runtime's rotation has fused multiply-adds on
    some CPUs, and a row's bits are to be the same everywhere.

    Args:
        types: Types of network and cache.
        attributes: ``rope_interleave`` and ``latent_scale``.
    """
    import onnx_ir

    def rotate(op: Any, x_THR: Any, position_ids: Any, cos: Any, sin: Any) -> Any:
        # Every token is a batch entry of one position, so heads need no attribute.
        rotated = op.RotaryEmbedding(
            op.Unsqueeze(op.Cast(x_THR, to=onnx_ir.DataType.FLOAT), [2]),
            cos,
            sin,
            op.Unsqueeze(position_ids, [1]),
            interleaved=onnx_ir.RefAttr("interleaved", "rope_interleave", onnx_ir.AttributeType.INT),
        )
        return op.Squeeze(rotated, [2])

    def rotate_key(op: Any, x_TR: Any, position_ids: Any, cos: Any, sin: Any) -> Any:
        # Pair i is (2i, 2i + 1) if interleaved, else (i, i + half).
        interleaved, half = int_attribute(op, "rope_interleave"), size(op, cos, 1)
        pair, element = arange(op, half), arange(op, op.Mul(half, 2))
        stride = op.Add(interleaved, 1)
        first = op.Mul(pair, stride)
        second = op.Add(first, op.Where(op.Greater(interleaved, 0), [1], half))
        cos, sin = op.Gather(cos, position_ids), op.Gather(sin, position_ids)
        x, y = op.Gather(x_TR, first, axis=1), op.Gather(x_TR, second, axis=1)
        rotated_x = op.Sub(op.Mul(x, cos), op.Mul(y, sin))
        rotated_y = op.Add(op.Mul(y, cos), op.Mul(x, sin))
        of_pair = op.Add(op.Div(element, stride), op.Mul(op.Mod(element, stride), half))
        return op.Gather(op.Concat(rotated_x, rotated_y, axis=1), of_pair, axis=1)

    def trace(
        op: Any,
        past_latent_PSW: Any,
        latent: Any,
        k_pe_TR: Any,
        q_pe_THR: Any,
        position_ids_T: Any,
        slot_mapping_T: Any,
        rotary_cos_sin: Any,
    ) -> Any:
        cos, sin = op.Split(rotary_cos_sin, axis=-1, num_outputs=2, _outputs=2)
        position_ids = op.Cast(position_ids_T, to=onnx_ir.DataType.INT64)
        q_pe = rotate(op, q_pe_THR, position_ids, cos, sin)
        if types.cache_dtype.is_quantized:
            k_pe = rotate_key(op, op.Cast(k_pe_TR, to=onnx_ir.DataType.FLOAT), position_ids, cos, sin)
            values = op.Div(op.Cast(latent, to=onnx_ir.DataType.FLOAT), float_attribute(op, "latent_scale"))
            rows_TW = encode_rows(op, values, k_pe, types.layout)
        else:
            k_pe = op.Squeeze(rotate(op, op.Unsqueeze(k_pe_TR, [1]), position_ids, cos, sin), [1])
            cache_type = types.cache_dtype.onnx
            rows_TW = op.Concat(op.Cast(latent, to=cache_type), op.Cast(k_pe, to=cache_type), axis=-1)
        index_T2 = slot_index(op, slot_mapping_T, past_latent_PSW)
        return op.ScatterND(past_latent_PSW, index_T2, rows_TW), op.Cast(q_pe, to=types.model_dtype.onnx)

    return build_body_function(
        "AppendLatent",
        trace,
        {
            "past_latent": types.cache_dtype,
            "latent": types.model_dtype,
            "k_pe": types.model_dtype,
            "q_pe": types.model_dtype,
            "position_ids": "int32",
            "slot_mapping": "int32",
            "rotary_cos_sin": "float32",
        },
        attributes,
    )
