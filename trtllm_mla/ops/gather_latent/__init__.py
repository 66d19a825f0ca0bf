"""GatherLatent: cache rows of the context group, in the compute type."""

from trtllm_mla.ops.definition import OpDefinition, TensorContract
from trtllm_mla.ops.gather_latent.body import build_body
from trtllm_mla.ops.gather_latent.plan import plan, variants

GATHER_LATENT = OpDefinition(
    name="GatherLatent",
    inputs=(
        TensorContract("latent_cache", "cache", ("pages", "page_size", "width")),
        TensorContract("kv_slots", "int32", ("keys",)),
    ),
    outputs=(
        TensorContract("latent", "model", ("keys", "kv_lora_rank")),
        TensorContract("k_pe", "model", ("keys", "rope_dim")),
    ),
    attributes={"kv_lora_rank": int, "rope_dim": int, "latent_scale": float},
    build_body=build_body,
    plan=plan,
    variants=variants,
    dynamic_dims=frozenset({"pages", "keys"}),
)
