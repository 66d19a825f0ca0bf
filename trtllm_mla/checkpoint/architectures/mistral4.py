"""Mistral-Small-4's language model: queries that grow with the position, and a softmax router."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

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
from trtllm_mla.checkpoint.spec import MoeSpec

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Mistral4Config(MoeConfig):
    """``config.json`` of Mistral-Small-4's language model, with the defaults of transformers' ``Mistral4Config``."""

    vocab_size: Dimension = 131072
    hidden_size: Dimension = 4096
    intermediate_size: Dimension = 12288
    num_hidden_layers: Layers = 36
    num_attention_heads: Dimension = 32
    q_lora_rank: Dimension | None = 1024
    kv_lora_rank: Dimension = 256
    qk_nope_head_dim: Dimension = 64
    qk_rope_head_dim: Dimension = 64
    v_head_dim: Dimension = 128
    max_position_embeddings: Dimension = 1048576
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    tie_word_embeddings: Flag = False
    moe_intermediate_size: Dimension = 2048
    n_routed_experts: Experts = 128
    n_shared_experts: Experts = 1
    num_experts_per_tok: Experts = 4
    n_group: Experts | None = 1
    topk_group: Experts | None = 1
    norm_topk_prob: Flag = True
    routed_scaling_factor: PositiveNumber = 1.0
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    first_k_dense_replace: FirstLayer = 0
    moe_layer_freq: Literal[1] = 1

    @model_validator(mode="before")
    @classmethod
    def _read_rope(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Takes the rotary width, which the config gives as a part of a whole head, to be ``qk_rope_head_dim``."""
        values = dict(values)
        if not values.get("rope_scaling") and values.get("rope_parameters") is None:
            values["rope_parameters"] = _DEFAULT_ROPE
        nope, rotary = (
            values.get(name, cls.model_fields[name].default) for name in ("qk_nope_head_dim", "qk_rope_head_dim")
        )
        if type(nope) is not int or type(rotary) is not int or nope <= 0 or rotary <= 0:
            return values  # the fields' own checks say what is wrong
        width = nope + rotary
        if values.get("head_dim") == width:
            del values["head_dim"]
        for table in ("rope_parameters", "rope_scaling", None):
            keys = values if table is None else values.get(table)
            if not isinstance(keys, dict):
                continue
            part = keys.get("partial_rotary_factor")
            if isinstance(part, int | float) and int(width * part) == rotary:
                kept = {name: value for name, value in keys.items() if name != "partial_rotary_factor"}
                values = kept if table is None else values | {table: kept}
            elif part is not None:
                raise ValueError(
                    f"partial_rotary_factor: found {part!r:.80}, expected qk_rope_head_dim / (qk_nope_head_dim + "
                    f"qk_rope_head_dim) = {rotary / width}"
                )
        return values

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        if self.rope.llama_4_scaling_beta and self.rope.effective_type != "yarn":
            raise ValueError(
                f"llama_4_scaling_beta: found it beside rope type '{self.rope.effective_type:.80}', expected 'yarn', "
                "which has original_max_position_embeddings"
            )
        return self

    @property
    def moe(self) -> MoeSpec | None:
        """The mixture of experts, or None if every layer's MLP is dense."""
        moe = super().moe
        return None if moe is None else dataclasses.replace(moe, correction_bias=False)

    @property
    def extras(self) -> dict[str, Any]:
        """Values of those attributes of ``ModelSpec`` that are off in most architectures."""
        return {"query_scaling_beta": self.rope.llama_4_scaling_beta or 0.0}


ARCHITECTURE = Architecture("mistral4", ("Mistral4ForCausalLM",), Mistral4Config, stacked_experts=True)
