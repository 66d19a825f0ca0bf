"""What MLA decoders of the DeepSeek family share: their config keys, tensors and tensors to skip.

Keys, defaults and formulas follow transformers 5.24 (``configuration_deepseek_v3.py``, ``modeling_rope_utils.py``,
``modeling_deepseek_v3.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import ConfigDict, Field, model_validator

from trtllm_mla.checkpoint.fp8 import QuantizationConfig
from trtllm_mla.checkpoint.spec import ModelSpec, MoeSpec, RopeSpec, RopeType, ScoringFunction, TopkMethod
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 9
MAX_EXPERTS = 1 << 12

# The norms on the latents are made without an epsilon in transformers, so they keep its default.
LATENT_NORM_EPS = 1e-6

Dimension = Annotated[int, Field(gt=0, le=MAX_DIMENSION, strict=True)]
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS, strict=True)]
Experts = Annotated[int, Field(gt=0, le=MAX_EXPERTS, strict=True)]
FirstLayer = Annotated[int, Field(ge=0, strict=True)]
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
    short_factor: list[PositiveNumber] | None = None
    long_factor: list[PositiveNumber] | None = None
    beta_fast: PositiveNumber | None = None
    beta_slow: PositiveNumber | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    llama_4_scaling_beta: Number | None = None
    truncate: Flag = True
    partial_rotary_factor: Literal[1] | None = None

    @property
    def effective_type(self) -> str:
        """The rope type under either spelling of the key."""
        return self.rope_type or self.type or "default"


class HfConfig(StrictModel):
    """The keys of ``config.json`` that decide what an MLA decoder computes; others are ignored.

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
    quantization_config: QuantizationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
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

    @property
    def moe(self) -> MoeSpec | None:
        """The mixture of experts, or None if every layer's MLP is dense."""
        return None

    @property
    def extras(self) -> dict[str, Any]:
        """Values of those attributes of ``ModelSpec`` that are off in most architectures."""
        return {}


