"""Youtu-LLM: a dense MLA decoder."""

from __future__ import annotations

from trtllm_mla.checkpoint.architectures.base import Architecture, Dimension, Flag, HfConfig, Layers, TokenId


class YoutuConfig(HfConfig):
    """``config.json`` of Youtu, with the defaults of transformers' ``YoutuConfig``."""

    vocab_size: Dimension = 128256
    hidden_size: Dimension = 2048
    intermediate_size: Dimension = 6144
    num_hidden_layers: Layers = 32
    num_attention_heads: Dimension = 16
    q_lora_rank: Dimension | None = 1536
    kv_lora_rank: Dimension = 512
    qk_nope_head_dim: Dimension = 128
    qk_rope_head_dim: Dimension = 64
    v_head_dim: Dimension = 128
    max_position_embeddings: Dimension = 131072
    bos_token_id: TokenId | None = 128000
    eos_token_id: TokenId | list[TokenId] | None = 128001
    tie_word_embeddings: Flag = True


ARCHITECTURE = Architecture("youtu", ("YoutuForCausalLM",), YoutuConfig)
