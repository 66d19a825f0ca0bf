"""Printing thresholds and comparisons."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_mla.benchmark.compare import Comparison, Metric
from trtllm_mla.benchmark.formatting import show_number, show_range
from trtllm_mla.benchmark.spread import MedianInterval, Spread
from trtllm_mla.benchmark.threshold import ThresholdReport

_MAX_WIDTH = 10_000


def print_threshold_report(report: ThresholdReport, console: Console) -> None:
    """Prints the workload at each threshold, chunks in both forms, and the recommendation."""
    workload = report.options.workload
    console.print(
        Text(f"{report.subject.model}, {report.executor.description}; {report.machine.name}"), soft_wrap=True
    )
    _print_title(
        f"{workload.batch_size} x {workload.input_len} prompt tokens, {workload.output_len} new ones each: median "
        f"of {workload.iterations} (p10 to p90); prompt tokens absorbed and decompressed",
        console,
    )
    table = _table("threshold", "prefill, ms", "decode step, ms", "absorbed", "decompressed")
    for item in report.workloads:
        table.add_row(
            f"{item.threshold}",
            _spread(Spread.of(item.prefill_ms)),
            _spread(Spread.of(item.decode_step_ms)),
            f"{item.absorbed_tokens}",
            f"{item.context_tokens}",
        )
    _print_table(table, console)
    _print_title("One chunk in both forms: median (p10 to p90)", console)
    table = _table("cached", "new tokens", "absorbed, ms", "decompressed, ms", "difference, ms", "faster")
    for chunk in report.chunks:
        difference = MedianInterval.of(chunk.differences_ms)
        table.add_row(
            f"{chunk.history}",
            f"{chunk.num_tokens}",
            _spread(Spread.of(chunk.absorbed_ms)),
            _spread(Spread.of(chunk.decompressed_ms)),
            f"{show_number(difference.median)} {show_range(difference.low, difference.high)}",
            {1: "decompressed", -1: "absorbed", 0: "within noise"}[difference.side_of(0.0)],
        )
    _print_table(table, console)
    console.print()
    for sentence in report.advice:
        console.print(Text(sentence), soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints contestants side by side."""
    options = comparison.options
    title = "Results side by side: median (p10 to p90)"
    if options is not None:
        title = (
            f"{options.batch_size} x {options.input_len} prompt tokens, {options.output_len} new ones each: median of "
            f"{options.iterations} (p10 to p90)"
        )
    for row in comparison.rows:
        console.print(Text(f"{row.name}: {row.description}"), soft_wrap=True)
    first = comparison.rows[0].name
    _print_title(f"{title}; x: as a multiple of {first}", console)
    table = _table("", *(row.name for row in comparison.rows))
    for key, label in comparison.metrics.items():
        items = [row.metrics.get(key) for row in comparison.rows]
        if not any(items):
            continue
        table.add_row(Text(label), *(_metric(item) for item in items))
        table.add_row("", *(_ratio(item, is_first=index == 0) for index, item in enumerate(items)))
    if any(row.same_tokens is not None for row in comparison.rows):
        shares = ("" if row.same_tokens is None else f"{row.same_tokens:.1%}" for row in comparison.rows)
        table.add_row(Text(f"New tokens equal to those of {first}"), *shares)
    _print_table(table, console)


def _print_title(title: str, console: Console) -> None:
    console.print()
    console.print(Text(title, style="italic"), soft_wrap=True)


def _print_table(table: Table, console: Console) -> None:
    """Prints a table, as wide as it is where there is no terminal whose width it has to keep to."""
    if not console.is_terminal:
        width = console.measure(table, options=console.options.update(width=_MAX_WIDTH)).maximum
        console = Console(file=console.file, width=max(width, console.width))
    console.print(table, highlight=False)


def _table(*headings: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    table.columns[0].justify = "left"
    return table


def _spread(spread: Spread) -> str:
    return f"{show_number(spread.median)} {show_range(spread.p10, spread.p90)}"


def _metric(item: Metric | None) -> str:
    if item is None:
        return ""
    around = "" if item.low is None or item.high is None else f" {show_range(item.low, item.high)}"
    return show_number(item.value) + around


def _ratio(item: Metric | None, *, is_first: bool) -> str:
    if item is None or item.ratio is None or is_first:
        return ""
    low, high = item.ratio_low, item.ratio_high
    return f"x {item.ratio:.3f}" + ("" if low is None or high is None else f" {show_range(low, high)}")
