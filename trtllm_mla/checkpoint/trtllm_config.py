"""``config.json`` of TensorRT-LLM's checkpoint layout for DeepSeek models.

The keys are those of TensorRT-LLM's ``deepseek_v2`` config in the variant whose cache size is coherent:
``num_key_value_heads`` is 1 and ``head_size`` is that of a cached row. ``hf_config`` and ``hf_generation_config`` hold
the original files, since a config of this layout does not say everything that the original one did, and ``hf_dtypes``
the types of tensors that the layout stores in a wider one. TensorRT-LLM carries keys along that it does not know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.architectures.base import yarn_mscale
from trtllm_mla.checkpoint.pretrained_config import to_pretrained_config
from trtllm_mla.checkpoint.spec import ModelSpec, MoeSpec
from trtllm_mla.checkpoint.trtllm_layout import RankGrid, check_grid
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
MAX_RANKS = 1 << 10

_DEVICE_LIMITED = 3  # MoeConfig.ExpertScaleNormalizationMode
_MOE_KEYS = (
    "num_experts",
    "shared_expert_intermediate_size",
    "top_k",
    "normalization_mode",
    "device_limited_n_group",
    "device_limited_topk_group",
    "device_limited_routed_scaling_factor",
    "topk_method",
)
_Count = Annotated[int, Field(gt=0, le=MAX_RANKS, strict=True)]
_Name = Annotated[str, StringConstraints(max_length=256, strict=True)]


@dataclass(frozen=True)
class LayoutModel:
    """A model in the layout.

    Attributes:
        spec: The model; its ``dtype`` is that of the files.
        grid: How it is split.
        hf_config: ``config.json`` of the Hugging Face checkpoint.
        hf_generation_config: Its ``generation_config.json``, if it has one.
        hf_dtypes: Types of those Hugging Face tensors that the layout stores in a wider type.
    """

    spec: ModelSpec
    grid: RankGrid
    hf_config: Mapping[str, Any]
    hf_generation_config: Mapping[str, Any] | None
    hf_dtypes: Mapping[str, DType]


class _Ranks(StrictModel):
    model_config = ConfigDict(extra="ignore")

    tp_size: _Count
    pp_size: Literal[1] = 1
    moe_tp_size: _Count
    moe_ep_size: _Count

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.moe_tp_size * self.moe_ep_size != self.tp_size:
            raise ValueError(
                f"tp_size: found {self.tp_size}, expected moe_tp_size * moe_ep_size = "
                f"{self.moe_tp_size * self.moe_ep_size}"
            )
        return self


class _Quantization(StrictModel):
    model_config = ConfigDict(extra="ignore")

    quant_algo: None = None


class _LayoutConfig(StrictModel):
    """The keys that reading needs."""

    model_config = ConfigDict(extra="ignore")

    dtype: DType
    mapping: _Ranks
    quantization: _Quantization = _Quantization()
    hf_config: dict[str, Any]
    hf_generation_config: dict[str, Any] | None = None
    hf_dtypes: dict[_Name, DType] = Field(default_factory=dict)


def to_layout_config(model: LayoutModel, *, source: str) -> dict[str, Any]:
    """The JSON value of ``config.json``.

    Args:
        model: The model.
        source: Where it was found, for messages.

    Raises:
        UserError: The layout cannot describe the model; the message says what stands in the way.
    """
    _check_model(model.spec, source=source)
    spec, grid = model.spec, model.grid
    config = to_pretrained_config(spec)
    return config | {
        "moe": _moe_table(spec.moe, config["moe"]),
        "topk_method": None if spec.moe is None else spec.moe.topk_method,
        "coring_func": config["scoring_func"],  # TensorRT-LLM's own spelling of the key
        "rotary_scaling": _rotary_scaling(model, source=source),
        "mlp_bias": False,
        "residual_mlp": False,
        "fp8_format": False,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {
            "world_size": grid.tp_size,
            "tp_size": grid.tp_size,
            "pp_size": 1,
            "moe_tp_size": grid.moe_tp_size,
            "moe_ep_size": grid.moe_ep_size,
        },
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": None,
            "group_size": 128,
            "has_zero_point": False,
            "pre_quant_scale": False,
            "exclude_modules": None,
        },
        "hf_config": dict(model.hf_config),
        "hf_generation_config": None if model.hf_generation_config is None else dict(model.hf_generation_config),
        "hf_dtypes": {name: str(dtype) for name, dtype in model.hf_dtypes.items()},
    }


def _moe_table(moe: MoeSpec | None, table: dict[str, Any] | None) -> dict[str, Any]:
    """TensorRT-LLM's ``MoeConfig``, which takes no other keys, and which a model without experts has too."""
    if moe is None or table is None:
        return {"num_experts": 0, "shared_expert_intermediate_size": 0, "top_k": 0, "normalization_mode": 0}
    known = {name: table[name] for name in _MOE_KEYS}
    if moe.topk_method == "noaux_tc":
        # TensorRT-LLM gives it no other mode: dividing by the weights' sum is part of the method there.
        known["normalization_mode"] = _DEVICE_LIMITED
    return known


