"""Figures of benchmark results, in one style for files of their own and for HTML pages.

Every text in a figure is written out as text, and the same numbers give the same bytes. Names come from files of
strangers, so matplotlib reads no markup in them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_mla.benchmark.result_files import CompareBlock, SpreadBlock, ThresholdBlock, TimelineBlock
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

# Legible on white and on the dark page alike: a contrast of 3 or more with both, as WCAG asks of graphics.
PALETTE = ("#2f7fc1", "#c8651b", "#2d9059", "#c94a4a", "#8a66c4", "#9a6d3c", "#c0569a", "#5f8a8b")
FOREGROUND = "#222222"
PLOT_SUFFIXES = (".svg", ".png", ".pdf")

_DASHES = ("-", "--", "-.", ":")
_PERCENTILES = ((0.5, "o", "p50"), (0.9, "s", "p90"), (0.99, "D", "p99"))
_MAX_POINTS = 400
_MAX_NAME = 32
_SIZE = (5.2, 3.5)  # inches
_TALL = (5.2, 4.4)
_WIDE_RANGE = 30
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trtllm_mla",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": FOREGROUND,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": FOREGROUND,
    "axes.edgecolor": FOREGROUND,
    "axes.labelcolor": FOREGROUND,
    "xtick.color": FOREGROUND,
    "ytick.color": FOREGROUND,
}


def check_plot_path(path: Path) -> None:
    """Checks, before long work, that a figure can be written to a path.

    Raises:
        UserError: Its ending is that of no format for figures, or matplotlib is missing.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise UserError(f"{path}: found the ending '{path.suffix}', expected one of {', '.join(PLOT_SUFFIXES)}.")
    _require_matplotlib()


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure, atomically, on white."""
    kind = path.suffix.removeprefix(".")
    with atomic_file(path) as temporary, _style():
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(temporary, format=kind, metadata=metadata, dpi=150, facecolor="white")


def to_svg(figure: Figure) -> str:
    """A figure as SVG without a background."""
    out = io.StringIO()
    with _style():
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return out.getvalue()


def draw_distribution(title: str, quantity: str, samples: Mapping[str, Sequence[float]]) -> Figure:
    """Draws which share of the requests took at most so long, with percentiles marked.

    Args:
        title: What is distributed.
        quantity: The axis, with its unit.
        samples: Those of each result, by name. One without any is not drawn, but keeps its colour for other figures.
    """
    with _style():
        figure, axes = _figure()
        for index, (name, values) in enumerate(samples.items()):
            if not values:
                continue
            ordered = sorted(values)
            positions = _thin(len(ordered))
            axes.plot(
                [ordered[0], *(ordered[position] for position in positions)],
                [0, *((position + 1) / len(ordered) * 100 for position in positions)],
                drawstyle="steps-post",
                label=_shorten(name),
                **_line(index),
            )
            for share, marker, _ in _PERCENTILES:
                value = ordered[int(len(ordered) * share)]
                axes.plot([value], [share * 100], marker, color=_color(index), zorder=3)
        for _, marker, label in _PERCENTILES:
            axes.plot([], [], marker, color=FOREGROUND, label=label)
        _log_where_wide(axes, [value for values in samples.values() for value in values])
        axes.set(title=title, xlabel=quantity, ylabel="requests, %", ylim=(0, 103))
        _legend(figure, len(samples) + len(_PERCENTILES))
    return figure


def draw_throughput(series: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Draws output throughput against concurrency.

    Args:
        series: Points of concurrency and tokens per second, by what was measured.
    """
    with _style():
        figure, axes = _figure()
        for index, (name, points) in enumerate(series.items()):
            x, y = zip(*sorted(points), strict=True)
            axes.plot(x, y, marker="o", label=_shorten(name), **_line(index))
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(_plain)
        axes.set(
            title="Output throughput against concurrency",
            xlabel="requests at a time",
            ylabel="output tokens per second",
        )
        axes.set_ylim(bottom=0)
        _legend(figure, len(series), columns=2)
    return figure


