"""BlockScaledMatMul: a linear layer whose weight is E4M3 with a scale for each block of 128 x 128."""

from trtllm_mla.ops.block_scaled_mat_mul.body import build_body
from trtllm_mla.ops.block_scaled_mat_mul.plan import max_workspace_bytes, plan, variants
from trtllm_mla.ops.definition import OpDefinition, TensorContract

# output = x @ (weight * scale of its block)^T. Blocks at the right and lower edge of the weight may be short. Codes
# of E4M3's NaN (0x7F, 0xFF) are no weights: what they give is not defined.
BLOCK_SCALED_MAT_MUL = OpDefinition(
    name="BlockScaledMatMul",
    inputs=(
        TensorContract("x", "model", ("rows", "in_features")),
        # The bytes of E4M3 numbers: engines with inputs of type FP8 cannot be built for GPUs before sm_89.
        TensorContract("weight", "int8", ("out_features", "in_features")),
        TensorContract("scale", "float32", ("scale_rows", "scale_columns")),
    ),
    outputs=(TensorContract("output", "model", ("rows", "out_features")),),
    attributes={},
    build_body=build_body,
    plan=plan,
    variants=variants,
    dynamic_dims=frozenset({"rows"}),
    max_workspace_bytes=max_workspace_bytes,
)
