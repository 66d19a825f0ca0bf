"""Checkpoints of a config alone: an engine is built without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.directory import NetworkDirectory, convert


def write_config(directory: Path, **overrides: Any) -> Path:
    """Writes the config.json of a small model whose sizes are no powers of two."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "vocab_size": 131,
        "hidden_size": 80,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": 56,
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 32,
        "v_head_dim": 40,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **overrides,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_network(
    directory: Path, *, plugin: MlaPluginConfig | None = None, dtype: DType | None = None, **overrides: Any
) -> NetworkDirectory:
    """Converts such a model to ``directory/network``."""
    checkpoint = write_config(directory / "checkpoint", **overrides)
    return convert(checkpoint, directory / "network", plugin=plugin or MlaPluginConfig(), dtype=dtype)
