"""What a model's weights take, and its cache beside those of other forms of attention with the same heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.fp8 import SCALE_SUFFIX
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.trtllm_layout import RankGrid
from trtllm_mla.checkpoint.weights import EMBEDDING, HEAD, WeightMap, build_weight_map
from trtllm_mla.dtypes import DType, WeightDType

GROUPED_QUERY_HEADS = 8


class WeightKind(StrEnum):
    """What a weight input is for."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    UP_PROJECTION = "up_projection"
    DENSE_MLP = "dense_mlp"
    SHARED_EXPERTS = "shared_experts"
    ROUTED_EXPERTS = "routed_experts"
    ROUTER = "router"
    NORM = "norm"
    HEAD = "head"


class _Rule(NamedTuple):
    """Kind of the weight inputs with certain names, and which axis of theirs ranks share out.

    Attributes:
        pattern: Matches the whole name, behind the layer's number if it has one.
        kind: The kind.
        axis: The axis that is split over all ranks; None where each rank has it whole. Of routed experts it is the
            width of an expert, split over the ranks of a group; the experts are dealt out to the groups.
    """

    pattern: re.Pattern[str]
    kind: WeightKind
    axis: int | None


# Ranks share out weights as in TensorRT-LLM's layout: see trtllm_layout.py. Scales of FP8 weights go with them.
_RULES = tuple(
    _Rule(re.compile(pattern), kind, axis)
    for pattern, kind, axis in (
        (re.escape(EMBEDDING), WeightKind.EMBEDDING, None),
        (re.escape(HEAD), WeightKind.HEAD, 0),
        (r"(.*[._])?(layer)?norm\.weight", WeightKind.NORM, None),
        (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)\..*", WeightKind.ATTENTION, None),
        (r"self_attn\.(q_proj|q_b_proj)\..*", WeightKind.ATTENTION, 0),
        (r"self_attn\.o_proj\.weight.*", WeightKind.ATTENTION, 1),
        (r"self_attn\.o_proj\.bias", WeightKind.ATTENTION, None),
        (r"self_attn\.(k_up|v_up)", WeightKind.UP_PROJECTION, 0),
        (r"mlp\.gate\..*", WeightKind.ROUTER, None),
        (r"mlp\.experts\.gate_up_proj.*", WeightKind.ROUTED_EXPERTS, 1),
        (r"mlp\.experts\.down_proj.*", WeightKind.ROUTED_EXPERTS, 2),
        (r"mlp\.shared_experts\.(gate|up)_proj\..*", WeightKind.SHARED_EXPERTS, 0),
        (r"mlp\.shared_experts\.down_proj\..*", WeightKind.SHARED_EXPERTS, 1),
        (r"mlp\.(gate|up)_proj\..*", WeightKind.DENSE_MLP, 0),
        (r"mlp\.down_proj\..*", WeightKind.DENSE_MLP, 1),
    )
)
_LAYER = re.compile(r"model\.layers\.\d+\.")


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
class WeightGroup:
    """All weight inputs of one kind.

    Attributes:
        kind: The kind.
        num_inputs: How many they are.
        parameters: Their elements, without the scales of FP8 weights.
        num_bytes: What they take as they are bound.
        bytes_by_dtype: The same for each type; FP8 weights are ``int8``, and their scales ``float32``.
        dequantized_bytes: What those of them take that are FP8 in the checkpoint and dequantised when they are bound.
    """

    kind: WeightKind
    num_inputs: int
    parameters: int
    num_bytes: int
    bytes_by_dtype: Mapping[str, int]
    dequantized_bytes: int


def weight_groups(weights: WeightMap, dtype: DType) -> tuple[WeightGroup, ...]:
    """The weight inputs of a network by kind, in the order of ``WeightKind``; kinds without any are left out.

    Args:
        weights: The network's weight map.
        dtype: The network's type.

    Raises:
        ValueError: The kind of an input is not known.
    """
    found: dict[WeightKind, list[_Input]] = {}
    for item in _inputs(weights, dtype):
        found.setdefault(item.rule.kind, []).append(item)
    return tuple(_group(kind, found[kind]) for kind in WeightKind if kind in found)


def rank_weight_bytes(weights: WeightMap, dtype: DType, grid: RankGrid) -> dict[WeightKind, int]:
    """Bytes of each kind that a rank holds where ranks share out the weights as in TensorRT-LLM's layout.

    The embedding, norms, routers, biases and the projections to the latents are whole on every rank. What cannot be
    split evenly counts as the largest part.

    Args:
        weights: The network's weight map.
        dtype: The network's type.
        grid: The ranks.
    """
    sizes: dict[WeightKind, int] = {}
    for item in _inputs(weights, dtype):
        elements = math.prod(_rank_shape(item, grid))
        sizes[item.rule.kind] = sizes.get(item.rule.kind, 0) + elements * item.dtype.itemsize
    return sizes


