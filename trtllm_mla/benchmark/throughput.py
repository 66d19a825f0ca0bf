"""Throughput and latency of a network or an engine on a dataset: many requests in flight, or one at a time.

The clock encloses all that a server does for requests except their text: waiting for their turn, scheduling, packing
of the inputs, the executor, the choice of tokens. It starts after the warm-up and does not enclose loading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trtllm_mla.benchmark import metrics
from trtllm_mla.benchmark.dataset import DatasetEntry, check_entries, dataset_sha256, load_dataset
from trtllm_mla.benchmark.driver import (
    Load,
    Outcome,
    Progress,
    check_request_rate,
    poisson_arrivals,
    serve,
    warmup_requests,
)
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.benchmark.subject import ExecutorInfo, Subject, counts_json, open_model, report_head, report_identity
from trtllm_mla.config import BuildConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import GenerationSession
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.scheduler import SchedulerConfig, SchedulerStatistics, SchedulingPolicy

TIMER = (
    "wall clock of this process (perf_counter), from the first arrival to the last token: waiting, scheduling, "
    "packing of inputs, the executor, greedy choice of tokens; not loading, tokenisation, warm-up"
)


@dataclass(frozen=True)
class ServingOptions:
    """How a dataset is served.

    Attributes:
        num_requests: Requests taken from the dataset; None is all.
        concurrency: Requests in flight at most; None is no limit.
        request_rate: Requests per second that arrive, as a Poisson process; infinity lets each come as soon as it may.
        warmup: Requests served before the clock starts, of the dataset's lengths with random prompts.
        streaming: Whether the report has the times of first and further tokens.
        ignore_eos: Whether stop tokens are ignored, so that each request has all the new tokens it asks for.
        policy: When a waiting request is admitted.
        enable_block_reuse: Whether requests share the pages of a common beginning.
        num_pages: Pages of the pool; None is as many as the largest requests that can run together need.
        cache_tokens: The same in tokens, instead of ``num_pages``; rounded up to pages.
        seed: Decides the arrivals and the warm-up's prompts.
    """

    num_requests: int | None = None
    concurrency: int | None = None
    request_rate: float = math.inf
    warmup: int = 2
    streaming: bool = False
    ignore_eos: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.GUARANTEED_NO_EVICT
    enable_block_reuse: bool = True
    num_pages: int | None = None
    cache_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"num_requests": 1, "concurrency": 1, "num_pages": 1, "cache_tokens": 1, "warmup": 0, "seed": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name}: found {value}, expected at least {least}.")
        if self.num_pages is not None and self.cache_tokens is not None:
            raise UserError("num_pages and cache_tokens: found both, expected one of them or neither.")
        check_request_rate(self.request_rate)

    def to_json(self) -> dict[str, Any]:
        """The options as plain values; a rate without pauses is None."""
        rate = self.request_rate if math.isfinite(self.request_rate) else None
        return {**asdict(self), "policy": str(self.policy), "request_rate": rate}

    def load(self, num_requests: int) -> Load:
        """When requests arrive."""
        if math.isinf(self.request_rate):
            return Load(self.concurrency)
        return Load(self.concurrency, poisson_arrivals(num_requests, self.request_rate, seed=self.seed))


@dataclass(frozen=True)
class DatasetInfo:
    """The dataset that was served, for the report.

    Attributes:
        path: Its file.
        sha256: Hash of the file.
        lengths: Prompt tokens and new tokens of each request that was taken from it.
    """

    path: str
    sha256: str
    lengths: list[tuple[int, int]]


@dataclass(frozen=True)
class ServingReport:
    """What serving a dataset came to.

    Attributes:
        kind: The command: ``throughput``, or ``latency`` for one request at a time.
        subject: What was measured.
        executor: What ran it.
        options: How it was measured.
        config: Limits that it ran under.
        machine: What it ran on.
        dataset: What was served.
        outcome: What became of each request.
        statistics: The scheduler's counts, without the warm-up.
    """

    kind: Literal["throughput", "latency"]
    subject: Subject
    executor: ExecutorInfo
    options: ServingOptions
    config: SchedulerConfig
    machine: Machine
    dataset: DatasetInfo
    outcome: Outcome
    statistics: SchedulerStatistics

    def to_json(self) -> dict[str, Any]:
        """The report as plain values. Blocks and keys are trtllm-bench's where it has them; ours are in one more."""
        records = self.outcome.records
        rate = metrics.issue_rate(records)
        blocks = {
            **report_head(self.subject, self.executor, self.config, self.machine, issue_rate=rate),
            "request_info": metrics.request_info(records),
            "performance": metrics.performance(records),
        }
        if self.options.streaming:
            blocks["streaming_metrics"] = metrics.streaming_metrics(records)
        return {**blocks, "dataset": metrics.dataset(self.dataset.lengths), "trtllm_mla": self._own_block()}

    def _own_block(self) -> dict[str, Any]:
        counts, steps = self.statistics, self.outcome.steps
        page_bytes = self.config.page_size * self.executor.footprint(self.subject.spec).latent
        return {
            **report_identity(self.kind, self.subject, self.executor, self.config, self.machine, TIMER),
            "options": {
                "dataset": self.dataset.path,
                "dataset_sha256": self.dataset.sha256,
                **self.options.to_json(),
            },
            "cache_bytes_peak": counts.peak_pages_in_use * page_bytes,
            **counts_json(counts),
            "steps": asdict(steps),
            "requests": [record.to_json() for record in self.outcome.records],
            "timeline": self.outcome.timeline.to_json(),
        }


