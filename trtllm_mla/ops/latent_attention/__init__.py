"""LatentAttention: absorbed attention of the generation group over the paged latents."""

from trtllm_mla.ops.definition import OpDefinition, TensorContract
from trtllm_mla.ops.latent_attention.body import build_body
from trtllm_mla.ops.latent_attention.plan import max_workspace_bytes, plan, variants

LATENT_ATTENTION = OpDefinition(
    name="LatentAttention",
    inputs=(
        TensorContract("q_latent", "model", ("tokens", "heads", "kv_lora_rank")),
        TensorContract("q_pe", "model", ("tokens", "heads", "rope_dim")),
        TensorContract("latent_cache", "cache", ("pages", "page_size", "width")),
        TensorContract("block_offsets", "int32", ("requests", "pages_per_request")),
        TensorContract("sequence_length", "int32", ("requests",)),
        TensorContract("query_offsets", "int32", ("requests+1",)),
        TensorContract("query_index", "int32", ("requests", "longest_query")),
    ),
    outputs=(
        TensorContract("output", "model", ("tokens", "heads", "kv_lora_rank")),
        TensorContract("log_sum_exp", "float32", ("tokens", "heads")),
    ),
    attributes={"softmax_scale": float, "latent_scale": float},
    build_body=build_body,
    plan=plan,
    variants=variants,
    max_workspace_bytes=max_workspace_bytes,
    dynamic_dims=frozenset({"tokens", "pages", "requests", "pages_per_request", "longest_query"}),
)