class _Input(NamedTuple):
    """A weight input, and what its name says of it."""

    name: str
    shape: tuple[int, ...]
    dtype: WeightDType
    rule: _Rule
    dequantized: bool

    @property
    def num_bytes(self) -> int:
        """What it takes as it is bound."""
        return math.prod(self.shape) * self.dtype.itemsize


def _inputs(weights: WeightMap, dtype: DType) -> Iterator[_Input]:
    dtypes = weights.dtypes(dtype)
    for name, source in weights.weights.items():
        yield _Input(name, source.shape, dtypes[name], _rule(name), source.block_scaled)


def _rule(name: str) -> _Rule:
    relative = _LAYER.sub("", name, count=1)
    for rule in _RULES:
        if rule.pattern.fullmatch(relative):
            return rule
    raise ValueError(f"{name}: found a weight of no known kind")


def _group(kind: WeightKind, items: list[_Input]) -> WeightGroup:
    by_dtype: dict[str, int] = {}
    for item in items:
        by_dtype[str(item.dtype)] = by_dtype.get(str(item.dtype), 0) + item.num_bytes
    return WeightGroup(
        kind=kind,
        num_inputs=len(items),
        parameters=sum(math.prod(item.shape) for item in items if not item.name.endswith(SCALE_SUFFIX)),
        num_bytes=sum(by_dtype.values()),
        bytes_by_dtype=by_dtype,
        dequantized_bytes=sum(item.num_bytes for item in items if item.dequantized),
    )


def _rank_shape(item: _Input, grid: RankGrid) -> tuple[int, ...]:
    """Shape of a rank's part of an input, the largest one."""
    axis = item.rule.axis
    if axis is None:
        return item.shape
    parts = [1] * len(item.shape)
    if item.rule.kind is WeightKind.ROUTED_EXPERTS:
        parts[0], parts[axis] = grid.moe_ep_size, grid.moe_tp_size
    else:
        parts[axis] = grid.tp_size
    return tuple(-(-size // count) for size, count in zip(item.shape, parts, strict=True))


@dataclass(frozen=True)
class SkippedGroup:
    """Tensors of a checkpoint that a network does not read, for one reason.

    Attributes:
        reason: The reason.
        num_tensors: How many they are.
        elements: Their elements, the scales of FP8 weights included.
        num_bytes: What they take in the files.
    """

    reason: str
    num_tensors: int
    elements: int
    num_bytes: int


def skipped_groups(skipped: Mapping[str, str], checkpoint: Checkpoint) -> tuple[SkippedGroup, ...]:
    """Sums up what ``check_checkpoint`` returned: the largest group first.

    Args:
        skipped: The reason for each tensor.
        checkpoint: The checkpoint that has them.
    """
    groups = []
    for reason in dict.fromkeys(skipped.values()):
        tensors = [checkpoint.tensors[name] for name, other in skipped.items() if other == reason]
        elements = sum(math.prod(tensor.shape) for tensor in tensors)
        size = sum(tensor.offsets[1] - tensor.offsets[0] for tensor in tensors)
        groups.append(SkippedGroup(reason, len(tensors), elements, size))
    return tuple(sorted(groups, key=lambda group: -group.num_bytes))


@dataclass(frozen=True)
class WeightFootprint:
    """Weights of a model, and what a step uses of them.

    A step reads all of ``dense_bytes``: everything but the routed experts, and but an embedding that is not also the
    head, of which a step reads a few rows. Of the experts it reads those that its tokens are sent to.

    Attributes:
        parameters: Elements of all weights, without the scales of FP8 weights.
        active_parameters: Those that take part in the computation of one token: of the experts, the chosen ones. Where
            experts without weights may be chosen too, it is a mean over evenly spread choices.
        weight_bytes: Bytes of all weights as they are bound: an FP8 ``kv_b_proj`` is dequantised.
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
    groups = {group.kind: group for group in weight_groups(build_weight_map(spec), spec.dtype)}
    experts = groups.get(WeightKind.ROUTED_EXPERTS)
    looked_up = groups[WeightKind.EMBEDDING] if WeightKind.HEAD in groups else None
    num_experts, top_k = 1, 1
    if spec.moe is not None:
        num_experts, top_k = spec.moe.num_experts + spec.moe.num_identity_experts, spec.moe.top_k
    parameters = sum(group.parameters for group in groups.values())
    weight_bytes = sum(group.num_bytes for group in groups.values())
    expert_bytes = experts.num_bytes if experts else 0
    active = parameters - (experts.parameters * (num_experts - top_k) // num_experts if experts else 0)
    return WeightFootprint(
        parameters=parameters,
        active_parameters=active,
        weight_bytes=weight_bytes,
        multiplied=active - (looked_up.parameters if looked_up else 0),
        dense_bytes=weight_bytes - expert_bytes - (looked_up.num_bytes if looked_up else 0),
        expert_bytes=expert_bytes,
        num_experts=num_experts,
        top_k=top_k,
    )
