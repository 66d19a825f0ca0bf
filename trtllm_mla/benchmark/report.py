"""Printing latency reports, in the sections and words of trtllm-bench."""

from __future__ import annotations

from dataclasses import fields

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_mla.benchmark.latency import LatencyReport
from trtllm_mla.benchmark.statistics import Percentiles

_MIB = 1 << 20
_LABEL_WIDTH = 46


def print_latency_report(report: LatencyReport, console: Console) -> None:
    """Prints a latency report.

    Args:
        report: The report.
        console: Where to.
    """
    values = report.to_json()
    performance, requests, machine = values["performance"], values["request_info"], report.machine
    spec, cache = report.subject.spec, report.cache
    sections: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
        (
            "ENGINE DETAILS",
            (
                ("Model", f"{report.subject.model} ({spec.num_hidden_layers} layers, {spec.model_type})"),
                ("Directory", report.subject.engine_dir),
                ("SHA-256", report.subject.sha256[:16]),
                ("Backend", report.executor_description),
                ("Data type", f"{report.dtype}, latent cache {report.cache_dtype}"),
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
                ("Concurrent requests", f"{requests['avg_num_concurrent_requests']}"),
                ("Input length (tokens)", f"{requests['avg_input_length']}"),
                ("Output length (tokens)", f"{requests['avg_output_length']}"),
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
    for title, rows in sections:
        console.rule(f"[bold]{title}[/]", align="left")
        for label, value in rows:
            console.print(Text(f"{label:<{_LABEL_WIDTH}} {value}"), soft_wrap=True)
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
