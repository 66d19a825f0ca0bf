"""ONNX function body of AppendLatent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import build_body_function, slot_index

if TYPE_CHECKING:
    import onnx_ir

# Legend: T tokens, H heads, R rope_dim, P pages, S page_size, W width of a cached row


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: fp32 rotation, conversion to the cache's type, one scatter into the pool.

    ONNX Runtime's scatter writes in place where one buffer is bound as past and present.

    Args:
        types: Types of network and cache.
        attributes: ``rope_interleave``.
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
