"""Small random checkpoints, made and saved by transformers, together with the model that is the oracle for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

ModelType = Literal["deepseek_v3", "youtu"]
RopeKind = Literal["default", "linear", "yarn"]

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
}


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
        num_layers: Decoder layers, all of them dense.
        max_shard_size: Size above which the weights are split over several files.
        **overrides: Other keys of the model's config.

    Returns:
        The directory, and the model in evaluation mode: fp32 arithmetic and eager attention, with the weights as
        they were rounded to ``dtype``.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, YoutuConfig, YoutuForCausalLM

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
        "tie_word_embeddings": (model_type == "youtu") if tie is None else tie,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    if model_type == "deepseek_v3":
        values["first_k_dense_replace"] = num_layers
    values |= overrides
    if "num_attention_heads" in overrides:
        values["num_key_value_heads"] = overrides.get("num_key_value_heads", overrides["num_attention_heads"])

    if model_type == "deepseek_v3":
        model: Any = DeepseekV3ForCausalLM._from_config(DeepseekV3Config(**values), attn_implementation="eager")
    else:
        model = YoutuForCausalLM._from_config(YoutuConfig(**values), attn_implementation="eager")
    _randomise(model, seed)
    # Only weights are stored: the rotary frequencies, which are buffers, must not be rounded with them.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    model.to(torch.float32)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return HfCheckpoint(directory, model.eval())


def _randomise(model: nn.Module, seed: int) -> None:
    """Fills every parameter so that attention is far from uniform and the logits are spread."""
    generator = torch.Generator().manual_seed(seed)
    # A tied head repeats its input unless the layers, not the embedding, make up most of the residual stream.
    embedding_std = 0.15 if model.config.tie_word_embeddings else 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                parameter.uniform_(2.0, 4.0, generator=generator)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
            elif name == "model.embed_tokens.weight":
                parameter.normal_(0.0, embedding_std, generator=generator)
            elif name == "lm_head.weight":
                parameter.normal_(0.0, 0.15, generator=generator)
            else:
                gain = 2.5 if name.endswith(("q_proj.weight", "q_b_proj.weight")) else 1.0
                parameter.normal_(0.0, gain / math.sqrt(parameter.shape[1]), generator=generator)
