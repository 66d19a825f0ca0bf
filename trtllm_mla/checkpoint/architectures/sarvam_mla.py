"""Sarvam-105B: DeepSeek-V3 with other sizes, and other names for some keys of its config."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from trtllm_mla.checkpoint.architectures.base import (
    Architecture,
    Dimension,
    Experts,
    FirstLayer,
    Layers,
)
from trtllm_mla.checkpoint.architectures.deepseek_v3 import DeepseekV3Config

_OTHER_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


class SarvamMlaConfig(DeepseekV3Config):
    """``config.json`` of Sarvam-105B, as first published or as transformers' ``SarvamMLAConfig`` writes it."""

    vocab_size: Dimension = 262144
    hidden_size: Dimension = 4096
    intermediate_size: Dimension = 16384
    num_hidden_layers: Layers = 32
    num_attention_heads: Dimension = 64
    q_lora_rank: Dimension | None = None
    n_routed_experts: Experts = 128
    n_group: Experts | None = 1
    topk_group: Experts | None = 1
    first_k_dense_replace: FirstLayer = 1

    @model_validator(mode="before")
    @classmethod
    def _read_first_format(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = {_OTHER_NAMES.get(name, name): value for name, value in values.items()}
        # The first format has the width of a cached row here; the rotary width stands under its own name.
        values.pop("head_dim", None)
        rope = values.get("rope_scaling")
        if isinstance(rope, dict):
            values["rope_scaling"] = {
                name: "yarn" if name in ("type", "rope_type") and value == "deepseek_yarn" else value
                for name, value in rope.items()
            }
        return values


ARCHITECTURE = Architecture("sarvam_mla", ("DeepseekV3ForCausalLM", "SarvamMLAForCausalLM"), SarvamMlaConfig)
