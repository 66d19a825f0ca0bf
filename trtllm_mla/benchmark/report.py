"""Printing reports in the sections and words of trtllm-bench, and how far a benchmark is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from trtllm_mla.benchmark.driver import Progress
from trtllm_mla.benchmark.latency import LatencyReport
from trtllm_mla.benchmark.statistics import Percentiles

_MIB = 1 << 20
_LABEL_WIDTH = 47
_Sections = Sequence[tuple[str, Sequence[tuple[str, str]]]]


def print_latency_report(report: LatencyReport, console: Console) -> None:
    """Prints a latency report.

    Args:
        report: The report.
        console: Where to.
    """
    values = report.to_json()
    performance, requests, machine = values["performance"], values["request_info"], report.machine
    spec, cache = report.subject.spec, report.cache
    sections: _Sections = (
        (
            "ENGINE DETAILS",
            (
                ("Model", f"{report.subject.model} ({spec.num_hidden_layers} layers, {spec.model_type})"),
                ("Directory", report.subject.engine_dir),
                ("SHA-256", report.subject.sha256[:16]),
                ("Backend", report.executor.description),
                ("Data type", f"{report.executor.dtype}, latent cache {report.executor.cache_dtype}"),
                ("Max input / sequence length", f"{report.config.max_input_len} / {report.config.max_seq_len}"),
            ),
        ),
        (
            "MACHINE DETAILS",
            (
                ("Processor", machine.name),
                ("Cores", f"{machine.usable_cores} usable of {machine.logical_cores}"),
                ("Memory", f"{machine.memory_bytes / (1 << 30):.1f} GiB"),
            ),
        ),
        (
            "REQUEST DETAILS",
            (
                ("Number of requests", f"{requests['num_requests']}"),
                ("Concurrent requests", f"{requests['avg_num_concurrent_requests']:.2f}"),
                ("Input length (tokens)", f"{requests['avg_input_length']:g}"),
                ("Output length (tokens)", f"{requests['avg_output_length']:g}"),
                ("Warm-up / measured batches", f"{report.options.warmup} / {report.options.iterations}"),
                ("Clock encloses", report.timer),
            ),
        ),
        (
            "PERFORMANCE OVERVIEW",
            (
                ("Request Throughput (req/sec)", f"{performance['request_throughput_req_s']:.3f}"),
                ("Total Output Throughput (tokens/sec)", f"{performance['system_output_throughput_tok_s']:.2f}"),
                ("Total Token Throughput (tokens/sec)", f"{performance['system_total_throughput_tok_s']:.2f}"),
                ("Total Latency (ms)", f"{report.total_ms:.2f}"),
                ("Average request latency (ms)", f"{report.request_ms.average:.3f}"),
                (
                    "Per User Output Throughput [w/ ctx] (tps/user)",
                    f"{performance['output_throughput_per_user_tok_s']:.2f}",
                ),
                ("Average time-to-first-token [TTFT] (ms)", f"{report.ttft_ms.average:.3f}"),
                ("Average time-per-output-token [TPOT] (ms)", f"{report.tpot_ms.average:.3f}"),
                ("Prefill (tokens/sec, at the median)", f"{report.prefill.tokens_per_second:.2f}"),
                ("Decode (tokens/sec, at the median)", f"{report.decode.tokens_per_second:.2f}"),
            ),
        ),
        (
            "LATENT CACHE",
            (
                ("Bytes per token, all layers", f"{cache.footprint.latent}"),
                ("The same heads decompressed", f"{cache.footprint.decompressed}"),
                ("In use / pool (MiB)", f"{cache.used_bytes / _MIB:.2f} / {cache.pool_bytes / _MIB:.2f}"),
            ),
        ),
    )
    _print_sections(sections, console)
    console.rule("[bold]LATENCY PERCENTILES (ms)[/]", align="left")
    console.print(_percentile_table(report), highlight=False)
    first, last = report.decode.past_kv_length
    console.print(
        f"prefill: {report.prefill.tokens} tokens; decode: a step of {report.decode.tokens} tokens at a past KV "
        f"length of {first} to {last}; exec.: of it in the executor",
        highlight=False,
    )


def _percentile_table(report: LatencyReport) -> Table:
    columns = (
        ("prefill", report.prefill.latency_ms),
        ("exec.", report.prefill.executor_ms),
        ("decode", report.decode.latency_ms),
        ("exec.", report.decode.executor_ms),
        ("TTFT", report.ttft_ms),
        ("TPOT", report.tpot_ms),
        ("request", report.request_ms),
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for field in fields(Percentiles):
        table.add_row(field.name, *(f"{getattr(item, field.name):.3f}" for _, item in columns))
    return table


def print_serving_report(values: Mapping[str, Any], console: Console) -> None:
    """Prints what serving a dataset came to.

    Args:
        values: The report, as ``ServingReport.to_json`` gives it.
        console: Where to.
    """
    _print_sections(
        (
            ("ENGINE DETAILS", _engine_rows(values)),
            ("MACHINE DETAILS", _machine_rows(values)),
            ("WORLD + RUNTIME INFORMATION", _world_rows(values)),
            ("REQUEST DETAILS", _request_rows(values)),
            ("PERFORMANCE OVERVIEW", performance_rows(values)),
            ("LATENT CACHE", _cache_rows(values)),
            ("SCHEDULING", _scheduling_rows(values)),
        ),
        console,
    )
    console.rule("[bold]PER-REQUEST BREAKDOWN[/]", align="left")
    console.print(percentile_table(values), highlight=False)


def print_endpoint_report(values: Mapping[str, Any], console: Console) -> None:
    """Prints what sending a dataset to a server came to.

    Args:
        values: The report, as ``EndpointReport.to_json`` gives it.
        console: Where to.
    """
    _print_sections(
        (
            ("SERVER DETAILS", _server_rows(values)),
            ("CLIENT MACHINE DETAILS", _machine_rows(values)),
            ("REQUEST DETAILS", _request_rows(values)),
            ("PERFORMANCE OVERVIEW", performance_rows(values)),
            ("ANSWERS", _answer_rows(values)),
        ),
        console,
    )
    for kind, message in values["trtllm_mla"]["failure_examples"].items():
        console.print(Text(f"{kind}, for example: {message}"), soft_wrap=True)
    console.rule("[bold]PER-REQUEST BREAKDOWN[/]", align="left")
    console.print(percentile_table(values), highlight=False)


def performance_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values of trtllm-bench's performance overview.

    Args:
        values: A report with the blocks ``performance`` and, where it is streaming, ``streaming_metrics``.
    """
    performance, streaming = values["performance"], values.get("streaming_metrics")
    rows = [
        ("Request Throughput (req/sec)", f"{performance['request_throughput_req_s']:.4f}"),
        ("Total Output Throughput (tokens/sec)", f"{performance['system_output_throughput_tok_s']:.4f}"),
        ("Total Token Throughput (tokens/sec)", f"{performance['system_total_throughput_tok_s']:.4f}"),
        ("Total Latency (ms)", f"{performance['total_latency_ms']:.4f}"),
        ("Average request latency (ms)", f"{performance['avg_request_latency_ms']:.4f}"),
        (
            "Per User Output Throughput [w/ ctx] (tps/user)",
            f"{performance['output_throughput_per_user_tok_s']:.4f}",
        ),
    ]
    if performance["output_throughput_per_gpu_tok_s"] is not None:
        rows.append(("Per GPU Output Throughput (tps/gpu)", _number(performance["output_throughput_per_gpu_tok_s"])))
    if streaming is not None:
        rows += [
            ("Average time-to-first-token [TTFT] (ms)", _number(streaming["avg_ttft_ms"])),
            ("Average time-per-output-token [TPOT] (ms)", _number(streaming["avg_tpot_ms"])),
            ("Per User Output Speed (tps/user)", _number(streaming["token_output_speed_tok_s"])),
        ]
    return rows


