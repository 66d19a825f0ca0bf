"""A model's spec as the ``pretrained_config`` of a network's or an engine's ``config.json``.

Keys are those of TensorRT-LLM's ``deepseek_v2`` config in its coherent variant, where the cache's size can be read off
``num_key_value_heads`` (1) and ``head_size`` (latent and rotary key together). What TensorRT-LLM has no key for keeps
its Hugging Face name, or its name in ``ModelSpec``.

A mixture of experts has the table ``moe`` and some keys beside it. ``normalization_mode`` is a number of
TensorRT-LLM's ``MoeConfig.ExpertScaleNormalizationMode``, made of ``norm_topk_prob`` and ``topk_method``.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.architectures.base import (
    MAX_DIMENSION,
    MAX_EXPERTS,
    Dimension,
    Epsilon,
    Experts,
    FirstLayer,
    Flag,
    Layers,
    Number,
    PositiveNumber,
    RopeTheta,
    TokenId,
)
from trtllm_mla.checkpoint.fp8 import ModuleNames
from trtllm_mla.checkpoint.spec import Fp8Spec, ModelSpec, MoeSpec, RopeSpec, ScoringFunction, TopkMethod
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.dtypes import DType

# NONE, RENORMALIZE, DEVICE_LIMITED and DEVICE_LIMITED_RENORM: whether the method of choice knows groups, and whether
# weights are divided by their sum.
_NORMALIZATION_MODES: dict[tuple[bool, bool], Literal[0, 1, 3, 4]] = {
    (False, False): 0,
    (False, True): 1,
    (True, False): 3,
    (True, True): 4,
}
_DEVICE_LIMITED = frozenset(mode for (limited, _), mode in _NORMALIZATION_MODES.items() if limited)
_RENORMALIZE = frozenset(mode for (_, renormalize), mode in _NORMALIZATION_MODES.items() if renormalize)

# Keys in the table moe, and keys beside it, by attribute of MoeSpec.
_MOE_TABLE_KEYS = {
    "num_experts": "num_experts",
    "shared_intermediate_size": "shared_expert_intermediate_size",
    "num_identity_experts": "num_identity_experts",
    "top_k": "top_k",
    "n_group": "device_limited_n_group",
    "topk_group": "device_limited_topk_group",
    "routed_scaling_factor": "device_limited_routed_scaling_factor",
    "topk_method": "topk_method",
}
_MOE_KEYS = {
    "intermediate_size": "moe_inter_size",
    "scoring_func": "scoring_func",
    "correction_bias": "e_score_correction_bias",
    "first_k_dense_replace": "first_k_dense_replace",
    "moe_layer_freq": "moe_layer_freq",
    "output_norm": "moe_output_norm",
    "shortcut": "moe_shortcut",
}

ClassName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,128}$", strict=True)]


class RotaryScaling(StrictModel):
    """Scaling of the rotary frequencies; the attributes are those of ``RopeSpec``."""

    type: Literal["linear", "yarn", "longrope"]
    factor: PositiveNumber
    original_max_position_embeddings: Dimension | None
    beta_fast: PositiveNumber
    beta_slow: PositiveNumber
    truncate: Flag
    attention_factor: PositiveNumber
    frequency_factors: Annotated[tuple[PositiveNumber, ...], Field(max_length=MAX_DIMENSION)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "yarn" and self.original_max_position_embeddings is None:
            raise ValueError("original_max_position_embeddings: found null, expected a number for type 'yarn'")
        return self


class MoeTable(StrictModel):
    """Sizes and choice of the experts; see ``MoeSpec``."""

    num_experts: Experts
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=MAX_DIMENSION, strict=True)]
    num_identity_experts: Annotated[int, Field(ge=0, le=MAX_EXPERTS, strict=True)] = 0
    top_k: Experts
    normalization_mode: Literal[0, 1, 3, 4]
    device_limited_n_group: Experts
    device_limited_topk_group: Experts
    device_limited_routed_scaling_factor: PositiveNumber
    topk_method: TopkMethod

    @model_validator(mode="after")
    def _check(self) -> Self:
        groups, chosen = self.device_limited_n_group, self.device_limited_topk_group
        if self.num_experts % groups:
            raise ValueError(f"device_limited_n_group: found {groups}, expected a divisor of {self.num_experts}")
        if chosen > groups:
            raise ValueError(f"device_limited_topk_group: found {chosen}, expected at most {groups}")
        if self.topk_method == "greedy" and groups > 1:
            raise ValueError(f"device_limited_n_group: found {groups}, expected 1 for topk_method 'greedy'")
        if groups > 1 and self.num_identity_experts:
            raise ValueError(f"num_identity_experts: found {self.num_identity_experts}, expected 0 beside groups")
        candidates = chosen * (self.num_experts // groups) + self.num_identity_experts
        if self.top_k > candidates:
            raise ValueError(f"top_k: found {self.top_k}, expected at most the {candidates} experts to choose from")
        if self.topk_method == "noaux_tc" and self.num_experts // groups < 2:
            raise ValueError(f"device_limited_n_group: found {groups}, expected groups of at least 2 experts")
        if (self.normalization_mode in _DEVICE_LIMITED) != (self.topk_method != "greedy"):
            raise ValueError(
                f"normalization_mode: found {self.normalization_mode}, which does not go with topk_method "
                f"'{self.topk_method}'"
            )
        return self


class Mapping(StrictModel):
    """How the model is spread over ranks: not at all."""

    world_size: Literal[1] = 1
    tp_size: Literal[1] = 1
    pp_size: Literal[1] = 1
    moe_tp_size: Literal[1] = 1
    moe_ep_size: Literal[1] = 1


class Quantization(StrictModel):
    """Quantisation of the weights; see ``Fp8Spec``. That of the cache is the plugin config's."""

    quant_algo: Literal["FP8_BLOCK_SCALES"] | None = None
    kv_cache_quant_algo: None = None
    exclude_modules: ModuleNames | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quant_algo is None and self.exclude_modules is not None:
            raise ValueError("exclude_modules: found a list, expected null without a quant_algo")
        return self


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
    embedding_multiplier: PositiveNumber = 1.0
    residual_multiplier: PositiveNumber = 1.0
    logits_scaling: PositiveNumber = 1.0
    query_scaling_beta: Number = 0.0
    query_multiplier: PositiveNumber = 1.0
    latent_multiplier: PositiveNumber = 1.0
    moe: MoeTable | None = None
    moe_inter_size: Dimension | None = None
    scoring_func: ScoringFunction | None = None
    e_score_correction_bias: Flag | None = None
    first_k_dense_replace: FirstLayer | None = None
    moe_layer_freq: Layers | None = None
    moe_output_norm: Flag | None = None
    moe_shortcut: Flag | None = None
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
        scaling = self.rotary_scaling
        factors = 0 if scaling is None else len(scaling.frequency_factors)
        expected = self.qk_rope_head_dim // 2 if scaling is not None and scaling.type == "longrope" else 0
        if factors != expected:
            raise ValueError(f"rotary_scaling: found {factors} frequency_factors, expected {expected}")
        if self.query_scaling_beta and (scaling is None or scaling.original_max_position_embeddings is None):
            raise ValueError("query_scaling_beta: expected 0 without original_max_position_embeddings")
        if self.moe_shortcut and (self.moe_layer_freq != 2 or self.num_hidden_layers % 2):
            raise ValueError("moe_shortcut: found true, expected pairs of layers, the first of them with experts")
        for name in _MOE_KEYS.values():
            if (getattr(self, name) is None) != (self.moe is None):
                wanted = "null without" if self.moe is None else "a value beside"
                raise ValueError(f"{name}: found {getattr(self, name)}, expected {wanted} the table moe")
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
        **({} if spec.moe is None else _from_moe_spec(spec.moe)),
        quantization=_from_fp8_spec(spec.quantization),
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
        moe=None if config.moe is None else _to_moe_spec(config, config.moe),
        quantization=_to_fp8_spec(config.quantization),
        **{name: getattr(config, name) for name in _SAME_NAMES},
    )


