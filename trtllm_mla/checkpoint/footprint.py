"""Bytes that a model's cache takes, beside those of other forms of attention with the same heads."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.spec import ModelSpec

GROUPED_QUERY_HEADS = 8


@dataclass(frozen=True)
class CacheFootprint:
    """Bytes of one cached token, over all layers.

    Attributes:
        latent: MLA: one latent and one rotary key, with its scales where it is quantised.
        decompressed: The same model with every head's key and value cached, in 16 or 32 bits.
        multi_head: Multi-head attention of the same head widths, without a separate rotary part.
        grouped_query: The same with ``GROUPED_QUERY_HEADS`` key-value heads, or all heads if there are fewer.
    """

    latent: int
    decompressed: int
    multi_head: int
    grouped_query: int


def cache_footprint(spec: ModelSpec, cache_dtype: CacheDType, *, num_layers: int | None = None) -> CacheFootprint:
    """Computes a model's cache bytes per token.

    Args:
        spec: The model.
        cache_dtype: Type of the latent cache. Where it is quantised, the other forms have the model's type.
        num_layers: Layers that are kept; left out, all.
    """
    layers = spec.num_hidden_layers if num_layers is None else num_layers
    heads = spec.num_attention_heads
    itemsize = (cache_dtype.element or spec.dtype).itemsize
    plain_head = spec.qk_nope_head_dim + spec.v_head_dim
    return CacheFootprint(
        latent=layers * cache_dtype.layout(spec.kv_lora_rank, spec.qk_rope_head_dim).row_bytes,
        decompressed=layers * heads * (spec.qk_head_dim + spec.v_head_dim) * itemsize,
        multi_head=layers * heads * plain_head * itemsize,
        grouped_query=layers * min(heads, GROUPED_QUERY_HEADS) * plain_head * itemsize,
    )
