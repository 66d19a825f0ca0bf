"""BlockScaledRoutedExperts: RoutedExperts with weights that are E4M3, with a scale for each block of 128 x 128."""

from trtllm_mla.ops.block_scaled_routed_experts.body import build_body
from trtllm_mla.ops.block_scaled_routed_experts.plan import max_workspace_bytes, plan, variants
from trtllm_mla.ops.definition import OpDefinition, TensorContract

# A weight is its code times the scale of its block. Gate, up and down projection are each divided into blocks by
# themselves: a gate whose intermediate_size is no multiple of 128 ends in short blocks, and up begins with new ones.
# Codes of E4M3's NaN (0x7F, 0xFF) are no weights: what they give in a chosen expert is not defined. An id outside
# [first_expert, first_expert + experts) contributes nothing.
BLOCK_SCALED_ROUTED_EXPERTS = OpDefinition(
    name="BlockScaledRoutedExperts",
    inputs=(
        TensorContract("hidden", "model", ("tokens", "hidden_size")),
        # Bytes, as in BlockScaledMatMul. Rows of an expert's gate, then rows of its up projection: gate_up_size is
        # 2 * intermediate_size.
        TensorContract("gate_up_proj", "int8", ("experts", "gate_up_size", "hidden_size")),
        # Rows of the gate's scales, then rows of the up projection's: gate_up_blocks is 2 * intermediate_blocks.
        TensorContract("gate_up_scale", "float32", ("experts", "gate_up_blocks", "hidden_blocks")),
        TensorContract("down_proj", "int8", ("experts", "hidden_size", "intermediate_size")),
        TensorContract("down_scale", "float32", ("experts", "hidden_blocks", "intermediate_blocks")),
        TensorContract("expert_ids", "int32", ("tokens", "top_k")),
        TensorContract("expert_weights", "float32", ("tokens", "top_k")),
    ),
    outputs=(TensorContract("output", "model", ("tokens", "hidden_size")),),
    attributes={"first_expert": int},
    build_body=build_body,
    plan=plan,
    variants=variants,
    dynamic_dims=frozenset({"tokens"}),
    max_workspace_bytes=max_workspace_bytes,
)