def _from_fp8_spec(fp8: Fp8Spec | None) -> Quantization:
    if fp8 is None:
        return Quantization()
    return Quantization(quant_algo="FP8_BLOCK_SCALES", exclude_modules=list(fp8.exclude_modules))


def _to_fp8_spec(config: Quantization) -> Fp8Spec | None:
    return None if config.quant_algo is None else Fp8Spec(tuple(config.exclude_modules or ()))


def _from_moe_spec(moe: MoeSpec) -> dict[str, Any]:
    limited = moe.topk_method != "greedy"
    table = MoeTable(
        normalization_mode=_NORMALIZATION_MODES[limited, moe.norm_topk_prob],
        **{key: getattr(moe, name) for name, key in _MOE_TABLE_KEYS.items()},
    )
    return {"moe": table, **{key: getattr(moe, name) for name, key in _MOE_KEYS.items()}}


def _to_moe_spec(config: PretrainedConfig, table: MoeTable) -> MoeSpec:
    return MoeSpec(
        norm_topk_prob=table.normalization_mode in _RENORMALIZE,
        **{name: getattr(table, key) for name, key in _MOE_TABLE_KEYS.items()},
        **{name: getattr(config, key) for name, key in _MOE_KEYS.items()},
    )


# Attributes of ModelSpec that are keys of the config under the same name and with the same meaning.
_SAME_NAMES = tuple(
    field.name
    for field in dataclasses.fields(ModelSpec)
    if field.name in PretrainedConfig.model_fields and field.name not in ("hidden_act", "moe", "quantization")
)
