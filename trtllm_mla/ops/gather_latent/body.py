"""ONNX function body of GatherLatent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import build_body_function, float_attribute, int_attribute, slot_index
from trtllm_mla.ops.quantized_bodies import decode_rows

if TYPE_CHECKING:
    import onnx_ir

# Legend: K keys, P pages, S page_size, W width of a cached row


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: one gather of whole rows, conversion to the network's type, split.

    Args:
        types: Types of network and cache.
        attributes: ``kv_lora_rank``, ``rope_dim`` and ``latent_scale``.
    """

    def trace(op: Any, latent_cache_PSW: Any, kv_slots_K: Any) -> Any:
        rows_KW = op.GatherND(latent_cache_PSW, slot_index(op, kv_slots_K, latent_cache_PSW))
        if types.cache_dtype.is_quantized:
            latent, k_pe = decode_rows(op, rows_KW, types.layout)
            scaled = op.Mul(latent, float_attribute(op, "latent_scale"))
            return op.Cast(scaled, to=types.model_dtype.onnx), op.Cast(k_pe, to=types.model_dtype.onnx)
        sizes = op.Concat(int_attribute(op, "kv_lora_rank"), int_attribute(op, "rope_dim"), axis=0)
        return op.Split(op.Cast(rows_KW, to=types.model_dtype.onnx), sizes, axis=-1, _outputs=2)

    return build_body_function(
        "GatherLatent", trace, {"latent_cache": types.cache_dtype, "kv_slots": "int32"}, attributes
    )
