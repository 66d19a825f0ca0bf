"""ContextAttention: decompressed attention of the context group, requests of different lengths packed.

With ``causal`` 1 the last keys of a request are those of its queries, and a query sees the keys up to its own. With
``causal`` 0 every query of a request sees all of its keys, which are older than the queries.
"""

from trtllm_mla.ops.context_attention.body import build_body
from trtllm_mla.ops.context_attention.plan import plan, variants
from trtllm_mla.ops.definition import OpDefinition, TensorContract

CONTEXT_ATTENTION = OpDefinition(
    name="ContextAttention",
    inputs=(
        TensorContract("q_nope", "model", ("tokens", "heads", "nope_dim")),
        TensorContract("q_pe", "model", ("tokens", "heads", "rope_dim")),
        TensorContract("k_nope", "model", ("keys", "heads", "nope_dim")),
        TensorContract("k_pe", "model", ("keys", "rope_dim")),
        TensorContract("v", "model", ("keys", "heads", "v_dim")),
        TensorContract("query_offsets", "int32", ("requests+1",)),
        TensorContract("key_offsets", "int32", ("requests+1",)),
        TensorContract("query_index", "int32", ("requests", "longest_query")),
        TensorContract("key_index", "int32", ("requests", "longest_key")),
    ),
    outputs=(
        TensorContract("output", "model", ("tokens", "heads", "v_dim")),
        TensorContract("log_sum_exp", "float32", ("tokens", "heads")),
    ),
    attributes={"softmax_scale": float, "causal": int},
    build_body=build_body,
    plan=plan,
    variants=variants,
    dynamic_dims=frozenset({"tokens", "keys", "requests", "longest_query", "longest_key"}),
)
