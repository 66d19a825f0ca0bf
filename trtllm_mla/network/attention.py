"""Multi-head latent attention over the two groups of tokens.

The context group is decompressed: its requests' latents are read from the cache and lifted to keys and values of every
head. The generation group is absorbed: queries are taken to the latent space instead, where all heads share one key,
and the attended latent is lifted afterwards (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

Decompressed keys and values take much memory, so the context group works on a part of a long history at a time, in
passes. Their number is fixed when the graph is made. An ONNX Loop over as many passes as a step needs would make
TensorRT read the trip count on the host, a synchronisation in every layer, and would rule out CUDA graphs, also for
the decode steps that share the graph. A pass without keys costs its launches only.
"""

from __future__ import annotations

from trtllm_mla.dtypes import DType
from trtllm_mla.network.builder import NetworkBuilder, Tensor
from trtllm_mla.network.contract import history_inputs, present_latent

# Legend: T tokens, C context tokens, G generation tokens, S cached tokens of the context group, H heads,
# N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim, L kv_lora_rank, E hidden_size


def operations_per_layer(*, absorption: bool, context_passes: int) -> int:
    """MLA operations of one layer.

    AppendLatent; GatherLatent and ContextAttention in each pass; LatentAttention where there is a generation group.
    """
    return 1 + 2 * context_passes + int(absorption)


def latent_attention_block(net: NetworkBuilder, layer: int, hidden_TE: Tensor) -> Tensor:
    """The attention of one layer, from the normalised residual stream to what is added to it: [T, E]."""
    spec, op, step = net.spec, net.op, net.step
    prefix = f"model.layers.{layer}.self_attn"
    heads, values = spec.num_attention_heads, spec.num_attention_heads * spec.v_head_dim
    q_nope_THN, q_pe_THR = _queries(net, prefix, hidden_TE)
    latent_TL, k_pe_TR = _latents(net, prefix, hidden_TE)

    present, q_pe_THR = net.mla_op(
        "AppendLatent",
        net.latent_pool(layer),
        latent_TL,
        k_pe_TR,
        q_pe_THR,
        net.position_ids,
        step["slot_mapping"],
        step["rotary_cos_sin"],
        rope_interleave=int(spec.rope.interleaved),
        latent_scale=net.latent_scales[layer],
    )
    net.output(present, present_latent(layer))

    # kv_b_proj holds for each head the rows of its keys, then those of its values; they are bound apart.
    k_up_HNL = net.weight(f"{prefix}.k_up", heads, spec.qk_nope_head_dim, spec.kv_lora_rank)
    v_up_HVL = net.weight(f"{prefix}.v_up", heads, spec.v_head_dim, spec.kv_lora_rank)
    if net.group_sizes is None:
        output_THV = _context(net, layer, q_nope_THN, q_pe_THR, present, k_up_HNL, v_up_HVL)
    else:
        q_nope_CHN, q_nope_GHN = op.Split(q_nope_THN, net.group_sizes, axis=0, _outputs=2)
        q_pe_CHR, q_pe_GHR = op.Split(q_pe_THR, net.group_sizes, axis=0, _outputs=2)
        output_THV = op.Concat(
            _context(net, layer, q_nope_CHN, q_pe_CHR, present, k_up_HNL, v_up_HVL),
            _generation(net, layer, q_nope_GHN, q_pe_GHR, present, k_up_HNL, v_up_HVL),
            axis=0,
        )
    output_TF = op.Reshape(output_THV, [0, values])
    return net.linear(output_TF, f"{prefix}.o_proj", spec.hidden_size, values, bias=spec.attention_bias)


