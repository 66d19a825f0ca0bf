"""Several contestants side by side: measured in one run, or read from results.

In one run, all contestants are loaded first. In each iteration they serve the same prompts one after the other, in an
order that is drawn anew, so that a machine that becomes slower meanwhile slows all of them down; ratios are formed
within an iteration. Results of several runs have no such pairs: their ratios are those of medians.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np

from trtllm_mla._version import __version__
from trtllm_mla.benchmark.huggingface import ATTENTIONS, describe, load_model, time_prompts
from trtllm_mla.benchmark.latency import (
    TIMER,
    LatencyOptions,
    check_fits,
    full_decode_steps,
    pages_for_latency,
    serve_batch,
)
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.benchmark.result_files import BenchResult, ResultKind
from trtllm_mla.benchmark.spread import MedianInterval, Spread
from trtllm_mla.benchmark.subject import RESULT_FORMAT, ExecutorInfo, Subject, open_model
from trtllm_mla.config import BuildConfig
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import EXECUTORS, make_executor
from trtllm_mla.runtime.generation import GenerationSession
from trtllm_mla.runtime.scheduler import SchedulerConfig

HUGGINGFACE = "huggingface"
CONTESTANTS = (*EXECUTORS, HUGGINGFACE, *(f"{HUGGINGFACE}-{attention}" for attention in ATTENTIONS))
MAX_CONTESTANTS = 16

RUN_METRICS = {
    "prefill_ms": "Prefill of the batch, ms",
    "decode_step_ms": "Decode step, ms",
    "batch_ms": "Batch from start to end, ms",
    "output_tok_s": "Output tokens per second",
}
FILE_METRICS = {
    "request_throughput_req_s": "Requests per second",
    "system_output_throughput_tok_s": "Output tokens per second",
    "ttft_ms": "Time to first token, ms",
    "tpot_ms": "Time per output token, ms",
    "request_latency_ms": "Request latency, ms",
}
_MS = 1e3


@dataclass(frozen=True)
class Entrant:
    """What takes part in a comparison.

    Attributes:
        name: Its name in the table.
        runner: One of ``CONTESTANTS``.
        directory: Network or engine directory; of no use to transformers.
        build: Limits of steps and requests.
    """

    name: str
    runner: str
    directory: Path
    build: BuildConfig = field(default_factory=BuildConfig)


@dataclass(frozen=True)
class ServedBatch:
    """A batch that a contestant served.

    Attributes:
        prefill_seconds: From the start to the moment the last prompt has its first token.
        decode_step_seconds: The mean of the steps after it that served the whole batch.
        seconds: From start to end.
        output_ids: The new tokens of each prompt.
    """

    prefill_seconds: float
    decode_step_seconds: float
    seconds: float
    output_ids: list[list[int]]


class Contestant(Protocol):
    """Serves batches of prompts of one length."""

    @property
    def description(self) -> str:
        """One line that says what runs."""

    @property
    def identity(self) -> dict[str, Any]:
        """What else says what ran: types, hashes."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    def serve(self, prompts: list[list[int]], output_len: int) -> ServedBatch:
        """Serves prompts together, greedily, to ``output_len`` new tokens each."""

    def close(self) -> None:
        """Frees what it holds."""


class ExecutorContestant:
    """An executor of this package with in-flight batching.

    Args:
        executor: What runs the steps.
        subject: What it runs.
        config: Limits of steps and requests.
    """

    def __init__(self, executor: Executor, subject: Subject, config: SchedulerConfig) -> None:
        info = ExecutorInfo.of(executor)
        self.description = info.description
        self.identity = {
            "engine_dir": subject.engine_dir,
            "sha256": subject.sha256,
            "kernels_sha256": subject.kernels_sha256,
            "dtype": str(info.dtype),
            "kv_cache_dtype": str(info.cache_dtype),
            "cache_bytes_per_token": info.footprint(subject.spec).latent,
        }
        self.vocab_size = config.vocab_size
        self._executor = executor
        # Prompts are random, so there is nothing to reuse.
        self._session = GenerationSession(executor, replace(config, enable_block_reuse=False))

    def serve(self, prompts: list[list[int]], output_len: int) -> ServedBatch:
        """Serves prompts; see ``Contestant.serve``."""
        batch = serve_batch(self._session, prompts, output_len)
        return ServedBatch(
            prefill_seconds=max(result.time_to_first_token for result in batch.results),
            decode_step_seconds=fmean(step.seconds for step in full_decode_steps([batch])),
            seconds=batch.seconds,
            output_ids=[result.output_ids for result in batch.results],
        )

    def close(self) -> None:
        """Frees the executor."""
        self._executor.close()


