"""ONNX function body of ContextAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.functions import (
    arange,
    build_body_function,
    causal_bias,
    float_attribute,
    int_attribute,
    lengths,
    log_sum_exp,
    packed_rows,
    reshape,
    size,
    visible_keys,
)

if TYPE_CHECKING:
    import onnx_ir

# Legend: C tokens, S keys, H heads, D qk_head_dim, V v_dim, R requests, Q longest query, K most keys of a request


def build_body(types: BodyTypes, attributes: Mapping[str, Attribute]) -> onnx_ir.Function:
    """Makes the function: requests padded to the longest, two batched products in fp32.

    Padding of the queries repeats their row 0, which is dropped when the output is packed again. Padding of the keys
    repeats their row 0 and is masked; a row of zeros behind the last key gives it something to repeat where no request
    has a key.

    Args:
        types: Types of network and cache.
        attributes: ``softmax_scale`` and ``causal``.
    """
    import onnx_ir

    def trace(
        op: Any,
        q_nope: Any,
        q_pe: Any,
        k_nope: Any,
        k_pe: Any,
        v_SHV: Any,
        query_offsets: Any,
        key_offsets: Any,
        query_index_RQ: Any,
        key_index_RK: Any,
    ) -> Any:
        fp32, int64 = onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64
        tokens, heads = (size(op, q_nope, axis) for axis in range(2))
        requests, longest_query = (size(op, query_index_RQ, axis) for axis in range(2))
        offsets = op.Cast(query_offsets, to=int64)

        def heads_first(packed: Any, index: Any) -> Any:
            return op.Gather(op.Transpose(op.Cast(packed, to=fp32), perm=[1, 0, 2]), index, axis=1)

        def with_zeros(keys_SHX: Any) -> Any:
            return op.Pad(keys_SHX, [0, 0, 0, 1, 0, 0])

        shared_k_pe = op.Expand(op.Unsqueeze(k_pe, [1]), op.Concat([1], heads, [1], axis=0))
        q_HRQD = heads_first(op.Concat(q_nope, q_pe, axis=-1), query_index_RQ)
        k_HRKD = heads_first(with_zeros(op.Concat(k_nope, shared_k_pe, axis=-1)), key_index_RK)
        v_HRKV = heads_first(with_zeros(v_SHV), key_index_RK)

        product_HRQK = op.MatMul(q_HRQD, op.Transpose(k_HRKD, perm=[0, 1, 3, 2]))
        scaled_HRQK = op.Mul(product_HRQK, float_attribute(op, "softmax_scale"))
        key_K = arange(op, size(op, key_index_RK, 1))
        key_length_R = lengths(op, op.Cast(key_offsets, to=int64))
        causal = op.Cast(int_attribute(op, "causal"), to=onnx_ir.DataType.BOOL)
        up_to_own_RQ = visible_keys(op, key_length_R, lengths(op, offsets), longest_query)
        visible_RQ = op.Where(causal, up_to_own_RQ, op.Unsqueeze(key_length_R, [1]))
        scores_HRQK = op.Add(scaled_HRQK, causal_bias(op, key_K, visible_RQ))
        weights_HRQK = op.Softmax(scores_HRQK, axis=-1)
        output_HRQV = op.MatMul(weights_HRQK, v_HRKV)

        batch = op.Mul(requests, longest_query)
        packed_C = packed_rows(op, offsets, longest_query, tokens)
        sees_any_C1 = op.Greater(op.Gather(reshape(op, visible_RQ, batch, [1]), packed_C), 0)
        output_HCV = op.Gather(reshape(op, output_HRQV, heads, batch, size(op, v_SHV, 2)), packed_C, axis=1)
        output_CHV = op.Transpose(output_HCV, perm=[1, 0, 2])
        output_CHV = op.Cast(op.Where(op.Unsqueeze(sees_any_C1, [2]), output_CHV, 0.0), to=types.model_dtype.onnx)
        log_sum_exp_HRQ = log_sum_exp(op, scores_HRQK, weights_HRQK)
        log_sum_exp_HC = op.Gather(reshape(op, log_sum_exp_HRQ, heads, batch), packed_C, axis=1)
        log_sum_exp_CH = op.Transpose(log_sum_exp_HC, perm=[1, 0])
        return output_CHV, op.Where(sees_any_C1, log_sum_exp_CH, float("-inf"))

    return build_body_function(
        "ContextAttention",
        trace,
        {
            "q_nope": types.model_dtype,
            "q_pe": types.model_dtype,
            "k_nope": types.model_dtype,
            "k_pe": types.model_dtype,
            "v": types.model_dtype,
            "query_offsets": "int32",
            "key_offsets": "int32",
            "query_index": "int32",
            "key_index": "int32",
        },
        attributes,
    )
