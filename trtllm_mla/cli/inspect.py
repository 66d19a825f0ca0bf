"""``trtllm-mla inspect``: what a checkpoint is, where every byte would go, and what would be built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtllm_mla.cli.console import OUT, print_json, progress_bar
from trtllm_mla.cli.options import (
    KV_CACHE_FREE_GPU_MEM_FRACTION,
    CheckpointArgument,
    FreeFractionOption,
    JsonFlag,
    PluginConfigOption,
)
from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from trtllm_mla.checkpoint.files import Checkpoint
    from trtllm_mla.config import BuildConfig
    from trtllm_mla.roofline.memory import Deployment

_GIB = 1 << 30
_KINDS = {
    "embedding": "embedding",
    "attention": "attention projections",
    "up_projection": "kv_b_proj (k_up, v_up)",
    "dense_mlp": "dense MLPs",
    "shared_experts": "shared experts",
    "routed_experts": "routed experts",
    "router": "routers",
    "norm": "norms",
    "head": "head",
}
_DTYPES = {"int8": "fp8", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def inspect(
    checkpoint: CheckpointArgument,
    plugin_config: PluginConfigOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="Build config (JSON or TOML) whose limits apply.", show_default="defaults"
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(
            metavar="ENGINE_DIR",
            help="Engine directory: its network, its limits, and the memory that TensorRT planned for it.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cached tokens of each request. Left out: the limit, max_seq_len.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Requests at once. Left out: the limit, max_batch_size.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="a100, h100, h200, b200, rtx3090, rtx4090, rtx5090 or l40s. Left out: all.",
            show_default=False,
        ),
    ] = None,
    kv_cache_free_gpu_mem_fraction: FreeFractionOption = KV_CACHE_FREE_GPU_MEM_FRACTION,
    json: JsonFlag = False,
) -> None:
    """Show what a checkpoint is, where every byte goes, how many GPUs that takes, and what would be built.

    Only config.json is needed; tensors are checked where they are present.

    Example: trtllm-mla inspect examples/tiny-mla --gpu h100,rtx4090 --context 4096 --batch-size 16
    """
    report = describe(
        checkpoint,
        plugin_config,
        config=config,
        engine=engine,
        context=context,
        batch_size=batch_size,
        gpu=gpu,
        free_fraction=kv_cache_free_gpu_mem_fraction,
    )
    if json:
        print_json(report)
    else:
        _print(report)


def describe(
    checkpoint_path: Path,
    plugin_config: Path | None,
    *,
    config: Path | None = None,
    engine: Path | None = None,
    context: int | None = None,
    batch_size: int | None = None,
    gpu: str | None = None,
    free_fraction: float = KV_CACHE_FREE_GPU_MEM_FRACTION,
) -> dict[str, Any]:
    """Collects what the command shows.

    Args:
        checkpoint_path: A Hugging Face directory; weights may be absent.
        plugin_config: A plugin config file, or None for the defaults.
        config: A build config file, or None for the defaults with ``context`` and ``batch_size``.
        engine: An engine directory, in place of both.
        context: Cached tokens of each request; None is the limit.
        batch_size: Requests at once; None is the limit.
        gpu: Names of GPUs, separated by commas; None is all.
        free_fraction: Share of the memory left by weights and workspace that the cache may take.

    Returns:
        Plain values, fit for JSON.

    Raises:
        UserError: The checkpoint or a config is unusable, or they do not go together.
    """
    from trtllm_mla.checkpoint.files import Checkpoint
    from trtllm_mla.checkpoint.footprint import cache_footprint, skipped_groups, weight_footprint, weight_groups
    from trtllm_mla.checkpoint.pretrained_config import to_pretrained_config
    from trtllm_mla.checkpoint.weights import check_checkpoint
    from trtllm_mla.roofline.gpus import GPUS, get_gpu
    from trtllm_mla.roofline.memory import cache_memory, fit_gpus

    gpus = list(GPUS.values()) if gpu is None else [get_gpu(name) for name in dict.fromkeys(gpu.split(","))]
    with progress_bar("Reading headers", in_bytes=False) as progress:
        checkpoint = Checkpoint.open(checkpoint_path, progress=progress)
    limits = _Limits(config, context, batch_size)
    if engine is None:
        deployment = _deployment(checkpoint, plugin_config, limits)
    else:
        deployment, targets = _engine_deployment(checkpoint, engine, plugin_config, limits)
        gpus = [item for item in gpus if item.target in targets]
        if not gpus:
            raise UserError(
                f"{engine}: found an engine for {', '.join(targets)}, and no GPU of these generations among those "
                "named with --gpu. Name another one, or build again with --targets."
            )
    spec, plugin, weights = deployment.spec, deployment.plugin, deployment.weights
    skipped = check_checkpoint(weights, checkpoint) if checkpoint.has_weights else {}
    cache_dtype = plugin.cache_dtype(spec.dtype)
    row_bytes = cache_dtype.layout(spec.kv_lora_rank, spec.qk_rope_head_dim).row_bytes
    footprint = cache_footprint(spec, cache_dtype, num_layers=deployment.num_layers)
    groups = weight_groups(weights, spec.dtype)
    weight_bytes = sum(group.num_bytes for group in groups)
    return {
        "checkpoint": str(checkpoint_path),
        "pretrained_config": to_pretrained_config(spec),
        "num_layers": deployment.num_layers,
        "parameters": sum(group.parameters for group in groups),
        "active_parameters": weight_footprint(spec).active_parameters,
        "weight_bytes": weight_bytes,
        "expert_bytes": sum(group.num_bytes for group in groups if group.kind == "routed_experts"),
        "weights_by_kind": [
            {**dataclasses.asdict(group), "share": group.num_bytes / weight_bytes} for group in groups
        ],
        "num_moe_layers": spec.num_moe_layers(deployment.num_layers),
        "weights": "checked" if checkpoint.has_weights else "absent",
        "skipped_tensors": skipped,
        "skipped_by_reason": [dataclasses.asdict(group) for group in skipped_groups(skipped, checkpoint)],
        "cache_bytes_per_token": {
            "dtype": str(cache_dtype),
            "latent": footprint.latent,
            "decompressed": footprint.decompressed,
            "multi_head": footprint.multi_head,
            "grouped_query_8": footprint.grouped_query,
        },
        "limits": {
            name: getattr(deployment.config, name)
            for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "max_context_kv_tokens")
        },
        "cache": {
            "context": deployment.context,
            "batch_size": deployment.batch_size,
            "page_size": plugin.page_size,
            "formats": [dataclasses.asdict(item) for item in cache_memory(deployment)],
        },
        "workspace": _workspace(deployment, [item.target for item in gpus]),
        "kv_cache_free_gpu_mem_fraction": free_fraction,
        "gpus": [dataclasses.asdict(fit) for fit in fit_gpus(deployment, gpus, free_fraction=free_fraction)],
        "mla_plugin": plugin.model_dump(),
        "tiles": _tiles(plugin.tile_s, plugin.num_stages, row_bytes),
    }


@dataclass(frozen=True)
class _Limits:
    """What the user says of requests and limits."""

    config: Path | None
    context: int | None
    batch_size: int | None

    def choose(self, engine: BuildConfig | None) -> tuple[BuildConfig, int, int]:
        """The limits, and the requests within them.

        Args:
            engine: Limits of an engine, which the user cannot change.

        Raises:
            UserError: The build config is unusable, or the requests are beyond its limits.
        """
        from trtllm_mla.config import BuildConfig, load_config
        from trtllm_mla.roofline.memory import requests_config

        given = engine or (load_config(self.config, BuildConfig) if self.config else None)
        if given is None:
            default = BuildConfig()
            batch_size, context = self.batch_size or default.max_batch_size, self.context or default.max_seq_len
            return requests_config(context, batch_size), context, batch_size
        context, batch_size = self.context or given.max_seq_len, self.batch_size or given.max_batch_size
        for option, value, name, limit in (
            ("--context", context, "max_seq_len", given.max_seq_len),
            ("--batch-size", batch_size, "max_batch_size", given.max_batch_size),
        ):
            if value > limit:
                raise UserError(
                    f"{option}: found {value}, expected at most {name} = {limit}, the limit of the "
                    f"{'engine' if engine else 'build config'}. Lower it, or raise the limit."
                )
        return given, context, batch_size


def _deployment(checkpoint: Checkpoint, plugin_config: Path | None, limits: _Limits) -> Deployment:
    """What converting a checkpoint and building an engine would give."""
    from trtllm_mla.checkpoint.architectures import read_model_spec
    from trtllm_mla.config import MlaPluginConfig, PluginConfigFile, load_config
    from trtllm_mla.roofline.memory import plan_deployment

    spec = read_model_spec(checkpoint)
    given = load_config(plugin_config, PluginConfigFile).mla_plugin if plugin_config else MlaPluginConfig()
    config, context, batch_size = limits.choose(None)
    return plan_deployment(spec, given, config, context=context, batch_size=batch_size)


def _engine_deployment(
    checkpoint: Checkpoint, path: Path, plugin_config: Path | None, limits: _Limits
) -> tuple[Deployment, list[str]]:
    """An engine as it was built, and the targets it was built for."""
    from trtllm_mla.engine.directory import EngineDirectory
    from trtllm_mla.roofline.memory import Deployment

    for option, value in (("--plugin-config", plugin_config), ("--config", limits.config)):
        if value is not None:
            raise UserError(f"{option}: it has no effect with --engine, which has its own. Leave one of them out.")
    engine = EngineDirectory.load(path)
    network = engine.network
    network.check_model(checkpoint)
    config, context, batch_size = limits.choose(engine.config)
    deployment = Deployment(
        spec=network.spec,
        plugin=network.plugin,
        num_layers=network.num_layers,
        weights=network.weights,
        config=config,
        context=context,
        batch_size=batch_size,
        planned_bytes=engine.info.activation_bytes,
    )
    return deployment, [item.target for item in engine.info.targets]


def _workspace(deployment: Deployment, targets: list[str]) -> dict[str, Any] | None:
    """What one GPU holds beside weights and cache, on that of the targets where it is most; None if none can."""
    from trtllm_mla.checkpoint.trtllm_layout import RankGrid
    from trtllm_mla.roofline.memory import workspace_memory

    found = []
    for target in dict.fromkeys(targets):
        try:
            found.append(workspace_memory(deployment, target, RankGrid(1)))
        except UserError:
            continue  # the report on the GPUs of the target says why
    if not found:
        return None
    largest = max(found, key=lambda item: item.num_bytes)
    return {**dataclasses.asdict(largest), "num_bytes": largest.num_bytes}


def _tiles(tile_s: int | None, num_stages: int | None, row_bytes: int) -> dict[str, str]:
    """For each target, whether the tile fits its shared memory."""
    from trtllm_mla.cache_rows import tile_bytes
    from trtllm_mla.config import largest_fitting_tile
    from trtllm_mla.targets import KIB, TARGETS

    verdicts = {}
    for target in TARGETS.values():
        if tile_s is None or num_stages is None:
            verdicts[target.name] = "chosen at build"
            continue
        needed = tile_bytes(tile_s, num_stages, row_bytes)
        best = largest_fitting_tile(row_bytes, target, at_most=(tile_s, num_stages))
        if needed <= target.shared_memory_bytes:
            verdicts[target.name] = f"fits: {needed // KIB} of {target.shared_memory_bytes // KIB} KiB"
        else:
            advice = f"; tile_s {best[0]}, num_stages {best[1]} fits" if best else ""
            verdicts[target.name] = f"does not fit: {needed // KIB} of {target.shared_memory_bytes // KIB} KiB{advice}"
    return verdicts


def _print(report: dict[str, Any]) -> None:
    OUT.print(_about(report))
    OUT.print(_weights(report))
    OUT.print(_attention_forms(report))
    OUT.print(_cache(report))
    if report["workspace"] is not None:
        OUT.print(_workspace_table(report))
    _print_gpus(report)
    OUT.print(_built(report))


def _table(*columns: str, title: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table; columns of numbers are flush right and never broken."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return table


def _pairs(title: str) -> Table:
    """A table of names and values."""
    from rich.table import Table

    return Table("", "", title=title, show_header=False, title_justify="left")


def _about(report: dict[str, Any]) -> Table:
    model = report["pretrained_config"]
    about = _pairs(report["checkpoint"])
    about.add_row("architecture", f"{model['architecture']} ({model['model_type']})")
    kept, layers = report["num_layers"], model["num_hidden_layers"]
    about.add_row("layers", str(layers) if kept == layers else f"{kept} of {layers}")
    about.add_row(
        "hidden, MLP, vocabulary", f"{model['hidden_size']}, {model['intermediate_size']}, {model['vocab_size']}"
    )
    about.add_row("heads", str(model["num_attention_heads"]))
    about.add_row(
        "head widths", f"{model['qk_nope_head_dim']} + {model['qk_rope_head_dim']} rotary, value {model['v_head_dim']}"
    )
    about.add_row("latents", f"key-value {model['kv_lora_rank']}, query {model['q_lora_rank'] or 'none'}")
    if model["moe"] is not None:
        _add_experts(about, report)
    about.add_row("softmax scale", f"{model['softmax_scale']:.6g}")
    about.add_row("parameters", f"{report['parameters']:,} ({_gigabytes(report['weight_bytes'])} as bound)")
    if model["moe"] is not None:
        about.add_row("active parameters", f"{report['active_parameters']:,} a token")
    about.add_row("weights", report["weights"])
    return about


def _weights(report: dict[str, Any]) -> Table:
    columns = ("parameters", "bytes", "share")
    table = _table("weights", *columns, "bound as", title="Weights, as they are bound", numbers=columns)
    for group in report["weights_by_kind"]:
        dtypes = " + ".join(_DTYPES[name] for name in group["bytes_by_dtype"])
        table.add_row(
            _KINDS[group["kind"]],
            f"{group['parameters']:,}",
            f"{group['num_bytes']:,}",
            f"{group['share']:.1%}",
            dtypes + (", dequantised" if group["dequantized_bytes"] else ""),
        )
    table.add_section()
    table.add_row("total", f"{report['parameters']:,}", f"{report['weight_bytes']:,}", "100.0%", "")
    if report["skipped_by_reason"]:
        table.add_section()
    for group in report["skipped_by_reason"]:
        table.add_row(
            f"skipped, {group['num_tensors']:,} tensors",
            f"{group['elements']:,}",
            f"{group['num_bytes']:,}",
            "",
            group["reason"],
        )
    return table


def _attention_forms(report: dict[str, Any]) -> Table:
    cache = report["cache_bytes_per_token"]
    columns = ("bytes per token", "times the latent")
    table = _table("cache", *columns, title=f"Cache in {cache['dtype']}")
    labels = {
        "latent": "MLA: latent and rotary key",
        "grouped_query_8": "GQA, at most 8 heads of these widths",
        "multi_head": "MHA, heads of these widths",
        "decompressed": "this model, keys and values decompressed",
    }
    for key, label in labels.items():
        table.add_row(label, f"{cache[key]:,}", f"{cache[key] / cache['latent']:.1f}")
    return table


def _cache(report: dict[str, Any]) -> Table:
    cache = report["cache"]
    columns = ("a token and layer", "a token", "all requests")
    title = (
        f"Cache of {cache['batch_size']:,} requests of {cache['context']:,} tokens, in pages of {cache['page_size']}"
    )
    table = _table("cache", *columns, title=title, numbers=columns)
    for item in cache["formats"]:
        mark = " (as configured)" if item["dtype"] == report["cache_bytes_per_token"]["dtype"] else ""
        table.add_row(
            item["dtype"] + mark, f"{item['row_bytes']:,}", f"{item['bytes_per_token']:,}", _size(item["num_bytes"])
        )
    return table


def _workspace_table(report: dict[str, Any]) -> Table:
    limits, work = report["limits"], report["workspace"]
    title = (
        f"Workspace on {work['target']}, at the limits of {limits['max_num_tokens']:,} new tokens, "
        f"{limits['max_batch_size']:,} requests, {limits['max_seq_len']:,} tokens each"
    )
    table = _table("workspace", "size", "how it is known", title=title, numbers=("size",))
    if work["activations_planned"]:
        table.add_row("activations", _size(work["activation_bytes"]), "as TensorRT planned when it built the engine")
    else:
        table.add_row(
            "activations",
            _size(work["activation_bytes"]),
            "estimate from above; a build records TensorRT's own plan",
        )
    table.add_row(
        "  decompressed keys and values",
        _size(work["decompressed_bytes"]),
        f"part of it: {limits['max_context_kv_tokens']:,} tokens of {work['decompressed_bytes_per_token']:,} bytes",
    )
    for name, size in work["plugin_bytes"].items():
        if size:
            table.add_row(f"  {name}", _size(size), "part of it: bound of launch plans")
    table.add_row("rotary table", _size(work["rotary_bytes"]), f"{limits['max_seq_len']:,} positions, fp32")
    table.add_row("other step inputs", _size(work["step_input_bytes"]), "largest shapes of the profile")
    table.add_row("logits", _size(work["logits_bytes"]), f"{limits['max_batch_size']:,} rows, fp32")
    table.add_section()
    table.add_row("total", _size(work["num_bytes"]), "")
    return table


def _print_gpus(report: dict[str, Any]) -> None:
    cache, fraction = report["cache"], report["kv_cache_free_gpu_mem_fraction"]
    title = (
        f"GPUs for weights, workspace and the cache of {cache['batch_size']:,} requests of {cache['context']:,} tokens"
    )
    columns = ("GPUs", "weights", "workspace", "cache", "memory", "tokens\nthat fit")
    table = _table("GPU", *columns, title=title, numbers=columns)
    table.columns[0].no_wrap = True
    for fit in report["gpus"]:
        fits = fit["num_gpus"] is not None
        sizes = (fit["weight_bytes"], fit["workspace_bytes"], fit["cache_bytes"], fit["memory_bytes"])
        table.add_row(
            fit["gpu"],
            str(fit["num_gpus"]) if fits else "none",
            *("" if size is None else _size(size) for size in sizes),
            f"{fit['max_tokens']:,}" if fits else "",
        )
    OUT.print(table)
    for fit in report["gpus"]:
        if fit["problem"] is not None:
            OUT.print(f"{fit['gpu']}: {fit['problem']}", highlight=False)
    OUT.print(
        f"Sizes are each GPU's. The cache may take {fraction:.0%} of what weights and workspace leave "
        "(--kv-cache-free-gpu-mem-fraction). Engines of this package run on one GPU: more of them stand for "
        "TensorRT-LLM's tensor parallelism, which splits heads, widths and experts; the cache, embedding, norms, "
        "routers and projections to the latents are whole on each.",
        highlight=False,
    )


def _built(report: dict[str, Any]) -> Table:
    from trtllm_mla.network.attention import operations_per_layer

    plugin, layers = report["mla_plugin"], report["num_layers"]
    built = _pairs("What would be built")
    absorption, passes = plugin["enable_matrix_absorption"], plugin["max_context_passes"]
    nodes = operations_per_layer(absorption=absorption, context_passes=passes)
    built.add_row("MLA operations", f"{nodes} a layer, {nodes * layers} in all")
    if report["num_moe_layers"]:
        built.add_row("expert operations", f"one in each of {report['num_moe_layers']} layers")
    built.add_row("groups", "context and generation" if absorption else "context only")
    built.add_row("context passes", f"at most {passes}, of max_context_kv_tokens cached tokens each")
    built.add_row("prefill threshold", f"{plugin['prefill_absorption_threshold']} tokens")
    built.add_row("page size", f"{plugin['page_size']} tokens")
    for target, verdict in report["tiles"].items():
        built.add_row(f"tile on {target}", verdict)
    return built


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.4g} GB"


def _size(size: int) -> str:
    if size >= _GIB:
        return f"{size / _GIB:,.2f} GiB"
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.1f} KiB"


def _add_experts(table: Table, report: dict[str, Any]) -> None:
    model, moe = report["pretrained_config"], report["pretrained_config"]["moe"]
    shared = moe["shared_expert_intermediate_size"]
    table.add_row(
        "experts",
        f"{moe['num_experts']} of width {model['moe_inter_size']} in {report['num_moe_layers']} of "
        f"{model['num_hidden_layers']} layers ({_gigabytes(report['expert_bytes'])})"
        + (f", shared {shared}" if shared else "")
        + (f"; {moe['num_identity_experts']} that give back their input" if moe["num_identity_experts"] else ""),
    )
    groups = ""
    if moe["device_limited_topk_group"] < moe["device_limited_n_group"]:
        groups = f" from {moe['device_limited_topk_group']} of {moe['device_limited_n_group']} groups"
    bias = ", correction bias" if model["e_score_correction_bias"] else ""
    table.add_row(
        "router",
        f"{model['scoring_func']}, {moe['topk_method']}: {moe['top_k']} experts a token{groups}{bias}, weights times "
        f"{moe['device_limited_routed_scaling_factor']:g}",
    )
