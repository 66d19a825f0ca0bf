"""A.X-K1: DeepSeek-V3 with a norm behind the experts, and experts chosen without a correction bias."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import model_validator

from trtllm_mla.checkpoint.architectures.base import (
    Architecture,
    Dimension,
    Experts,
    FirstLayer,
    TokenId,
    first_sparse_layer,
)
from trtllm_mla.checkpoint.architectures.deepseek_v3 import DeepseekV3Config
from trtllm_mla.checkpoint.spec import MoeSpec


class AXK1Config(DeepseekV3Config):
    """``config.json`` of A.X-K1, with the defaults of transformers' ``AXK1Config``."""

    vocab_size: Dimension = 163840
    num_attention_heads: Dimension = 64
    q_lora_rank: Dimension = 1536
    max_position_embeddings: Dimension = 32768
    bos_token_id: TokenId | None = 163691
    eos_token_id: TokenId | list[TokenId] | None = 163691
    n_routed_experts: Experts = 192
    first_k_dense_replace: FirstLayer = 1

    @model_validator(mode="before")
    @classmethod
    def _read_layer_types(cls, values: dict[str, Any]) -> dict[str, Any]:
        types = values.get("mlp_layer_types")
        if types is None:
            return values
        layers = values.get("num_hidden_layers", cls.model_fields["num_hidden_layers"].default)
        return values | {"first_k_dense_replace": first_sparse_layer(types, layers), "moe_layer_freq": 1}

    @property
    def moe(self) -> MoeSpec | None:
        """The mixture of experts, or None if every layer's MLP is dense."""
        moe = super().moe
        return None if moe is None else dataclasses.replace(moe, correction_bias=False, output_norm=True)


ARCHITECTURE = Architecture("axk1", ("AXK1ForCausalLM",), AXK1Config)
