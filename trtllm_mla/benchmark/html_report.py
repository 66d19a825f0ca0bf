"""One self-contained HTML page from benchmark results: tables, figures, and what was measured.

The page loads nothing and runs nothing: figures are inline SVG, and its content security policy forbids the rest. All
text that comes from results is escaped. The same results give the same bytes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trtllm_mla._version import __version__
from trtllm_mla.benchmark import plots
from trtllm_mla.benchmark.formatting import show_number, show_range
from trtllm_mla.benchmark.html_page import (
    MAX_SHOWN_TEXT,
    Drawing,
    document,
    figures,
    section,
    table,
    table_head,
    table_row,
    text,
)
from trtllm_mla.benchmark.result_files import (
    BenchResult,
    MetricBlock,
    SpreadBlock,
    load_results,
)
from trtllm_mla.files import atomic_file

MAX_FACTS = 200
MAX_DEPTH = 4
MAX_SERIES = 8

_MIB = 1 << 20
_T = TypeVar("_T")
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlist = 3, MAX_SHOWN_TEXT, MAX_SHOWN_TEXT, 32


def write_html_report(paths: Sequence[Path], output: Path) -> int:
    """Reads results and writes the page, atomically.

    Args:
        paths: Files that ``bench`` wrote with ``--json``.
        output: The page.

    Returns:
        Its size in bytes.

    Raises:
        UserError: A file is no result, there are too many, or matplotlib is missing.
    """
    page = render_page(load_results(paths)).encode()
    with atomic_file(output) as temporary:
        temporary.write_bytes(page)
    return len(page)


def render_page(results: Mapping[str, BenchResult]) -> str:
    """The page.

    Args:
        results: One or more, by a name of their own each.
    """
    kinds = ", ".join(dict.fromkeys(str(result.own.kind) for result in results.values()))
    models = ", ".join(dict.fromkeys(result.engine.model for result in results.values() if result.engine.model))
    sections = [
        _summary(dict(sorted(results.items(), key=lambda item: item[1].performance is None))),
        _distributions(results),
        _throughput(results),
        _cache_use(results),
        *(_threshold(index, *item) for index, item in enumerate(results.items())),
        *(_comparison(index, *item) for index, item in enumerate(results.items())),
        _facts(results),
    ]
    return document(
        f"Benchmark report: {models}" if models else "Benchmark report",
        f"{len(results)} result{'s' if len(results) > 1 else ''} of trtllm-mla bench: {kinds}.",
        sections,
        f"Written by trtllm-mla report {__version__}.",
    )


@dataclass(frozen=True)
class _Row:
    """A row of the summary: a quantity, and how a result is asked for it."""

    label: str
    of: Callable[[BenchResult], float | str | None]


def _row(label: str, block: str, name: str) -> _Row:
    """The row of a value in one of a result's blocks."""

    def value(result: BenchResult) -> float | None:
        found = getattr(result, block)
        return None if found is None else getattr(found, name)

    return _Row(label, value)


def _percentile_rows(label: str, block: str, name: str) -> tuple[_Row, ...]:
    """The rows of percentiles in one of a result's blocks."""

    def row(key: str) -> _Row:
        def value(result: BenchResult) -> float | None:
            found = getattr(getattr(result, block), name, None)
            return None if found is None else getattr(found, key)

        return _Row(f"{label}, {key}", value)

    return tuple(row(key) for key in ("average", "p50", "p90", "p99"))


def _token_bytes(result: BenchResult) -> float | None:
    """Cached bytes of a token: a number, or a table of this and other forms of attention."""
    value = result.own.cache_bytes_per_token
    if isinstance(value, dict):
        value = value.get("latent")
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _pool_mib(result: BenchResult) -> float | None:
    size = result.own.cache_bytes_pool
    return None if size is None else size / _MIB


_GROUPS: tuple[tuple[str, tuple[_Row, ...]], ...] = (
    (
        "What ran",
        (
            _Row("Kind", lambda result: str(result.own.kind)),
            _Row("Model", lambda result: result.engine.model),
            _Row("Backend", lambda result: result.engine.backend),
            _Row("Data type", lambda result: result.engine.dtype),
            _Row("Latent cache", lambda result: result.engine.kv_cache_dtype),
        ),
    ),
    (
        "Load",
        (
            _row("Requests", "request_info", "num_requests"),
            _Row("Requests at a time", lambda result: result.concurrency),
            _row("Input tokens, average", "request_info", "avg_input_length"),
            _row("Output tokens, average", "request_info", "avg_output_length"),
        ),
    ),
    (
        "Throughput",
        (
            _row("Requests per second", "performance", "request_throughput_req_s"),
            _row("Output tokens per second", "performance", "system_output_throughput_tok_s"),
            _row("All tokens per second", "performance", "system_total_throughput_tok_s"),
            _row("Output tokens per second and user", "performance", "output_throughput_per_user_tok_s"),
            _row("Total time, ms", "performance", "total_latency_ms"),
        ),
    ),
    (
        "Latency, ms",
        (
            *_percentile_rows("Time to first token", "streaming_metrics", "ttft_percentiles"),
            *_percentile_rows("Time per output token", "streaming_metrics", "tpot_percentiles"),
            *_percentile_rows("Request", "performance", "request_latency_percentiles_ms"),
        ),
    ),
    (
        "Latent cache",
        (
            _Row("Bytes per token, all layers", _token_bytes),
            _Row("Pool, MiB", _pool_mib),
            _Row("Pages in use, at most", lambda result: result.own.pages_peak),
            _Row("Preemptions", lambda result: result.own.num_preemptions),
            _Row("Prompt tokens found in the cache", lambda result: result.own.reused_tokens),
        ),
    ),
)


