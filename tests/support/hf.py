"""Small random checkpoints, made and saved by transformers, together with the model that is the oracle for them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

ModelType = Literal[
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k2",
    "kimi_k25",
    "longcat_flash",
    "minicpm3",
    "mistral3",
    "mistral4",
    "sarvam_mla",
    "youtu",
]
RopeKind = Literal["default", "linear", "yarn", "longrope", "mistral"]

MAX_POSITION_EMBEDDINGS = 512
ORIGINAL_MAX_POSITION_EMBEDDINGS = 64

ROPE_PARAMETERS: dict[RopeKind, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    # mscale and mscale_all_dim differ, so that neither the scores' factor nor that of the cosines is 1.
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL_MAX_POSITION_EMBEDDINGS,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    # No text is longer than the original positions, so that the short factors count.
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "short_factor": [1.0 + 0.07 * pair * pair for pair in range(16)],
        "long_factor": [3.0 + pair for pair in range(16)],
    },
    # Queries grow every 20 positions, so that a short text shows it.
    "mistral": {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 20,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
        "partial_rotary_factor": 32 / 80,
    },
}


EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 36,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
# What tells the architectures apart, beside the sizes that they have in common.
ARCHITECTURES: dict[ModelType, dict[str, Any]] = {
    "deepseek_v2": {
        **EXPERTS,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
    },
    "deepseek_v3": EXPERTS,
    "glm4_moe_lite": {**EXPERTS, **ONE_GROUP},
    "axk1": {**EXPERTS, "first_k_dense_replace": 1},
    "kimi_k2": {**EXPERTS, **ONE_GROUP, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827},
    "longcat_flash": {
        "head_dim": 32,
        "expert_ffn_hidden_size": 36,
        "n_routed_experts": 9,
        "zero_expert_num": 5,
        "moe_topk": 4,
        "routed_scaling_factor": 3.0,
    },
    "minicpm3": {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
    "mistral4": {**EXPERTS, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "sarvam_mla": {**EXPERTS, **ONE_GROUP, "first_k_dense_replace": 1},
    "youtu": {},
}
# Of models that also see: that of their language model.
ARCHITECTURES["mistral3"] = ARCHITECTURES["mistral4"]
ARCHITECTURES["kimi_k25"] = ARCHITECTURES["kimi_k2"]


class HfCheckpoint(NamedTuple):
    """A checkpoint on disk and the transformers model with the same weights."""

    path: Path
    model: Any


def make_checkpoint(
    directory: Path,
    model_type: ModelType = "deepseek_v3",
    *,
    seed: int = 0,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    rope: RopeKind | dict[str, Any] = "default",
    rope_interleave: bool = True,
    q_lora_rank: int | None = 56,
    tie: bool | None = None,
    attention_bias: bool = False,
    num_layers: int = 2,
    max_shard_size: str = "5GB",
    edit: Callable[[Any], None] | None = None,
    **overrides: Any,
) -> HfCheckpoint:
    """Writes a random checkpoint with safetensors.

    Sizes are uneven and no powers of two. Nothing keeps transformers' initial ones and zeros: norm weights are
    uniform around their usual size and biases are random, so that a weight that is left out or mixed up shows.
    The two norm epsilons differ and are large enough to show.

    Args:
        directory: Where to write; made if need be.
        model_type: Architecture.
        seed: Seed of the weights; the same arguments give the same checkpoint.
        dtype: Type of the stored weights.
        rope: A name in ``ROPE_PARAMETERS``, or the parameters themselves.
        rope_interleave: Whether rotary pairs are neighbours.
        q_lora_rank: Width of the query latent; None projects queries directly.
        tie: Whether the head is the embedding; None is the architecture's default.
        attention_bias: Whether the attention's projections have biases.
        num_layers: Decoder layers; of ``longcat_flash``, halves of one. Those of ``deepseek_v3`` and ``youtu`` are
            dense, if no key says otherwise; of the others, the first.
        max_shard_size: Size above which the weights are split over several files.
        edit: Changes the model's random weights before they are rounded and stored.
        **overrides: Other keys of the model's config.

    Returns:
        The directory, and the model in evaluation mode: fp32 arithmetic and eager attention, with the weights as
        they were rounded to ``dtype``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

    text_type = {"mistral3": "mistral4", "kimi_k25": "kimi_k2"}.get(model_type, model_type)

    values: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 80,
        "intermediate_size": 112,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 32,
        "v_head_dim": 40,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rms_norm_eps": 1e-3,
        "rope_parameters": dict(ROPE_PARAMETERS[rope]) if isinstance(rope, str) else dict(rope),
        "rope_interleave": rope_interleave,
        "attention_bias": attention_bias,
        "tie_word_embeddings": (model_type in ("minicpm3", "youtu")) if tie is None else tie,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    if model_type == "deepseek_v3":
        values["first_k_dense_replace"] = num_layers
    if model_type in ("deepseek_v2", "longcat_flash", "minicpm3"):
        del values["rope_interleave"]
    values |= ARCHITECTURES[model_type] | overrides
    if "num_attention_heads" in overrides:
        values["num_key_value_heads"] = overrides.get("num_key_value_heads", overrides["num_attention_heads"])

    # transformers has no code for kimi_k2: it is deepseek_v3 under another name.
    config = AutoConfig.for_model("deepseek_v3" if text_type == "kimi_k2" else text_type, **values)
    # The automatic class does not know mistral4, which is part of a model that also sees.
    make: Any = Mistral4ForCausalLM._from_config if text_type == "mistral4" else AutoModelForCausalLM.from_config
    model: Any = make(config, attn_implementation="eager", experts_implementation="eager")
    _randomise(model, seed)
    if text_type != model_type:
        model = _inside_a_model_that_sees(model_type, model)
    if edit is not None:
        edit(model)
    # Only weights are rounded: not the rotary frequencies, which are not stored, nor the routers' biases, which
    # released checkpoints store in fp32.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name]
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    model.to(torch.float32)
    if model_type == "kimi_k2":
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    if model_type == "kimi_k25":
        _name_as_released(directory / "model.safetensors")
    return HfCheckpoint(directory, model.eval())


