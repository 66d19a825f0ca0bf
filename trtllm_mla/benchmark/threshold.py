"""The prefill threshold, measured: a workload at several of them, chunks in both forms, and the value that follows.

The network and the executor are the same throughout: a threshold decides only which group a prefill chunk joins. All
thresholds take turns in an order that is drawn anew in every iteration, with the same prompts within one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from trtllm_mla.benchmark.chunk_cost import (
    ChunkCost,
    ChunkSizes,
    Recommendation,
    break_even_tokens,
    cost_ms,
    measure_chunks,
    recommend,
)
from trtllm_mla.benchmark.latency import (
    Batch,
    LatencyOptions,
    check_fits,
    full_decode_steps,
    pages_for_latency,
    serve_batch,
)
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.benchmark.spread import CONFIDENCE, MedianInterval, Spread
from trtllm_mla.benchmark.subject import ExecutorInfo, Subject, open_model, report_head, report_identity
from trtllm_mla.checkpoint.attention_cost import break_even_queries
from trtllm_mla.config import BuildConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import GenerationSession
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.scheduler import SchedulerConfig, SchedulerStatistics

THRESHOLDS = (1, 64, 128, 256, 512, 1024)
TIMER = (
    "wall clock of this process (perf_counter). Workload: scheduling, packing of inputs, the executor, greedy choice "
    "of tokens. Chunks: packing of inputs and the executor. Not loading, prompts, warm-up"
)
_MAX_THRESHOLD = 2**31 - 1
_MS = 1e3


@dataclass(frozen=True)
class ThresholdOptions:
    """What is measured.

    Attributes:
        workload: Prompts, warm-up and iterations; the chunks are repeated as often.
        thresholds: Values for the workload.
        max_chunk_tokens: Prompt tokens of one request in a step; None leaves it to ``max_num_tokens``.
        histories: Cached tokens before a chunk; None chooses.
        chunk_lengths: New tokens of a chunk; None chooses.
    """

    workload: LatencyOptions
    thresholds: tuple[int, ...] = THRESHOLDS
    max_chunk_tokens: int | None = None
    histories: tuple[int, ...] | None = None
    chunk_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.thresholds:
            raise UserError("--thresholds: found none, expected one or more, such as 1,64,256.")
        outside = [value for value in self.thresholds if not 0 <= value <= _MAX_THRESHOLD]
        if outside:
            raise UserError(f"--thresholds: found {outside[0]}, expected numbers from 0 to {_MAX_THRESHOLD}.")


@dataclass(frozen=True)
class WorkloadCost:
    """The workload at one threshold.

    Attributes:
        threshold: The value.
        prefill_ms: Of each iteration, from the start to the moment the last request has its first token.
        decode_step_ms: Of each iteration, the mean of the steps after it that served the whole batch.
        context_tokens: Prompt tokens of a batch that ran decompressed.
        absorbed_tokens: Prompt tokens that ran absorbed.
    """

    threshold: int
    prefill_ms: tuple[float, ...]
    decode_step_ms: tuple[float, ...]
    context_tokens: int
    absorbed_tokens: int


@dataclass(frozen=True)
class ThresholdReport:
    """What ``bench_threshold`` measured.

    Attributes:
        subject: What was measured.
        executor: What ran it.
        config: Limits that it ran under, with the directory's threshold.
        machine: What it ran on.
        options: How it was measured.
        workloads: The workload at each threshold.
        chunks: Chunks in both forms.
        recommendation: What follows from the chunks.
    """

    subject: Subject
    executor: ExecutorInfo
    config: SchedulerConfig
    machine: Machine
    options: ThresholdOptions
    workloads: tuple[WorkloadCost, ...]
    chunks: tuple[ChunkCost, ...]
    recommendation: Recommendation

    @property
    def predicted(self) -> dict[int, float | None]:
        """Break-even by operations alone, for each history."""
        return {
            history: break_even_tokens(self.subject.spec, history)
            for history in sorted({chunk.history for chunk in self.chunks})
        }

    @property
    def predicted_limit(self) -> float | None:
        """What ``roofline`` prints: the break-even with many cached tokens; None if absorbed always costs less."""
        limit = break_even_queries(self.subject.spec)
        return limit if np.isfinite(limit) else None

    @property
    def advice(self) -> tuple[str, ...]:
        """The recommendation in sentences: the value, how sure it is, the directory's own, the operations alone."""
        return (self._verdict(), self._certainty(), self._configured(), self._prediction())

    def _verdict(self) -> str:
        advised, repetitions = self.recommendation, self.options.workload.iterations
        where = f"{self.executor.name} with {self.subject.model} on this machine"
        if not advised.is_decided:
            return (
                f"No recommendation for {where}: the two forms differ by less than the noise of {repetitions} "
                "repetitions at every length next to the best threshold."
            )
        return f"Recommended prefill_absorption_threshold for {where}: {advised.threshold}."

    def _certainty(self) -> str:
        advised = self.recommendation
        if not advised.is_decided:
            return f"More --iterations tell more; {CONFIDENCE:.0%} confidence takes at least 6."
        text = (
            f"Not told apart from it: any from {advised.low}"
            + (f" to {advised.high}" if advised.high is not None else " on")
            + "."
        )
        if advised.undecided:
            text += f" Within noise: chunks of {_listed(advised.undecided)} tokens."
        if advised.contrary:
            text += (
                f" No threshold suits all lengths: chunks of {_listed(advised.contrary)} tokens are faster in the "
                "other form."
            )
        return text

    def _configured(self) -> str:
        advised, configured = self.recommendation, self.config.prefill_absorption_threshold
        if advised.allows(configured):
            return f"The directory's own, {configured}, is as good within noise."
        best = cost_ms(self.chunks, advised.threshold)
        loss = cost_ms(self.chunks, configured) / best - 1
        return f"With the directory's own, {configured}, the measured chunks take {loss:.1%} more time."

    def _prediction(self) -> str:
        if self.predicted_limit is None:
            return "By operations alone, the absorbed form always costs less."
        parts = ", ".join(f"{tokens:.0f} after {history}" for history, tokens in self.predicted.items() if tokens)
        return (
            f"By operations alone (roofline) the forms break even at {self.predicted_limit:.0f} new tokens after many "
            "cached ones" + (f"; {parts}." if parts else ".")
        )

    def to_json(self) -> dict[str, Any]:
        """The report as plain values; heads are those of other results, the rest is in the block ``threshold``."""
        advised, subject = self.recommendation, self.subject
        return {
            **report_head(subject, self.executor, self.config, self.machine, issue_rate=None),
            "trtllm_mla": {
                **report_identity("threshold", subject, self.executor, self.config, self.machine, TIMER),
                "options": asdict(self.options),
                "threshold": {
                    "configured": self.config.prefill_absorption_threshold,
                    "workloads": [
                        {
                            "threshold": item.threshold,
                            "prefill_ms": asdict(Spread.of(item.prefill_ms)),
                            "decode_step_ms": asdict(Spread.of(item.decode_step_ms)),
                            "context_tokens": item.context_tokens,
                            "absorbed_tokens": item.absorbed_tokens,
                            "prefill_samples_ms": item.prefill_ms,
                            "decode_step_samples_ms": item.decode_step_ms,
                        }
                        for item in self.workloads
                    ],
                    "chunks": [
                        {
                            "history": item.history,
                            "num_tokens": item.num_tokens,
                            "absorbed_ms": asdict(Spread.of(item.absorbed_ms)),
                            "decompressed_ms": asdict(Spread.of(item.decompressed_ms)),
                            "difference_ms": asdict(MedianInterval.of(item.differences_ms)),
                            "absorbed_samples_ms": item.absorbed_ms,
                            "decompressed_samples_ms": item.decompressed_ms,
                        }
                        for item in self.chunks
                    ],
                    "predicted": [
                        {"history": history, "num_tokens": tokens} for history, tokens in self.predicted.items()
                    ],
                    "predicted_limit": self.predicted_limit,
                    "recommendation": {
                        **asdict(advised),
                        "is_decided": advised.is_decided,
                        "text": " ".join(self.advice),
                    },
                },
            },
        }


