"""Where every byte of a GPU's memory goes: weights, cache, workspace; and how many GPUs of a kind that takes.

An engine of this package runs on one GPU. More of them stand for TensorRT-LLM's tensor parallelism, which splits
weights as ``checkpoint/trtllm_layout.py`` does: heads, widths and experts are shared out, and the latent cache, which
belongs to all heads, is whole on every GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.footprint import rank_weight_bytes
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.trtllm_layout import RankGrid, uneven_split
from trtllm_mla.checkpoint.weights import WeightMap, build_weight_map
from trtllm_mla.config import BuildConfig, MlaPluginConfig, merge_plugin_configs, parse_config
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.profile import SizeRange, shape_ranges, size_ranges
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import step_inputs
from trtllm_mla.network.directory import effective_plugin
from trtllm_mla.roofline.activations import step_memory
from trtllm_mla.roofline.gpus import Gpu
from trtllm_mla.targets import get_target

MAX_GPUS = 1 << 10

_GIB = 1 << 30
_ROTARY = "rotary_cos_sin"
_ITEM_BYTES = 4  # of every step input, int32 or float32


@dataclass(frozen=True)
class Deployment:
    """A network, the limits of its engine, and the requests it is to serve at once.

    Attributes:
        spec: The model; its ``dtype`` is the network's.
        plugin: The effective plugin config.
        num_layers: Layers of the network.
        weights: Its weight map.
        config: The engine's limits.
        context: Cached tokens of each request.
        batch_size: Requests.
        planned_bytes: Memory that TensorRT planned for activations and workspaces on one GPU, if an engine says it.
    """

    spec: ModelSpec
    plugin: MlaPluginConfig
    num_layers: int
    weights: WeightMap
    config: BuildConfig
    context: int
    batch_size: int
    planned_bytes: int | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens that the requests' pages hold: the last page of each may be partly empty."""
        page_size = self.plugin.page_size
        return self.batch_size * -(-self.context // page_size) * page_size

    def bytes_per_token(self, cache_dtype: CacheDType | None = None) -> int:
        """Cache of a token in all layers; left out, in the network's type of cache."""
        spec = self.spec
        dtype = cache_dtype or self.plugin.cache_dtype(spec.dtype)
        return self.num_layers * dtype.layout(spec.kv_lora_rank, spec.qk_rope_head_dim).row_bytes


@dataclass(frozen=True)
class CacheMemory:
    """The requests' cache in one format.

    Attributes:
        dtype: ``kv_cache_dtype`` in a plugin config.
        row_bytes: A token in one layer.
        bytes_per_token: A token in all layers.
        num_bytes: All pages of all requests.
    """

    dtype: str
    row_bytes: int
    bytes_per_token: int
    num_bytes: int


@dataclass(frozen=True)
class WorkspaceMemory:
    """What a GPU holds beside weights and cache, at the engine's limits.

    Attributes:
        target: The GPU generation.
        num_gpus: GPUs that share the model.
        plugin_bytes: Workspace of each operation with a plugin, by name; part of the activations.
        decompressed_bytes: Keys and values of ``max_context_kv_tokens`` tokens, in one layer; part of the activations.
        decompressed_bytes_per_token: The same of one token.
        activation_bytes: Intermediate values and workspaces: TensorRT's plan, or else an estimate from above.
        activations_planned: Whether it is TensorRT's plan for an engine.
        rotary_bytes: Cosines and sines for ``max_seq_len`` positions.
        step_input_bytes: All other inputs of a step.
        logits_bytes: fp32 logits of one token of each request.
    """

    target: str
    num_gpus: int
    plugin_bytes: Mapping[str, int]
    decompressed_bytes: int
    decompressed_bytes_per_token: int
    activation_bytes: int
    activations_planned: bool
    rotary_bytes: int
    step_input_bytes: int
    logits_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it. Plugin workspaces and decompressed keys and values are activations."""
        return self.activation_bytes + self.rotary_bytes + self.step_input_bytes + self.logits_bytes


@dataclass(frozen=True)
class GpuShare:
    """What each of some GPUs that share a deployment holds, and the room that it leaves for the cache.

    Attributes:
        num_gpus: GPUs that share it.
        moe_ep_size: Groups of them that routed experts are dealt out to.
        weight_bytes: Weights on each.
        workspace_bytes: Workspace on each; None where the weights alone are too large, or kernels do not fit.
        free_bytes: Memory that they leave; negative where they take more than there is.
        max_tokens: Tokens that the cache has room for: in the share of ``free_bytes`` that is granted to it.
        problem: Why kernels do not fit the GPU; None if they do, or if the weights alone are too large.
    """

    num_gpus: int
    moe_ep_size: int
    weight_bytes: int
    workspace_bytes: int | None
    free_bytes: int
    max_tokens: int
    problem: str | None


@dataclass(frozen=True)
class GpuFit:
    """On how many GPUs of a kind a deployment fits.

    Attributes:
        gpu: The GPU's name.
        title: The part.
        memory_bytes: Its memory.
        num_gpus: The smallest number on which it fits; None if there is none.
        moe_ep_size: Groups of them that routed experts are dealt out to.
        weight_bytes: Weights on each. This and what follows is for ``num_gpus``, or the last number that was tried.
        workspace_bytes: Workspace on each; None where the weights alone are too large, or kernels do not fit.
        cache_bytes: The requests' cache, on each.
        max_tokens: Tokens that the cache has room for: in the share of free memory that is granted to it.
        tokens_left: What of it the requests leave.
        problem: Why it does not fit; None if it does.
    """

    gpu: str
    title: str
    memory_bytes: int
    num_gpus: int | None
    moe_ep_size: int
    weight_bytes: int
    workspace_bytes: int | None
    cache_bytes: int
    max_tokens: int
    tokens_left: int
    problem: str | None


def requests_config(context: int, batch_size: int) -> BuildConfig:
    """The default limits, but for those that requests set.

    Args:
        context: Cached tokens of each request, ``max_seq_len``.
        batch_size: Requests at once, ``max_batch_size``.

    Raises:
        UserError: A number is none that an engine can have as its limit.
    """
    tokens = max(BuildConfig().max_num_tokens, batch_size)
    values = {"max_batch_size": batch_size, "max_seq_len": context, "max_num_tokens": tokens}
    return parse_config(values, BuildConfig, source="--batch-size, --context")


def plan_deployment(
    spec: ModelSpec, plugin: MlaPluginConfig, config: BuildConfig, *, context: int, batch_size: int
) -> Deployment:
    """What converting a checkpoint and building an engine would give.

    Args:
        spec: The model.
        plugin: The plugin config, as a user writes it.
        config: The build config.
        context: Cached tokens of each request.
        batch_size: Requests.

    Raises:
        UserError: The plugin config is not the model's.
    """
    effective = merge_plugin_configs(effective_plugin(plugin, spec), config.mla_plugin)
    weights = build_weight_map(spec)
    return Deployment(spec, effective, spec.num_hidden_layers, weights, config, context, batch_size)


def cache_memory(deployment: Deployment) -> tuple[CacheMemory, ...]:
    """The requests' cache in the network's format, in that of 16 bits, and in the quantised ones."""
    spec = deployment.spec
    chosen = deployment.plugin.cache_dtype(spec.dtype)
    plain = CacheDType.of(DType.BFLOAT16 if spec.dtype is DType.FLOAT32 else spec.dtype)
    formats = dict.fromkeys((chosen, plain, CacheDType.FP8, CacheDType.NVFP4))
    return tuple(
        CacheMemory(
            dtype=item.value,
            row_bytes=deployment.bytes_per_token(item) // deployment.num_layers,
            bytes_per_token=deployment.bytes_per_token(item),
            num_bytes=deployment.cached_tokens * deployment.bytes_per_token(item),
        )
        for item in formats
    )


def workspace_memory(deployment: Deployment, target: str, grid: RankGrid) -> WorkspaceMemory:
    """What a GPU holds beside weights and cache.

    Args:
        deployment: The network and its limits.
        target: The GPU generation.
        grid: How GPUs share the model; a grid for which ``uneven_split`` found nothing.

    Raises:
        UserError: The limits are too large for 32-bit numbers, or cached rows too wide for the target.
    """
    spec, plugin, config = _rank_spec(deployment.spec, grid), deployment.plugin, deployment.config
    step = step_memory(spec, plugin, config, get_target(target), num_layers=deployment.num_layers)
    planned = deployment.planned_bytes if grid.tp_size == 1 else None
    ranges = size_ranges(config.model_copy(update={"mla_plugin": plugin}))
    ranges["qk_rope_head_dim"] = SizeRange(*3 * (spec.qk_rope_head_dim,))
    input_bytes = {
        item.name: _ITEM_BYTES * math.prod(shape_ranges(item.dims, ranges)[2])
        for item in step_inputs(absorption=plugin.enable_matrix_absorption, context_passes=plugin.max_context_passes)
    }
    per_token = spec.num_attention_heads * (spec.qk_nope_head_dim + spec.v_head_dim) * spec.dtype.itemsize
    return WorkspaceMemory(
        target=target,
        num_gpus=grid.tp_size,
        plugin_bytes=step.workspace_bytes,
        decompressed_bytes=config.max_context_kv_tokens * per_token,
        decompressed_bytes_per_token=per_token,
        activation_bytes=step.activation_bytes if planned is None else planned,
        activations_planned=planned is not None,
        rotary_bytes=input_bytes.pop(_ROTARY),
        step_input_bytes=sum(input_bytes.values()),
        logits_bytes=config.max_batch_size * deployment.spec.vocab_size * DType.FLOAT32.itemsize,
    )


def rank_grid(spec: ModelSpec, num_gpus: int) -> RankGrid:
    """How GPUs share a model: whole experts as far as their number goes, since parts of one have narrower matrices."""
    return RankGrid(num_gpus, 1 if spec.moe is None else math.gcd(num_gpus, spec.moe.num_experts))


def gpu_share(deployment: Deployment, gpu: Gpu, num_gpus: int, *, free_fraction: float) -> GpuShare:
    """What each of a certain number of GPUs holds.

    Args:
        deployment: The network and its limits; the requests do not count.
        gpu: The kind.
        num_gpus: GPUs; a number for whose ``rank_grid`` ``uneven_split`` finds nothing.
        free_fraction: Share of the memory that weights and workspace leave which the cache may take. The rest is for
            what is not counted: the driver, CUDA's context, the engine and its kernels, fragmentation.

    Raises:
        UserError: The limits are too large for 32-bit numbers.
    """
    # Checked here, since below a target that the kernels do not fit is no mistake.
    size_ranges(deployment.config.model_copy(update={"mla_plugin": deployment.plugin}))
    grid = rank_grid(deployment.spec, num_gpus)
    weights = sum(rank_weight_bytes(deployment.weights, deployment.spec.dtype, grid).values())
    workspace_bytes, problem = None, None
    if weights < gpu.memory_bytes:
        try:
            workspace_bytes = workspace_memory(deployment, gpu.target, grid).num_bytes
        except UserError as error:
            problem = str(error)
    free = gpu.memory_bytes - weights - (workspace_bytes or 0)
    page_size = deployment.plugin.page_size
    pages = max(0, int(free_fraction * free)) // (page_size * deployment.bytes_per_token())
    return GpuShare(
        num_gpus=num_gpus,
        moe_ep_size=grid.moe_ep_size,
        weight_bytes=weights,
        workspace_bytes=workspace_bytes,
        free_bytes=free,
        max_tokens=0 if workspace_bytes is None else pages * page_size,
        problem=problem,
    )


def fit_gpus(deployment: Deployment, gpus: Sequence[Gpu], *, free_fraction: float) -> tuple[GpuFit, ...]:
    """On how many GPUs of each kind a deployment fits: the smallest of 1, 2, 4, ... on which it does.

    Args:
        deployment: The network and its requests.
        gpus: The kinds.
        free_fraction: As for ``gpu_share``.

    Raises:
        UserError: The limits are too large for 32-bit numbers.
    """
    return tuple(_fit(deployment, gpu, free_fraction) for gpu in gpus)


def _fit(deployment: Deployment, gpu: Gpu, free_fraction: float) -> GpuFit:
    spec = deployment.spec
    num_gpus = 1
    fit = _fit_number(deployment, gpu, num_gpus, free_fraction)
    while fit.problem is not None and num_gpus < MAX_GPUS:
        num_gpus *= 2
        uneven = uneven_split(spec, rank_grid(spec, num_gpus))
        if uneven is not None:
            return dataclasses.replace(fit, problem=f"{fit.problem}; {num_gpus} are too many: {uneven}")
        fit = _fit_number(deployment, gpu, num_gpus, free_fraction)
    return fit


def _fit_number(deployment: Deployment, gpu: Gpu, num_gpus: int, free_fraction: float) -> GpuFit:
    """Whether a deployment fits a certain number of GPUs."""
    share = gpu_share(deployment, gpu, num_gpus, free_fraction=free_fraction)
    cache = deployment.cached_tokens * deployment.bytes_per_token()
    problem = share.problem
    if problem is None and share.max_tokens < deployment.cached_tokens:
        verb = "GPU lacks" if num_gpus == 1 else "GPUs lack"
        lacking = (cache / free_fraction - share.free_bytes) / _GIB
        problem = f"{num_gpus} {verb} {'at least ' if share.workspace_bytes is None else ''}{lacking:.1f} GiB each"
    return GpuFit(
        gpu=gpu.name,
        title=gpu.title,
        memory_bytes=gpu.memory_bytes,
        num_gpus=num_gpus if problem is None else None,
        moe_ep_size=share.moe_ep_size,
        weight_bytes=share.weight_bytes,
        workspace_bytes=share.workspace_bytes,
        cache_bytes=cache,
        max_tokens=share.max_tokens,
        tokens_left=max(0, share.max_tokens - deployment.cached_tokens),
        problem=problem,
    )


def _rank_spec(spec: ModelSpec, grid: RankGrid) -> ModelSpec:
    """A model whose step has the sizes of one GPU's part. In the worst case all tokens are sent to its experts."""
    moe = spec.moe
    if moe is not None:
        moe = dataclasses.replace(
            moe,
            intermediate_size=moe.intermediate_size // grid.moe_tp_size,
            shared_intermediate_size=moe.shared_intermediate_size // grid.tp_size,
        )
    return dataclasses.replace(
        spec,
        num_attention_heads=spec.num_attention_heads // grid.tp_size,
        intermediate_size=spec.intermediate_size // grid.tp_size,
        vocab_size=-(-spec.vocab_size // grid.tp_size),
        moe=moe,
    )
