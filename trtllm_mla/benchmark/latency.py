"""Latency of a network or an engine: prefill and decode timed apart.

A batch of random prompts of one length is served to a fixed number of new tokens, again and again. The clock
encloses all that a server does for a request except its text: scheduling, packing of the inputs, the executor, the
choice of tokens. It does not enclose loading, the making of prompts, and the warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_mla.benchmark import metrics
from trtllm_mla.benchmark.driver import Timeline
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.benchmark.records import RequestRecord
from trtllm_mla.benchmark.statistics import Percentiles
from trtllm_mla.benchmark.subject import ExecutorInfo, Subject, counts_json, open_model, report_head, report_identity
from trtllm_mla.checkpoint.footprint import CacheFootprint
from trtllm_mla.config import BuildConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import GenerationResult, GenerationSession, StepStats
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.scheduler import SchedulerConfig, SchedulerStatistics

TIMER = (
    "wall clock of this process (perf_counter): scheduling, packing of inputs, the executor, greedy choice of tokens; "
    "not loading, prompts, warm-up"
)
_MS = 1e3


@dataclass(frozen=True)
class LatencyOptions:
    """What is measured.

    Attributes:
        input_len: Tokens of each prompt.
        output_len: New tokens of each prompt; 2 or more, so that there is a decode step.
        batch_size: Prompts served together.
        warmup: Batches served before the clock starts.
        iterations: Batches that are measured.
        seed: Seed of the prompts; every batch has its own.
    """

    input_len: int
    output_len: int
    batch_size: int = 1
    warmup: int = 2
    iterations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"input_len": 1, "output_len": 2, "batch_size": 1, "warmup": 0, "iterations": 1, "seed": 0}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise UserError(f"{name}: found {getattr(self, name)}, expected at least {least}.")


@dataclass(frozen=True)
class PhaseLatency:
    """Latency of the prefill, or of one decode step.

    Attributes:
        latency_ms: Milliseconds on the clock.
        executor_ms: The executor's share of them.
        tokens: Prompt tokens of a prefill, or new tokens of a decode step, over the batch.
        steps: Steps it takes, on average.
        past_kv_length: Cached tokens of each request before it: of the first and of the last step.
    """

    latency_ms: Percentiles
    executor_ms: Percentiles
    tokens: int
    steps: float
    past_kv_length: tuple[int, int]

    @property
    def tokens_per_second(self) -> float:
        """Tokens divided by the median latency."""
        return self.tokens / self.latency_ms.median * _MS


@dataclass(frozen=True)
class CacheUse:
    """Bytes of the latent cache, over all layers.

    Attributes:
        footprint: Bytes per token, beside other forms of attention.
        used_bytes: Pages that a batch holds at its end.
        pool_bytes: Pages of the pool.
    """

    footprint: CacheFootprint
    used_bytes: int
    pool_bytes: int


@dataclass(frozen=True)
class LatencyReport:
    """What ``bench_executor`` measured.

    Attributes:
        subject: What was measured.
        executor: What ran it.
        options: How it was measured.
        config: Limits that it ran under.
        machine: What it ran on.
        timer: What the clock encloses.
        prefill: From the start to the moment the last request of the batch has its first token.
        decode: One decode step of the whole batch.
        ttft_ms: Time to first token of each request.
        tpot_ms: Time per output token of each request: (end - first token) / (output_len - 1).
        request_ms: Each request from start to end.
        records: Every request. The clock stands still between batches.
        timeline: Pages and requests after each step.
        statistics: The scheduler's counts.
        cache: Bytes of the latent cache.
    """

    subject: Subject
    executor: ExecutorInfo
    options: LatencyOptions
    config: SchedulerConfig
    machine: Machine
    timer: str
    prefill: PhaseLatency
    decode: PhaseLatency
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    request_ms: Percentiles
    records: list[RequestRecord]
    timeline: Timeline
    statistics: SchedulerStatistics
    cache: CacheUse

    @property
    def total_ms(self) -> float:
        """From the first request's start to the last one's end."""
        return metrics.total_seconds(self.records) * _MS

    def to_json(self) -> dict[str, Any]:
        """The report as plain values. Blocks and keys are trtllm-bench's where it has them; ours are in one more."""
        return {
            **report_head(self.subject, self.executor, self.config, self.machine, issue_rate=None),
            "request_info": metrics.request_info(self.records),
            "performance": metrics.performance(self.records),
            "streaming_metrics": metrics.streaming_metrics(self.records),
            "dataset": metrics.dataset([(record.input_tokens, record.output_tokens) for record in self.records]),
            "trtllm_mla": {
                **report_identity("latency", self.subject, self.executor, self.config, self.machine, self.timer),
                "options": asdict(self.options),
                "prefill": _phase_json(self.prefill),
                "decode": _phase_json(self.decode),
                "cache_bytes_used": self.cache.used_bytes,
                **counts_json(self.statistics),
                "requests": [record.to_json() for record in self.records],
                "timeline": self.timeline.to_json(),
            },
        }


