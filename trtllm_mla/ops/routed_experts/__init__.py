"""RoutedExperts: the gated MLPs that the router chose for each token, weighted and added up."""

from trtllm_mla.ops.definition import OpDefinition, TensorContract
from trtllm_mla.ops.routed_experts.body import build_body
from trtllm_mla.ops.routed_experts.plan import max_workspace_bytes, plan, variants

# An id outside [first_expert, first_expert + experts) contributes nothing: experts may be split over nodes and ranks.
ROUTED_EXPERTS = OpDefinition(
    name="RoutedExperts",
    inputs=(
        TensorContract("hidden", "model", ("tokens", "hidden_size")),
        # Rows of an expert's gate, then rows of its up projection: gate_up_size is 2 * intermediate_size.
        TensorContract("gate_up_proj", "model", ("experts", "gate_up_size", "hidden_size")),
        TensorContract("down_proj", "model", ("experts", "hidden_size", "intermediate_size")),
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