def from_layout_config(values: Mapping[str, Any], *, source: str) -> LayoutModel:
    """Reads ``config.json`` back.

    Args:
        values: What the file holds.
        source: Its path, for messages.

    Raises:
        UserError: A key is missing or has an unusable value, or the model cannot be split as the file says.
    """
    if "hf_config" not in values:
        raise UserError(
            f"{source}: found no key hf_config, which 'trtllm-mla convert --layout trtllm' writes. Add it, with the "
            "contents of the original model's config.json."
        )
    config = parse_config(dict(values), _LayoutConfig, source=source)
    inner = f"{source}: hf_config"
    architecture = get_architecture(config.hf_config.get("model_type"), source=inner)
    spec = architecture.model_spec(config.hf_config, config.hf_generation_config, source=inner)
    spec = dataclasses.replace(spec, dtype=config.dtype)
    grid = RankGrid(config.mapping.tp_size, config.mapping.moe_ep_size)
    _check_model(spec, source=inner)
    check_grid(spec, grid, source=f"{source}: mapping")
    return LayoutModel(spec, grid, config.hf_config, config.hf_generation_config, config.hf_dtypes)


def _check_model(spec: ModelSpec, *, source: str) -> None:
    """Refuses a model that TensorRT-LLM's DeepSeek model would not compute."""
    moe = spec.moe
    problem = None
    if spec.model_type not in MODEL_TYPES:
        problem = (
            f"model_type '{spec.model_type}', expected one of {', '.join(MODEL_TYPES)}: TensorRT-LLM's layout is that "
            "of its DeepSeek model"
        )
    elif spec.quantization is not None:
        problem = "FP8 weights, expected float32, float16 or bfloat16: dequantise the checkpoint first"
    elif spec.attention_bias:
        problem = "attention_bias true, expected false: the layout has no tensors for these biases"
    elif not spec.rope.interleaved:
        problem = "rope_interleave false, expected true: TensorRT-LLM rotates neighbouring pairs"
    elif spec.rope.rope_type not in ("default", "yarn"):
        problem = f"rope type '{spec.rope.rope_type}', expected default or yarn: TensorRT-LLM knows no other for MLA"
    elif moe is not None and moe.moe_layer_freq != 1:
        problem = f"moe_layer_freq {moe.moe_layer_freq}, expected 1: TensorRT-LLM gives every later layer experts"
    elif moe is not None and moe.topk_method == "noaux_tc" and not moe.norm_topk_prob:
        problem = "norm_topk_prob false, expected true with topk_method 'noaux_tc': TensorRT-LLM divides by the sum"
    elif moe is not None and moe.topk_method == "greedy" and moe.routed_scaling_factor != 1:
        problem = (
            f"routed_scaling_factor {moe.routed_scaling_factor:g}, expected 1 with topk_method 'greedy': TensorRT-LLM "
            "applies the factor with a group-limited choice only"
        )
    if problem is not None:
        raise UserError(f"{source}: found {problem}.")


def _rotary_scaling(model: LayoutModel, *, source: str) -> dict[str, Any] | None:
    """YaRN's parameters with the two factors from which TensorRT-LLM computes the scale of cosines and of scores."""
    rope = model.spec.rope
    if rope.rope_type == "default":
        return None
    values = get_architecture(model.spec.model_type, source=source).read_config(model.hf_config, source=source).rope
    all_dims = values.mscale_all_dim or 0.0
    mscale = values.mscale if values.mscale and all_dims else 1.0
    computed = yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, all_dims)
    if not math.isclose(computed, rope.attention_factor, rel_tol=1e-9) or not rope.truncate:
        raise UserError(
            f"{source}: found rotary parameters that the layout cannot describe: TensorRT-LLM rounds YaRN's ramp to "
            f"whole dimensions and would scale cosines by {computed:g}, this model by {rope.attention_factor:g}."
        )
    return {
        "type": "yarn",
        "factor": rope.factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": mscale,
        "mscale_all_dim": all_dims,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
