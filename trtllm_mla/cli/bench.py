"""``trtllm-mla bench``: measuring networks and engines."""

from __future__ import annotations

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

bench = typer.Typer(help="Measure a network or an engine.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    pass


@bench.command()
def latency(
    directory: DirectoryArgument,
    checkpoint: CheckpointOption,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Prompts served together.")] = 1,
    executor: ExecutorOption = ExecutorName.ONNXRUNTIME,
    warmup: Annotated[int, typer.Option(help="Batches served before the clock starts.")] = 2,
    iterations: Annotated[int, typer.Option(help="Batches that are measured.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0,
    config: ConfigOption = None,
    threads: ThreadsOption = None,
    json: JsonFileOption = None,
) -> None:
    """Time prefill and decode of a batch of random prompts.

    Example: trtllm-mla bench latency network -c examples/tiny-mla --input-len 128 --output-len 32 --batch-size 4
    """
    from trtllm_mla.benchmark.latency import LatencyOptions, bench_latency
    from trtllm_mla.benchmark.report import print_latency_report
    from trtllm_mla.cli.limits import find_limits
    from trtllm_mla.files import check_writable

    if json:
        check_writable(json)
    options = LatencyOptions(input_len, output_len, batch_size, warmup, iterations, seed)
    with ERR.status("Loading") as status:
        report = bench_latency(
            directory,
            checkpoint,
            executor,
            options,
            build=find_limits(directory, config),
            num_threads=threads,
            on_progress=status.update,
        )
    print_latency_report(report, OUT)
    save_json(json, report.to_json())
