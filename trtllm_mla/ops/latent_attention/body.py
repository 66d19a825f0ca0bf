"""ONNX function body of LatentAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import (
    arange,
    build_body_function,
    causal_bias,
    float_attribute,
    lengths,
    log_sum_exp,
    packed_rows,
    reshape,
    size,
    visible_keys,
)
from trtllm_mla.ops.quantized_bodies import decode_rows

if TYPE_CHECKING:
    import onnx_ir

# Legend: G tokens, H heads, L kv_lora_rank, R requests, Q longest query, K keys of the longest page table,
# P pages, S page_size, W width of a row (latent, then rotary key)


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: requests padded to the longest, their rows gathered once, two batched products in fp32.

    Heads share the keys, so they fold into the rows of the products. Keys behind a request's end repeat its last row:
    memory that was never written is not read, and the mask need not touch the gathered rows.

    Args:
        types: Types of network and cache.
        attributes: ``softmax_scale`` and ``latent_scale``.
    """
    import onnx_ir

    def trace(
        op: Any,
        q_latent_GHL: Any,
        q_pe: Any,
        latent_cache_PSW: Any,
        block_offsets_RB: Any,
        sequence_length_R: Any,
        query_offsets: Any,
        query_index_RQ: Any,
    ) -> Any:
        fp32, int64 = onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64
        tokens, heads, kv_lora_rank = (size(op, q_latent_GHL, axis) for axis in range(3))
        pages, page_size = (size(op, latent_cache_PSW, axis) for axis in range(2))
        width = op.Add(kv_lora_rank, size(op, q_pe, 2))
        requests, longest_query = (size(op, query_index_RQ, axis) for axis in range(2))
        keys = op.Mul(size(op, block_offsets_RB, 1), page_size)
        rows = op.Mul(longest_query, heads)
        offsets = op.Cast(query_offsets, to=int64)
        length_R = op.Cast(sequence_length_R, to=int64)
        key_K = arange(op, keys)

        # Page numbers are clamped because those of a request without tokens are arbitrary.
        last_R1 = op.Max(op.Unsqueeze(op.Sub(length_R, 1), [1]), 0)
        position_RK = op.Min(key_K, last_R1)
        column_RK = op.Div(position_RK, page_size)
        page_RK = op.GatherElements(op.Cast(block_offsets_RB, to=int64), column_RK, axis=1)
        page_RK = op.Max(op.Min(page_RK, op.Sub(pages, 1)), 0)
        offset_RK = op.Sub(position_RK, op.Mul(column_RK, page_size))
        index_RK2 = op.Concat(op.Unsqueeze(page_RK, [2]), op.Unsqueeze(offset_RK, [2]), axis=2)
        if types.cache_dtype.is_quantized:
            # The outer scale of the keys goes to the query, that of the values to the output.
            index_N2 = reshape(op, index_RK2, op.Mul(requests, keys), [2])
            parts = decode_rows(op, op.GatherND(latent_cache_PSW, index_N2), types.layout)
            rows_RKW = reshape(op, op.Concat(*parts, axis=1), requests, keys, width)
            scale = float_attribute(op, "latent_scale")
            q_latent_GHL = op.Cast(op.Mul(op.Cast(q_latent_GHL, to=fp32), scale), to=types.model_dtype.onnx)
        else:
            rows_RKW = op.Cast(op.GatherND(latent_cache_PSW, index_RK2), to=fp32)

        # Padding repeats the first query, or the zeros behind the last where there is none.
        q_GHW = op.Pad(op.Cast(op.Concat(q_latent_GHL, q_pe, axis=-1), to=fp32), [0, 0, 0, 1, 0, 0])
        q_RMW = reshape(op, op.Gather(q_GHW, query_index_RQ), requests, rows, width)
        product_RMK = op.MatMul(q_RMW, op.Transpose(rows_RKW, perm=[0, 2, 1]))
        scaled_RMK = op.Mul(product_RMK, float_attribute(op, "softmax_scale"))
        visible_RQ = visible_keys(op, length_R, lengths(op, offsets), longest_query)
        bias_RQ1K = op.Unsqueeze(causal_bias(op, key_K, visible_RQ), [2])
        scores_RQHK = op.Add(reshape(op, scaled_RMK, requests, longest_query, heads, keys), bias_RQ1K)
        weights_RQHK = op.Softmax(scores_RQHK, axis=-1)
        # The product takes whole rows, because cutting the rotary keys off would copy all the latents.
        sums_RMW = op.MatMul(reshape(op, weights_RQHK, requests, rows, keys), rows_RKW)

        batch = op.Mul(requests, longest_query)
        packed_G = packed_rows(op, offsets, longest_query, tokens)
        sees_any_G1 = op.Greater(op.Gather(reshape(op, visible_RQ, batch, [1]), packed_G), 0)
        sums_GHW = op.Gather(reshape(op, sums_RMW, batch, heads, width), packed_G)
        sums_GHL = op.Slice(sums_GHW, [0], kv_lora_rank, [2])
        if types.cache_dtype.is_quantized:
            sums_GHL = op.Mul(sums_GHL, scale)
        output_GHL = op.Cast(op.Where(op.Unsqueeze(sees_any_G1, [2]), sums_GHL, 0.0), to=types.model_dtype.onnx)
        log_sum_exp_RQH = log_sum_exp(op, scores_RQHK, weights_RQHK)
        log_sum_exp_GH = op.Gather(reshape(op, log_sum_exp_RQH, batch, heads), packed_G)
        return output_GHL, op.Where(sees_any_G1, log_sum_exp_GH, float("-inf"))

    return build_body_function(
        "LatentAttention",
        trace,
        {
            "q_latent": types.model_dtype,
            "q_pe": types.model_dtype,
            "latent_cache": types.cache_dtype,
            "block_offsets": "int32",
            "sequence_length": "int32",
            "query_offsets": "int32",
            "query_index": "int32",
        },
        attributes,
    )
