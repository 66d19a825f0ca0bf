"""Kimi-K2: DeepSeek-V3 with other sizes, under a ``model_type`` of its own."""

from __future__ import annotations

from trtllm_mla.checkpoint.architectures.base import Architecture
from trtllm_mla.checkpoint.architectures.deepseek_v3 import DeepseekV3Config

ARCHITECTURE = Architecture(
    "kimi_k2", ("DeepseekV3ForCausalLM",), DeepseekV3Config, transformers_model_type="deepseek_v3"
)
