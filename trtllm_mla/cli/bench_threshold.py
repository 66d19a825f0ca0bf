"""``trtllm-mla bench threshold``: where absorbed prefill stops paying."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, OUT, save_json, say_wrote
from trtllm_mla.cli.options import (
    CheckpointOption,
    ConfigOption,
    DirectoryArgument,
    ExecutorName,
    ExecutorOption,
    JsonFileOption,
    ThreadsOption,
    check_outputs,
    parse_numbers,
)


def threshold(
    directory: DirectoryArgument,
    checkpoint: CheckpointOption,
    thresholds: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Thresholds that the workload is served at.")
    ] = "1,64,128,256,512,1024",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt of the workload.")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Prompts served together.")] = 1,
    max_chunk_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens of one request in a step.", show_default=False)
    ] = None,
    chunk_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...",
            help="New tokens of the chunks that are measured in both forms; left out, 8 to 1024 as far as they fit.",
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...",
            help="Cached tokens before a chunk; left out, 0 and half of max_seq_len, at most 2048.",
            show_default=False,
        ),
    ] = None,
    executor: ExecutorOption = ExecutorName.ONNXRUNTIME,
    warmup: Annotated[int, typer.Option(help="Iterations before the clock starts.")] = 2,
    iterations: Annotated[int, typer.Option(help="Iterations that are measured, of the workload and of chunks.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the order.")] = 0,
    config: ConfigOption = None,
    threads: ThreadsOption = None,
    json: JsonFileOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw both tables (.svg, .png or .pdf).", show_default=False),
    ] = None,
) -> None:
    """Serve one workload at several prefill thresholds, time chunks in both forms, and recommend a threshold.

    Everything takes turns in random order. What is recommended holds for this executor, model and machine.

    Example: trtllm-mla bench threshold network -c examples/tiny-mla --iterations 20 --plot threshold.svg
    """
    from trtllm_mla.benchmark.latency import LatencyOptions
    from trtllm_mla.benchmark.plots import check_plot_path, draw_threshold_report, save_figure
    from trtllm_mla.benchmark.result_files import ThresholdBlock
    from trtllm_mla.benchmark.tables import print_threshold_report
    from trtllm_mla.benchmark.threshold import ThresholdOptions, bench_threshold
    from trtllm_mla.runtime.limits import find_limits

    options = ThresholdOptions(
        LatencyOptions(input_len, output_len, batch_size, warmup, iterations, seed),
        thresholds=tuple(parse_numbers("--thresholds", thresholds)),
        max_chunk_tokens=max_chunk_tokens,
        histories=None if history is None else tuple(parse_numbers("--history", history)),
        chunk_lengths=None if chunk_lengths is None else tuple(parse_numbers("--chunk-lengths", chunk_lengths)),
    )
    check_outputs({"--json": json, "--plot": plot})
    if plot is not None:
        check_plot_path(plot)
    with ERR.status("Loading") as status:
        report = bench_threshold(
            directory,
            checkpoint,
            executor,
            options,
            build=find_limits(directory, config),
            num_threads=threads,
            on_progress=status.update,
        )
    values = report.to_json()
    save_json(json, values)
    if plot is not None:
        block = ThresholdBlock.model_validate(values["trtllm_mla"]["threshold"])
        save_figure(draw_threshold_report(block), plot)
        say_wrote(plot)
    print_threshold_report(report, OUT)
