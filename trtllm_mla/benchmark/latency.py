"""Latency of a network or an engine: prefill and decode timed apart.

A batch of random prompts of one length is served to a fixed number of new tokens, again and again. The clock
encloses all that a server does for a request except its text: scheduling, packing of the inputs, the executor, the
choice of tokens. It does not enclose loading, the making of prompts, and the warm-up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_mla._version import __version__
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.benchmark.statistics import Percentiles
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.footprint import CacheFootprint, cache_footprint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import BuildConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.directory import ENGINE_NAME
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import ONNX_NAME, NetworkDirectory
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import GenerationResult, GenerationSession, StepStats
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.scheduler import Request, SchedulerConfig

TIMER = (
    "wall clock of this process (perf_counter): scheduling, packing of inputs, the executor, greedy choice of tokens; "
    "not loading, prompts, warm-up"
)
_MS = 1e3
_GIB = 1 << 30


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
class Subject:
    """What is measured, for the report.

    Attributes:
        model: Name of the model, for example its directory's.
        model_path: Checkpoint that the weights come from.
        engine_dir: Network or engine directory.
        sha256: Hash of its ``network.onnx`` or ``rank0.engine``.
        spec: The model, with the layers that run.
    """

    model: str
    model_path: str
    engine_dir: str
    sha256: str
    spec: ModelSpec


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
        executor: Name of the executor.
        executor_description: What ran.
        dtype: Type of the network that ran.
        cache_dtype: Type of the latent cache as it lay in memory.
        options: How it was measured.
        config: Limits that it ran under.
        machine: What it ran on.
        timer: What the clock encloses.
        prefill: From the start to the moment the last request of the batch has its first token.
        decode: One decode step of the whole batch.
        ttft_ms: Time to first token of each request.
        tpot_ms: Time per output token of each request: (end - first token) / (output_len - 1).
        request_ms: Each request from start to end.
        total_ms: All measured batches.
        cache: Bytes of the latent cache.
    """

    subject: Subject
    executor: str
    executor_description: str
    dtype: DType
    cache_dtype: CacheDType
    options: LatencyOptions
    config: SchedulerConfig
    machine: Machine
    timer: str
    prefill: PhaseLatency
    decode: PhaseLatency
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    request_ms: Percentiles
    total_ms: float
    cache: CacheUse

    def to_json(self) -> dict[str, Any]:
        """The report as plain values. Blocks and keys are trtllm-bench's where it has them; ours are in one more."""
        options, config, spec = self.options, self.config, self.subject.spec
        seconds = self.total_ms / _MS
        num_requests = options.batch_size * options.iterations
        output_tokens = num_requests * options.output_len
        return {
            "engine": {
                "model": self.subject.model,
                "model_path": self.subject.model_path,
                "engine_dir": self.subject.engine_dir,
                "version": __version__,
                "backend": self.executor,
                "dtype": str(self.dtype),
                "kv_cache_dtype": str(self.cache_dtype),
                "quantization": None,
                "max_input_length": config.max_input_len,
                "max_sequence_length": config.max_seq_len,
            },
            "machine": {
                "name": self.machine.name,
                "memory.total": self.machine.memory_bytes / _GIB,
                "clocks.mem": None,
            },
            "world_info": {
                "tp_size": 1,
                "pp_size": 1,
                "ep_size": 1,
                "world_size": 1,
                "max_batch_size": config.max_batch_size,
                "max_num_tokens": config.max_num_tokens,
                "scheduling_policy": "GUARANTEED_NO_EVICT",
                "kv_cache_percentage": None,
                "issue_rate": None,
            },
            "request_info": {
                "num_requests": num_requests,
                "avg_num_concurrent_requests": options.batch_size,
                "avg_input_length": options.input_len,
                "avg_output_length": options.output_len,
            },
            "performance": {
                "total_latency_ms": self.total_ms,
                "avg_request_latency_ms": self.request_ms.average,
                "request_throughput_req_s": num_requests / seconds,
                "system_output_throughput_tok_s": output_tokens / seconds,
                "system_total_throughput_tok_s": num_requests * (options.input_len + options.output_len) / seconds,
                "output_throughput_per_user_tok_s": options.output_len / self.request_ms.average * _MS,
                "output_throughput_per_gpu_tok_s": output_tokens / seconds,
                "request_latency_percentiles_ms": asdict(self.request_ms),
            },
            "streaming_metrics": {
                "token_output_speed_tok_s": _MS / self.tpot_ms.average,
                "avg_ttft_ms": self.ttft_ms.average,
                "avg_tpot_ms": self.tpot_ms.average,
                "ttft_percentiles": asdict(self.ttft_ms),
                "tpot_percentiles": asdict(self.tpot_ms),
            },
            "trtllm_mla": {
                "executor": self.executor_description,
                "timer": self.timer,
                "sha256": self.subject.sha256,
                "num_layers": spec.num_hidden_layers,
                "options": asdict(options),
                "page_size": config.page_size,
                "enable_matrix_absorption": config.enable_matrix_absorption,
                "prefill_absorption_threshold": config.prefill_absorption_threshold,
                "prefill": _phase_json(self.prefill),
                "decode": _phase_json(self.decode),
                "cache_bytes_per_token": asdict(self.cache.footprint),
                "cache_bytes_used": self.cache.used_bytes,
                "cache_bytes_pool": self.cache.pool_bytes,
                "machine": asdict(self.machine),
            },
        }


