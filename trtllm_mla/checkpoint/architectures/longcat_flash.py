"""LongCat-Flash: two attentions in a layer, scaled latents, and experts that bridge the second attention.

A half of such a layer, an attention and a dense MLP, is a layer of the network. The experts read what the first half's
MLP reads, and their output is added behind the second half.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from trtllm_mla.checkpoint.architectures.base import (
    Architecture,
    Dimension,
    Epsilon,
    Experts,
    Flag,
    HfConfig,
    Layers,
    PositiveNumber,
    RopeTheta,
    TokenId,
)
from trtllm_mla.checkpoint.spec import MoeSpec

_HALVES = 2
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# transformers takes these names for the others.
_OTHER_NAMES = {
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}


class LongcatFlashConfig(HfConfig):
    """``config.json`` of LongCat-Flash, with the defaults of transformers' ``LongcatFlashConfig``."""

    vocab_size: Dimension = 131072
    hidden_size: Dimension = 6144
    intermediate_size: Dimension = 12288
    num_hidden_layers: Layers = 56
    num_attention_heads: Dimension = 64
    q_lora_rank: Dimension = 1536
    kv_lora_rank: Dimension = 512
    qk_nope_head_dim: Dimension = 128
    qk_rope_head_dim: Dimension = 64
    head_dim: Dimension | None = 64
    v_head_dim: Dimension = 128
    max_position_embeddings: Dimension = 131072
    rms_norm_eps: Epsilon = 1e-5
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    tie_word_embeddings: Flag = False
    rope_theta: RopeTheta = 10_000_000.0
    rope_interleave: Literal[True] = True
    mla_scale_q_lora: Literal[True] = True
    mla_scale_kv_lora: Literal[True] = True
    router_bias: Literal[False] = False
    norm_topk_prob: Literal[False] = False
    moe_intermediate_size: Dimension = 2048
    n_routed_experts: Experts = 512
    num_experts_per_tok: Experts = 12
    zero_expert_num: Experts | Literal[0] | None = Field(default=256)
    zero_expert_type: Literal["identity"] = "identity"
    routed_scaling_factor: PositiveNumber = 6.0

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = {_OTHER_NAMES.get(name, name): value for name, value in values.items()}
        layers = values.pop("num_layers", None)
        if layers is None:
            return values
        if type(layers) is not int:
            raise ValueError(f"num_layers: found {layers!r:.80}, expected a whole number")
        return values | {"num_hidden_layers": _HALVES * layers}

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.num_hidden_layers % _HALVES:
            raise ValueError(f"num_hidden_layers: found {self.num_hidden_layers}, expected an even number")
        choices = self.n_routed_experts + (self.zero_expert_num or 0)
        if self.num_experts_per_tok > choices:
            raise ValueError(f"moe_topk: found {self.num_experts_per_tok}, expected at most {choices}: all experts")
        return self

    @property
    def moe(self) -> MoeSpec | None:
        """The mixture of experts, or None if every layer's MLP is dense."""
        return MoeSpec(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=0,
            scoring_func="softmax",
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=self.routed_scaling_factor,
            correction_bias=True,
            first_k_dense_replace=0,
            moe_layer_freq=_HALVES,
            num_identity_experts=self.zero_expert_num or 0,
            shortcut=True,
        )

    @property
    def extras(self) -> dict[str, Any]:
        """Values of those attributes of ``ModelSpec`` that are off in most architectures."""
        return {
            "query_multiplier": math.sqrt(self.hidden_size / self.q_lora_rank),
            "latent_multiplier": math.sqrt(self.hidden_size / self.kv_lora_rank),
        }


@dataclass(frozen=True)
class LongcatFlashArchitecture(Architecture):
    """LongCat-Flash names the modules of a layer's halves by a second number."""

    def tensor_name(self, parameter: str) -> str:
        """Name in the checkpoint of what the network calls ``parameter``."""
        match = _LAYER.fullmatch(parameter)
        if match is None:
            return parameter
        layer, half = divmod(int(match[1]), _HALVES)
        module, _, rest = match[2].partition(".")
        if match[2] == "mlp.gate.weight":
            name = "mlp.router.classifier.weight"
        elif match[2] == "mlp.gate.e_score_correction_bias":
            name = "mlp.router.e_score_correction_bias"
        elif match[2].startswith("mlp.experts."):
            name = match[2]
        else:
            name = f"{'mlps' if module == 'mlp' else module}.{half}.{rest}"
        return f"model.layers.{layer}.{name}"


ARCHITECTURE = LongcatFlashArchitecture(
    "longcat_flash", ("LongcatFlashForCausalLM",), LongcatFlashConfig, mtp_prefix="model.mtp.", sublayers=_HALVES
)
