"""Printing calibrations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from trtllm_mla.calibration.calibrate import CalibrationReport
from trtllm_mla.calibration.scale_search import MARGIN


def to_json(report: CalibrationReport) -> dict[str, Any]:
    """A report as plain values."""
    return asdict(report)


def print_calibration(report: CalibrationReport, console: Console) -> None:
    """Prints what was chosen for each layer, and where it is."""
    table = Table(
        title=f"{report.kv_cache_dtype} latents of {report.tokens} tokens",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    for heading in ("layer", "largest", "error at 1", "scale", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, layer in enumerate(report.layers):
        table.add_row(
            str(number),
            f"{layer.amax:.4g}",
            f"{layer.error_before:.3%}",
            f"{layer.latent_scale:.6g}",
            f"{layer.error_after:.3%}",
        )
    console.print(f"executor: {report.executor}", highlight=False)
    console.print(table)
    console.print(
        "error: RMS of the difference that quantising makes, relative to the latents' RMS, over the half of the "
        f"tokens that the scale was not chosen by. A scale other than 1 lowers it by {MARGIN:.0%} or more.",
        highlight=False,
    )
    changed = sum(layer.latent_scale != 1.0 for layer in report.layers)
    console.print(
        f"{report.output_dir}: stored the outer scales of {len(report.layers)} layers, {changed} of them other than "
        "1. An engine has the scales of the network it was built from: build it again.",
        soft_wrap=True,
        highlight=False,
    )
