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
from trtllm_mla.validation.comparison import OutputComparison
from trtllm_mla.validation.runners import LATENT_PREFIX
from trtllm_mla.validation.validate import ScenarioResult, ValidationReport

_COLUMNS = (
    ("cosine", "1 - cos"),
    ("norm_ratio", "norm - 1"),
    ("max_abs_error", "max err"),
    ("mean_abs_error", "mean err"),
    ("greedy_agreement", "greedy"),
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
    for scenario in report.scenarios:
        for output in scenario.outputs:
            _print_failures(scenario, output, console)
    for greedy in report.greedy:
        prompts = ", ".join(str(length) for length in greedy.prompt_lengths)
        console.print(
            _verdict(greedy.passed),
            f"greedy decode, prompts of {prompts} tokens served together, {greedy.name}: {greedy.matching} of "
            f"{greedy.total} tokens as transformers' generate{'' if greedy.required else ' (not required)'}",
            highlight=False,
        )
    if report.perplexity is not None:
        item = report.perplexity
        console.print(
            _verdict(item.passed),
            f"perplexity over {item.executor.tokens} tokens: {item.executor.perplexity:.6g}, reference "
            f"{item.reference.perplexity:.6g}, relative difference {item.deviation:.2g} (<= {item.max_deviation:g})",
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
        outputs = [output for output in scenario.outputs if output.output != LOGITS]
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


def _scenario_table(report: ValidationReport, *, layers: bool) -> Table:
    rows = "each layer's rows" if layers else "the rows of the layer that is furthest off"
    table = Table(
        title=f"\nTeacher-forced, {report.scenarios[0].tokens} tokens a scenario, {report.arithmetic} gates",
        caption=f"max err, mean err: largest and mean absolute difference; cache: {rows}",
        **_TABLE_STYLE,
    )
    for heading in ("scenario", "output"):
        table.add_column(heading, no_wrap=True)
    for _, heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for scenario in report.scenarios:
        for row, (label, output) in enumerate(_rows(scenario, layers=layers)):
            cells = [_cell(name, output.value(name)) for name, _ in _COLUMNS]
            table.add_row("" if row else scenario.name, label, *cells, _verdict(output.passed))
    return table


def _rows(scenario: ScenarioResult, *, layers: bool) -> list[tuple[str, OutputComparison]]:
    logits = [(output.output, output) for output in scenario.outputs if output.output == LOGITS]
    caches = [output for output in scenario.outputs if output.output != LOGITS]
    shown = caches if layers else [max(caches, key=_badness)]
    return logits + [(f"cache {item.output.removeprefix(LATENT_PREFIX)}", item) for item in shown]


def _badness(output: OutputComparison) -> tuple[bool, float]:
    error = output.value("relative_mean_error")
    return not output.passed, float("inf") if error is None else error


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "" if name == "greedy_agreement" else "n/a"
    if name == "greedy_agreement":
        return f"{value:.1%}"
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
