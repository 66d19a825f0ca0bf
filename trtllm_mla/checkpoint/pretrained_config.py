"""A model's spec as the ``pretrained_config`` of a network's or an engine's ``config.json``.

Keys are those of TensorRT-LLM's ``deepseek_v2`` config in its coherent variant, where the cache's size can be read off
``num_key_value_heads`` (1) and ``head_size`` (latent and rotary key together). What TensorRT-LLM has no key for keeps
its Hugging Face name, or its name in ``ModelSpec``.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.architectures.dense import (
    Dimension,
    Epsilon,
    Flag,
    Layers,
    PositiveNumber,
    RopeTheta,
    TokenId,
)
from trtllm_mla.checkpoint.spec import ModelSpec, RopeSpec
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.dtypes import DType

ClassName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,128}$", strict=True)]


class RotaryScaling(StrictModel):
    """Scaling of the rotary frequencies; the attributes are those of ``RopeSpec``."""

    type: Literal["linear", "yarn"]
    factor: PositiveNumber
    original_max_position_embeddings: Dimension | None
    beta_fast: PositiveNumber
    beta_slow: PositiveNumber
    truncate: Flag
    attention_factor: PositiveNumber

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "yarn" and self.original_max_position_embeddings is None:
            raise ValueError("original_max_position_embeddings: found null, expected a number for type 'yarn'")
        return self


class Mapping(StrictModel):
    """How the model is spread over ranks: not at all."""

    world_size: Literal[1] = 1
    tp_size: Literal[1] = 1
    pp_size: Literal[1] = 1
    moe_tp_size: Literal[1] = 1
    moe_ep_size: Literal[1] = 1


class Quantization(StrictModel):
    """Quantisation of weights and cache: none."""

    quant_algo: None = None
    kv_cache_quant_algo: None = None


class PretrainedConfig(StrictModel):
    """``pretrained_config`` in ``config.json``. ``swiglu`` is a gated MLP with SiLU on the gate."""

    model_config = ConfigDict(protected_namespaces=())

    architecture: ClassName
    model_type: str
    dtype: DType
    logits_dtype: Literal["float32"] = "float32"
    vocab_size: Dimension
    hidden_size: Dimension
    intermediate_size: Dimension
    num_hidden_layers: Layers
    num_attention_heads: Dimension
    num_key_value_heads: Literal[1] = 1
    head_size: Annotated[int, Field(gt=0, strict=True)]
    q_lora_rank: Dimension | None
    kv_lora_rank: Dimension
    qk_nope_head_dim: Dimension
    qk_rope_head_dim: Dimension
    v_head_dim: Dimension
    hidden_act: Literal["swiglu"] = "swiglu"
    norm_epsilon: Epsilon
    latent_norm_eps: Epsilon
    softmax_scale: PositiveNumber
    attn_bias: Flag
    tie_word_embeddings: Flag
    position_embedding_type: Literal["rope_gpt_neox"] = "rope_gpt_neox"
    max_position_embeddings: Dimension
    rotary_base: RopeTheta
    rotary_scaling: RotaryScaling | None
    rope_interleave: Flag
    bos_token_id: TokenId | None
    eos_token_id: list[TokenId]
    mapping: Mapping = Mapping()
    quantization: Quantization = Quantization()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_size != self.kv_lora_rank + self.qk_rope_head_dim:
            raise ValueError(
                f"head_size: found {self.head_size}, expected kv_lora_rank + qk_rope_head_dim = "
                f"{self.kv_lora_rank + self.qk_rope_head_dim}"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: found {self.qk_rope_head_dim}, expected an even number")
        return self


def to_pretrained_config(spec: ModelSpec) -> dict[str, Any]:
    """The JSON value that describes a model.

    Args:
        spec: The model. Its ``dtype`` is written as the network's.
    """
    if spec.hidden_act != "silu":
        raise ValueError(f"hidden_act: found '{spec.hidden_act}', which has no name here")
    rope = spec.rope
    scaling = None
    if rope.rope_type != "default":
        scaling = RotaryScaling(
            type=rope.rope_type,
            **{name: getattr(rope, name) for name in RotaryScaling.model_fields if name != "type"},
        )
    config = PretrainedConfig(
        architecture=spec.hf_architecture,
        head_size=spec.latent_width,
        norm_epsilon=spec.rms_norm_eps,
        attn_bias=spec.attention_bias,
        rotary_base=rope.theta,
        rotary_scaling=scaling,
        rope_interleave=rope.interleaved,
        eos_token_id=list(spec.eos_token_ids),
        **{name: getattr(spec, name) for name in _SAME_NAMES},
    )
    return config.model_dump(mode="json")


def from_pretrained_config(values: object, *, source: str) -> ModelSpec:
    """Reads a spec back.

    Args:
        values: What ``to_pretrained_config`` gave.
        source: Where it was found, for messages.

    Raises:
        UserError: A key is missing or unknown, a value is unusable, or the architecture is not supported.
    """
    config = parse_config(values, PretrainedConfig, source=source)
    get_architecture(config.model_type, source=source)
    scaling = config.rotary_scaling
    rope = RopeSpec(
        dim=config.qk_rope_head_dim,
        theta=config.rotary_base,
        rope_type="default" if scaling is None else scaling.type,
        interleaved=config.rope_interleave,
        **({} if scaling is None else scaling.model_dump(exclude={"type"})),
    )
    return ModelSpec(
        hf_architecture=config.architecture,
        rms_norm_eps=config.norm_epsilon,
        hidden_act="silu",
        attention_bias=config.attn_bias,
        rope=rope,
        eos_token_ids=tuple(config.eos_token_id),
        **{name: getattr(config, name) for name in _SAME_NAMES},
    )


# Attributes of ModelSpec that are keys of the config under the same name and with the same meaning.
_SAME_NAMES = tuple(
    field.name
    for field in dataclasses.fields(ModelSpec)
    if field.name in PretrainedConfig.model_fields and field.name != "hidden_act"
)
