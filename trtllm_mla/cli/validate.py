"""``trtllm-mla validate``: a network or an engine against the checkpoint's PyTorch model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, OUT, save_json
from trtllm_mla.cli.options import (
    CheckpointOption,
    ConfigOption,
    DirectoryArgument,
    ExecutorName,
    ExecutorOption,
    JsonFileOption,
    ThreadsOption,
)

COMPARISON_FAILED = 1
QUICK_LENGTHS = (9, 5)
QUICK_GREEDY_TOKENS = 4


def validate(
    directory: DirectoryArgument,
    checkpoint: CheckpointOption,
    executor: ExecutorOption = ExecutorName.ONNXRUNTIME,
    layers: Annotated[bool, typer.Option("--layers", help="Print a row for the cache of each layer.")] = False,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Also compare perplexities of this text.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few and short prompts: for the interpreter, which is slow.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw each layer's error (.png, .svg, .pdf).", show_default=False),
    ] = None,
    config: ConfigOption = None,
    threads: ThreadsOption = None,
    json: JsonFileOption = None,
) -> None:
    """Compare logits, cache rows and tokens with the PyTorch model; exit status 1 if they differ.

    Example: trtllm-mla validate network --checkpoint examples/tiny-mla --json report.json
    """
    from trtllm_mla.files import check_writable
    from trtllm_mla.runtime.limits import find_limits
    from trtllm_mla.validation.report import check_plot, plot_errors, print_report
    from trtllm_mla.validation.scenarios import fit_lengths
    from trtllm_mla.validation.validate import ValidationOptions
    from trtllm_mla.validation.validate import validate as validate_directory

    if plot:
        check_plot(plot)
    for path in (json, plot):
        if path:
            check_writable(path)
    limits = find_limits(directory, config)
    options = ValidationOptions(seed=seed)
    if quick:
        options = replace(options, lengths=fit_lengths(QUICK_LENGTHS, limits), greedy_tokens=QUICK_GREEDY_TOKENS)
    with ERR.status("Validating") as status:
        report = validate_directory(
            directory,
            checkpoint,
            executor,
            build=limits,
            options=options,
            perplexity_text=text,
            num_threads=threads,
            on_progress=status.update,
        )
    print_report(report, OUT, layers=layers)
    if plot:
        plot_errors(report, plot)
    save_json(json, report.to_json())
    if not report.passed:
        raise typer.Exit(COMPARISON_FAILED)
