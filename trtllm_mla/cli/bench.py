"""``trtllm-mla bench``: measuring networks and engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_mla.cli.bench_compare import compare
from trtllm_mla.cli.bench_dataset import prepare_dataset
from trtllm_mla.cli.bench_endpoint import endpoint
from trtllm_mla.cli.bench_threshold import threshold
from trtllm_mla.cli.console import ERR, OUT, save_json, say_wrote
from trtllm_mla.cli.options import (
    CheckpointOption,
    ConfigOption,
    CudaGraphOption,
    DirectoryArgument,
    ExecutorName,
    ExecutorOption,
    JsonFileOption,
    ThreadsOption,
    check_outputs,
)
from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from trtllm_mla.benchmark.records import RequestRecord
    from trtllm_mla.benchmark.report import ServingProgress
    from trtllm_mla.benchmark.throughput import ServingReport
    from trtllm_mla.config import BuildConfig

bench = typer.Typer(help="Measure a network, an engine or a server.", no_args_is_help=True)
bench.add_typer(prepare_dataset, name="prepare-dataset")
bench.command()(endpoint)
bench.command()(threshold)
bench.command()(compare)


class PolicyName(StrEnum):
    """When a waiting request is admitted, under TensorRT-LLM's names."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


RequestLogOption = Annotated[
    Path | None,
    typer.Option(
        "--request-log",
        metavar="FILE",
        help="Also write a line of JSON for each request, with the moments of its tokens.",
        show_default=False,
    ),
]
NumRequestsOption = Annotated[
    int | None, typer.Option(help="Requests taken from the dataset; left out, all.", show_default=False)
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option(
        "--ignore-eos/--stop-at-eos",
        help="Whether stop tokens are ignored, as in trtllm-bench, so that each request has all its output_tokens.",
    ),
]


@bench.callback()
def _group() -> None:
    pass


@bench.command()
def throughput(
    directory: DirectoryArgument,
    checkpoint: CheckpointOption,
    dataset: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Dataset in trtllm-bench's format (see prepare-dataset).", show_default=False
        ),
    ],
    num_requests: NumRequestsOption = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Requests in flight at most; left out, there is no limit.", show_default=False),
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(help="Requests per second, as a Poisson process; inf lets each come as soon as it may."),
    ] = math.inf,
    warmup: Annotated[
        int, typer.Option(help="Requests served before the clock starts: the dataset's lengths, random prompts.")
    ] = 2,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Report times to first token and per output token.")
    ] = False,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Requests in one step, instead of the build config's.", show_default=False)
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option(help="New tokens in one step, instead of the build config's.", show_default=False)
    ] = None,
    policy: Annotated[
        PolicyName,
        typer.Option(
            help="guaranteed_no_evict admits a request when all its pages are sure to be had; max_utilization when "
            "its next ones are free, and takes them from the youngest when they run out."
        ),
    ] = PolicyName.GUARANTEED_NO_EVICT,
    block_reuse: Annotated[
        bool, typer.Option("--block-reuse/--no-block-reuse", help="Share the pages of prompts that begin alike.")
    ] = True,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the cache has room for, rounded up to pages; left out, those of the largest requests "
            "that can run together.",
            show_default=False,
        ),
    ] = None,
    num_pages: Annotated[
        int | None, typer.Option(help="The same in pages, instead of --cache-tokens.", show_default=False)
    ] = None,
    executor: ExecutorOption = ExecutorName.ONNXRUNTIME,
    ignore_eos: IgnoreEosOption = True,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and of the warm-up's prompts.")] = 0,
    config: ConfigOption = None,
    threads: ThreadsOption = None,
    cuda_graph: CudaGraphOption = True,
    json: JsonFileOption = None,
    request_log: RequestLogOption = None,
) -> None:
    """Serve a dataset with in-flight batching, and report as trtllm-bench does.

    Stop tokens are ignored unless --stop-at-eos is given.

    Example: trtllm-mla bench throughput network -c examples/tiny-mla --dataset data.jsonl --concurrency 16 --streaming
    """
    from trtllm_mla.benchmark.throughput import ServingOptions, bench_dataset
    from trtllm_mla.runtime.limits import find_limits
    from trtllm_mla.runtime.scheduler import SchedulingPolicy

    limits = _override(
        directory, find_limits(directory, config), {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens}
    )
    options = ServingOptions(
        num_requests=num_requests,
        concurrency=concurrency,
        request_rate=request_rate,
        warmup=warmup,
        streaming=streaming,
        ignore_eos=ignore_eos,
        policy=SchedulingPolicy(policy),
        enable_block_reuse=block_reuse,
        num_pages=num_pages,
        cache_tokens=cache_tokens,
        seed=seed,
    )

    def run(progress: ServingProgress) -> ServingReport:
        return bench_dataset(
            directory,
            checkpoint,
            executor,
            dataset,
            options,
            build=limits,
            num_threads=threads,
            use_cuda_graph=cuda_graph,
            on_phase=progress.phase,
            on_progress=progress.update,
        )

    _serve(run, json, request_log)