def draw_cache_use(name: str, timeline: TimelineBlock, pool_pages: float | None) -> Figure:
    """Draws the pages in use and the requests over time.

    Args:
        name: What was measured.
        timeline: Entries after steps.
        pool_pages: Pages in the pool, where known.
    """
    from matplotlib.ticker import MaxNLocator

    positions = _thin(len(timeline.seconds))
    seconds, pages, running, waiting = (
        [values[position] for position in positions]
        for values in (timeline.seconds, timeline.pages_in_use, timeline.running, timeline.waiting)
    )
    with _style():
        figure = _new_figure(_TALL)
        upper, lower = figure.subplots(2, 1, sharex=True)
        upper.fill_between(seconds, pages, step="post", color=_color(0), alpha=0.25, linewidth=0)
        upper.plot(seconds, pages, drawstyle="steps-post", label="pages in use", **_line(0))
        if pool_pages is not None:
            upper.axhline(pool_pages, color=_color(3), linestyle="--", label=f"pool of {pool_pages:,.0f} pages")
        upper.set(title=f"Cache use: {_shorten(name)}", ylabel="pages")
        lower.plot(seconds, running, drawstyle="steps-post", label="running", **_line(2))
        lower.plot(seconds, waiting, drawstyle="steps-post", label="waiting", **_line(1))
        lower.set(xlabel="seconds from the start", ylabel="requests")
        for axes in (upper, lower):
            axes.set_ylim(bottom=0)
            axes.margins(y=0.1)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        _legend(figure, 4)
    return figure


def draw_chunks(block: ThresholdBlock) -> Figure:
    """Draws the time of a prefill chunk in both forms of attention, with the recommended threshold."""
    with _style():
        figure, axes = _figure()
        _plot_chunks(axes, block)
        _legend(figure, len(axes.get_legend_handles_labels()[1]), columns=2)
    return figure


def draw_thresholds(block: ThresholdBlock) -> Figure:
    """Draws prefill and decode of the workload at each threshold."""
    with _style():
        figure = _new_figure(_TALL)
        _plot_thresholds(figure.subplots(2, 1, sharex=True), block)
    return figure


def draw_threshold_report(block: ThresholdBlock) -> Figure:
    """Draws both side by side."""
    with _style():
        figure = _new_figure((2 * _TALL[0], _TALL[1]))
        left, right = figure.subfigures(1, 2, squeeze=False)[0]
        axes = left.subplots()
        _plot_chunks(axes, block)
        _legend(left, len(axes.get_legend_handles_labels()[1]), columns=2)
        _plot_thresholds(right.subplots(2, 1, sharex=True), block)
    return figure


def draw_comparison(block: CompareBlock, metric: str) -> Figure:
    """Draws one quantity of every subject.

    Args:
        block: The comparison.
        metric: Key of the quantity; some subject has it.
    """
    rows = [(subject.name, subject.metrics[metric]) for subject in block.subjects if metric in subject.metrics]
    with _style():
        figure = _new_figure((_SIZE[0], 1.2 + 0.42 * len(rows)))
        axes = figure.subplots()
        for index, (_, item) in enumerate(rows):
            low = item.value if item.low is None else min(item.low, item.value)
            high = item.value if item.high is None else max(item.high, item.value)
            error = [[item.value - low], [high - item.value]]
            axes.barh([index], [item.value], 0.62, xerr=error, capsize=3, color=_color(index), ecolor=FOREGROUND)
        axes.set_yticks(range(len(rows)), [_shorten(name) for name, _ in rows])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_title(_shorten(block.metrics.get(metric, metric), 60))
        axes.set_xlim(left=0)
    return figure


@contextmanager
def _style() -> Iterator[None]:
    _require_matplotlib()
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # Viewers have fonts of their own for what DejaVu Sans lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _require_matplotlib() -> None:
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise MissingDependencyError("matplotlib", "draw figures", "plots") from None


def _new_figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _figure() -> tuple[Figure, Axes]:
    figure = _new_figure(_SIZE)
    return figure, figure.subplots()