def _inside_a_model_that_sees(model_type: ModelType, language_model: Any) -> Any:
    """A random model of transformers that also sees, with the given language model."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision: dict[str, Any] = {"model_type": "pixtral", **sizes, "head_dim": 16, "image_size": 28, "patch_size": 14}
    config_class: Any = transformers.Mistral3Config
    model_class: Any = transformers.Mistral3ForConditionalGeneration
    if model_type == "kimi_k25":
        vision = {**sizes, "pos_emb_height": 4, "pos_emb_width": 4}
        config_class = transformers.Kimi_K25Config
        model_class = transformers.Kimi_K25ForConditionalGeneration
    config = language_model.config
    whole = config_class(
        text_config=config.to_dict(), vision_config=vision, tie_word_embeddings=config.tie_word_embeddings
    )
    model = model_class._from_config(whole, attn_implementation="eager", experts_implementation="eager")
    model.model.language_model.load_state_dict(language_model.model.state_dict())
    model.lm_head.load_state_dict(language_model.lm_head.state_dict())
    return model


def _name_as_released(file: Path) -> None:
    """Undoes how transformers 5.24 saves Kimi's decoder: it names the layers as it does those that see."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _randomise(model: nn.Module, seed: int) -> None:
    """Fills every parameter so that attention is far from uniform and the logits are spread."""
    generator = torch.Generator().manual_seed(seed)
    # A tied head repeats its input unless the layers, not the embedding, make up most of the residual stream.
    embedding_std = 0.15 if model.config.tie_word_embeddings else 0.5
    embedding_std /= getattr(model.config, "scale_emb", 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                parameter.uniform_(2.0, 4.0, generator=generator)
            elif name.endswith(("norm.weight", "norm.0.weight", "norm.1.weight")):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
            elif name == "model.embed_tokens.weight":
                parameter.normal_(0.0, embedding_std, generator=generator)
            elif name == "lm_head.weight":
                parameter.normal_(0.0, 0.15, generator=generator)
            else:
                sharp = ("q_proj.weight", "q_b_proj.weight", "mlp.gate.weight", "classifier.weight")
                gain = 2.5 if name.endswith(sharp) else 1.0
                parameter.normal_(0.0, gain / math.sqrt(parameter.shape[-1]), generator=generator)
        for name, buffer in model.named_buffers():
            # A.X-K1 is released without this bias; transformers has zeros in its place.
            if name.endswith("e_score_correction_bias") and model.config.model_type != "axk1":
                buffer.normal_(0.0, 0.2, generator=generator)
