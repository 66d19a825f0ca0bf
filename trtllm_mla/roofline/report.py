"""Printing rooflines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.roofline.model import Roofline

_GIB = 1 << 30
_TIB = 1 << 40
# As wide as a terminal of 80 columns.
_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "show_edge": False,
    "pad_edge": False,
    "padding": (0, 1, 0, 0),
    "title_justify": "left",
    "caption_justify": "left",
}
_FORMS = {"mla": "MLA", "grouped_query_8": "GQA, 8 key-value heads", "multi_head": "MHA"}


def to_json(roofline: Roofline) -> dict[str, Any]:
    """A roofline as plain values: seconds, bytes, and FLOP; of the model only its sizes."""
    values = asdict(roofline)
    spec = roofline.spec
    values["spec"] = {
        name: getattr(spec, name)
        for name in (
            *("model_type", "dtype", "num_hidden_layers", "num_attention_heads", "kv_lora_rank"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        )
    }
    return values


def print_roofline(roofline: Roofline, console: Console) -> None:
    """Prints a roofline as tables.

    Args:
        roofline: The roofline.
        console: Where to.
    """
    gpu, spec = roofline.gpu, roofline.spec
    console.print(
        f"{gpu.title}: {gpu.memory_bytes / _GIB:.0f} GiB, {gpu.bandwidth / 1e9:.4g} GB/s, dense TFLOPS "
        f"{gpu.bf16_flops / 1e12:.4g} bf16 and {gpu.fp32_flops / 1e12:.4g} fp32, {gpu.multiprocessors} "
        f"multiprocessors at {gpu.clock_hz / 1e9:.3g} GHz\n({gpu.source})\n"
        f"{spec.hf_architecture}: {spec.num_hidden_layers} layers, {spec.num_attention_heads} heads, latent "
        f"{spec.kv_lora_rank} + {spec.qk_rope_head_dim} rotary, weights in {spec.dtype}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_break_even(roofline), highlight=False, soft_wrap=True)
    for table in (_formats(roofline), _rows(roofline), _steps(roofline), _capacities(roofline)):
        console.print(table)
    problems = (f"{item.cache}: {item.problem}" for item in roofline.capacities if item.problem is not None)
    for problem in dict.fromkeys(problems):
        console.print(problem, highlight=False, soft_wrap=True)
    console.print(_cache_sizes(roofline))


def _break_even(roofline: Roofline) -> str:
    default = MlaPluginConfig().prefill_absorption_threshold
    if roofline.break_even_queries is None:
        return "Prefill: absorbed attention takes fewer operations at every chunk length"
    return (
        f"Prefill: absorbed attention takes fewer operations up to {roofline.break_even_queries:.1f} query tokens "
        f"that share the cached ones (default threshold: {default})"
    )


def _formats(roofline: Roofline) -> Table:
    table = Table(
        "cache",
        *("bytes", "MMA-bound from", "memory", "conversion"),
        title="\nRow of one token and layer",
        caption="Cycles of each multiprocessor for a row: in which memory delivers it, and (an estimate) converts it",
        **_STYLE,
    )
    for item in roofline.formats:
        table.add_row(
            item.name,
            str(item.row_bytes),
            f"{item.break_even_heads:.1f} heads",
            f"{item.memory_cycles:.1f} cycles",
            f"{item.dequantisation_cycles:.1f} cycles" if item.dequantisation_cycles else "none",
        )
    return table


def _rows(roofline: Roofline) -> Table:
    table = Table(
        *("heads", "cache", "bytes", "FLOP", "FLOP/B", "memory", "MMA", "convert", "bound"),
        title="\nFloor per cached token, layer and decode step; ps of the whole GPU",
        **_STYLE,
    )
    for row in roofline.rows:
        table.add_row(
            _heads(row.num_heads, row.tensor_parallel),
            row.cache,
            str(row.row_bytes),
            f"{row.flops:,}",
            f"{row.intensity:.1f}",
            *(f"{seconds * 1e12:.1f}" for seconds in (row.memory_seconds, row.mma_seconds)),
            f"{row.dequantisation_seconds * 1e12:.1f}" if row.dequantisation_seconds else "",
            row.bound,
        )
    return table


def _steps(roofline: Roofline) -> Table:
    table = Table(
        *("heads", "cache", "context", "a layer", "attention", "weights", "attention\ntok/s", "\ntok/s", "\nfits"),
        title=f"\nFloor of a decode step of {roofline.batch_size} requests (ms), ceiling in tokens per second",
        **_STYLE,
    )
    for step in roofline.steps:
        table.add_row(
            _heads(step.num_heads, step.tensor_parallel),
            step.cache,
            f"{step.context:,}",
            *(
                f"{seconds * 1e3:.3g}"
                for seconds in (step.layer_seconds, step.attention_seconds, step.weights_seconds)
            ),
            f"{step.attention_tokens_per_second:,.0f}",
            f"{step.tokens_per_second:,.0f}",
            "yes" if step.fits else "no",
        )
    return table


def _capacities(roofline: Roofline) -> Table:
    requests = f"{roofline.batch_size:,} requests of at most {roofline.max_context:,} tokens"
    fraction = f"{roofline.kv_cache_free_gpu_mem_fraction:.0%}"
    table = Table(
        *("heads", "cache", "weights", "workspace", "bytes per token", "tokens that fit"),
        title=f"\nCapacity of each GPU, for {requests}",
        caption=f"The cache may take {fraction} of what weights and workspace leave;\n"
        "inspect with this --context and --batch-size lists them",
        **_STYLE,
    )
    for item in roofline.capacities:
        table.add_row(
            _heads(item.num_heads, item.tensor_parallel),
            item.cache,
            _size(item.weight_bytes),
            "" if item.workspace_bytes is None else _size(item.workspace_bytes),
            f"{item.bytes_per_token:,}",
            f"{item.tokens:,}",
        )
    return table


def _cache_sizes(roofline: Roofline) -> Table:
    contexts = list(dict.fromkeys(item.context for item in roofline.cache_sizes))
    table = Table(
        "attention",
        "cache",
        *(f"{context:,} tokens" for context in contexts),
        title=f"\nCache of {roofline.batch_size} requests, all layers and heads",
        **_STYLE,
    )
    sizes = {(item.form, item.cache, item.context): item.cache_bytes for item in roofline.cache_sizes}
    for form, cache in dict.fromkeys((item.form, item.cache) for item in roofline.cache_sizes):
        table.add_row(_FORMS[form], cache, *(_size(sizes[form, cache, context]) for context in contexts))
    return table


def _heads(num_heads: int, tensor_parallel: int) -> str:
    return str(num_heads) if tensor_parallel == 1 else f"{num_heads} (TP{tensor_parallel})"


def _size(size: int) -> str:
    if size >= _TIB:
        return f"{size / _TIB:.2f} TiB"
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / (1 << 20):.1f} MiB"