def bench_threshold(
    directory: Path,
    checkpoint: Path,
    executor_name: str,
    options: ThresholdOptions,
    *,
    build: BuildConfig | None = None,
    num_threads: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ThresholdReport:
    """Measures a network or an engine at several thresholds.

    Args:
        directory: A network or an engine directory.
        checkpoint: A Hugging Face directory with the weights.
        executor_name: What runs the network; a key of ``EXECUTORS``.
        options: What to measure.
        build: Limits of steps and requests; left out, the defaults of a build config.
        num_threads: Threads of an operator, where the executor computes on the CPU.
        on_progress: Called with a line before each part.

    Raises:
        UserError: A directory is unusable, the network has no generation group, the executor cannot run here, or the
            workload does not fit the limits.
    """
    build = build or BuildConfig()
    network, opened = open_model(directory, checkpoint, build)
    if not network.plugin.enable_matrix_absorption:
        raise UserError(
            f"{directory}: the network was converted without enable_matrix_absorption, so no chunk is ever absorbed "
            "and there is no threshold. Convert the checkpoint again with it."
        )
    config = SchedulerConfig.from_build_config(
        build,
        network.plugin,
        vocab_size=network.spec.vocab_size,
        num_pages=pages_for_latency(options.workload, network.plugin.page_size),
        max_chunk_tokens=options.max_chunk_tokens,
        enable_block_reuse=False,  # the prompts of an iteration are the same at every threshold
    )
    sizes = ChunkSizes.choose(config, options.histories, options.chunk_lengths)
    config = replace(config, num_pages=max(config.num_pages, pages_for(sizes.num_tokens, config.page_size)))
    check_fits(options.workload, config)
    if on_progress is not None:
        on_progress(f"executor {executor_name}: loading")
    executor = make_executor(executor_name, network, opened, num_pages=config.num_pages, num_threads=num_threads)
    try:
        return measure_thresholds(
            executor, Subject.of(network, checkpoint), config, options, sizes, on_progress=on_progress
        )
    finally:
        executor.close()


def measure_thresholds(
    executor: Executor,
    subject: Subject,
    config: SchedulerConfig,
    options: ThresholdOptions,
    sizes: ChunkSizes,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> ThresholdReport:
    """Measures an executor at several thresholds.

    Args:
        executor: What runs the steps.
        subject: What it runs.
        config: Limits of steps and requests, without block reuse; its pool is the executor's.
        options: What to measure.
        sizes: The chunks.
        on_progress: Called with a line before each iteration.
    """
    workload = options.workload
    chunks = measure_chunks(
        executor,
        config,
        sizes,
        warmup=workload.warmup,
        repetitions=workload.iterations,
        seed=workload.seed,
        on_progress=on_progress,
    )
    return ThresholdReport(
        subject,
        ExecutorInfo.of(executor),
        config,
        Machine.here(),
        options,
        tuple(_measure_workload(executor, config, options, on_progress or (lambda _: None))),
        tuple(chunks),
        recommend(chunks),
    )


def _measure_workload(
    executor: Executor, config: SchedulerConfig, options: ThresholdOptions, say: Callable[[str], None]
) -> list[WorkloadCost]:
    workload, thresholds = options.workload, sorted(set(options.thresholds))
    generator = np.random.default_rng(workload.seed)
    served: dict[int, list[tuple[Batch, SchedulerStatistics]]] = {threshold: [] for threshold in thresholds}
    for index in range(-workload.warmup, workload.iterations):
        if index < 0:
            say(f"workload: warm-up {index + workload.warmup + 1} of {workload.warmup}")
        else:
            say(f"workload: {index + 1} of {workload.iterations}")
        shape = (workload.batch_size, workload.input_len)
        prompts = generator.integers(config.vocab_size, size=shape).tolist()
        for threshold in generator.permutation(thresholds).tolist():
            session = GenerationSession(executor, replace(config, prefill_absorption_threshold=threshold))
            batch = serve_batch(session, prompts, workload.output_len)
            if index >= 0:
                served[threshold].append((batch, session.statistics))
    return [_workload_cost(threshold, served[threshold]) for threshold in thresholds]


def _workload_cost(threshold: int, served: list[tuple[Batch, SchedulerStatistics]]) -> WorkloadCost:
    batches = [batch for batch, _ in served]
    counts = served[0][1]  # alike in all iterations: the lengths are
    return WorkloadCost(
        threshold=threshold,
        prefill_ms=tuple(max(item.time_to_first_token for item in batch.results) * _MS for batch in batches),
        decode_step_ms=tuple(fmean(step.seconds for step in full_decode_steps([batch])) * _MS for batch in batches),
        context_tokens=counts.num_context_tokens,
        absorbed_tokens=counts.num_absorbed_tokens,
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