def _summary(results: Mapping[str, BenchResult]) -> str:
    rows = []
    for group, items in _GROUPS:
        values = [(item.label, [item.of(result) for result in results.values()]) for item in items]
        shown = [(label, cells) for label, cells in values if any(cell is not None for cell in cells)]
        if shown:
            rows.append(f'<tr><th scope="rowgroup" colspan="{len(results) + 1}">{text(group)}</th></tr>')
            rows += [table_row(label, map(_cell, cells)) for label, cells in shown]
    head = table_head(["", *results])
    return section("Summary", table("All results side by side; those that measured requests come first", head, rows))


def _distributions(results: Mapping[str, BenchResult]) -> str:
    quantities: tuple[tuple[str, str, Callable[[BenchResult], list[float]]], ...] = (
        ("Time to first token", "time to first token, ms", lambda result: result.ttft_ms),
        ("Time per output token", "time per output token, ms", lambda result: result.tpot_ms),
        ("Request latency", "from arrival to last token, ms", lambda result: result.latency_ms),
    )
    drawings = []
    logged = {name: result for name, result in results.items() if result.completed}
    for title, quantity, of in quantities:
        for part in _parts({name: of(result) for name, result in logged.items()}):
            medians = [
                f"{name}: median {show_number(_middle(samples))} ms" for name, samples in part.items() if samples
            ]
            if medians:
                drawing = plots.draw_distribution(title, quantity, part)
                drawings.append(Drawing(drawing, f"{title}. {'; '.join(medians)}"))
    if not drawings:
        return ""
    note = (
        "Share of the completed requests that took at most so long. Latencies count from a request's arrival; markers "
        "are the percentiles of the summary."
    )
    return section("Latency distribution", f'<p class="soft">{note}</p>' + figures("latency", drawings))


def _throughput(results: Mapping[str, BenchResult]) -> str:
    models = {result.engine.model for result in results.values()}
    series: dict[str, list[tuple[float, float]]] = {}
    for result in results.values():
        if result.performance is not None and result.concurrency is not None:
            model = result.engine.model if len(models) > 1 else None
            limited = None if result.asked_concurrency else "no limit"
            name = ", ".join(filter(None, (model, result.engine.backend, str(result.own.kind), limited)))
            point = (result.concurrency, result.performance.system_output_throughput_tok_s)
            series.setdefault(name, []).append(point)
    if len({x for points in series.values() for x, _ in points}) < 2:
        return ""
    drawings = []
    for part in _parts(series):
        described = "; ".join(
            f"{name}: " + ", ".join(f"{show_number(y)} at {show_number(x)}" for x, y in sorted(points))
            for name, points in part.items()
        )
        drawings.append(
            Drawing(plots.draw_throughput(part), f"Output tokens per second against requests at a time. {described}")
        )
    return section("Throughput against concurrency", figures("throughput", drawings))


def _cache_use(results: Mapping[str, BenchResult]) -> str:
    drawings = []
    for name, result in results.items():
        timeline = result.own.timeline
        if timeline is not None and timeline.seconds:
            described = (
                f"Pages in use and requests over time, {name}: at most {show_number(max(timeline.pages_in_use))} "
                f"pages, {show_number(max(timeline.running))} running and {show_number(max(timeline.waiting))} waiting"
            )
            drawings.append(Drawing(plots.draw_cache_use(name, timeline, result.own.num_pages), described))
    return section("Cache use over time", figures("cache", drawings)) if drawings else ""