def percentile_table(values: Mapping[str, Any]) -> Table:
    """Percentiles of request latency, TTFT, TPOT (ms) and generation throughput (tps/user), as far as there are any.

    Args:
        values: A report with the blocks ``performance`` and, where it is streaming, ``streaming_metrics``.
    """
    streaming = values.get("streaming_metrics") or {}
    columns = [("Latency (ms)", values["performance"]["request_latency_percentiles_ms"])]
    for heading, key in (("TTFT (ms)", "ttft"), ("TPOT (ms)", "tpot"), ("GTPS (tps/user)", "gen_tps")):
        if (percentiles := streaming.get(f"{key}_percentiles")) is not None:
            columns.append((heading, percentiles))
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name in ("minimum", "maximum", "average", "p50", "p90", "p95", "p99"):
        table.add_row(name.upper(), *(f"{percentiles[name]:.4f}" for _, percentiles in columns))
    return table


class ServingProgress:
    """Shows how far a benchmark is, while it runs: requests, tokens per second, pages, the time that is left.

    Nothing is shown where the console is no terminal.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self._bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("Loading", total=None, facts="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, line: str) -> None:
        """Says what is done now."""
        self._bar.update(self._task, description=line)

    def update(self, progress: Progress) -> None:
        """Shows how far the benchmark is."""
        rate = progress.output_tokens / progress.seconds if progress.seconds else 0.0
        pages = "" if progress.pages_in_use is None else f", {progress.pages_in_use} pages"
        self._bar.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            facts=f"{rate:,.0f} tok/s, {progress.num_running} running{pages}",
        )


def _print_sections(sections: _Sections, console: Console) -> None:
    for title, rows in sections:
        console.rule(f"[bold]{title}[/]", align="left")
        for label, value in rows:
            console.print(Text(f"{label:<{_LABEL_WIDTH}} {value}"), soft_wrap=True)


def _engine_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    engine, ours = values["engine"], values["trtllm_mla"]
    return [
        ("Model", f"{engine['model']} ({ours['num_layers']} layers)"),
        ("Model Path", engine["model_path"]),
        ("Engine Directory", engine["engine_dir"]),
        ("SHA-256", ours["sha256"][:16]),
        ("Backend", ours["executor"]),
        ("Dtype", engine["dtype"]),
        ("KV Cache Dtype", engine["kv_cache_dtype"]),
        ("Max Input Length", f"{engine['max_input_length']}"),
        ("Max Sequence Length", f"{engine['max_sequence_length']}"),
    ]


def _server_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    options = values["trtllm_mla"]["options"]
    return [
        ("Base URL", options["base_url"]),
        ("Model", options["model"]),
        ("Interface", f"{options['api']}, {'streaming' if options['streaming'] else 'whole answers'}"),
    ]


def _answer_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    ours = values["trtllm_mla"]
    rows = [
        ("New tokens counted by", _counts(ours["output_tokens_counted_by"])),
        ("Ends", _counts(ours["finish_reasons"])),
        ("Sent again", _counts(ours["retries"])),
        ("Failed", _counts(ours["failures"])),
    ]
    if ours["dataset_input_tokens"] is not None:
        rows.insert(0, ("Average Input Length in the dataset (tokens)", f"{ours['dataset_input_tokens']:.4f}"))
    return rows


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _machine_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = values["trtllm_mla"]["machine"]
    return [
        ("Processor", machine["name"]),
        ("Cores", f"{machine['usable_cores']} usable of {machine['logical_cores']}"),
        ("Memory", f"{machine['memory_bytes'] / (1 << 30):.1f} GiB"),
    ]


def _world_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    world = values["world_info"]
    rate = world["issue_rate"]
    return [
        ("TP / PP / EP Size", f"{world['tp_size']} / {world['pp_size']} / {world['ep_size']}"),
        ("Max Runtime Batch Size", f"{world['max_batch_size']}"),
        ("Max Runtime Tokens", f"{world['max_num_tokens']}"),
        ("Scheduling Policy", world["scheduling_policy"]),
        ("Issue Rate (req/sec)", "all at once" if rate is None else f"{rate:.4f}"),
    ]


def _request_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    requests, options = values["request_info"], values["trtllm_mla"]["options"]
    concurrency, rate = options["concurrency"], options["request_rate"]
    return [
        ("Number of requests", f"{requests['num_requests']}"),
        ("Number of concurrent requests", f"{requests['avg_num_concurrent_requests']:.4f}"),
        ("Average Input Length (tokens)", f"{requests['avg_input_length']:.4f}"),
        ("Average Output Length (tokens)", f"{requests['avg_output_length']:.4f}"),
        ("Dataset", options["dataset"]),
        ("Concurrency limit", "none" if concurrency is None else f"{concurrency}"),
        ("Request rate (req/sec)", "none" if rate is None else f"{rate:g} (Poisson)"),
        ("Warm-up requests", f"{options['warmup']}"),
        ("Stop tokens", "ignored" if options["ignore_eos"] else "end a request"),
        ("Clock encloses", values["trtllm_mla"]["timer"]),
    ]


def _cache_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    ours = values["trtllm_mla"]
    per_token = ours["cache_bytes_per_token"]
    peak, pool = ours["cache_bytes_peak"] / _MIB, ours["cache_bytes_pool"] / _MIB
    return [
        ("Bytes per token, all layers", f"{per_token['latent']}"),
        ("The same heads decompressed", f"{per_token['decompressed']}"),
        ("Pages at most / in the pool", f"{ours['pages_peak']} / {ours['num_pages']} of {ours['page_size']} tokens"),
        ("MiB at most / in the pool", f"{peak:.2f} / {pool:.2f}"),
        ("Prompt tokens found in the cache", f"{ours['reused_tokens']} of {ours['prompt_tokens']}"),
        ("Preemptions", f"{ours['num_preemptions']}"),
    ]


def _scheduling_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    ours = values["trtllm_mla"]
    chunks, steps = ours["chunks"], ours["steps"]
    seconds = steps["scheduler_seconds"] + steps["host_seconds"] + steps["executor_seconds"]
    shares = (f"{steps[f'{part}_seconds'] / seconds:.1%}" for part in ("scheduler", "host", "executor"))
    return [
        ("Prefill threshold (tokens)", f"{ours['prefill_absorption_threshold']}"),
        ("Prefill chunks decompressed", f"{chunks['context']} ({chunks['context_tokens']} tokens)"),
        ("Prefill chunks absorbed", f"{chunks['absorbed']} ({chunks['absorbed_tokens']} tokens)"),
        ("Decoded tokens", f"{chunks['decodes']}"),
        ("Steps", f"{steps['count']}"),
        ("Their time: scheduler / packing / executor", " / ".join(shares)),
    ]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
