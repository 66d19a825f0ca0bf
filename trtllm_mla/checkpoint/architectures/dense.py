"""What dense MLA decoders of the DeepSeek family share: their config keys, tensors and tensors to skip.

Keys, defaults and formulas follow transformers 5.24 (``configuration_deepseek_v3.py``, ``modeling_rope_utils.py``,
``modeling_deepseek_v3.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import ConfigDict, Field, model_validator

from trtllm_mla.checkpoint.spec import ModelSpec, RopeSpec, RopeType
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 9

# The norms on the latents are made without an epsilon in transformers, so they keep its default.
LATENT_NORM_EPS = 1e-6

Dimension = Annotated[int, Field(gt=0, le=MAX_DIMENSION, strict=True)]
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS, strict=True)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Number = Annotated[float, Field(ge=0, le=1e3, strict=True, allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0, le=1e9, strict=True, allow_inf_nan=False)]
RopeTheta = Annotated[float, Field(gt=1, le=1e15, strict=True, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(gt=0, lt=1, strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


class RopeConfig(StrictModel):
    """The keys of ``rope_parameters`` (older: ``rope_scaling``) that decide the angles; others have no effect."""

    model_config = ConfigDict(extra="allow")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: RopeTheta | None = None
    factor: PositiveNumber | None = None
    original_max_position_embeddings: Dimension | None = None
    attention_factor: PositiveNumber | None = None
    beta_fast: PositiveNumber | None = None
    beta_slow: PositiveNumber | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    truncate: Flag = True
    partial_rotary_factor: Literal[1] | None = None

    @property
    def effective_type(self) -> str:
        """The rope type under either spelling of the key."""
        return self.rope_type or self.type or "default"


class HfConfig(StrictModel):
    """The keys of ``config.json`` that decide what a dense MLA decoder computes; others are ignored.

    A subclass gives each architecture's defaults for keys that are missing.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    architectures: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    vocab_size: Dimension
    hidden_size: Dimension
    intermediate_size: Dimension
    num_hidden_layers: Layers
    num_attention_heads: Dimension
    num_key_value_heads: Dimension | None = None
    q_lora_rank: Dimension | None
    kv_lora_rank: Dimension
    qk_nope_head_dim: Dimension
    qk_rope_head_dim: Dimension
    head_dim: Dimension | None = None
    v_head_dim: Dimension
    hidden_act: str = "silu"
    max_position_embeddings: Dimension
    original_max_position_embeddings: Dimension | None = None
    rms_norm_eps: Epsilon = 1e-6
    bos_token_id: TokenId | None
    eos_token_id: TokenId | list[TokenId] | None
    tie_word_embeddings: Flag
    rope_parameters: RopeConfig | None = None
    rope_scaling: RopeConfig | None = None
    rope_theta: RopeTheta = 10_000.0
    partial_rotary_factor: Literal[1] | None = None
    rope_interleave: Flag | None = True
    attention_bias: Flag = False
    quantization_config: object = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantization_config is not None:
            raise ValueError(
                "quantization_config: quantised checkpoints are not supported; expected float32, float16 or bfloat16 "
                "weights. Convert the checkpoint to bfloat16 first"
            )
        heads = self.num_attention_heads
        if self.num_key_value_heads not in (None, heads):
            raise ValueError(
                f"num_key_value_heads: found {self.num_key_value_heads}, expected num_attention_heads = {heads}: all "
                "heads of MLA share one latent"
            )
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act: found '{self.hidden_act:.80}', expected 'silu'")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: found {self.qk_rope_head_dim}, expected an even number")
        if self.head_dim not in (None, self.qk_rope_head_dim):
            raise ValueError(
                f"head_dim: found {self.head_dim}, expected qk_rope_head_dim = {self.qk_rope_head_dim}: transformers "
                "takes the rotary frequencies from it"
            )
        return self

    @property
    def rope(self) -> RopeConfig:
        """The rotary parameters; like transformers, the older key wins where both are filled."""
        if self.rope_scaling is not None and self.rope_scaling.model_fields_set:
            return self.rope_scaling
        return self.rope_parameters or RopeConfig()


class _GenerationConfig(StrictModel):
    model_config = ConfigDict(extra="ignore")

    eos_token_id: TokenId | list[TokenId] | None = None


