"""DeepSeek-V2, V2.5 and V2-Lite."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

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


class DeepseekV2Config(MoeConfig):
    """``config.json`` of DeepSeek-V2, with the defaults of transformers' ``DeepseekV2Config``."""

    vocab_size: Dimension = 102400
    hidden_size: Dimension = 4096
    intermediate_size: Dimension = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Dimension = 32
    q_lora_rank: Dimension | None = 1536
    kv_lora_rank: Dimension = 512
    qk_nope_head_dim: Dimension = 128
    qk_rope_head_dim: Dimension = 64
    v_head_dim: Dimension = 128
    max_position_embeddings: Dimension = 2048
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    tie_word_embeddings: Flag = False
    rope_interleave: Literal[True] = True
    mlp_bias: Literal[False] = False
    moe_intermediate_size: Dimension = 1407
    n_routed_experts: Experts = 64
    n_shared_experts: Experts = 2
    num_experts_per_tok: Experts
    n_group: Experts | None = None
    topk_group: Experts | None = None
    norm_topk_prob: Flag = False
    routed_scaling_factor: PositiveNumber = 1.0
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    first_k_dense_replace: FirstLayer = 0

    @model_validator(mode="after")
    def _check_normalisation(self) -> Self:
        if self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob: found true, expected false: DeepSeek's code would leave out routed_scaling_factor "
                "then, and transformers ignores the key"
            )
        return self


ARCHITECTURE = Architecture(
    "deepseek_v2", ("DeepseekV2ForCausalLM",), DeepseekV2Config, transformers_splits_pairs=False
)
