"""MiniCPM3: a dense MLA decoder with half-split rotary pairs and scaled branches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from trtllm_mla.checkpoint.architectures.base import (
    Architecture,
    Dimension,
    Epsilon,
    Flag,
    HfConfig,
    Layers,
    PositiveNumber,
    TokenId,
)
from trtllm_mla.checkpoint.spec import ModelSpec


class MiniCPM3Config(HfConfig):
    """``config.json`` of MiniCPM3, with the defaults of transformers' ``MiniCPM3Config``."""

    vocab_size: Dimension = 73448
    hidden_size: Dimension = 2560
    intermediate_size: Dimension = 6400
    num_hidden_layers: Layers = 62
    num_attention_heads: Dimension = 40
    q_lora_rank: Dimension | None = 768
    kv_lora_rank: Dimension = 256
    qk_nope_head_dim: Dimension = 64
    qk_rope_head_dim: Dimension = 32
    v_head_dim: Dimension = 64
    max_position_embeddings: Dimension = 32768
    rms_norm_eps: Epsilon = 1e-5
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    tie_word_embeddings: Flag = True
    rope_interleave: Literal[False] = False
    mlp_bias: Literal[False] = False
    scale_emb: PositiveNumber = 12.0
    scale_depth: PositiveNumber | None = 1.4
    dim_model_base: Dimension | None = 256

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fills in the width of values; transformers ignores ``head_dim``."""
        values = {name: value for name, value in values.items() if name != "head_dim"}
        hidden, heads = (
            values.get(name, cls.model_fields[name].default) for name in ("hidden_size", "num_attention_heads")
        )
        if values.get("v_head_dim") is None and type(hidden) is int and type(heads) is int and heads > 0:
            values["v_head_dim"] = hidden // heads
        return values

    @property
    def extras(self) -> dict[str, Any]:
        """Values of those attributes of ``ModelSpec`` that are off in most architectures."""
        return {
            "embedding_multiplier": self.scale_emb,
            "residual_multiplier": 1.0
            if self.scale_depth is None
            else self.scale_depth / math.sqrt(self.num_hidden_layers),
            "logits_scaling": 1.0 if self.dim_model_base is None else self.hidden_size / self.dim_model_base,
        }


@dataclass(frozen=True)
class MiniCPM3Architecture(Architecture):
    """MiniCPM3 divides ``scale_depth`` by the root of the number of layers."""

    def transformers_config(self, spec: ModelSpec) -> dict[str, Any]:
        """What transformers' config must say for the first ``spec.num_hidden_layers`` layers of a checkpoint."""
        scale_depth = spec.residual_multiplier * math.sqrt(spec.num_hidden_layers)
        return super().transformers_config(spec) | {"scale_depth": scale_depth}


ARCHITECTURE = MiniCPM3Architecture("minicpm3", ("MiniCPM3ForCausalLM",), MiniCPM3Config)
