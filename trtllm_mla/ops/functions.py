"""Shared parts of the ONNX function bodies.

A body is the definition of its operation: ONNX Runtime runs it, and TensorRT inlines it where no plugin is asked for.
Bodies take every size from shapes, never from values, so that no operator has a data-dependent output size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import DOMAIN, Attribute

if TYPE_CHECKING:
    import onnx_ir

OPSET = 23
PLUGIN_ATTRIBUTES = ("plugin_namespace", "plugin_version")

INDEX_MAX = (1 << 63) - 1
# Added to the scores of unseen keys in place of -inf: a row without a visible key then has a softmax, not NaN.
LOWEST_FLOAT32 = -3.4028234663852886e38


def build_body_function(
    name: str,
    trace: Callable[..., Any],
    inputs: Mapping[str, DType | CacheDType | str],
    attributes: Mapping[str, Attribute],
) -> onnx_ir.Function:
    """Traces a function body.

    Args:
        name: Name of the operation.
        trace: Called with an operator builder and the inputs; returns the outputs.
        inputs: Name and element type of each input, in order.
        attributes: The operation's attributes. The function declares them and TensorRT's plugin attributes.
    """
    import onnx_ir
    from onnxscript import build_function

    values = [onnx_ir.val(input_name, _element_type(dtype)) for input_name, dtype in inputs.items()]
    declared = {
        **{
            key: onnx_ir.AttributeType.INT if isinstance(value, int) else onnx_ir.AttributeType.FLOAT
            for key, value in attributes.items()
        },
        **dict.fromkeys(PLUGIN_ATTRIBUTES, onnx_ir.AttributeType.STRING),
    }
    return build_function(
        trace,
        values,
        domain=DOMAIN,
        name=name,
        attributes=[onnx_ir.Attr(key, kind, None) for key, kind in declared.items()],
        opset_imports={"": OPSET},
    )


def _element_type(dtype: DType | CacheDType | str) -> onnx_ir.DataType:
    import onnx_ir

    if isinstance(dtype, DType | CacheDType):
        return dtype.onnx
    return onnx_ir.DataType[{"int8": "INT8", "int32": "INT32", "float32": "FLOAT"}[dtype]]


def int_attribute(op: Any, name: str) -> Any:
    """The node's whole-number attribute ``name`` as an int64 tensor [1]."""
    import onnx_ir

    value = op.Constant(value_int=onnx_ir.RefAttr("value_int", name, onnx_ir.AttributeType.INT))
    return op.Unsqueeze(value, [0])


def float_attribute(op: Any, name: str) -> Any:
    """The node's attribute ``name`` as an fp32 scalar."""
    import onnx_ir

    value = op.Constant(value_float=onnx_ir.RefAttr("value_float", name, onnx_ir.AttributeType.FLOAT))
    value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    return value


def size(op: Any, value: Any, axis: int) -> Any:
    """Size of one axis as an int64 tensor [1]."""
    return op.Shape(value, start=axis, end=axis + 1)


def reshape(op: Any, value: Any, *dims: Any) -> Any:
    """Reshapes to sizes [1] each. Zero is a size like any other."""
    return op.Reshape(value, op.Concat(*dims, axis=0), allowzero=1)


def arange(op: Any, count: Any) -> Any:
    """0, 1, ... up to ``count`` [1], exclusive, as int64."""
    return op.Range(0, op.Squeeze(count, [0]), 1)


def slot_index(op: Any, slots: Any, pool: Any) -> Any:
    """Page and offset of each cache slot.

    Args:
        op: Operator builder.
        slots: int32 [n].
        pool: The latent cache [pages, page_size, width].

    Returns:
        int64 [n, 2], as GatherND and ScatterND index the pool.
    """
    import onnx_ir

    slot = op.Unsqueeze(op.Cast(slots, to=onnx_ir.DataType.INT64), [1])
    page_size = size(op, pool, 1)
    page = op.Div(slot, page_size)
    return op.Concat(page, op.Sub(slot, op.Mul(page, page_size)), axis=1)


def lengths(op: Any, offsets: Any) -> Any:
    """Differences of prefix sums [n+1]: int64 [n]."""
    return op.Sub(op.Slice(offsets, [1], [INDEX_MAX]), op.Slice(offsets, [0], [-1]))


def visible_keys(op: Any, key_length: Any, query_length: Any, longest_query: Any) -> Any:
    """How many keys each query of a padded batch sees, counted from the first.

    Causality is aligned to the end: query j of n sees the first ``key_length - n + j + 1`` keys.

    Args:
        op: Operator builder.
        key_length: Keys of each request, int64 [requests].
        query_length: Queries of each request, int64 [requests].
        longest_query: Queries a request is padded to, [1].

    Returns:
        int64 [requests, longest_query], zero or less where a query sees nothing.
    """
    history = op.Unsqueeze(op.Sub(key_length, query_length), [1])
    return op.Add(op.Add(history, arange(op, longest_query)), 1)


def causal_bias(op: Any, key: Any, visible: Any) -> Any:
    """What masks the keys that a query does not see when it is added to their scores.

    Args:
        op: Operator builder.
        key: Numbers of the padded batch's keys from 0, int64 [keys].
        visible: Keys that each query sees, int64 [requests, longest_query].

    Returns:
        fp32 [requests, longest_query, keys]: 0 or the lowest number there is.
    """
    return op.Where(op.Less(key, op.Unsqueeze(visible, [2])), 0.0, LOWEST_FLOAT32)


def log_sum_exp(op: Any, scores: Any, weights: Any) -> Any:
    """Logarithm of the sum of exponentials of the scores, along the last axis, given their softmax.

    The largest weight w of a row is ``exp(s - log_sum_exp)`` for the largest score s. It is at least one over the
    number of keys, so its logarithm is exact enough; this is cheaper than to sum exponentials again.
    """
    largest_score, largest_weight = (op.ReduceMax(value, [-1], keepdims=0) for value in (scores, weights))
    return op.Sub(largest_score, op.Log(largest_weight))


def packed_rows(op: Any, offsets: Any, longest: Any, tokens: Any) -> Any:
    """Where each packed token stands in a batch padded to ``longest``.

    Args:
        op: Operator builder.
        offsets: Prefix sums of tokens a request, int64 [requests+1].
        longest: Tokens a request is padded to, [1].
        tokens: Number of packed tokens, [1].

    Returns:
        Row ``request * longest + index in the request`` of each token, int64 [tokens].
    """
    import onnx_ir

    token = arange(op, tokens)
    ends = op.Slice(offsets, [1], [INDEX_MAX])
    started = op.GreaterOrEqual(op.Unsqueeze(token, [1]), ends)
    request = op.ReduceSum(op.Cast(started, to=onnx_ir.DataType.INT64), [1], keepdims=0)
    return op.Add(op.Mul(request, longest), op.Sub(token, op.Gather(offsets, request)))
