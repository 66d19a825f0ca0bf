"""Checks and times decode steps with CUDA graphs on one GPU, beside the same steps without.

    python bench/cuda_graph_check.py demo-output/engine --checkpoint examples/tiny-mla --json graphs.json
    python bench/cuda_graph_check.py demo-output/engine --checkpoint examples/tiny-mla --dry-run   # no GPU

The engine is loaded twice, one after the other. Each time, batches of requests of unequal lengths are prefilled, and
then given the same tokens, one a step: first to compare the logits of every step and the cache afterwards, then again
to time the steps, which write the same rows. Steps with graphs are padded to their bucket, so that products may run in
other kernels, which round differently: ``TOLERANCE`` allows for that.

A dry run interprets the kernels on the CPU, pads the steps, and compares; there is no graph, and nothing is timed.

The exit status is 1 if a comparison fails or a step that should have been a graph was none, 2 if it cannot run here.
Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.config import BuildConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.errors import UserError
from trtllm_mla.files import check_writable, write_json
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.runtime.decode_buckets import DecodeBuckets, pad_decode
from trtllm_mla.runtime.executors.base import Executor, Float32Array
from trtllm_mla.runtime.executors.decode_graphs import GraphStatistics
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.step import Chunk, ContextPasses, LogitRows, StepInputs, build_step

# Norm of the difference of logits over their norm: fp32 sums in another order, a percent of roundings in 16 bits.
TOLERANCE = {DType.FLOAT32: 1e-5, DType.FLOAT16: 1e-2, DType.BFLOAT16: 2e-2}
REPEATS = 5


@dataclass(frozen=True)
class Workload:
    """A batch of requests.

    Attributes:
        prompts: Token ids of each.
        tokens: Token of each request in each decode step: [steps, requests].
    """

    prompts: list[Any]
    tokens: Any

    @classmethod
    def random(cls, requests: int, longest: int, steps: int, vocab_size: int, seed: int) -> Workload:
        """Prompts of 1 to ``longest`` tokens, of which one has all."""
        generator = np.random.default_rng([seed, requests])
        lengths = [longest, *generator.integers(1, longest + 1, requests - 1)]
        prompts = [generator.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]
        return cls(prompts, generator.integers(0, vocab_size, (steps, requests), dtype=np.int32))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]


@dataclass(frozen=True)
class Run:
    """What one executor did with a workload.

    Attributes:
        logits: [steps, requests, vocab_size].
        caches: Pool of each layer afterwards.
        step_ms: Milliseconds of each timed decode step.
    """

    logits: Float32Array
    caches: list[Float32Array]
    step_ms: list[float]


@dataclass(frozen=True)
class Comparison:
    """A workload with graphs beside without.

    Attributes:
        requests: How many.
        longest: Tokens of the longest prompt.
        error: Norm of the difference of logits over their norm.
        equal_tokens: Share of steps and requests whose likeliest token is the same.
        cache_error: The same as ``error``, of the cached rows; NaN where other slots are written.
        eager_ms: Median milliseconds of a step without graphs; None in a dry run.
        graph_ms: With graphs.
    """

    requests: int
    longest: int
    error: float
    equal_tokens: float
    cache_error: float
    eager_ms: float | None
    graph_ms: float | None

    def passed(self, dtype: DType) -> bool:
        """Whether logits and cache agree."""
        return self.error <= TOLERANCE[dtype] and self.cache_error <= TOLERANCE[dtype]


class PaddedExecutor:
    """An executor whose decode steps are padded as those of a graph, for a dry run."""

    def __init__(self, executor: Executor, buckets: DecodeBuckets) -> None:
        self._executor, self._buckets, self._padded = executor, buckets, 0

    @property
    def graph_statistics(self) -> GraphStatistics:
        """Padded steps, under the name of what they stand for."""
        return GraphStatistics(num_replayed=self._padded)

    def run(self, step: StepInputs) -> Float32Array:
        """Runs a step; see ``Executor.run``."""
        bucket = self._buckets.find(step)
        if bucket is None:
            return self._executor.run(step)
        self._padded += 1
        return self._executor.run(pad_decode(step, bucket))[: len(step.last_token_ids)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def main() -> int:
    """Runs the check, prints a table, and returns the exit status."""
    arguments = parse_arguments()
    try:
        return check(arguments)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="engine directory; for a dry run a network directory as well")
    parser.add_argument("--checkpoint", "-c", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--batch-sizes", default="1,2,3,5,8,11,16", help="requests in a batch, comma-separated")
    parser.add_argument("--input-len", type=int, default=100, help="tokens of the longest prompt")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of each batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="padding alone, in Triton's interpreter")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> int:
    """Loads, runs, compares and prints."""
    if arguments.json is not None:
        check_writable(arguments.json)
    network = NetworkDirectory.load(arguments.engine)
    limits = BuildConfig()
    if EngineDirectory.is_engine(arguments.engine):
        limits = EngineDirectory.load(arguments.engine).config
    if not network.plugin.enable_matrix_absorption:
        raise UserError(f"{arguments.engine}: found no matrix absorption, without which there are no CUDA graphs.")
    workloads = make_workloads(arguments, network, limits)
    passes = ContextPasses(network.plugin.max_context_passes, limits.max_context_kv_tokens)

    def make(*, use_cuda_graph: bool) -> Any:
        page_size = network.plugin.page_size
        longest = arguments.input_len + arguments.steps
        executor = make_executor(
            "interpreter" if arguments.dry_run else "tensorrt",
            network,
            Checkpoint.open(arguments.checkpoint),
            num_pages=max(len(item.prompts) for item in workloads) * pages_for(longest, page_size),
            use_cuda_graph=use_cuda_graph,
        )
        if arguments.dry_run and use_cuda_graph:
            return PaddedExecutor(executor, DecodeBuckets(limits.max_batch_size, pages_for(longest, page_size)))
        return executor

    runs, statistics, description, dtype = [], None, "", network.dtype
    for use_cuda_graph in (False, True):
        executor = make(use_cuda_graph=use_cuda_graph)
        try:
            runs.append(
                [run(executor, item, passes, network.num_layers, timed=not arguments.dry_run) for item in workloads]
            )
            if use_cuda_graph:
                statistics = executor.graph_statistics
            description, dtype = executor.description, executor.dtype
        finally:
            executor.close()
    comparisons = [compare(*items) for items in zip(workloads, *runs, strict=True)]

    console = Console(width=100)
    console.print(make_table(comparisons, dtype))
    console.print(description, highlight=False, soft_wrap=True)
    if arguments.dry_run:
        console.print("Dry run: padded steps in the interpreter. No GPU, no graph, no times.", highlight=False)
    launched = statistics is not None and statistics.num_replayed > 0
    if statistics is not None and not arguments.dry_run:
        # A graph is captured at the first step of its bucket, which is enqueued.
        launched = launched and statistics.num_eager == statistics.num_captured
        console.print(
            f"{statistics.num_captured} graphs captured; {statistics.num_replayed} decode steps launched as graphs, "
            f"{statistics.num_eager} enqueued.",
            highlight=False,
        )
    if not launched:
        console.print("FAILED: not every decode step was launched as a graph", highlight=False)
    if arguments.json is not None:
        values = {
            "executor": description,
            "dry_run": arguments.dry_run,
            "statistics": None if statistics is None else asdict(statistics),
            "machine": asdict(Machine.here()),
            "batches": [asdict(item) for item in comparisons],
        }
        write_json(arguments.json, values)
    return 0 if launched and all(item.passed(dtype) for item in comparisons) else 1


def make_workloads(arguments: argparse.Namespace, network: NetworkDirectory, limits: BuildConfig) -> list[Workload]:
    """A workload for each batch size that the limits allow."""
    try:
        sizes = [int(item[:20]) for item in arguments.batch_sizes.split(",")]
    except ValueError:
        raise UserError(
            f"--batch-sizes: found '{arguments.batch_sizes:.40}', expected numbers such as 1,3,8."
        ) from None
    for name in ("input_len", "steps"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: found {getattr(arguments, name)}, expected at least 1.")
    longest = arguments.input_len + arguments.steps
    longest_prompt = min(limits.max_num_tokens, limits.max_context_kv_tokens)
    if longest > limits.max_seq_len or arguments.input_len > longest_prompt:
        raise UserError(
            f"--input-len {arguments.input_len}, --steps {arguments.steps}: found {longest} tokens, expected at most "
            f"{limits.max_seq_len}, and prompts of at most {longest_prompt}: the limits of the engine. Ask for fewer."
        )
    sizes = [size for size in sizes if 1 <= size <= limits.max_batch_size]
    if not sizes:
        raise UserError(
            f"--batch-sizes {arguments.batch_sizes}: found none of 1 to {limits.max_batch_size}, the engine's "
            "max_batch_size. Name others."
        )
    return [
        Workload.random(size, arguments.input_len, arguments.steps, network.spec.vocab_size, arguments.seed)
        for size in sizes
    ]


def run(executor: Any, workload: Workload, passes: ContextPasses, num_layers: int, *, timed: bool) -> Run:
    """Prefills a batch, decodes it, and decodes it again on the clock."""
    tables = make_tables(workload, executor.page_size)

    def build(context: list[Chunk], generation: list[Chunk]) -> StepInputs:
        return build_step(
            context,
            generation,
            page_size=executor.page_size,
            num_pages=executor.num_pages,
            context_passes=passes,
        )

    for prompt, pages in zip(workload.prompts, tables, strict=True):
        executor.run(build([Chunk(prompt, 0, pages, LogitRows.NONE)], []))
    steps = [
        build(
            [],
            [
                Chunk(tokens[request : request + 1], length + number, tables[request])
                for request, length in enumerate(workload.lengths)
            ],
        )
        for number, tokens in enumerate(workload.tokens)
    ]
    logits = np.stack([executor.run(step) for step in steps])
    caches = [executor.read_cache(layer) for layer in range(num_layers)]
    times = []
    for step in steps * REPEATS if timed else ():
        begin = time.perf_counter()
        executor.run(step)
        times.append((time.perf_counter() - begin) * 1e3)
    return Run(logits, caches, times)


def make_tables(workload: Workload, page_size: int) -> list[Any]:
    """Pages of each request, dealt out in turn."""
    needed = [pages_for(length + len(workload.tokens), page_size) for length in workload.lengths]
    ends = np.cumsum(needed)
    return [np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, needed, strict=True)]


def compare(workload: Workload, eager: Run, graph: Run) -> Comparison:
    """Compares logits and caches."""
    return Comparison(
        requests=len(workload.prompts),
        longest=max(workload.lengths),
        error=relative_error(graph.logits, eager.logits),
        equal_tokens=float((graph.logits.argmax(-1) == eager.logits.argmax(-1)).mean()),
        cache_error=max(cache_error(*layer) for layer in zip(graph.caches, eager.caches, strict=True)),
        eager_ms=median(eager.step_ms) if eager.step_ms else None,
        graph_ms=median(graph.step_ms) if graph.step_ms else None,
    )


def cache_error(found: Float32Array, expected: Float32Array) -> float:
    """Relative error of the written slots. Those that were never written hold NaN, and have to be the same."""
    written = ~np.isnan(expected)
    if not np.array_equal(written, ~np.isnan(found)):
        return float("nan")
    return relative_error(found[written], expected[written])


def relative_error(found: Float32Array, expected: Float32Array) -> float:
    """Norm of the difference over the norm of ``expected``."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def make_table(comparisons: Sequence[Comparison], dtype: DType) -> Table:
    """The report as a table."""
    table = Table(title="Decode steps with CUDA graphs beside the same steps without")
    for name in ("requests", "longest", "logits", "same token", "cache", "eager, ms", "graph, ms", "ratio", ""):
        table.add_column(name, justify="right")
    for item in comparisons:
        times = ("", "", "")
        if item.eager_ms is not None and item.graph_ms is not None:
            times = (f"{item.eager_ms:.3f}", f"{item.graph_ms:.3f}", f"{item.eager_ms / item.graph_ms:.2f}")
        table.add_row(
            str(item.requests),
            str(item.longest),
            f"{item.error:.1e}",
            f"{item.equal_tokens:.1%}",
            f"{item.cache_error:.1e}",
            *times,
            "" if item.passed(dtype) else "FAILED",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