class HuggingFaceContestant:
    """transformers' ``generate`` on a float32 model.

    Args:
        checkpoint: A Hugging Face directory.
        attention: One of ``ATTENTIONS``.
        num_threads: Threads of an operator.
    """

    def __init__(self, checkpoint: Path, attention: str, *, num_threads: int | None = None) -> None:
        self._model = load_model(checkpoint, attention, num_threads=num_threads)
        self.description = describe(attention)
        self.identity: dict[str, Any] = {"dtype": "float32"}
        self.vocab_size = int(self._model.config.vocab_size)

    def serve(self, prompts: list[list[int]], output_len: int) -> ServedBatch:
        """Serves prompts; see ``Contestant.serve``."""
        timed = time_prompts(self._model, prompts, output_len)
        steps = np.diff(timed.times)
        return ServedBatch(float(steps[0]), float(steps[1:].mean()), float(steps.sum()), timed.output_ids)

    def close(self) -> None:
        """Drops the model."""
        del self._model


@dataclass(frozen=True)
class Metric:
    """A quantity of one contestant, and as a multiple of the first one's.

    Attributes:
        value: Its median.
        low: 10th percentile; None where only the value is known.
        high: 90th percentile.
        ratio: The multiple; None where the first one has no such quantity.
        ratio_low: Lower bound of its median; None without pairs.
        ratio_high: Upper bound.
    """

    value: float
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True)
class Row:
    """A contestant's outcome.

    Attributes:
        name: Its name.
        description: What ran.
        metrics: Its quantities.
        same_tokens: Share of new tokens that are the first one's; None where it is not known.
        identity: Types and hashes.
        samples: What the quantities are medians of, one an iteration.
    """

    name: str
    description: str
    metrics: dict[str, Metric]
    same_tokens: float | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Contestants side by side.

    Attributes:
        mode: ``run`` where they took turns in one run, ``files`` where results were read.
        metrics: Name of each quantity by its key.
        rows: The contestants, the one that ratios refer to first.
        model: Name of the model; None where results differ in it.
        options: How they were measured.
    """

    mode: str
    metrics: Mapping[str, str]
    rows: tuple[Row, ...]
    model: str | None = None
    options: LatencyOptions | None = None

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values."""
        machine = Machine.here() if self.mode == "run" else None
        return {
            "engine": {"model": self.model, "version": __version__},
            "trtllm_mla": {
                "format": RESULT_FORMAT,
                "kind": str(ResultKind.COMPARE),
                "executor": "; ".join(f"{row.name}: {row.description}" for row in self.rows),
                "timer": TIMER if machine else None,
                "sha256": {row.name: row.identity["sha256"] for row in self.rows if "sha256" in row.identity},
                "versions": {"trtllm_mla": __version__, "python": machine.python, **machine.packages}
                if machine
                else None,
                "options": asdict(self.options) if self.options else None,
                "machine": asdict(machine) if machine else None,
                "compare": {
                    "mode": self.mode,
                    "metrics": dict(self.metrics),
                    "subjects": [asdict(row) for row in self.rows],
                },
            },
        }