def _queries(net: NetworkBuilder, prefix: str, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Queries before rotation: [T, H, N] and [T, H, R]."""
    spec, op = net.spec, net.op
    width = spec.num_attention_heads * spec.qk_head_dim
    rank = spec.q_lora_rank
    if rank is None:
        q = net.linear(hidden_TE, f"{prefix}.q_proj", width, spec.hidden_size)
    else:
        q_latent = net.linear(hidden_TE, f"{prefix}.q_a_proj", rank, spec.hidden_size, bias=spec.attention_bias)
        q_latent = net.rms_norm(q_latent, f"{prefix}.q_a_layernorm", rank, spec.latent_norm_eps)
        q = net.linear(q_latent, f"{prefix}.q_b_proj", width, rank)
    q = op.Reshape(q, [0, spec.num_attention_heads, spec.qk_head_dim])
    q = net.multiplied(q, spec.query_multiplier)
    if net.query_factors is not None:
        q = net.multiplied(q, net.query_factors)
    q_nope, q_pe = op.Split(q, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], axis=-1, _outputs=2)
    return q_nope, q_pe


def _latents(net: NetworkBuilder, prefix: str, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
    """What is cached of each token, before rotation: [T, L] and [T, R]."""
    spec = net.spec
    row = net.linear(
        hidden_TE, f"{prefix}.kv_a_proj_with_mqa", spec.latent_width, spec.hidden_size, bias=spec.attention_bias
    )
    latent, k_pe = net.op.Split(row, [spec.kv_lora_rank, spec.qk_rope_head_dim], axis=-1, _outputs=2)
    latent = net.rms_norm(latent, f"{prefix}.kv_a_layernorm", spec.kv_lora_rank, spec.latent_norm_eps)
    return net.multiplied(latent, spec.latent_multiplier), k_pe


def _context(
    net: NetworkBuilder,
    layer: int,
    q_nope_CHN: Tensor,
    q_pe_CHR: Tensor,
    cache: Tensor,
    k_up_HNL: Tensor,
    v_up_HVL: Tensor,
) -> Tensor:
    """Decompressed attention: [C, H, V].

    The first pass is causal, over the newest cached tokens; the further ones see all of theirs. Attention over all of
    them is the mean of the passes' outputs, weighted by their sums of exponentials (as in FlashInfer,
    arXiv:2501.01005, section 2.2).
    """
    operands = (layer, q_nope_CHN, q_pe_CHR, cache, k_up_HNL, v_up_HVL)
    newest = ("context_kv_slots", "context_key_offsets", "context_key_index")
    output_CHV, log_sum_exp_CH = _attend(net, *operands, newest, True)
    if net.context_passes == 1:
        return output_CHV
    merge = _Merge(net, output_CHV, log_sum_exp_CH)
    for number in range(1, net.context_passes):
        older = tuple(item.name for item in history_inputs(number))
        merge.add(*net.scoped(f"pass_{number}", _attend, *operands, older, False))
    return merge.output()


class _Merge:
    """Outputs of passes, merged in fp32 one after the other.

    Every query sees its own key in the first pass, whose log-sum-exp is therefore finite: so is the largest one, and
    the weight of a pass without keys is exp(-inf) = 0, never NaN. A pass's output comes rounded to the network's type,
    as the operation gives it, and the merged one is rounded once more: half a unit in the last place each time.

    Args:
        net: The network.
        output_CHV: Output of the first pass.
        log_sum_exp_CH: Its log-sum-exp, fp32.
    """

    def __init__(self, net: NetworkBuilder, output_CHV: Tensor, log_sum_exp_CH: Tensor) -> None:
        self._net = net
        self._sum_CHV = self._fp32(output_CHV)
        self._largest_CH = log_sum_exp_CH
        self._total_CH: Tensor = 1.0

    def add(self, output_CHV: Tensor, log_sum_exp_CH: Tensor) -> None:
        """Adds a pass."""
        op = self._net.op
        largest_CH = op.Max(self._largest_CH, log_sum_exp_CH)
        old_CH = op.Exp(op.Sub(self._largest_CH, largest_CH))
        new_CH = op.Exp(op.Sub(log_sum_exp_CH, largest_CH))
        self._total_CH = op.Add(op.Mul(old_CH, self._total_CH), new_CH)
        self._sum_CHV = op.Add(
            op.Mul(op.Unsqueeze(old_CH, [2]), self._sum_CHV),
            op.Mul(op.Unsqueeze(new_CH, [2]), self._fp32(output_CHV)),
        )
        self._largest_CH = largest_CH

    def output(self) -> Tensor:
        """The merged output in the network's type: [C, H, V]."""
        op = self._net.op
        return op.Cast(op.Div(self._sum_CHV, op.Unsqueeze(self._total_CH, [2])), to=self._net.dtype.onnx)

    def _fp32(self, value: Tensor) -> Tensor:
        return self._net.op.Cast(value, to=DType.FLOAT32.onnx)


def _attend(
    net: NetworkBuilder,
    layer: int,
    q_nope_CHN: Tensor,
    q_pe_CHR: Tensor,
    cache: Tensor,
    k_up_HNL: Tensor,
    v_up_HVL: Tensor,
    keys: tuple[str, ...],
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """One pass: output [C, H, V] and log-sum-exp [C, H] over the cached tokens that the step inputs ``keys`` name."""
    spec, op, step = net.spec, net.op, net.step
    kv_slots, key_offsets, key_index = (step[name] for name in keys)
    latent_SL, k_pe_SR = net.mla_op(
        "GatherLatent",
        cache,
        kv_slots,
        kv_lora_rank=spec.kv_lora_rank,
        rope_dim=spec.qk_rope_head_dim,
        latent_scale=net.latent_scales[layer],
    )

    def lift(up_HDL: Tensor, width: int) -> Tensor:
        rows = op.Reshape(up_HDL, [spec.num_attention_heads * width, spec.kv_lora_rank])
        return op.Reshape(op.Gemm(latent_SL, rows, transB=1), [0, spec.num_attention_heads, width])

    output_CHV, log_sum_exp_CH = net.mla_op(
        "ContextAttention",
        q_nope_CHN,
        q_pe_CHR,
        lift(k_up_HNL, spec.qk_nope_head_dim),
        k_pe_SR,
        lift(v_up_HVL, spec.v_head_dim),
        step["context_query_offsets"],
        key_offsets,
        step["context_query_index"],
        key_index,
        softmax_scale=spec.softmax_scale,
        causal=int(causal),
    )
    return output_CHV, log_sum_exp_CH


def _generation(
    net: NetworkBuilder,
    layer: int,
    q_nope_GHN: Tensor,
    q_pe_GHR: Tensor,
    cache: Tensor,
    k_up_HNL: Tensor,
    v_up_HVL: Tensor,
) -> Tensor:
    """Absorbed attention: [G, H, V]."""
    op, step = net.op, net.step
    q_latent_HGL = op.MatMul(op.Transpose(q_nope_GHN, perm=[1, 0, 2]), k_up_HNL)
    attended_GHL, _ = net.mla_op(
        "LatentAttention",
        op.Transpose(q_latent_HGL, perm=[1, 0, 2]),
        q_pe_GHR,
        cache,
        step["kv_cache_block_offsets"],
        step["generation_sequence_length"],
        step["generation_query_offsets"],
        step["generation_query_index"],
        softmax_scale=net.spec.softmax_scale,
        latent_scale=net.latent_scales[layer],
    )
    v_up_HLV = op.Transpose(v_up_HVL, perm=[0, 2, 1])
    output_HGV = op.MatMul(op.Transpose(attended_GHL, perm=[1, 0, 2]), v_up_HLV)
    return op.Transpose(output_HGV, perm=[1, 0, 2])