def _plot_chunks(axes: Axes, block: ThresholdBlock) -> None:
    for index, history in enumerate(sorted({row.history for row in block.chunks})):
        rows = sorted((row for row in block.chunks if row.history == history), key=lambda row: row.num_tokens)
        forms = (
            ("absorbed", "-", "o", [row.absorbed_ms for row in rows]),
            ("decompressed", "--", "s", [row.decompressed_ms for row in rows]),
        )
        for form, dashes, marker, spreads in forms:
            axes.errorbar(
                [row.num_tokens for row in rows],
                [spread.median for spread in spreads],
                yerr=_errors(spreads),
                linestyle=dashes,
                marker=marker,
                capsize=2,
                color=_color(index),
                label=f"{form}, {history:,} cached",
            )
    advised, limit = block.recommendation, block.predicted_limit
    if advised.is_decided:
        axes.axvline(advised.threshold, color=FOREGROUND, linewidth=1.2, label=f"recommended: {advised.threshold:,}")
    if limit:
        axes.axvline(limit, color=FOREGROUND, linewidth=1.2, linestyle=":", label=f"by operations: {limit:,.0f}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row.num_tokens for row in block.chunks}))
    axes.xaxis.set_major_formatter(_plain)
    axes.tick_params(axis="x", rotation=45)
    axes.minorticks_off()
    _plain_log(axes.yaxis)
    axes.set(title="One prefill chunk in both forms", xlabel="new tokens of the chunk", ylabel="ms (p10 to p90)")


def _plot_thresholds(panels: Sequence[Axes], block: ThresholdBlock) -> None:
    rows = block.workloads
    ticks = range(len(rows))
    phases = (
        ("prefill, ms", [row.prefill_ms for row in rows]),
        ("decode step, ms", [row.decode_step_ms for row in rows]),
    )
    for index, (axes, (label, spreads)) in enumerate(zip(panels, phases, strict=True)):
        medians = [spread.median for spread in spreads]
        axes.bar(ticks, medians, 0.6, yerr=_errors(spreads), capsize=3, color=_color(index), ecolor=FOREGROUND)
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
    panels[0].set_title("The workload at each threshold (median, p10 to p90)")
    panels[1].set_xticks(ticks, [f"{row.threshold:,}" for row in rows], rotation=45 if len(rows) > 8 else 0)
    panels[1].set_xlabel("prefill_absorption_threshold, tokens")


def _plain(value: float, _position: float) -> str:
    """A tick's label without powers of ten."""
    return f"{value:g}"


def _color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def _line(index: int) -> dict[str, Any]:
    """Colour and dashes, since not everybody tells the colours apart."""
    return {"color": _color(index), "linestyle": _DASHES[index % len(_DASHES)]}


def _errors(spreads: Sequence[SpreadBlock]) -> list[list[float]]:
    return [
        [max(0.0, spread.median - spread.p10) for spread in spreads],
        [max(0.0, spread.p90 - spread.median) for spread in spreads],
    ]


def _log_where_wide(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if low > 0 and high / low > _WIDE_RANGE:
        axes.set_xscale("log")
        _plain_log(axes.xaxis)


def _plain_log(axis: Axis) -> None:
    """Labels a logarithmic axis at 1, 2 and 5 of each decade, without powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_plain)


def _legend(figure: Figure | SubFigure, entries: int, *, columns: int = 3) -> None:
    figure.legend(loc="outside lower left", ncols=min(columns, entries), handlelength=2.2, columnspacing=1.2)


def _thin(count: int) -> list[int]:
    """At most ``_MAX_POINTS`` of ``count`` positions, evenly spread, the last one included."""
    if count <= _MAX_POINTS:
        return list(range(count))
    return [(index + 1) * count // _MAX_POINTS - 1 for index in range(_MAX_POINTS)]


def _shorten(text: str, most: int = _MAX_NAME) -> str:
    """A name that fits a legend, without what a file cannot hold.

    A leading underscore would hide a line from the legend.
    """
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[: most + 1])
    shown = shown if len(text) <= most else shown[: most - 1] + "…"
    return f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown
