"""DeepSeek-V3 and R1."""

from __future__ import annotations

from typing import Literal

from trtllm_mla.checkpoint.architectures.base import (
    Architecture,
    Dimension,
    Experts,
    FirstLayer,
    Flag,
    Layers,
    MoeConfig,
    PositiveNumber,
    TokenId,
)


class DeepseekV3Config(MoeConfig):
    """``config.json`` of DeepSeek-V3, with the defaults of transformers' ``DeepseekV3Config``."""

    vocab_size: Dimension = 129280
    hidden_size: Dimension = 7168
    intermediate_size: Dimension = 18432
    num_hidden_layers: Layers = 61
    num_attention_heads: Dimension = 128
    q_lora_rank: Dimension | None = 1536
    kv_lora_rank: Dimension = 512
    qk_nope_head_dim: Dimension = 128
    qk_rope_head_dim: Dimension = 64
    v_head_dim: Dimension = 128
    max_position_embeddings: Dimension = 4096
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 1
    tie_word_embeddings: Flag = False
    moe_intermediate_size: Dimension = 2048
    n_routed_experts: Experts = 256
    n_shared_experts: Experts = 1
    num_experts_per_tok: Experts = 8
    n_group: Experts | None = 8
    topk_group: Experts | None = 4
    norm_topk_prob: Flag = True
    routed_scaling_factor: PositiveNumber = 2.5
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    first_k_dense_replace: FirstLayer = 3


ARCHITECTURE = Architecture("deepseek_v3", ("DeepseekV3ForCausalLM",), DeepseekV3Config)