def compare_run(
    entrants: Sequence[Entrant],
    checkpoint: Path,
    options: LatencyOptions,
    *,
    num_threads: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Loads all contestants and measures them in turns.

    Args:
        entrants: Who takes part; ratios refer to the first.
        checkpoint: A Hugging Face directory with the weights.
        options: What to measure.
        num_threads: Threads of an operator, where a contestant computes on the CPU.
        on_progress: Called with a line before each part.

    Raises:
        UserError: A name appears twice, a contestant cannot run here, or the batch does not fit its limits.
    """
    names = [entrant.name for entrant in entrants]
    if not 1 <= len(names) <= MAX_CONTESTANTS or len(set(names)) < len(names):
        raise UserError(
            f"Found the contestants {', '.join(names)}, expected 1 to {MAX_CONTESTANTS} with a name of their own "
            "each. Name directories with NAME=DIRECTORY."
        )
    say = on_progress or (lambda _: None)
    with ExitStack() as stack:
        contestants = {}
        for entrant in entrants:
            say(f"{entrant.name}: loading")
            contestants[entrant.name] = _load(entrant, checkpoint, options, num_threads)
            stack.callback(contestants[entrant.name].close)
        rows = take_turns(contestants, options, on_progress=say)
    return Comparison("run", RUN_METRICS, tuple(rows), checkpoint.resolve().name, options)


def take_turns(
    contestants: Mapping[str, Contestant], options: LatencyOptions, *, on_progress: Callable[[str], None]
) -> list[Row]:
    """Measures contestants in turns.

    Args:
        contestants: By name; ratios refer to the first.
        options: What to measure.
        on_progress: Called with a line before each iteration.
    """
    generator = np.random.default_rng(options.seed)
    names = list(contestants)
    vocab_size = min(contestant.vocab_size for contestant in contestants.values())
    served: dict[str, list[ServedBatch]] = {name: [] for name in names}
    for index in range(-options.warmup, options.iterations):
        if index < 0:
            on_progress(f"warm-up {index + options.warmup + 1} of {options.warmup}")
        else:
            on_progress(f"iteration {index + 1} of {options.iterations}")
        prompts = generator.integers(vocab_size, size=(options.batch_size, options.input_len)).tolist()
        for position in generator.permutation(len(names)):
            batch = contestants[names[position]].serve(prompts, options.output_len)
            if index >= 0:
                served[names[position]].append(batch)
    first = served[names[0]]
    return [_run_row(name, contestants[name], served[name], first, options) for name in names]


def compare_files(results: Mapping[str, BenchResult]) -> Comparison:
    """Sets results side by side.

    Args:
        results: Two or more, by name; ratios refer to the first.

    Raises:
        UserError: There is one result only, or one is of a kind that measures no requests.
    """
    if len(results) < 2:
        raise UserError(
            "Found one result, expected two or more to compare. Name another file, or pass --checkpoint to run a "
            "network."
        )
    for name, result in results.items():
        if result.performance is None:
            raise UserError(
                f"{name}: found a result of kind {result.own.kind}, expected one of throughput, latency or endpoint."
            )
    found = {name: _file_metrics(result) for name, result in results.items()}
    first = next(iter(found.values()))
    rows = tuple(
        Row(
            name,
            result.own.executor or result.engine.backend or str(result.own.kind),
            {key: _with_ratio(metric, first.get(key)) for key, metric in found[name].items()},
        )
        for name, result in results.items()
    )
    models = {result.engine.model for result in results.values()}
    return Comparison("files", FILE_METRICS, rows, models.pop() if len(models) == 1 else None)


def _load(entrant: Entrant, checkpoint: Path, options: LatencyOptions, num_threads: int | None) -> Contestant:
    if entrant.runner.startswith(HUGGINGFACE):
        attention = entrant.runner.removeprefix(HUGGINGFACE).removeprefix("-") or ATTENTIONS[0]
        return HuggingFaceContestant(checkpoint, attention, num_threads=num_threads)
    network, opened = open_model(entrant.directory, checkpoint, entrant.build)
    config = SchedulerConfig.from_build_config(
        entrant.build,
        network.plugin,
        vocab_size=network.spec.vocab_size,
        num_pages=pages_for_latency(options, network.plugin.page_size),
    )
    check_fits(options, config)
    executor = make_executor(entrant.runner, network, opened, num_pages=config.num_pages, num_threads=num_threads)
    return ExecutorContestant(executor, Subject.of(network, checkpoint), config)


def _run_row(
    name: str, contestant: Contestant, batches: list[ServedBatch], first: list[ServedBatch], options: LatencyOptions
) -> Row:
    samples, others = _samples(batches, options), _samples(first, options)
    return Row(
        name,
        contestant.description,
        {key: _paired(values, others[key]) for key, values in samples.items()},
        same_tokens=_same_tokens(batches, first),
        identity=contestant.identity,
        samples=samples,
    )


def _samples(batches: list[ServedBatch], options: LatencyOptions) -> dict[str, list[float]]:
    tokens = options.batch_size * options.output_len
    return {
        "prefill_ms": [batch.prefill_seconds * _MS for batch in batches],
        "decode_step_ms": [batch.decode_step_seconds * _MS for batch in batches],
        "batch_ms": [batch.seconds * _MS for batch in batches],
        "output_tok_s": [tokens / batch.seconds for batch in batches],
    }


def _paired(values: list[float], others: list[float]) -> Metric:
    spread = Spread.of(values)
    ratio = MedianInterval.of([value / other for value, other in zip(values, others, strict=True)])
    return Metric(spread.median, spread.p10, spread.p90, ratio.median, ratio.low, ratio.high)


def _same_tokens(batches: list[ServedBatch], first: list[ServedBatch]) -> float:
    pairs = zip(_tokens(batches), _tokens(first), strict=True)
    return fmean(token == other for token, other in pairs)


def _tokens(batches: list[ServedBatch]) -> list[int]:
    return [token for batch in batches for ids in batch.output_ids for token in ids]


def _file_metrics(result: BenchResult) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    performance, streaming = result.performance, result.streaming_metrics
    if performance is not None:
        for key in ("request_throughput_req_s", "system_output_throughput_tok_s"):
            metrics[key] = Metric(getattr(performance, key))
    logged = {"ttft_ms": result.ttft_ms, "tpot_ms": result.tpot_ms, "request_latency_ms": result.latency_ms}
    summaries = {
        "ttft_ms": streaming and streaming.ttft_percentiles,
        "tpot_ms": streaming and streaming.tpot_percentiles,
        "request_latency_ms": performance and performance.request_latency_percentiles_ms,
    }
    for key, samples in logged.items():
        summary = summaries[key]
        if samples:
            spread = Spread.of(samples)
            metrics[key] = Metric(median(samples), spread.p10, spread.p90)
        elif summary:
            metrics[key] = Metric(summary.p50)
    return metrics


def _with_ratio(metric: Metric, first: Metric | None) -> Metric:
    return metric if first is None or first.value == 0 else replace(metric, ratio=metric.value / first.value)


def parse_contestants(arguments: Sequence[str], executors: Sequence[str]) -> list[tuple[str, str, Path]]:
    """Names, runners and directories that the command line asks for.

    Args:
        arguments: Directories, each run by every executor, and ``NAME=DIRECTORY``: an engine, run by ``tensorrt``,
            or a network, run by ``onnxruntime``.
        executors: Some of ``CONTESTANTS``.

    Raises:
        UserError: There is no directory, a name is empty, or an executor is unknown.
    """
    for executor in executors:
        if executor not in CONTESTANTS:
            raise UserError(f"--executors: found '{executor:.80}', expected some of {', '.join(CONTESTANTS)}.")
    entrants = []
    plain = [argument for argument in arguments if "=" not in argument]
    for argument in arguments:
        name, separator, path = argument.partition("=")
        if separator:
            if not name or not path:
                missing = "directory" if name else "name"
                raise UserError(f"{argument:.80}: found no {missing}, expected NAME=DIRECTORY.")
            directory = Path(path)
            entrants.append((name, "tensorrt" if EngineDirectory.is_engine(directory) else "onnxruntime", directory))
            continue
        for executor in executors:
            label = executor if len(plain) == 1 else f"{Path(argument).name}, {executor}"
            if not (executor.startswith(HUGGINGFACE) and any(item[1] == executor for item in entrants)):
                entrants.append((label, executor, Path(argument)))
    if not entrants:
        raise UserError("Found no directory, expected a network or an engine directory, or results to compare.")
    return entrants
