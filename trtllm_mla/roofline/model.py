"""The roofline of absorbed decode: the least time that memory, MMA and dequantisation leave for a step.

In a step each request has one query token. Attention reads every cached row once, for all heads, and converts it once
if it is quantised; each of the three kinds of work can hide behind the longest. Weights are read once per step (of a
mixture of experts those that evenly spread tokens are sent to, on average), and their products and the attention run
one after the other. Not counted, so that the floor is a floor: launches, partly
filled tiles and waves, a second reading or conversion where heads do not fit one program, the combination of splits,
norms, sampling, and the communication of tensor parallelism.

Under tensor parallelism a GPU has a part of the heads and of the weights, but the whole cache: the latent belongs to
all heads. The floor has weights divided evenly, which no split beats. What fits the memory is ``memory.py``'s answer,
with its split of the weights and its workspace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.attention_cost import absorbed_flops_per_pair, break_even_queries
from trtllm_mla.checkpoint.footprint import WeightFootprint, cache_footprint, weight_footprint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.trtllm_layout import uneven_split
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.ops.plan import MAX_INT32
from trtllm_mla.roofline.formats import RowFormat
from trtllm_mla.roofline.gpus import Gpu
from trtllm_mla.roofline.memory import Deployment, gpu_share, plan_deployment, rank_grid, requests_config

Bound = Literal["memory", "MMA", "dequantisation"]

TENSOR_PARALLEL = (1, 2, 4, 8)
MAX_COUNT = MAX_INT32  # of requests, and of tokens of each, in an engine


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
        fits: Whether weights, workspace and the requests' pages fit the memory.
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
    """What fits a GPU's memory: an engine whose limits are the requests, as ``gpu_share`` has it.

    Attributes:
        tensor_parallel: GPUs that share the model.
        num_heads: Heads on each of them.
        cache: Format of the cache.
        weight_bytes: Weights on each of them.
        workspace_bytes: Workspace on each; None where the weights alone are too large, or kernels do not fit.
        bytes_per_token: Cache of a token, all layers.
        tokens: Tokens that the cache has room for.
        problem: Why kernels do not fit the GPU; None if they do, or if the weights alone are too large.
    """

    tensor_parallel: int
    num_heads: int
    cache: str
    weight_bytes: int
    workspace_bytes: int | None
    bytes_per_token: int
    tokens: int
    problem: str | None


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
        max_context: Cached tokens of the longest of them, the limit of the engine whose memory is counted.
        kv_cache_free_gpu_mem_fraction: Share of the memory that weights and workspace leave which the cache may take.
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
    max_context: int
    kv_cache_free_gpu_mem_fraction: float
    break_even_queries: float | None
    formats: tuple[FormatReport, ...]
    rows: tuple[RowFloor, ...]
    steps: tuple[StepFloor, ...]
    capacities: tuple[Capacity, ...]
    cache_sizes: tuple[CacheSize, ...]


def make_roofline(
    spec: ModelSpec,
    gpu: Gpu,
    *,
    formats: Sequence[RowFormat],
    contexts: Sequence[int],
    batch_size: int,
    free_fraction: float,
) -> Roofline:
    """Computes the roofline of a model on a GPU.

    Args:
        spec: The model.
        gpu: The GPU.
        formats: Cache formats; at least one.
        contexts: Cached tokens of each request; at least one.
        batch_size: Requests of a step.
        free_fraction: Share of the memory that weights and workspace leave which the cache may take.

    Raises:
        UserError: A context or the batch is no 32-bit number from 1, or together they are too large for an engine.
    """
    for option, value in (("--batch-size", batch_size), *(("--context", context) for context in contexts)):
        if not 1 <= value <= MAX_COUNT:
            raise UserError(f"{option}: found {value}, expected a number from 1 to {MAX_COUNT}.")
    weights, max_context = weight_footprint(spec), max(contexts)
    limits = requests_config(max_context, batch_size)
    plain = plan_deployment(spec, MlaPluginConfig(), limits, context=max_context, batch_size=batch_size)
    deployments = [
        replace(plain, plugin=plain.plugin.model_copy(update={"kv_cache_dtype": item.name})) for item in formats
    ]
    rows, steps, capacities = [], [], []
    for ranks in TENSOR_PARALLEL:
        if uneven_split(spec, rank_grid(spec, ranks)) is not None:
            continue
        for item, deployment in zip(formats, deployments, strict=True):
            row = row_floor(spec, gpu, item, ranks)
            room = capacity(deployment, gpu, ranks, free_fraction)
            rows.append(row)
            capacities.append(room)
            for context in contexts:
                requests = replace(deployment, context=context)
                steps.append(step_floor(gpu, row, weights, requests, fits=requests.cached_tokens <= room.tokens))
    break_even = break_even_queries(spec)
    return Roofline(
        gpu=gpu,
        spec=spec,
        batch_size=batch_size,
        max_context=max_context,
        kv_cache_free_gpu_mem_fraction=free_fraction,
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


def capacity(deployment: Deployment, gpu: Gpu, tensor_parallel: int, free_fraction: float) -> Capacity:
    """How many tokens fit beside weights and workspace."""
    spec = deployment.spec
    share = gpu_share(deployment, gpu, tensor_parallel, free_fraction=free_fraction)
    return Capacity(
        tensor_parallel=tensor_parallel,
        num_heads=spec.num_attention_heads // tensor_parallel,
        cache=deployment.plugin.cache_dtype(spec.dtype).value,
        weight_bytes=share.weight_bytes,
        workspace_bytes=share.workspace_bytes,
        bytes_per_token=deployment.bytes_per_token(),
        tokens=share.max_tokens,
        problem=share.problem,
    )


def step_floor(gpu: Gpu, row: RowFloor, weights: WeightFootprint, requests: Deployment, *, fits: bool) -> StepFloor:
    """The floor of a decode step.

    Args:
        gpu: The GPU.
        row: The floor for one cached token.
        weights: What the step reads and multiplies.
        requests: The model, and the requests of the step.
        fits: Whether they fit the memory.
    """
    spec, context, batch_size = requests.spec, requests.context, requests.batch_size
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
        fits=fits,
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
