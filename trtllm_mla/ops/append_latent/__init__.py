"""AppendLatent: rotates the new tokens' rotary parts and writes their rows to the latent cache."""

from trtllm_mla.ops.append_latent.body import build_body
from trtllm_mla.ops.append_latent.plan import plan, variants
from trtllm_mla.ops.definition import OpDefinition, TensorContract

APPEND_LATENT = OpDefinition(
    name="AppendLatent",
    inputs=(
        TensorContract("past_latent", "cache", ("pages", "page_size", "width")),
        TensorContract("latent", "model", ("tokens", "kv_lora_rank")),
        TensorContract("k_pe", "model", ("tokens", "rope_dim")),
        TensorContract("q_pe", "model", ("tokens", "heads", "rope_dim")),
        TensorContract("position_ids", "int32", ("tokens",)),
        TensorContract("slot_mapping", "int32", ("tokens",)),
        TensorContract("rotary_cos_sin", "float32", ("positions", "rope_dim")),
    ),
    outputs=(
        TensorContract("present_latent", "cache", ("pages", "page_size", "width")),
        TensorContract("rotated_q_pe", "model", ("tokens", "heads", "rope_dim")),
    ),
    attributes={"rope_interleave": int, "latent_scale": float},
    aliases={0: 0},
    build_body=build_body,
    plan=plan,
    variants=variants,
    dynamic_dims=frozenset({"pages", "tokens", "positions"}),
)