def _threshold(index: int, name: str, result: BenchResult) -> str:
    block = result.own.threshold
    if block is None:
        return ""
    drawings = []
    if block.chunks:
        drawings.append(
            Drawing(
                plots.draw_chunks(block),
                f"Time of a prefill chunk, absorbed and decompressed, by its new tokens. {block.recommendation.text}",
            )
        )
    if block.workloads:
        described = "; ".join(
            f"{row.threshold}: {show_number(row.prefill_ms.median)} and {show_number(row.decode_step_ms.median)} ms"
            for row in block.workloads
        )
        drawings.append(
            Drawing(plots.draw_thresholds(block), f"Median prefill and decode step at each threshold. {described}")
        )
    chunk_rows = [
        table_row(
            f"{show_number(row.num_tokens)} after {show_number(row.history)}",
            (
                _spread(row.absorbed_ms),
                _spread(row.decompressed_ms),
                f"{show_number(row.difference_ms.median)} {show_range(row.difference_ms.low, row.difference_ms.high)}",
            ),
        )
        for row in block.chunks
    ]
    workload_rows = [
        table_row(
            show_number(row.threshold),
            (
                _spread(row.prefill_ms),
                _spread(row.decode_step_ms),
                show_number(row.absorbed_tokens),
                show_number(row.context_tokens),
            ),
        )
        for row in block.workloads
    ]
    return section(
        f"Prefill threshold: {name}",
        f'<p class="advice">{text(block.recommendation.text)}</p>'
        + figures(f"threshold{index}-", drawings)
        + table(
            "The workload at each threshold: median (p10 to p90), and the prompt tokens that went either way",
            table_head(["Threshold", "Prefill, ms", "Decode step, ms", "Tokens absorbed", "Tokens decompressed"]),
            workload_rows,
        )
        + table(
            "A chunk in both forms: median (p10 to p90). Difference: absorbed minus decompressed of each repetition, "
            "and where its median lies with "
            f"{min((row.difference_ms.confidence for row in block.chunks), default=0):.0%} confidence",
            table_head(["New tokens after cached ones", "Absorbed, ms", "Decompressed, ms", "Difference, ms"]),
            chunk_rows,
        ),
    )


def _comparison(index: int, name: str, result: BenchResult) -> str:
    block = result.own.compare
    if block is None:
        return ""
    shown = {
        key: label for key, label in block.metrics.items() if any(key in subject.metrics for subject in block.subjects)
    }
    rows = []
    for key, label in shown.items():
        items = [subject.metrics.get(key) for subject in block.subjects]
        rows.append(table_row(label, map(_measured, items)))
        if any(item is not None and item.ratio is not None for item in items):
            rows.append(table_row("as a multiple of the first", ("", *map(_ratio, items[1:]))))
    if any(subject.same_tokens is not None for subject in block.subjects):
        shares = ("" if item.same_tokens is None else f"{item.same_tokens:.1%}" for item in block.subjects)
        rows.append(table_row("New tokens equal to the first's", shares))
    drawings = []
    for key, label in shown.items():
        described = "; ".join(
            f"{subject.name}: {show_number(subject.metrics[key].value)}"
            for subject in block.subjects
            if key in subject.metrics
        )
        drawings.append(Drawing(plots.draw_comparison(block, key), f"{label}. {described}"))
    descriptions = "".join(
        f"<li><strong>{text(subject.name)}</strong>: {text(subject.description)}</li>"
        for subject in block.subjects
        if subject.description
    )
    what = "Measured in one run, taking turns" if block.mode == "run" else "Read from results of several runs"
    return section(
        f"Comparison: {name}",
        (f"<ul>{descriptions}</ul>" if descriptions else "")
        + table(
            f"{what}: median (p10 to p90)",
            table_head(["", *(subject.name for subject in block.subjects)]),
            rows,
        )
        + figures(f"comparison{index}-", drawings),
    )


def _facts(results: Mapping[str, BenchResult]) -> str:
    parts = []
    for name, result in results.items():
        own = result.own
        values = {
            "timer": own.timer,
            "executor": own.executor,
            "directory": result.engine.engine_dir,
            "layers": own.num_layers,
            "sha256": own.sha256,
            "kernels_sha256": own.kernels_sha256,
            "versions": own.versions,
            "options": own.options,
            "chunks": own.chunks,
            "cache_bytes_per_token": own.cache_bytes_per_token,
            "page_size": own.page_size,
            "machine": own.machine,
        }
        facts = list(_flatten("", values))
        rows = [table_row(key, (value,)) for key, value in facts[:MAX_FACTS]]
        if len(facts) > MAX_FACTS:
            rows.append(table_row("…", (f"{len(facts) - MAX_FACTS} more in the file",)))
        parts.append(
            f"<details><summary>{text(name)}</summary>\n"
            + '<div class="text"><table><tbody>\n'
            + "".join(rows)
            + "</tbody></table></div></details>\n"
        )
    return section("What was measured", "".join(parts))


def _flatten(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """A nested value as lines of key and text; what is absent has none."""
    if isinstance(value, dict) and depth < MAX_DEPTH:
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item, depth + 1)
    elif value is not None:
        yield prefix, value if isinstance(value, str) else _REPR.repr(value)


def _parts(series: Mapping[str, _T]) -> Iterator[dict[str, _T]]:
    """Series in portions that one figure can show."""
    items = list(series.items())
    for start in range(0, len(items), MAX_SERIES):
        yield dict(items[start : start + MAX_SERIES])


def _middle(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 2]


def _measured(item: MetricBlock | None) -> str:
    if item is None:
        return ""
    around = "" if item.low is None or item.high is None else f" {show_range(item.low, item.high)}"
    return show_number(item.value) + around


def _ratio(item: MetricBlock | None) -> str:
    if item is None or item.ratio is None:
        return ""
    low, high = item.ratio_low, item.ratio_high
    return show_number(item.ratio) + ("" if low is None or high is None else f" {show_range(low, high)}")


def _spread(spread: SpreadBlock) -> str:
    return f"{show_number(spread.median)} {show_range(spread.p10, spread.p90)}"


def _cell(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else show_number(value)
