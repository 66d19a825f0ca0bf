"""GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from trtllm_mla.checkpoint.architectures.base import (
    Architecture,
    Dimension,
    Epsilon,
    Experts,
    FirstLayer,
    Flag,
    Layers,
    MoeConfig,
    PositiveNumber,
    TokenId,
    first_sparse_layer,
)


class Glm4MoeLiteConfig(MoeConfig):
    """``config.json`` of GLM-4.7-Flash, with the defaults of transformers' ``Glm4MoeLiteConfig``."""

    vocab_size: Dimension = 154880
    hidden_size: Dimension = 2048
    intermediate_size: Dimension = 10240
    num_hidden_layers: Layers = 47
    num_attention_heads: Dimension = 20
    q_lora_rank: Dimension | None = 768
    kv_lora_rank: Dimension = 512
    qk_nope_head_dim: Dimension = 192
    qk_rope_head_dim: Dimension = 64
    v_head_dim: Dimension = 256
    max_position_embeddings: Dimension = 202752
    rms_norm_eps: Epsilon = 1e-5
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 1
    tie_word_embeddings: Flag = False
    moe_intermediate_size: Dimension = 1536
    n_routed_experts: Experts = 64
    n_shared_experts: Experts = 1
    num_experts_per_tok: Experts = 4
    n_group: Experts | None = 1
    topk_group: Experts | None = 1
    norm_topk_prob: Flag = True
    routed_scaling_factor: PositiveNumber = 1.8
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    first_k_dense_replace: FirstLayer = 1

    @model_validator(mode="before")
    @classmethod
    def _read_layer_types(cls, values: dict[str, Any]) -> dict[str, Any]:
        types = values.get("mlp_layer_types")
        if types is None:
            return values
        layers = values.get("num_hidden_layers", cls.model_fields["num_hidden_layers"].default)
        return values | {"first_k_dense_replace": first_sparse_layer(types, layers)}


ARCHITECTURE = Architecture("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), Glm4MoeLiteConfig)
