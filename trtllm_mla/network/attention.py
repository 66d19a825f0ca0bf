"""Multi-head latent attention over the two groups of tokens.

The context group is decompressed: its requests' latents are read from the cache and lifted to keys and values of every
head. The generation group is absorbed: queries are taken to the latent space instead, where all heads share one key,
and the attended latent is lifted afterwards (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

from trtllm_mla.network.builder import NetworkBuilder, Tensor
from trtllm_mla.network.contract import present_latent

# Legend: T tokens, C context tokens, G generation tokens, S cached tokens of the context group, H heads,
# N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim, L kv_lora_rank, E hidden_size

# AppendLatent, GatherLatent and ContextAttention, and LatentAttention where there is a generation group.
OPERATIONS_PER_LAYER = {False: 3, True: 4}


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
    )
    net.output(present, present_latent(layer))

    # kv_b_proj holds for each head the rows of its keys, then those of its values; they are bound apart.
    k_up_HNL = net.weight(f"{prefix}.k_up", heads, spec.qk_nope_head_dim, spec.kv_lora_rank)
    v_up_HVL = net.weight(f"{prefix}.v_up", heads, spec.v_head_dim, spec.kv_lora_rank)
    if net.group_sizes is None:
        output_THV = _context(net, q_nope_THN, q_pe_THR, present, k_up_HNL, v_up_HVL)
    else:
        q_nope_CHN, q_nope_GHN = op.Split(q_nope_THN, net.group_sizes, axis=0, _outputs=2)
        q_pe_CHR, q_pe_GHR = op.Split(q_pe_THR, net.group_sizes, axis=0, _outputs=2)
        output_THV = op.Concat(
            _context(net, q_nope_CHN, q_pe_CHR, present, k_up_HNL, v_up_HVL),
            _generation(net, q_nope_GHN, q_pe_GHR, present, k_up_HNL, v_up_HVL),
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
    q_nope, q_pe = op.Split(q, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], axis=-1, _outputs=2)
    return q_nope, q_pe


def _latents(net: NetworkBuilder, prefix: str, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
    """What is cached of each token, before rotation: [T, L] and [T, R]."""
    spec = net.spec
    row = net.linear(
        hidden_TE, f"{prefix}.kv_a_proj_with_mqa", spec.latent_width, spec.hidden_size, bias=spec.attention_bias
    )
    latent, k_pe = net.op.Split(row, [spec.kv_lora_rank, spec.qk_rope_head_dim], axis=-1, _outputs=2)
    return net.rms_norm(latent, f"{prefix}.kv_a_layernorm", spec.kv_lora_rank, spec.latent_norm_eps), k_pe


def _context(
    net: NetworkBuilder, q_nope_CHN: Tensor, q_pe_CHR: Tensor, cache: Tensor, k_up_HNL: Tensor, v_up_HVL: Tensor
) -> Tensor:
    """Decompressed attention: [C, H, V]."""
    spec, op, step = net.spec, net.op, net.step
    latent_SL, k_pe_SR = net.mla_op(
        "GatherLatent",
        cache,
        step["context_kv_slots"],
        kv_lora_rank=spec.kv_lora_rank,
        rope_dim=spec.qk_rope_head_dim,
    )

    def lift(up_HDL: Tensor, width: int) -> Tensor:
        rows = op.Reshape(up_HDL, [spec.num_attention_heads * width, spec.kv_lora_rank])
        return op.Reshape(op.Gemm(latent_SL, rows, transB=1), [0, spec.num_attention_heads, width])

    output_CHV, _ = net.mla_op(
        "ContextAttention",
        q_nope_CHN,
        q_pe_CHR,
        lift(k_up_HNL, spec.qk_nope_head_dim),
        k_pe_SR,
        lift(v_up_HVL, spec.v_head_dim),
        step["context_query_offsets"],
        step["context_key_offsets"],
        step["context_query_index"],
        step["context_key_index"],
        softmax_scale=spec.softmax_scale,
    )
    return output_CHV


def _generation(
    net: NetworkBuilder, q_nope_GHN: Tensor, q_pe_GHR: Tensor, cache: Tensor, k_up_HNL: Tensor, v_up_HVL: Tensor
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
    )
    v_up_HLV = op.Transpose(v_up_HVL, perm=[0, 2, 1])
    output_HGV = op.MatMul(op.Transpose(attended_GHL, perm=[1, 0, 2]), v_up_HLV)
    return op.Transpose(output_HGV, perm=[1, 0, 2])