@dataclass(frozen=True)
class Batch:
    """One batch that was served.

    Attributes:
        results: Of each request.
        prefill_steps: Steps until every request had its first token.
        decode_steps: Those after.
        step_ends: Seconds from the start to the end of each step.
        seconds: From start to end.
    """

    results: list[GenerationResult]
    prefill_steps: list[StepStats]
    decode_steps: list[StepStats]
    step_ends: list[float]
    seconds: float


def bench_latency(
    directory: Path,
    checkpoint: Path,
    executor_name: str,
    options: LatencyOptions,
    *,
    build: BuildConfig | None = None,
    num_threads: int | None = None,
    use_cuda_graph: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> LatencyReport:
    """Measures a network or an engine.

    Args:
        directory: A network or an engine directory.
        checkpoint: A Hugging Face directory with the weights.
        executor_name: What runs the network; a key of ``EXECUTORS``.
        options: What to measure.
        build: Limits of steps and requests; left out, the defaults of a build config.
        num_threads: Threads of an operator, where the executor computes on the CPU.
        use_cuda_graph: Whether decode steps are captured in CUDA graphs, where the executor computes on a GPU.
        on_progress: Called with a line before each part.

    Raises:
        UserError: A directory is unusable, the executor cannot run here, or the batch does not fit the limits.
    """
    build = build or BuildConfig()
    network, opened = open_model(directory, checkpoint, build)
    config = SchedulerConfig.from_build_config(
        build,
        network.plugin,
        vocab_size=network.spec.vocab_size,
        num_pages=pages_for_latency(options, network.plugin.page_size),
    )
    check_fits(options, config)
    if on_progress is not None:
        on_progress(f"executor {executor_name}: loading")
    executor = make_executor(
        executor_name,
        network,
        opened,
        num_pages=config.num_pages,
        num_threads=num_threads,
        use_cuda_graph=use_cuda_graph,
    )
    try:
        subject = Subject.of(network, checkpoint)
        return bench_executor(executor, subject, config, options, on_progress=on_progress)
    finally:
        executor.close()


def pages_for_latency(options: LatencyOptions, page_size: int) -> int:
    """Pages that a pool needs for a batch."""
    return options.batch_size * pages_for(options.input_len + options.output_len, page_size)


def bench_executor(
    executor: Executor,
    subject: Subject,
    config: SchedulerConfig,
    options: LatencyOptions,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> LatencyReport:
    """Measures an executor.

    Args:
        executor: What runs the steps.
        subject: What it runs.
        config: Limits of steps and requests; its pool is the executor's.
        options: What to measure.
        on_progress: Called with a line before each batch.

    Raises:
        UserError: The batch does not fit the limits.
    """
    check_fits(options, config)
    say = on_progress or (lambda _: None)
    generator = np.random.default_rng(options.seed)

    def serve(session: GenerationSession) -> Batch:
        prompts = generator.integers(config.vocab_size, size=(options.batch_size, options.input_len)).tolist()
        return serve_batch(session, prompts, options.output_len)

    for index in range(options.warmup):
        say(f"warm-up {index + 1} of {options.warmup}")
        serve(GenerationSession(executor, config))
    session = GenerationSession(executor, config)
    batches = []
    for index in range(options.iterations):
        say(f"iteration {index + 1} of {options.iterations}")
        batches.append(serve(session))
    return _summarise(ExecutorInfo.of(executor), subject, config, options, batches, session.statistics)


def check_fits(options: LatencyOptions, config: SchedulerConfig) -> None:
    """Checks that a batch can be served at once.

    Raises:
        UserError: It cannot; the message names the limit.
    """
    config.check_lengths(options.input_len, options.output_len)
    # A batch that is served in turns would be measured as if its requests ran together.
    if options.batch_size > config.max_batch_size:
        raise UserError(
            f"batch_size: found {options.batch_size}, expected at most max_batch_size = {config.max_batch_size}. Ask "
            "for less, or raise it in the build config."
        )
    needed = pages_for_latency(options, config.page_size)
    if needed > config.num_pages:
        raise UserError(
            f"The batch needs {needed} pages of {config.page_size} tokens, and the pool has {config.num_pages}. Make "
            "the pool larger, or the batch smaller."
        )


def serve_batch(session: GenerationSession, prompts: list[list[int]], output_len: int) -> Batch:
    """Serves prompts together, to ``output_len`` new tokens each; the clock starts with the call."""
    first_tokens: set[int] = set()
    prefill: list[StepStats] = []
    decode: list[StepStats] = []
    step_ends: list[float] = []
    complete = False

    def on_step(stats: StepStats) -> None:
        nonlocal complete
        step_ends.append(time.perf_counter() - begin)
        (decode if complete else prefill).append(stats)
        complete = len(first_tokens) == len(prompts)

    def request(index: int) -> Request:
        return Request(prompts[index], output_len, on_token=lambda _: first_tokens.add(index))

    requests = [request(index) for index in range(len(prompts))]
    begin = time.perf_counter()
    results = session.generate(requests, on_step=on_step)
    return Batch(results, prefill, decode, step_ends, time.perf_counter() - begin)


def full_decode_steps(batches: Sequence[Batch]) -> list[StepStats]:
    """Decode steps that served a whole batch.

    Requests that had their first token before the batch's last one decode along during the prefill, and end earlier.

    Raises:
        UserError: There is none.
    """
    steps = [step for batch in batches for step in batch.decode_steps if step.num_requests == len(batch.results)]
    if not steps:
        raise UserError(
            "No decode step served the whole batch: its prompts take more steps to prefill than there are new tokens. "
            "Raise --output-len or max_num_tokens, or lower --batch-size."
        )
    return steps


def _summarise(
    executor: ExecutorInfo,
    subject: Subject,
    config: SchedulerConfig,
    options: LatencyOptions,
    batches: list[Batch],
    statistics: SchedulerStatistics,
) -> LatencyReport:
    results = [result for batch in batches for result in batch.results]
    footprint = executor.footprint(subject.spec)
    page_bytes = footprint.latent * config.page_size
    full_steps = full_decode_steps(batches)
    return LatencyReport(
        subject,
        executor,
        options,
        config,
        Machine.here(),
        TIMER,
        prefill=PhaseLatency(
            _percentiles_ms([max(result.time_to_first_token for result in batch.results) for batch in batches]),
            _percentiles_ms([sum(step.executor_seconds for step in batch.prefill_steps) for batch in batches]),
            options.batch_size * options.input_len,
            float(np.mean([len(batch.prefill_steps) for batch in batches])),
            (0, 0),
        ),
        decode=PhaseLatency(
            _percentiles_ms([step.seconds for step in full_steps]),
            _percentiles_ms([step.executor_seconds for step in full_steps]),
            options.batch_size,
            1.0,
            (options.input_len, options.input_len + options.output_len - 2),
        ),
        ttft_ms=_percentiles_ms([result.time_to_first_token for result in results]),
        tpot_ms=_percentiles_ms(
            [(result.token_times[-1] - result.token_times[0]) / (options.output_len - 1) for result in results]
        ),
        request_ms=_percentiles_ms([result.token_times[-1] for result in results]),
        records=_records(batches, options.input_len),
        timeline=_timeline(batches),
        statistics=statistics,
        cache=CacheUse(
            footprint, pages_for_latency(options, config.page_size) * page_bytes, config.num_pages * page_bytes
        ),
    )


def _records(batches: list[Batch], input_tokens: int) -> list[RequestRecord]:
    """Records of all requests on a clock that stands still between batches."""
    records: list[RequestRecord] = []
    begin = 0.0
    for batch in batches:
        for result in batch.results:
            times = tuple(begin + moment for moment in result.token_times)
            records.append(
                RequestRecord(
                    task_id=len(records),
                    input_tokens=input_tokens,
                    output_tokens=len(times),
                    arrival=begin,
                    token_times=times,
                    end=times[-1],
                    finish_reason=result.finish_reason,
                    num_preemptions=result.num_preemptions,
                    reused_tokens=result.num_reused_tokens,
                )
            )
        begin += batch.seconds
    return records


def _timeline(batches: list[Batch]) -> Timeline:
    timeline = Timeline()
    begin = 0.0
    for batch in batches:
        for end, stats in zip(batch.step_ends, (*batch.prefill_steps, *batch.decode_steps), strict=True):
            timeline.add(begin + end, stats)
        begin += batch.seconds
    return timeline


def _percentiles_ms(seconds: list[float]) -> Percentiles:
    return Percentiles.of([value * _MS for value in seconds])


def _phase_json(phase: PhaseLatency) -> dict[str, Any]:
    return {**asdict(phase), "tokens_per_second": phase.tokens_per_second}
