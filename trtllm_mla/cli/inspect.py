"""``trtllm-mla inspect``: what a checkpoint is and what would be built from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_mla.cli.console import OUT, print_json
from trtllm_mla.cli.options import CheckpointArgument, JsonFlag, PluginConfigOption

if TYPE_CHECKING:
    from rich.table import Table


def inspect(
    checkpoint: CheckpointArgument,
    plugin_config: PluginConfigOption = None,
    json: JsonFlag = False,
) -> None:
    """Show what a checkpoint is, what its cache takes, and what would be built.

    Example: trtllm-mla inspect examples/tiny-mla
    """
    report = describe(checkpoint, plugin_config)
    if json:
        print_json(report)
    else:
        _print(report)


def describe(checkpoint_path: Path, plugin_config: Path | None) -> dict[str, Any]:
    """Collects what the command shows.

    Args:
        checkpoint_path: A Hugging Face directory; weights may be absent.
        plugin_config: A plugin config file, or None for the defaults.

    Returns:
        Plain values, fit for JSON.

    Raises:
        UserError: The checkpoint or the config is unusable.
    """
    from trtllm_mla.checkpoint.architectures import read_model_spec
    from trtllm_mla.checkpoint.files import Checkpoint
    from trtllm_mla.checkpoint.footprint import cache_footprint, weight_footprint
    from trtllm_mla.checkpoint.pretrained_config import to_pretrained_config
    from trtllm_mla.checkpoint.weights import build_weight_map, check_checkpoint
    from trtllm_mla.config import MlaPluginConfig, PluginConfigFile, load_config
    from trtllm_mla.network.directory import effective_plugin

    checkpoint = Checkpoint.open(checkpoint_path)
    spec = read_model_spec(checkpoint)
    given = load_config(plugin_config, PluginConfigFile).mla_plugin if plugin_config else MlaPluginConfig()
    plugin = effective_plugin(given, spec)
    weights = build_weight_map(spec)
    skipped = check_checkpoint(weights, checkpoint) if checkpoint.has_weights else {}
    cache_dtype = plugin.cache_dtype(spec.dtype)
    row_bytes = cache_dtype.layout(spec.kv_lora_rank, spec.qk_rope_head_dim).row_bytes
    footprint = cache_footprint(spec, cache_dtype)
    weight = weight_footprint(spec)
    return {
        "checkpoint": str(checkpoint_path),
        "pretrained_config": to_pretrained_config(spec),
        "parameters": weight.parameters,
        "active_parameters": weight.active_parameters,
        "weight_bytes": weight.weight_bytes,
        "expert_bytes": weight.expert_bytes,
        "num_moe_layers": spec.num_moe_layers(spec.num_hidden_layers),
        "weights": "checked" if checkpoint.has_weights else "absent",
        "skipped_tensors": skipped,
        "cache_bytes_per_token": {
            "dtype": str(cache_dtype),
            "latent": footprint.latent,
            "decompressed": footprint.decompressed,
            "multi_head": footprint.multi_head,
            "grouped_query_8": footprint.grouped_query,
        },
        "mla_plugin": plugin.model_dump(),
        "tiles": _tiles(plugin.tile_s, plugin.num_stages, row_bytes),
    }


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
    from rich.table import Table

    from trtllm_mla.network.attention import operations_per_layer

    model = report["pretrained_config"]
    about = Table("", "", title=report["checkpoint"], show_header=False, title_justify="left")
    about.add_row("architecture", f"{model['architecture']} ({model['model_type']})")
    about.add_row("layers", str(model["num_hidden_layers"]))
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
    about.add_row(
        "parameters", f"{report['parameters']:,} ({report['weight_bytes'] / 1e9:.3g} GB in {model['dtype']})"
    )
    if model["moe"] is not None:
        about.add_row("active parameters", f"{report['active_parameters']:,} a token")
    about.add_row("weights", report["weights"])
    for name, reason in report["skipped_tensors"].items():
        about.add_row("skipped", f"{name}: {reason}")
    OUT.print(about)

    cache = report["cache_bytes_per_token"]
    table = Table(
        "cache", "bytes per token", "times the latent", title=f"Cache in {cache['dtype']}", title_justify="left"
    )
    labels = {
        "latent": "MLA: latent and rotary key",
        "grouped_query_8": "GQA, at most 8 heads of these widths",
        "multi_head": "MHA, heads of these widths",
        "decompressed": "this model, keys and values decompressed",
    }
    for key, label in labels.items():
        table.add_row(label, f"{cache[key]:,}", f"{cache[key] / cache['latent']:.1f}")
    OUT.print(table)

    plugin = report["mla_plugin"]
    built = Table("", "", title="What would be built", show_header=False, title_justify="left")
    absorption, passes = plugin["enable_matrix_absorption"], plugin["max_context_passes"]
    nodes = operations_per_layer(absorption=absorption, context_passes=passes)
    built.add_row("MLA operations", f"{nodes} a layer, {nodes * model['num_hidden_layers']} in all")
    if report["num_moe_layers"]:
        built.add_row("expert operations", f"one in each of {report['num_moe_layers']} layers")
    built.add_row("groups", "context and generation" if absorption else "context only")
    built.add_row("context passes", f"at most {passes}, of max_context_kv_tokens cached tokens each")
    built.add_row("prefill threshold", f"{plugin['prefill_absorption_threshold']} tokens")
    built.add_row("page size", f"{plugin['page_size']} tokens")
    for target, verdict in report["tiles"].items():
        built.add_row(f"tile on {target}", verdict)
    OUT.print(built)


def _add_experts(table: Table, report: dict[str, Any]) -> None:
    model, moe = report["pretrained_config"], report["pretrained_config"]["moe"]
    shared = moe["shared_expert_intermediate_size"]
    table.add_row(
        "experts",
        f"{moe['num_experts']} of width {model['moe_inter_size']} in {report['num_moe_layers']} of "
        f"{model['num_hidden_layers']} layers ({report['expert_bytes'] / 1e9:.3g} GB)"
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