@bench.command()
def latency(
    directory: DirectoryArgument,
    checkpoint: CheckpointOption,
    input_len: Annotated[
        int | None, typer.Option(help="Tokens of each prompt.  [default: 128]", show_default=False)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="New tokens of each prompt.  [default: 32]", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts served together.  [default: 1]", show_default=False)
    ] = None,
    executor: ExecutorOption = ExecutorName.ONNXRUNTIME,
    warmup: Annotated[int, typer.Option(help="Batches, or requests of a dataset, before the clock starts.")] = 2,
    iterations: Annotated[
        int | None, typer.Option(help="Batches that are measured.  [default: 10]", show_default=False)
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Serve the requests of a dataset, one at a time, instead of batches of one length.",
            show_default=False,
        ),
    ] = None,
    num_requests: NumRequestsOption = None,
    ignore_eos: IgnoreEosOption = True,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0,
    config: ConfigOption = None,
    threads: ThreadsOption = None,
    cuda_graph: CudaGraphOption = True,
    json: JsonFileOption = None,
    request_log: RequestLogOption = None,
) -> None:
    """Time prefill and decode of a batch of random prompts, or a dataset's requests one at a time.

    Stop tokens are ignored, unless --stop-at-eos is given with --dataset.

    Example: trtllm-mla bench latency network -c examples/tiny-mla --input-len 128 --output-len 32 --batch-size 4
    """
    from trtllm_mla.benchmark.latency import LatencyOptions, bench_latency
    from trtllm_mla.benchmark.report import print_latency_report
    from trtllm_mla.benchmark.throughput import ServingOptions, bench_dataset
    from trtllm_mla.runtime.limits import find_limits

    batch = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size, "iterations": iterations}
    given = [f"--{name.replace('_', '-')}" for name, value in batch.items() if value is not None]
    limits = find_limits(directory, config)
    if dataset is not None:
        if given:
            raise UserError(f"{given[0]}: found beside --dataset, whose requests say their lengths. Leave one out.")
        serving = ServingOptions(
            num_requests=num_requests, concurrency=1, warmup=warmup, streaming=True, ignore_eos=ignore_eos, seed=seed
        )

        def run(progress: ServingProgress) -> ServingReport:
            return bench_dataset(
                directory,
                checkpoint,
                executor,
                dataset,
                serving,
                kind="latency",
                build=limits,
                num_threads=threads,
                use_cuda_graph=cuda_graph,
                on_phase=progress.phase,
                on_progress=progress.update,
            )

        _serve(run, json, request_log)
        return
    for name, found in (("--num-requests", num_requests is not None), ("--stop-at-eos", not ignore_eos)):
        if found:
            raise UserError(f"{name}: found without --dataset, expected with it. Leave it out, or name a dataset.")
    check_outputs({"--json": json, "--request-log": request_log})
    options = LatencyOptions(
        128 if input_len is None else input_len,
        32 if output_len is None else output_len,
        1 if batch_size is None else batch_size,
        warmup,
        10 if iterations is None else iterations,
        seed,
    )
    with ERR.status("Loading") as status:
        report = bench_latency(
            directory,
            checkpoint,
            executor,
            options,
            build=limits,
            num_threads=threads,
            use_cuda_graph=cuda_graph,
            on_progress=status.update,
        )
    save_json(json, report.to_json())
    _save_request_log(request_log, report.records)
    print_latency_report(report, OUT)


def _serve(run: Callable[[ServingProgress], ServingReport], json: Path | None, request_log: Path | None) -> None:
    """Runs a benchmark of a dataset, prints its report, and writes what was asked for."""
    from trtllm_mla.benchmark.report import ServingProgress, print_serving_report

    check_outputs({"--json": json, "--request-log": request_log})
    with ServingProgress(ERR) as progress:
        report = run(progress)
    values = report.to_json()
    save_json(json, values)
    _save_request_log(request_log, report.outcome.records)
    print_serving_report(values, OUT)


def _save_request_log(path: Path | None, records: list[RequestRecord]) -> None:
    from trtllm_mla.benchmark.records import write_request_log

    if path is not None:
        write_request_log(path, records)
        say_wrote(path)


def _override(path: Path, limits: BuildConfig, values: dict[str, int | None]) -> BuildConfig:
    """Puts limits of the command line in the place of those of a network; those of an engine can only be lowered."""
    from trtllm_mla.config import BuildConfig, parse_config
    from trtllm_mla.engine.directory import EngineDirectory

    changes = {name: value for name, value in values.items() if value is not None}
    if not changes:
        return limits
    for name, value in changes.items():
        most = getattr(limits, name)
        if EngineDirectory.is_engine(path) and value > most:
            raise UserError(
                f"--{name.replace('_', '-')}: found {value}, expected at most {most}, which {path} was built for. Ask "
                "for less, or build again."
            )
    # What an engine is tuned for plays no part in running it, and may be above the new limits.
    kept = limits.model_dump(exclude={"opt_batch_size", "opt_num_tokens"}, exclude_unset=True)
    return parse_config({**kept, **changes}, BuildConfig, source="command line")