@dataclass(frozen=True)
class DenseArchitecture:
    """A dense MLA decoder whose modules are named as in DeepSeek-V3.

    Attributes:
        model_type: ``model_type`` in ``config.json``.
        hf_architecture: The class with the language-model head.
        config_class: Its config keys and their defaults.
        mtp_marker: A tensor (relative to its layer) that only multi-token-prediction layers have. They stand behind
            the decoder's layers; None if the architecture has none.
    """

    model_type: str
    hf_architecture: str
    config_class: type[HfConfig]
    mtp_marker: str | None = None

    def model_spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, *, source: str
    ) -> ModelSpec:
        """Turns a config into a spec.

        Args:
            config: What ``config.json`` holds.
            generation_config: What ``generation_config.json`` holds; where there is one, its ``eos_token_id`` counts
                and not the config's, as in transformers.
            source: The config's path, for messages.

        Raises:
            UserError: A value is unusable or asks for something that is not supported.
        """
        values = parse_config(dict(config), self.config_class, source=source)
        architecture = (values.architectures or [self.hf_architecture])[0]
        if architecture != self.hf_architecture:
            raise UserError(
                f"{source}: found architecture {architecture!r:.80}, expected '{self.hf_architecture}', the model "
                "with a language-model head."
            )
        eos_token_id = values.eos_token_id
        if generation_config is not None:
            generation_source = source.removesuffix("config.json") + "generation_config.json"
            eos_token_id = parse_config(
                dict(generation_config), _GenerationConfig, source=generation_source
            ).eos_token_id
        rope = _rope_spec(values, source=source)
        return ModelSpec(
            model_type=self.model_type,
            hf_architecture=architecture,
            dtype=_dtype(values, source=source),
            vocab_size=values.vocab_size,
            hidden_size=values.hidden_size,
            intermediate_size=values.intermediate_size,
            num_hidden_layers=values.num_hidden_layers,
            num_attention_heads=values.num_attention_heads,
            q_lora_rank=values.q_lora_rank,
            kv_lora_rank=values.kv_lora_rank,
            qk_nope_head_dim=values.qk_nope_head_dim,
            qk_rope_head_dim=values.qk_rope_head_dim,
            v_head_dim=values.v_head_dim,
            softmax_scale=_softmax_scale(values, rope),
            rms_norm_eps=values.rms_norm_eps,
            latent_norm_eps=LATENT_NORM_EPS,
            hidden_act=values.hidden_act,
            attention_bias=values.attention_bias,
            tie_word_embeddings=values.tie_word_embeddings,
            max_position_embeddings=values.max_position_embeddings,
            rope=rope,
            bos_token_id=values.bos_token_id,
            eos_token_ids=_as_tuple(eos_token_id),
        )

    def tensors(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a checkpoint of such a model holds.

        Linear weights are [out, in]. A tied head is not among them: it is the embedding.
        """
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
        for layer in range(spec.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {prefix + name: shape for name, shape in _layer_tensors(spec).items()}
        shapes["model.norm.weight"] = (spec.hidden_size,)
        if not spec.tie_word_embeddings:
            shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
        return shapes


def _layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    query_rows = heads * spec.qk_head_dim
    if spec.q_lora_rank is None:
        shapes["self_attn.q_proj.weight"] = (query_rows, hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (spec.q_lora_rank, hidden)
        if spec.attention_bias:
            shapes["self_attn.q_a_proj.bias"] = (spec.q_lora_rank,)
        shapes["self_attn.q_a_layernorm.weight"] = (spec.q_lora_rank,)
        shapes["self_attn.q_b_proj.weight"] = (query_rows, spec.q_lora_rank)
    shapes["self_attn.kv_a_proj_with_mqa.weight"] = (spec.latent_width, hidden)
    if spec.attention_bias:
        shapes["self_attn.kv_a_proj_with_mqa.bias"] = (spec.latent_width,)
    shapes["self_attn.kv_a_layernorm.weight"] = (spec.kv_lora_rank,)
    shapes["self_attn.kv_b_proj.weight"] = (heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    shapes["self_attn.o_proj.weight"] = (hidden, heads * spec.v_head_dim)
    if spec.attention_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes["mlp.gate_proj.weight"] = (spec.intermediate_size, hidden)
    shapes["mlp.up_proj.weight"] = (spec.intermediate_size, hidden)
    shapes["mlp.down_proj.weight"] = (hidden, spec.intermediate_size)
    return shapes


def _dtype(values: HfConfig, *, source: str) -> DType:
    given = (name for name in (values.dtype, values.torch_dtype) if name is not None)
    name = next(given, DType.FLOAT32.value)
    try:
        return DType(name.removeprefix("torch."))
    except ValueError:
        raise UserError(f"{source}: found dtype {name!r:.80}, expected one of {', '.join(DType)}.") from None


def _as_tuple(token_ids: int | list[int] | None) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)


def _rope_spec(values: HfConfig, *, source: str) -> RopeSpec:
    rope = values.rope
    if rope.effective_type not in get_args(RopeType):
        raise UserError(
            f"{source}: found rope type {rope.effective_type!r:.80}, expected one of {', '.join(get_args(RopeType))}."
        )
    rope_type = cast(RopeType, rope.effective_type)
    theta = rope.rope_theta or values.rope_theta
    if rope_type == "default":
        return RopeSpec(values.qk_rope_head_dim, theta, rope_type, bool(values.rope_interleave))
    if rope.factor is None and (rope_type == "linear" or "factor" not in rope.model_fields_set):
        raise UserError(f"{source}: rope type '{rope_type}' needs a factor. Add the key 'factor' beside the type.")
    if rope_type == "linear":
        return RopeSpec(
            values.qk_rope_head_dim, theta, rope_type, bool(values.rope_interleave), cast(float, rope.factor)
        )
    original = (
        values.original_max_position_embeddings
        or rope.original_max_position_embeddings
        or values.max_position_embeddings
    )
    factor = rope.factor or values.max_position_embeddings / original
    return RopeSpec(
        dim=values.qk_rope_head_dim,
        theta=theta,
        rope_type=rope_type,
        interleaved=bool(values.rope_interleave),
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        truncate=rope.truncate,
        attention_factor=rope.attention_factor or _attention_factor(factor, rope),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of the scores' magnitude with the context (``yarn_get_mscale`` of DeepSeek and transformers)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(factor: float, rope: RopeConfig) -> float:
    """Factor on cosines and sines where the config gives none (``_compute_yarn_parameters`` in transformers)."""
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(factor, rope.mscale) / yarn_mscale(factor, rope.mscale_all_dim)
    return yarn_mscale(factor)


def _softmax_scale(values: HfConfig, rope: RopeSpec) -> float:
    """Factor on the scores: ``(nope + rope)^-0.5 * mscale^2`` (``yarn_apply_mscale`` in transformers)."""
    scale = math.pow(values.qk_nope_head_dim + values.qk_rope_head_dim, -0.5)
    if rope.rope_type == "default" or not values.rope.mscale_all_dim:
        return scale
    mscale = yarn_mscale(rope.factor, values.rope.mscale_all_dim)
    return scale * mscale * mscale
