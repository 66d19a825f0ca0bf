"""Printing and plotting validation reports."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.files import atomic_file
from trtllm_mla.network.contract import LOGITS
from trtllm_mla.validation.absorption import AbsorptionResult
from trtllm_mla.validation.comparison import UNQUANTIZED_LOGITS, OutputComparison
from trtllm_mla.validation.quantization import K_PE_PREFIX, LATENT_PREFIX
from trtllm_mla.validation.validate import GreedyResult, PerplexityResult, ScenarioResult, ValidationReport

_COLUMNS = (
    ("cosine", "1 - cos"),
    ("norm_ratio", "norm - 1"),
    ("max_abs_error", "max err"),
    ("mean_abs_error", "mean err"),
    ("greedy_agreement", "greedy"),
)
_CACHE_COLUMNS = (
    ("relative_rms_error", "RMS err"),
    ("conversion_rms_error", "exact"),
    ("rms_ratio", "ratio"),
    ("norm_ratio", "norm - 1"),
    ("rounding", "rounding"),
    ("same_codes", "same"),
)
# As wide as a terminal of 80 columns.
_TABLE_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "show_edge": False,
    "pad_edge": False,
    "padding": (0, 1, 0, 0),
    "title_justify": "left",
    "caption_justify": "left",
}
_PLOT_SUFFIXES = frozenset({".png", ".svg", ".pdf"})


def print_report(report: ValidationReport, console: Console, *, layers: bool = False) -> None:
    """Prints a report as tables and a verdict.

    Args:
        report: The report.
        console: Where to.
        layers: Print a row for the cache of each layer; otherwise one for the worst.
    """
    console.print(f"executor:  {report.executor_description}", highlight=False)
    console.print(f"reference: {report.reference_description}", highlight=False)
    console.print(_scenario_table(report, layers=layers))
    if report.cache_dtype.is_quantized:
        console.print(_cache_table(report, layers=layers))
    for scenario in report.scenarios:
        for output in scenario.outputs:
            _print_failures(scenario, output, console)
    for greedy in report.greedy:
        prompts = ", ".join(str(length) for length in greedy.prompt_lengths)
        console.print(
            _verdict(greedy.passed),
            f"greedy decode, prompts of {prompts} tokens served together, {greedy.name}: {_greedy_agreement(greedy)}",
            highlight=False,
        )
    if report.perplexity is not None:
        item = report.perplexity
        console.print(
            _verdict(item.passed),
            f"perplexity over {item.executor.tokens} tokens: {item.executor.perplexity:.6g}, reference "
            f"{item.reference.perplexity:.6g}, relative difference {item.deviation:.2g} "
            f"({_perplexity_gate(item)})",
            highlight=False,
        )
    for absorption in report.absorption:
        console.print(absorption_table(absorption))
    console.print(_verdict(report.passed), f"validation of {report.executor} in {report.arithmetic}", highlight=False)


def absorption_table(result: AbsorptionResult) -> Table:
    """The absorption check as a table of relative L2 errors and their bounds."""
    sizes = result.sizes
    table = Table(
        title=(
            f"\nAbsorption check in {result.dtype}, relative L2 errors: {sizes.num_attention_heads} heads, "
            f"nope {sizes.qk_nope_head_dim}, rope {sizes.qk_rope_head_dim}, latent {sizes.kv_lora_rank}, "
            f"v {sizes.v_head_dim}, {sizes.keys} keys, {sizes.queries} queries"
        ),
        caption=(
            f"decompressed {result.decompressed_flops / 1e9:.3g} GFLOP, absorbed {result.absorbed_flops / 1e9:.3g} "
            f"GFLOP; they break even at {sizes.break_even_queries:.0f} queries that share the keys"
        ),
        **_TABLE_STYLE,
    )
    table.add_column("form and reference", no_wrap=True)
    for heading in ("scores", "bound", "output", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    scores, outputs = (
        [error for error in result.errors if error.quantity == quantity] for quantity in ("scores", "output")
    )
    for score, output in zip(scores, outputs, strict=True):
        in_float64 = score.against == "decompressed float64"
        table.add_row(
            "both forms in float64" if in_float64 else f"{score.form}, {score.against}",
            *(f"{value:.1e}" for item in (score, output) for value in (item.relative_l2, item.bound)),
            _verdict(score.passed and output.passed),
        )
    return table


def check_plot(path: Path) -> Any:
    """Checks that a plot can be drawn; for long work, before it begins.

    Returns:
        Matplotlib's ``Figure``.

    Raises:
        UserError: The file's suffix is none of a plot, or matplotlib is not installed.
    """
    if path.suffix not in _PLOT_SUFFIXES:
        raise UserError(f"{path}: found suffix '{path.suffix}', expected one of {', '.join(sorted(_PLOT_SUFFIXES))}.")
    try:
        return import_module("matplotlib.figure").Figure
    except ModuleNotFoundError:
        raise MissingDependencyError("matplotlib", "draw a plot", "plots") from None


def plot_errors(report: ValidationReport, path: Path) -> None:
    """Draws the cache's mean error, layer by layer, and that of the logits behind the last, for each scenario.

    Args:
        report: The report.
        path: Where to write: a .png, .svg or .pdf file.

    Raises:
        UserError: The suffix is another, or matplotlib is not installed.
    """
    figure = check_plot(path)(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    labels: list[str] = []
    for scenario in report.scenarios:
        outputs = [output for output in scenario.outputs if output.output.startswith(LATENT_PREFIX)]
        outputs += [output for output in scenario.outputs if output.output == LOGITS]
        labels = [output.output.removeprefix(LATENT_PREFIX) for output in outputs]
        errors = [output.value("relative_mean_error") for output in outputs]
        axes.plot(labels, [float("nan") if error is None else error for error in errors], "o-", label=scenario.name)
    axes.axhline(
        report.gates.max_relative_mean_error, color="black", linestyle="--", label=f"gate of {report.arithmetic}"
    )
    axes.set_yscale("log")
    axes.set_xticks(labels[:: max(len(labels) // 16, 1)])
    axes.set_xlabel("layer whose latent cache is compared; last, the logits")
    axes.set_ylabel("mean absolute error / reference's RMS")
    axes.set_title(f"{report.executor} against {report.reference_description}", fontsize="medium")
    axes.legend()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=150)


def _greedy_agreement(greedy: GreedyResult) -> str:
    optional = "" if greedy.required else " (not required)"
    counted = f"{greedy.matching} of {greedy.total} tokens as "
    if greedy.matching_unquantized is None:
        return f"{counted}transformers' generate{optional}"
    return (
        f"{counted}the reference reading the same cache{optional}; {greedy.matching_unquantized} as transformers' "
        "generate, whose cache is not quantised"
    )


def _perplexity_gate(item: PerplexityResult) -> str:
    gate = f"<= {item.max_deviation:g}"
    return gate if item.required else f"{gate} not required: the reference itself hardly predicts this text"


def _scenario_table(report: ValidationReport, *, layers: bool) -> Table:
    title = f"\nTeacher-forced, {report.scenarios[0].tokens} tokens a scenario, {report.arithmetic} gates"
    caption = "max err, mean err: largest and mean absolute difference; "
    if report.cache_dtype.is_quantized:
        title += f", {report.cache_dtype} cache"
        caption += "the reference reads the same cache; unquantised: one that has its own, without gates"
    else:
        caption += f"cache: {_shown_layers(layers=layers)}"
    table = Table(title=title, caption=caption, **_TABLE_STYLE)
    for heading in ("scenario", "output"):
        table.add_column(heading, no_wrap=True)
    for _, heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for scenario in report.scenarios:
        rows = [("logits", output) for output in scenario.outputs if output.output == LOGITS]
        rows += [("unquantised", output) for output in scenario.outputs if output.output == UNQUANTIZED_LOGITS]
        if not report.cache_dtype.is_quantized:
            shown = _shown(scenario, LATENT_PREFIX, "relative_mean_error", layers=layers)
            rows += [(f"cache {output.output.removeprefix(LATENT_PREFIX)}", output) for output in shown]
        for row, (label, output) in enumerate(rows):
            cells = [_cell(name, output.value(name)) for name, _ in _COLUMNS]
            passed = "" if output.output == UNQUANTIZED_LOGITS and output.passed else _verdict(output.passed)
            table.add_row("" if row else scenario.name, label, *cells, passed)
    return table


def _cache_table(report: ValidationReport, *, layers: bool) -> Table:
    table = Table(
        title=f"\nRows of the {report.cache_dtype} cache beside those that the reference would have cached",
        caption=(
            f"{_shown_layers(layers=layers)}; exact: RMS err of exact conversion; ratio: of RMS err to that and the "
            "arithmetic's; rounding: largest error in half steps of the format; same: values of the exact conversion"
        ),
        **_TABLE_STYLE,
    )
    for heading in ("scenario", "rows"):
        table.add_column(heading, no_wrap=True)
    for _, heading in _CACHE_COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for scenario in report.scenarios:
        shown = [
            (f"{label} {output.output.removeprefix(prefix)}", output)
            for prefix, label in ((LATENT_PREFIX, "latent"), (K_PE_PREFIX, "k_pe"))
            for output in _shown(scenario, prefix, "rms_ratio", layers=layers)
        ]
        for row, (label, output) in enumerate(shown):
            cells = [_cell(name, output.value(name)) for name, _ in _CACHE_COLUMNS]
            table.add_row("" if row else scenario.name, label, *cells, _verdict(output.passed))
    return table


def _shown_layers(*, layers: bool) -> str:
    return "each layer's rows" if layers else "the rows of the layer that is furthest off"


def _shown(scenario: ScenarioResult, prefix: str, metric: str, *, layers: bool) -> list[OutputComparison]:
    """The outputs of each layer, or that of the layer which a metric finds worst."""

    def badness(output: OutputComparison) -> tuple[bool, float]:
        error = output.value(metric)
        return not output.passed, float("inf") if error is None else error

    outputs = [output for output in scenario.outputs if output.output.startswith(prefix)]
    return outputs if layers else [max(outputs, key=badness)]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "" if name == "greedy_agreement" else "n/a"
    if name == "greedy_agreement":
        return f"{value:.1%}"
    if name in ("relative_rms_error", "conversion_rms_error", "same_codes"):
        return f"{value:.2%}"
    if name in ("rms_ratio", "rounding"):
        return f"{value:.4g}"
    if name in ("cosine", "norm_ratio"):
        return f"{(1 - value) if name == 'cosine' else (value - 1):.1e}"
    return f"{value:.1e}"


def _print_failures(scenario: ScenarioResult, output: OutputComparison, console: Console) -> None:
    for metric in output.metrics:
        if not metric.passed:
            found = "not finite" if metric.value is None else f"{metric.value:.9g}"
            console.print(
                _verdict(False),
                f"{scenario.name}: {output.output}: {metric.name} {found}, expected {metric.gate}",
                highlight=False,
            )


def _verdict(passed: bool) -> Text:
    return Text("passed", style="green") if passed else Text("FAILED", style="bold red")