@dataclass(frozen=True)
class _Batch:
    """One batch that was served.

    Attributes:
        results: Of each request.
        prefill_steps: Steps until every request had its first token.
        decode_steps: Those after.
        seconds: From start to end.
    """

    results: list[GenerationResult]
    prefill_steps: list[StepStats]
    decode_steps: list[StepStats]
    seconds: float


def bench_latency(
    directory: Path,
    checkpoint: Path,
    executor_name: str,
    options: LatencyOptions,
    *,
    build: BuildConfig | None = None,
    num_threads: int | None = None,
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
        on_progress: Called with a line before each part.

    Raises:
        UserError: A directory is unusable, the executor cannot run here, or the batch does not fit the limits.
    """
    build = build or BuildConfig()
    network = NetworkDirectory.load(directory).configured(build.mla_plugin)
    opened = Checkpoint.open(checkpoint)
    if not opened.has_weights:
        raise UserError(f"{checkpoint}: found no weights, expected a checkpoint with safetensors to bind.")
    config = SchedulerConfig.from_build_config(
        build,
        network.plugin,
        vocab_size=network.spec.vocab_size,
        num_pages=pages_for_latency(options, network.plugin.page_size),
    )
    _check_fits(options, config)
    if on_progress is not None:
        on_progress(f"executor {executor_name}: loading")
    executor = make_executor(executor_name, network, opened, num_pages=config.num_pages, num_threads=num_threads)
    try:
        subject = Subject(
            model=checkpoint.resolve().name,
            model_path=str(checkpoint),
            engine_dir=str(directory),
            sha256=_network_hash(directory),
            spec=replace(network.spec, num_hidden_layers=network.num_layers),
        )
        return bench_executor(executor, subject, config, options, on_progress=on_progress)
    finally:
        executor.close()


def _network_hash(directory: Path) -> str:
    """SHA-256 of the engine, or of the network where there is none."""
    engine = directory / ENGINE_NAME
    path = engine if engine.is_file() else directory / ONNX_NAME
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    _check_fits(options, config)
    say = on_progress or (lambda _: None)
    session = GenerationSession(executor, config)
    generator = np.random.default_rng(options.seed)
    batches = []
    for index in range(-options.warmup, options.iterations):
        if index < 0:
            say(f"warm-up {index + options.warmup + 1} of {options.warmup}")
        else:
            say(f"iteration {index + 1} of {options.iterations}")
        prompts = generator.integers(config.vocab_size, size=(options.batch_size, options.input_len)).tolist()
        batch = _serve(session, prompts, options.output_len)
        if index >= 0:
            batches.append(batch)
    return _summarise(executor, subject, config, options, batches)


def _check_fits(options: LatencyOptions, config: SchedulerConfig) -> None:
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


def _serve(session: GenerationSession, prompts: list[list[int]], output_len: int) -> _Batch:
    first_tokens: set[int] = set()
    prefill: list[StepStats] = []
    decode: list[StepStats] = []
    complete = False

    def on_step(stats: StepStats) -> None:
        nonlocal complete
        (decode if complete else prefill).append(stats)
        complete = len(first_tokens) == len(prompts)

    def request(index: int) -> Request:
        return Request(prompts[index], output_len, on_token=lambda _: first_tokens.add(index))

    requests = [request(index) for index in range(len(prompts))]
    begin = time.perf_counter()
    results = session.generate(requests, on_step=on_step)
    return _Batch(results, prefill, decode, time.perf_counter() - begin)


def _summarise(
    executor: Executor, subject: Subject, config: SchedulerConfig, options: LatencyOptions, batches: list[_Batch]
) -> LatencyReport:
    results = [result for batch in batches for result in batch.results]
    spec = subject.spec
    footprint = cache_footprint(spec, executor.cache_dtype)
    page_bytes = footprint.latent * config.page_size
    # Requests that had their first token before the batch's last one decode along during the prefill.
    decode_steps = [step for batch in batches for step in batch.decode_steps]
    full_steps = [step for step in decode_steps if step.num_requests == options.batch_size]
    if not full_steps:
        raise UserError(
            "No decode step served the whole batch: its prompts take more steps to prefill than there are new tokens. "
            "Raise --output-len or max_num_tokens, or lower --batch-size."
        )
    return LatencyReport(
        subject,
        executor.name,
        executor.description,
        executor.dtype,
        executor.cache_dtype,
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
            _percentiles_ms([step.executor_seconds + step.host_seconds for step in full_steps]),
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
        total_ms=sum(batch.seconds for batch in batches) * _MS,
        cache=CacheUse(
            footprint, pages_for_latency(options, config.page_size) * page_bytes, config.num_pages * page_bytes
        ),
    )


def _percentiles_ms(seconds: list[float]) -> Percentiles:
    return Percentiles.of([value * _MS for value in seconds])


def _phase_json(phase: PhaseLatency) -> dict[str, Any]:
    return {**asdict(phase), "tokens_per_second": phase.tokens_per_second}
