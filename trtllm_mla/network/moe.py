"""Mixture of experts: the router, the routed experts, and the expert that every token goes to.

The router follows DeepSeek-V2 (arXiv:2405.04434, section 2.2) and V3 (arXiv:2412.19437, section 2.1.2), as
transformers computes it. It is made of ordinary operators and in fp32, whatever the network's type.

Of experts, or groups, with equal scores ONNX's TopK takes those with the lower numbers. PyTorch leaves open which it
takes, and its CPU code takes others; the weights are the same.
"""

from __future__ import annotations

from trtllm_mla.checkpoint.spec import MoeSpec
from trtllm_mla.dtypes import DType
from trtllm_mla.network.builder import NetworkBuilder, Tensor
from trtllm_mla.network.mlp import gated_mlp

# Legend: T tokens, E hidden_size, X experts to choose from, K top_k, N n_group, M topk_group, P experts of a group

# Keeps the sum of scores that all underflowed from being 0.
_EPSILON = 1e-20
# A score that no expert has: TopK takes it last.
_NEVER = -3.4028234663852886e38


def mixture_of_experts(net: NetworkBuilder, layer: int, moe: MoeSpec, hidden_TE: Tensor) -> Tensor:
    """The experts of one layer, from the normalised residual stream to what is added to it: [T, E]."""
    hidden, prefix = net.spec.hidden_size, f"model.layers.{layer}.mlp"
    expert_ids_TK, expert_weights_TK = route(net, f"{prefix}.gate", moe, hidden_TE)
    gate_up = net.weight_and_scales(
        f"{prefix}.experts.gate_up_proj", moe.num_experts, 2 * moe.intermediate_size, hidden, parts=2
    )
    down = net.weight_and_scales(f"{prefix}.experts.down_proj", moe.num_experts, hidden, moe.intermediate_size)
    name = "RoutedExperts" if len(gate_up) == 1 else "BlockScaledRoutedExperts"
    (output_TE,) = net.mla_op(name, hidden_TE, *gate_up, *down, expert_ids_TK, expert_weights_TK, first_expert=0)
    if moe.num_identity_experts:
        output_TE = net.op.Add(output_TE, _identity_experts(net, moe, hidden_TE, expert_ids_TK, expert_weights_TK))
    if moe.shared_intermediate_size:
        shared_TE = gated_mlp(net, f"{prefix}.shared_experts", moe.shared_intermediate_size, hidden_TE)
        output_TE = net.op.Add(output_TE, shared_TE)
    if moe.output_norm:
        output_TE = net.rms_norm(output_TE, f"model.layers.{layer}.post_mlp_layernorm", hidden, net.spec.rms_norm_eps)
    return output_TE


def route(net: NetworkBuilder, prefix: str, moe: MoeSpec, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: int32 and fp32 [T, K]."""
    import onnx_ir

    op = net.op
    choices = moe.num_experts + moe.num_identity_experts
    weight_XE = net.weight(f"{prefix}.weight", choices, net.spec.hidden_size, dtype=DType.FLOAT32)
    logits_TX = op.Gemm(op.Cast(hidden_TE, to=onnx_ir.DataType.FLOAT), weight_XE, transB=1)
    # Written out, since runtimes approximate the operator Sigmoid: badly, relative to a small score.
    sigmoid = moe.scoring_func == "sigmoid"
    scores_TX = op.Reciprocal(op.Add(op.Exp(op.Neg(logits_TX)), 1.0)) if sigmoid else op.Softmax(logits_TX, axis=-1)

    choice_TX = scores_TX
    if moe.correction_bias:
        bias_X = net.weight(f"{prefix}.e_score_correction_bias", choices, dtype=DType.FLOAT32)
        choice_TX = op.Add(choice_TX, bias_X)
    if moe.group_limited:
        choice_TX = _limit_to_groups(net, moe, choice_TX)
    _, ids_TK = op.TopK(choice_TX, [moe.top_k], axis=-1, _outputs=2)
    weights_TK = op.GatherND(scores_TX, op.Unsqueeze(ids_TK, [2]), batch_dims=1)
    if moe.norm_topk_prob:
        weights_TK = op.Div(weights_TK, op.Add(op.ReduceSum(weights_TK, [-1], keepdims=1), _EPSILON))
    if moe.routed_scaling_factor != 1:
        weights_TK = op.Mul(weights_TK, moe.routed_scaling_factor)
    return op.Cast(ids_TK, to=onnx_ir.DataType.INT32), weights_TK


def _identity_experts(
    net: NetworkBuilder, moe: MoeSpec, hidden_TE: Tensor, expert_ids_TK: Tensor, expert_weights_TK: Tensor
) -> Tensor:
    """What the experts without weights give, whose numbers follow those of the others: [T, E]."""
    import onnx_ir

    op = net.op
    first = op.Cast(op.Constant(value_ints=[moe.num_experts]), to=onnx_ir.DataType.INT32)
    weights_TK = op.Where(op.GreaterOrEqual(expert_ids_TK, first), expert_weights_TK, 0.0)
    return net.multiplied(hidden_TE, op.ReduceSum(weights_TK, [-1], keepdims=1))


def _limit_to_groups(net: NetworkBuilder, moe: MoeSpec, choice_TX: Tensor) -> Tensor:
    """The scores of the experts in the best groups, and of the others one that is never chosen: [T, X]."""
    op = net.op
    choice_TNP = op.Reshape(choice_TX, [0, moe.n_group, moe.num_experts // moe.n_group])
    if moe.topk_method == "noaux_tc":
        best_two, _ = op.TopK(choice_TNP, [2], axis=-1, _outputs=2)
        group_TN = op.ReduceSum(best_two, [-1], keepdims=0)
    else:
        group_TN = op.ReduceMax(choice_TNP, [-1], keepdims=0)
    _, groups_TM = op.TopK(group_TN, [moe.topk_group], axis=-1, _outputs=2)
    is_best_TMN = op.Equal(op.Unsqueeze(groups_TM, [2]), op.Constant(value_ints=list(range(moe.n_group))))
    chosen_TN = op.ReduceMax(op.Where(is_best_TMN, 1.0, 0.0), [1], keepdims=0)
    limited_TNP = op.Where(op.Unsqueeze(op.Greater(chosen_TN, 0.5), [2]), choice_TNP, _NEVER)
    return op.Reshape(limited_TNP, [0, moe.num_experts])
