"""Bytes that a model's cache takes, beside those of other forms of attention with the same heads."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mla.checkpoint.spec import ModelSpec

GROUPED_QUERY_HEADS = 8


@dataclass(frozen=True)
class CacheFootprint:
    """Bytes of one cached token, over all layers.

    Attributes:
        latent: MLA: one latent and one rotary key.
        decompressed: The same model with every head's key and value cached.
        multi_head: Multi-head attention of the same head widths, without a separate rotary part.
        grouped_query: The same with ``GROUPED_QUERY_HEADS`` key-value heads, or all heads if there are fewer.
    """

    latent: int
    decompressed: int
    multi_head: int
    grouped_query: int


def cache_footprint(spec: ModelSpec, *, itemsize: int, num_layers: int | None = None) -> CacheFootprint:
    """Computes a model's cache bytes per token.

    Args:
        spec: The model.
        itemsize: Bytes of a cached element.
        num_layers: Layers that are kept; left out, all.
    """
    layers = spec.num_hidden_layers if num_layers is None else num_layers
    heads = spec.num_attention_heads
    plain_head = spec.qk_nope_head_dim + spec.v_head_dim
    return CacheFootprint(
        latent=layers * spec.latent_width * itemsize,
        decompressed=layers * heads * (spec.qk_head_dim + spec.v_head_dim) * itemsize,
        multi_head=layers * heads * plain_head * itemsize,
        grouped_query=layers * min(heads, GROUPED_QUERY_HEADS) * plain_head * itemsize,
    )
