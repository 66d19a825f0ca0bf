"""The roofline of absorbed decode: the least time that memory, MMA and dequantisation leave for a step.

In a step each request has one query token. Attention reads every cached row once, for all heads, and converts it once
if it is quantised; each of the three kinds of work can hide behind the longest. Weights are read once per step (of a
mixture of experts those that evenly spread tokens are sent to, on average), and their products and the attention run
one after the other. Not counted, so that the floor is a floor: launches, partly
filled tiles and waves, a second reading or conversion where heads do not fit one program, the combination of splits,
norms, sampling, and the communication of tensor parallelism.

Under tensor parallelism a GPU has a part of the heads and of the weights, but the whole cache: the latent belongs to
all heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.attention_cost import absorbed_flops_per_pair, break_even_queries
from trtllm_mla.checkpoint.footprint import WeightFootprint, cache_footprint, weight_footprint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.errors import UserError
from trtllm_mla.roofline.formats import RowFormat
from trtllm_mla.roofline.gpus import Gpu

Bound = Literal["memory", "MMA", "dequantisation"]

TENSOR_PARALLEL = (1, 2, 4, 8)
MAX_TOKENS = 1 << 40


@dataclass(frozen=True)
class FormatReport:
    """A cache format on a GPU, whatever the heads.

    Attributes:
        name: The format.
        row_bytes: Bytes of a cached token in one layer.
        break_even_heads: Local heads from which MMA takes longer than memory.
        memory_cycles: Cycles of each multiprocessor in which memory delivers it a row.
        dequantisation_cycles: Cycles in which it converts the row, estimated; below ``memory_cycles`` they can hide.
    """

    name: str
    row_bytes: int
    break_even_heads: float
    memory_cycles: float
    dequantisation_cycles: float


@dataclass(frozen=True)
class RowFloor:
    """The floor for one cached token, in one layer and decode step.

    Attributes:
        tensor_parallel: GPUs that share the heads.
        num_heads: Heads on each of them.
        cache: Format of the cache.
        row_bytes: Bytes read.
        flops: Operations.
        intensity: Operations per byte.
        memory_seconds: Time of the whole GPU to read it.
        mma_seconds: Time to multiply.
        dequantisation_seconds: Time to convert it, estimated.
        seconds: The longest of the three.
        bound: Which one that is.
    """

    tensor_parallel: int
    num_heads: int
    cache: str
    row_bytes: int
    flops: int
    intensity: float
    memory_seconds: float
    mma_seconds: float
    dequantisation_seconds: float
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class StepFloor:
    """The floor of a decode step.

    Attributes:
        tensor_parallel: GPUs that share the heads.
        num_heads: Heads on each of them.
        cache: Format of the cache.
        context: Cached tokens of each request.
        layer_seconds: Attention of one layer.
        attention_seconds: Attention of all layers.
        weights_seconds: Reading and multiplying the weights.
        attention_tokens_per_second: Ceiling with attention alone, all requests together.
        tokens_per_second: Ceiling with attention and weights.
        fits: Whether weights and caches fit the memory.
    """

    tensor_parallel: int
    num_heads: int
    cache: str
    context: int
    layer_seconds: float
    attention_seconds: float
    weights_seconds: float
    attention_tokens_per_second: float
    tokens_per_second: float
    fits: bool


@dataclass(frozen=True)
class Capacity:
    """What fits a GPU's memory.

    Attributes:
        tensor_parallel: GPUs that share the weights.
        num_heads: Heads on each of them.
        cache: Format of the cache.
        weight_bytes: Weights on each of them, split evenly.
        bytes_per_token: Cache of a token, all layers.
        tokens: Tokens that fit beside the weights, with nothing left for activations.
    """

    tensor_parallel: int
    num_heads: int
    cache: str
    weight_bytes: int
    bytes_per_token: int
    tokens: int


@dataclass(frozen=True)
class CacheSize:
    """Cache of a whole batch, in MLA's form or in another with the same heads.

    Attributes:
        form: ``mla``, ``grouped_query_8`` or ``multi_head``.
        cache: Format; the other forms have the model's type.
        context: Cached tokens of each request.
        cache_bytes: Bytes, all layers.
    """

    form: Literal["mla", "grouped_query_8", "multi_head"]
    cache: str
    context: int
    cache_bytes: int


@dataclass(frozen=True)
class Roofline:
    """Everything the command shows.

    Attributes:
        gpu: The GPU.
        spec: The model.
        batch_size: Requests of a step.
        break_even_queries: Query tokens sharing the cached ones below which the absorbed form takes fewer operations;
            None if it always does.
        formats: The cache formats.
        rows: Floors per cached token, by heads and format.
        steps: Floors of a step, by heads, format and context.
        capacities: What fits, by heads and format.
        cache_sizes: Caches of the batch beside other forms of attention.
    """

    gpu: Gpu
    spec: ModelSpec
    batch_size: int
    break_even_queries: float | None
    formats: tuple[FormatReport, ...]
    rows: tuple[RowFloor, ...]
    steps: tuple[StepFloor, ...]
    capacities: tuple[Capacity, ...]
    cache_sizes: tuple[CacheSize, ...]


def make_roofline(
    spec: ModelSpec, gpu: Gpu, *, formats: Sequence[RowFormat], contexts: Sequence[int], batch_size: int
) -> Roofline:
    """Computes the roofline of a model on a GPU.

    Args:
        spec: The model.
        gpu: The GPU.
        formats: Cache formats; at least one.
        contexts: Cached tokens of each request.
        batch_size: Requests of a step.

    Raises:
        UserError: A context or the batch is not from 1 to 2^40.
    """
    for option, value in (("--batch-size", batch_size), *(("--context", context) for context in contexts)):
        if not 1 <= value <= MAX_TOKENS:
            raise UserError(f"{option}: found {value}, expected a number from 1 to {MAX_TOKENS}.")
    weights = weight_footprint(spec)
    rows, steps, capacities = [], [], []
    for ranks in TENSOR_PARALLEL:
        if spec.num_attention_heads % ranks:
            continue
        for item in formats:
            row = row_floor(spec, gpu, item, ranks)
            fit = capacity(spec, gpu, item, ranks, weights)
            rows.append(row)
            capacities.append(fit)
            steps += [step_floor(spec, gpu, row, fit, weights, context, batch_size) for context in contexts]
    break_even = break_even_queries(spec)
    return Roofline(
        gpu=gpu,
        spec=spec,
        batch_size=batch_size,
        break_even_queries=break_even if math.isfinite(break_even) else None,
        formats=tuple(format_report(spec, gpu, item) for item in formats),
        rows=tuple(rows),
        steps=tuple(steps),
        capacities=tuple(capacities),
        cache_sizes=tuple(
            size for context in contexts for size in _cache_sizes(spec, formats, context, batch_size * context)
        ),
    )


def format_report(spec: ModelSpec, gpu: Gpu, item: RowFormat) -> FormatReport:
    """What is known of a format before the heads are."""
    row_bytes = item.row_bytes(spec)
    return FormatReport(
        name=item.name,
        row_bytes=row_bytes,
        break_even_heads=gpu.ridge(item.compute_dtype) * row_bytes / absorbed_flops_per_pair(spec),
        memory_cycles=row_bytes / gpu.bandwidth * gpu.multiprocessors * gpu.clock_hz,
        dequantisation_cycles=spec.kv_lora_rank * item.dequantisation_cycles,
    )


def row_floor(spec: ModelSpec, gpu: Gpu, item: RowFormat, tensor_parallel: int) -> RowFloor:
    """The floor for one cached token, in one layer and decode step."""
    heads = spec.num_attention_heads // tensor_parallel
    row_bytes, flops = item.row_bytes(spec), heads * absorbed_flops_per_pair(spec)
    conversion_cycles = spec.kv_lora_rank * item.dequantisation_cycles
    times: dict[Bound, float] = {
        "memory": row_bytes / gpu.bandwidth,
        "MMA": flops / gpu.flops(item.compute_dtype),
        "dequantisation": conversion_cycles / (gpu.multiprocessors * gpu.clock_hz),
    }
    bound = max(times, key=lambda kind: times[kind])
    return RowFloor(
        tensor_parallel=tensor_parallel,
        num_heads=heads,
        cache=item.name,
        row_bytes=row_bytes,
        flops=flops,
        intensity=flops / row_bytes,
        memory_seconds=times["memory"],
        mma_seconds=times["MMA"],
        dequantisation_seconds=times["dequantisation"],
        seconds=times[bound],
        bound=bound,
    )


def capacity(spec: ModelSpec, gpu: Gpu, item: RowFormat, tensor_parallel: int, weights: WeightFootprint) -> Capacity:
    """How many tokens fit beside the weights."""
    weight_bytes = -(-weights.weight_bytes // tensor_parallel)
    bytes_per_token = spec.num_hidden_layers * item.row_bytes(spec)
    return Capacity(
        tensor_parallel=tensor_parallel,
        num_heads=spec.num_attention_heads // tensor_parallel,
        cache=item.name,
        weight_bytes=weight_bytes,
        bytes_per_token=bytes_per_token,
        tokens=max(0, gpu.memory_bytes - weight_bytes) // bytes_per_token,
    )


def step_floor(
    spec: ModelSpec, gpu: Gpu, row: RowFloor, fit: Capacity, weights: WeightFootprint, context: int, batch_size: int
) -> StepFloor:
    """The floor of a decode step of ``batch_size`` requests with ``context`` cached tokens each."""
    layer = batch_size * context * row.seconds
    attention = spec.num_hidden_layers * layer
    reading = weights.read_bytes(batch_size) / gpu.bandwidth
    multiplying = 2 * batch_size * weights.multiplied / gpu.flops(spec.dtype)
    weights_seconds = max(reading, multiplying) / row.tensor_parallel
    return StepFloor(
        tensor_parallel=row.tensor_parallel,
        num_heads=row.num_heads,
        cache=row.cache,
        context=context,
        layer_seconds=layer,
        attention_seconds=attention,
        weights_seconds=weights_seconds,
        attention_tokens_per_second=batch_size / attention,
        tokens_per_second=batch_size / (attention + weights_seconds),
        fits=batch_size * context <= fit.tokens,
    )


def _cache_sizes(spec: ModelSpec, formats: Sequence[RowFormat], context: int, tokens: int) -> list[CacheSize]:
    own, other = spec.dtype.triton, cache_footprint(spec, CacheDType.of(spec.dtype))
    sizes = [
        CacheSize("mla", item.name, context, tokens * spec.num_hidden_layers * item.row_bytes(spec))
        for item in formats
    ]
    sizes.append(CacheSize("grouped_query_8", own, context, tokens * other.grouped_query))
    sizes.append(CacheSize("multi_head", own, context, tokens * other.multi_head))
    return sizes
