"""What a model's weights take, and its cache beside those of other forms of attention with the same heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.fp8 import SCALE_SUFFIX
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import EMBEDDING, HEAD, build_weight_map

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


@dataclass(frozen=True)
class WeightFootprint:
    """Weights of a model, and what a step uses of them.

    A step reads all of ``dense_bytes``: everything but the routed experts, and but an embedding that is not also the
    head, of which a step reads a few rows. Of the experts it reads those that its tokens are sent to.

    Attributes:
        parameters: Elements of all weights, without the scales of FP8 weights.
        active_parameters: Those that take part in the computation of one token: of the experts, the chosen ones. Where
            experts without weights may be chosen too, it is a mean over evenly spread choices.
        weight_bytes: Bytes of all weights as they are bound: FP8 experts and ``kv_b_proj`` are dequantised.
        multiplied: Elements that each token is multiplied by: the active ones without such an embedding.
        dense_bytes: Bytes that a step reads whole.
        expert_bytes: Bytes of the routed experts.
        num_experts: Experts of a layer, those without weights included; 1 without a mixture of experts.
        top_k: Experts that a token is sent to; 1 without a mixture of experts.
    """

    parameters: int
    active_parameters: int
    weight_bytes: int
    multiplied: int
    dense_bytes: int
    expert_bytes: int
    num_experts: int
    top_k: int

    def read_bytes(self, tokens: int) -> float:
        """Bytes that a step of ``tokens`` tokens reads, on average over tokens that are spread evenly.

        A token misses an expert with probability ``1 - top_k / num_experts``. Tokens that resemble one another are
        sent to the same experts, and read fewer bytes.
        """
        missed = (1 - self.top_k / self.num_experts) ** tokens
        return self.dense_bytes + self.expert_bytes * (1 - missed)


def weight_footprint(spec: ModelSpec) -> WeightFootprint:
    """Computes what a model's weights take in its own type."""
    weights = build_weight_map(spec)
    dtypes = weights.dtypes(spec.dtype)
    elements = {name: math.prod(shape) for name, shape in weights.shapes.items()}
    sizes = {name: 0 if name.endswith(SCALE_SUFFIX) else count for name, count in elements.items()}
    of_experts = {name for name in sizes if ".mlp.experts." in name}

    def total_bytes(names: set[str]) -> int:
        return sum(elements[name] * dtypes[name].itemsize for name in names)

    num_experts, top_k = 1, 1
    if spec.moe is not None:
        num_experts, top_k = spec.moe.num_experts + spec.moe.num_identity_experts, spec.moe.top_k
    parameters = sum(sizes.values())
    active = parameters - sum(sizes[name] * (num_experts - top_k) // num_experts for name in of_experts)
    looked_up = {EMBEDDING} if HEAD in sizes else set()
    return WeightFootprint(
        parameters=parameters,
        active_parameters=active,
        weight_bytes=total_bytes(set(sizes)),
        multiplied=active - sum(sizes[name] for name in looked_up),
        dense_bytes=total_bytes(sizes.keys() - of_experts - looked_up),
        expert_bytes=total_bytes(of_experts),
        num_experts=num_experts,
        top_k=top_k,
    )
