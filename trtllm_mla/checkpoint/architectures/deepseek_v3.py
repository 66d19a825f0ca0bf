"""DeepSeek-V3 and R1, as far as all their layers are dense."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from trtllm_mla.checkpoint.architectures.dense import DenseArchitecture, Dimension, Flag, HfConfig, Layers, TokenId


class DeepseekV3Config(HfConfig):
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
    first_k_dense_replace: Annotated[int, Field(ge=0, strict=True)] = 3

    @model_validator(mode="after")
    def _check_dense(self) -> Self:
        dense, layers = self.first_k_dense_replace, self.num_hidden_layers
        if dense < layers:
            first = f"layers {dense} to {layers - 1} have" if dense < layers - 1 else f"layer {dense} has"
            raise ValueError(
                f"first_k_dense_replace: found {dense}, expected at least num_hidden_layers = {layers}: {first} a "
                "mixture of experts, which is not supported"
            )
        return self


ARCHITECTURE = DenseArchitecture("deepseek_v3", "DeepseekV3ForCausalLM", DeepseekV3Config, mtp_marker="eh_proj.weight")