class MoeConfig(HfConfig):
    """The keys of a decoder with a mixture of experts.

    ``scoring_func`` and ``topk_method`` are what the architecture's code computes, whether the config says it or not;
    a subclass narrows them to that.
    """

    moe_intermediate_size: Dimension
    n_routed_experts: Experts
    n_shared_experts: Experts
    num_experts_per_tok: Experts
    n_group: Experts | None
    topk_group: Experts | None
    norm_topk_prob: Flag
    routed_scaling_factor: PositiveNumber
    scoring_func: ScoringFunction
    topk_method: TopkMethod
    first_k_dense_replace: FirstLayer
    moe_layer_freq: Layers = 1

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        experts, groups, chosen = self.n_routed_experts, self.n_group or 1, self.topk_group or 1
        candidates, where = experts, f"n_routed_experts = {experts}"
        if self.topk_method != "greedy":
            if experts % groups:
                raise ValueError(f"n_group: found {groups}, expected a divisor of n_routed_experts = {experts}")
            if chosen > groups:
                raise ValueError(f"topk_group: found {chosen}, expected at most n_group = {groups}")
            if self.topk_method == "noaux_tc" and experts // groups < 2:
                raise ValueError(f"n_group: found {groups}, expected groups of at least 2 of the {experts} experts")
            if chosen < groups:
                candidates, where = chosen * (experts // groups), f"the experts of topk_group = {chosen} groups"
        shared = self.n_shared_experts * self.moe_intermediate_size
        if shared > MAX_DIMENSION:
            raise ValueError(f"n_shared_experts * moe_intermediate_size: found {shared}, expected <= {MAX_DIMENSION}")
        if self.num_experts_per_tok > candidates:
            raise ValueError(
                f"num_experts_per_tok: found {self.num_experts_per_tok}, expected at most {candidates}: {where}"
            )
        return self

    @property
    def moe(self) -> MoeSpec | None:
        """The mixture of experts, or None if every layer's MLP is dense."""
        first, frequency = self.first_k_dense_replace, self.moe_layer_freq
        if -(-first // frequency) * frequency >= self.num_hidden_layers:
            return None
        limited = self.topk_method != "greedy"
        return MoeSpec(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.n_shared_experts * self.moe_intermediate_size,
            scoring_func=self.scoring_func,
            topk_method=self.topk_method,
            n_group=self.n_group or 1 if limited else 1,
            topk_group=self.topk_group or 1 if limited else 1,
            norm_topk_prob=self.norm_topk_prob,
            routed_scaling_factor=self.routed_scaling_factor,
            correction_bias=self.topk_method == "noaux_tc",
            first_k_dense_replace=first,
            moe_layer_freq=frequency,
        )


def first_sparse_layer(mlp_layer_types: object, num_hidden_layers: object) -> int:
    """``first_k_dense_replace`` of a config that lists its layers: ``dense`` ones, then ``sparse`` ones.

    Raises:
        ValueError: It lists something else, or fewer than ``num_hidden_layers``.
    """
    types = mlp_layer_types if isinstance(mlp_layer_types, list) else [None]
    first = types.index("sparse") if "sparse" in types else len(types)
    if types != ["dense"] * first + ["sparse"] * (len(types) - first):
        raise ValueError("mlp_layer_types: expected a list of 'dense' layers, followed by 'sparse' ones only")
    if isinstance(num_hidden_layers, int) and len(types) < num_hidden_layers:
        raise ValueError(
            f"mlp_layer_types: found {len(types)} layers, expected num_hidden_layers = {num_hidden_layers}"
        )
    return first


class _GenerationConfig(StrictModel):
    model_config = ConfigDict(extra="ignore")

    eos_token_id: TokenId | list[TokenId] | None = None


@dataclass(frozen=True)
class Architecture:
    """An MLA decoder whose modules are named as in DeepSeek-V3.

    Attributes:
        model_type: ``model_type`` in ``config.json``.
        hf_architectures: Classes with the language-model head that a config may name; the first is the default.
        config_class: Its config keys and their defaults.
        mtp_marker: A tensor (relative to its layer) that only multi-token-prediction layers have. They stand behind
            the decoder's layers.
        transformers_model_type: ``model_type`` under which transformers knows it; None if under its own.
        mtp_prefix: What the names of multi-token-prediction layers' tensors start with, where they stand apart.
        sublayers: Layers of this package that make up one of the checkpoint: an attention and an MLP each.
        stacked_experts: Whether the experts' projections are stored one behind the other, as two tensors of a layer.
        transformers_splits_pairs: Whether transformers caches interleaved rotary pairs as first, then second elements.
        tensor_prefix: What the names of all its tensors start with, where it is a part of a larger model.
        other_parts: What the names of tensors of that model's other parts start with.
    """

    model_type: str
    hf_architectures: tuple[str, ...]
    config_class: type[HfConfig]
    mtp_marker: str = "eh_proj.weight"
    mtp_prefix: str | None = None
    sublayers: int = 1
    stacked_experts: bool = False
    transformers_model_type: str | None = None
    transformers_splits_pairs: bool = True
    tensor_prefix: str = ""
    other_parts: tuple[str, ...] = ()

    def read_config(self, config: Mapping[str, Any], *, source: str) -> HfConfig:
        """Reads the keys that decide what is computed.

        Args:
            config: What ``config.json`` holds.
            source: The config's path, for messages.

        Raises:
            UserError: A value is unusable or asks for something that is not supported.
        """
        return parse_config(dict(config), self.config_class, source=source)

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
        values = self.read_config(config, source=source)
        architecture = (values.architectures or self.hf_architectures)[0]
        if architecture not in self.hf_architectures:
            raise UserError(
                f"{source}: found architecture {architecture!r:.80}, expected {' or '.join(self.hf_architectures)}, "
                "the model with a language-model head."
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
            moe=values.moe,
            quantization=values.quantization_config.spec if values.quantization_config else None,
            **values.extras,
        )

    def tensors(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a checkpoint of such a model holds; see ``parameters``."""
        return {self.tensor_name(name): shape for name, shape in self.parameters(spec).items()}

    def transformers_config(self, spec: ModelSpec) -> dict[str, Any]:
        """What transformers' config must say for the first ``spec.num_hidden_layers`` layers of a checkpoint."""
        return {"num_hidden_layers": spec.num_hidden_layers}

    def tensor_name(self, parameter: str) -> str:
        """Name in the checkpoint of what the network calls ``parameter``: the same, but for few architectures."""
        return self.tensor_prefix + parameter

    def parameters(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Names, as the network has them, and shapes of a model's parameters.

        Linear weights are [out, in]. A tied head is not among them: it is the embedding. Nor are the scales of FP8
        weights.
        """
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
        for layer in range(spec.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {prefix + name: shape for name, shape in self.layer_tensors(spec, layer).items()}
        shapes["model.norm.weight"] = (spec.hidden_size,)
        if not spec.tie_word_embeddings:
            shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
        return shapes

    def layer_tensors(self, spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
        """Names, relative to the layer, and shapes of a layer's tensors."""
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (spec.hidden_size,)}
        shapes |= {f"self_attn.{name}": shape for name, shape in attention_tensors(spec).items()}
        shapes["post_attention_layernorm.weight"] = (spec.hidden_size,)
        feed_forward: dict[str, tuple[int, ...]] = {}
        if spec.moe is not None and spec.is_moe_layer(layer):
            if spec.moe.output_norm:
                shapes["post_mlp_layernorm.weight"] = (spec.hidden_size,)
            feed_forward |= moe_tensors(spec.hidden_size, spec.moe, stacked=self.stacked_experts)
        if spec.has_dense_mlp(layer):
            feed_forward |= mlp_tensors(spec.hidden_size, spec.intermediate_size)
        return shapes | {f"mlp.{name}": shape for name, shape in feed_forward.items()}


def attention_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names, relative to the attention, and shapes of its tensors."""
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {}
    query_rows = heads * spec.qk_head_dim
    if spec.q_lora_rank is None:
        shapes["q_proj.weight"] = (query_rows, hidden)
    else:
        shapes["q_a_proj.weight"] = (spec.q_lora_rank, hidden)
        if spec.attention_bias:
            shapes["q_a_proj.bias"] = (spec.q_lora_rank,)
        shapes["q_a_layernorm.weight"] = (spec.q_lora_rank,)
        shapes["q_b_proj.weight"] = (query_rows, spec.q_lora_rank)
    shapes["kv_a_proj_with_mqa.weight"] = (spec.latent_width, hidden)
    if spec.attention_bias:
        shapes["kv_a_proj_with_mqa.bias"] = (spec.latent_width,)
    shapes["kv_a_layernorm.weight"] = (spec.kv_lora_rank,)
    shapes["kv_b_proj.weight"] = (heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    shapes["o_proj.weight"] = (hidden, heads * spec.v_head_dim)
    if spec.attention_bias:
        shapes["o_proj.bias"] = (hidden,)
    return shapes


def mlp_tensors(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    """Names, relative to a gated MLP, and shapes of its tensors."""
    return {
        "gate_proj.weight": (intermediate_size, hidden_size),
        "up_proj.weight": (intermediate_size, hidden_size),
        "down_proj.weight": (hidden_size, intermediate_size),
    }


def moe_tensors(hidden_size: int, moe: MoeSpec, *, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Names, relative to a mixture of experts, and shapes of its tensors."""
    choices = moe.num_experts + moe.num_identity_experts
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (choices, hidden_size)}
    if moe.correction_bias:
        shapes["gate.e_score_correction_bias"] = (choices,)
    expert = mlp_tensors(hidden_size, moe.intermediate_size)
    if stacked:
        shapes["experts.gate_up_proj"] = (moe.num_experts, 2 * moe.intermediate_size, hidden_size)
        shapes["experts.down_proj"] = (moe.num_experts, hidden_size, moe.intermediate_size)
    for number in range(0 if stacked else moe.num_experts):
        shapes |= {f"experts.{number}.{name}": shape for name, shape in expert.items()}
    if moe.shared_intermediate_size:
        shared = mlp_tensors(hidden_size, moe.shared_intermediate_size)
        shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
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
    if rope.factor is None and (
        rope_type == "linear" or (rope_type == "yarn" and "factor" not in rope.model_fields_set)
    ):
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
    if rope_type == "longrope":
        return RopeSpec(
            dim=values.qk_rope_head_dim,
            theta=theta,
            rope_type=rope_type,
            interleaved=bool(values.rope_interleave),
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=rope.attention_factor or _longrope_attention_factor(factor, original),
            frequency_factors=_frequency_factors(values, original, source=source),
        )
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


def _longrope_attention_factor(factor: float, original: int) -> float:
    """Factor on cosines and sines where the config gives none (``_compute_longrope_parameters`` in transformers)."""
    return 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _frequency_factors(values: HfConfig, original: int, *, source: str) -> tuple[float, ...]:
    """LongRoPE's divisors of the frequencies.

    Those for long texts take the place of those for short ones when a text outgrows the original positions. Its
    cached keys are rotated by then, so what it computes would depend on how it was split into steps.
    """
    short, long = values.rope.short_factor, values.rope.long_factor
    pairs = values.qk_rope_head_dim // 2
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if factors is None or len(factors) != pairs:
            raise UserError(
                f"{source}: rope type 'longrope': {name}: found {'none' if factors is None else len(factors)}, "
                f"expected a list of qk_rope_head_dim / 2 = {pairs} numbers."
            )
    if short != long and values.max_position_embeddings > original:
        raise UserError(
            f"{source}: rope type 'longrope': found max_position_embeddings {values.max_position_embeddings}, "
            f"expected at most original_max_position_embeddings = {original}, since short_factor and long_factor "
            "differ. Lower it to use short_factor; or, for texts that are all longer, set short_factor to long_factor."
        )
    return tuple(float(factor) for factor in short or ())


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