def bench_dataset(
    directory: Path,
    checkpoint: Path,
    executor_name: str,
    dataset: Path,
    options: ServingOptions,
    *,
    kind: Literal["throughput", "latency"] = "throughput",
    build: BuildConfig | None = None,
    num_threads: int | None = None,
    use_cuda_graph: bool = True,
    on_phase: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ServingReport:
    """Serves a dataset on a network or an engine.

    Args:
        directory: A network or an engine directory.
        checkpoint: A Hugging Face directory with the weights.
        executor_name: What runs the network; a key of ``EXECUTORS``.
        dataset: The dataset's file.
        options: How to serve it.
        kind: What the report is called.
        build: Limits of steps and requests; left out, the defaults of a build config.
        num_threads: Threads of an operator, where the executor computes on the CPU.
        use_cuda_graph: Whether decode steps are captured in CUDA graphs, where the executor computes on a GPU.
        on_phase: Called with a line before each part.
        on_progress: Called after each step on the clock.

    Raises:
        UserError: A directory or the dataset is unusable, the executor cannot run here, or a request does not fit the
            limits.
    """
    build = build or BuildConfig()
    say = on_phase or (lambda _: None)
    network, opened = open_model(directory, checkpoint, build)
    say("Reading the dataset")
    vocab_size = network.spec.vocab_size
    entries = load_dataset(dataset, vocab_size=vocab_size, checkpoint=checkpoint, max_requests=options.num_requests)
    config = SchedulerConfig.from_build_config(
        build,
        network.plugin,
        vocab_size=vocab_size,
        num_pages=_pool_for(entries, options, build, network.plugin.page_size),
        policy=options.policy,
        enable_block_reuse=options.enable_block_reuse,
    )
    check_entries(dataset, entries, config)
    say(f"Loading {executor_name}")
    executor = make_executor(
        executor_name,
        network,
        opened,
        num_pages=config.num_pages,
        num_threads=num_threads,
        use_cuda_graph=use_cuda_graph,
    )
    try:
        outcome, statistics = serve_entries(
            executor,
            config,
            entries,
            options,
            stop_token_ids=frozenset(network.spec.eos_token_ids),
            on_phase=say,
            on_progress=on_progress,
        )
        return ServingReport(
            kind=kind,
            subject=Subject.of(network, checkpoint),
            executor=ExecutorInfo.of(executor),
            options=options,
            config=config,
            machine=Machine.here(),
            dataset=DatasetInfo(str(dataset), dataset_sha256(dataset), [entry.lengths for entry in entries]),
            outcome=outcome,
            statistics=statistics,
        )
    finally:
        executor.close()


def serve_entries(
    executor: Executor,
    config: SchedulerConfig,
    entries: Sequence[DatasetEntry],
    options: ServingOptions,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    on_phase: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[Outcome, SchedulerStatistics]:
    """Serves requests on an executor, after a warm-up.

    The warm-up has a session of its own: what it leaves in the cache is found by no measured request.

    Args:
        executor: What runs the steps.
        config: Limits of steps and requests; its pool is the executor's.
        entries: The requests, in the order of their arrival.
        options: How to serve them.
        stop_token_ids: Tokens that end a request, unless ``options.ignore_eos``.
        on_phase: Called with a line before each part.
        on_progress: Called after each step on the clock.

    Returns:
        What became of each request, and the scheduler's counts.
    """
    stop = frozenset[int]() if options.ignore_eos else stop_token_ids
    requests = [Request(entry.input_ids, entry.output_tokens, stop_token_ids=stop) for entry in entries]
    say = on_phase or (lambda _: None)
    if options.warmup:
        say(f"Warming up with {options.warmup} requests")
        warmup = warmup_requests(requests, options.warmup, vocab_size=config.vocab_size, seed=options.seed)
        serve(GenerationSession(executor, config), warmup, Load(options.concurrency))
    session = GenerationSession(executor, config)
    say(f"Serving {len(requests)} requests")
    outcome = serve(
        session,
        requests,
        options.load(len(requests)),
        task_ids=[entry.task_id for entry in entries],
        on_progress=on_progress,
    )
    return outcome, session.statistics


def pages_for_entries(entries: Sequence[DatasetEntry], page_size: int, *, at_most: int) -> int:
    """Pages that the ``at_most`` largest requests need together."""
    needs = sorted((pages_for(sum(entry.lengths), page_size) for entry in entries), reverse=True)
    return sum(needs[:at_most])


def _pool_for(entries: Sequence[DatasetEntry], options: ServingOptions, build: BuildConfig, page_size: int) -> int:
    if options.num_pages is not None:
        return options.num_pages
    if options.cache_tokens is not None:
        return pages_for(options.cache_tokens, page_size)
    at_most = min(build.max_batch_size, options.concurrency or build.max_batch_size)
    wanted = pages_for_entries(entries, page_size, at_most=at_most)
    # A request beyond max_seq_len is refused afterwards, before a pool of its size is made.
    return min(wanted, at_most * pages_for(build.max_seq_len, page_size))
