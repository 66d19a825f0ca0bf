"""Reading results that ``bench`` wrote, as strangers' files: sizes, types and lengths are checked."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trtllm_mla.benchmark.dataset import TaskId
from trtllm_mla.benchmark.records import RequestOutcome, RequestRecord
from trtllm_mla.benchmark.subject import RESULT_FORMAT
from trtllm_mla.config import parse_config
from trtllm_mla.errors import UserError
from trtllm_mla.files import read_table

BLOCK = "trtllm_mla"
MAX_RESULT_BYTES = 64 << 20
MAX_RESULTS = 64
MAX_REQUESTS = 1_000_000
MAX_TIMELINE = 100_000
MAX_ROWS = 1_000

_MS = 1e3

Number = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e18)]
SignedNumber = Annotated[float, Field(allow_inf_nan=False, ge=-1e18, le=1e18)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Text = Annotated[str, Field(max_length=10_000)]


class ResultKind(StrEnum):
    """Which command measured."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    THRESHOLD = "threshold"
    COMPARE = "compare"
    ENDPOINT = "endpoint"


class _Block(BaseModel):
    """A part of a result. Keys that a report has no use for are let through."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class EngineBlock(_Block):
    """What ran; trtllm-bench's ``engine``."""

    model: Text | None = None
    engine_dir: Text | None = None
    backend: Text | None = None
    dtype: Text | None = None
    kv_cache_dtype: Text | None = None


class RequestInfoBlock(_Block):
    """trtllm-bench's ``request_info``."""

    num_requests: Count
    avg_num_concurrent_requests: Number
    avg_input_length: Number
    avg_output_length: Number


class PercentilesBlock(_Block):
    """Milliseconds, or tokens per second."""

    p50: Number
    p90: Number
    p95: Number
    p99: Number
    minimum: Number
    maximum: Number
    average: Number


class PerformanceBlock(_Block):
    """trtllm-bench's ``performance``."""

    total_latency_ms: Number
    request_throughput_req_s: Number
    system_output_throughput_tok_s: Number
    system_total_throughput_tok_s: Number
    output_throughput_per_user_tok_s: Number
    request_latency_percentiles_ms: PercentilesBlock


class StreamingBlock(_Block):
    """trtllm-bench's ``streaming_metrics``."""

    ttft_percentiles: PercentilesBlock | None = None
    tpot_percentiles: PercentilesBlock | None = None


class RequestRow(_Block):
    """A request of the log; seconds from the start of the clock."""

    task_id: TaskId
    input_tokens: Count
    output_tokens: Count
    arrival_s: SignedNumber
    first_token_s: SignedNumber | None = None
    end_s: SignedNumber
    finish_reason: RequestOutcome

    @property
    def record(self) -> RequestRecord:
        """The request without the moments between its first token and its end."""
        first = () if self.first_token_s is None else (self.first_token_s,)
        return RequestRecord(
            self.task_id, self.input_tokens, self.output_tokens, self.arrival_s, first, self.end_s, self.finish_reason
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        _ = self.record  # refuses moments out of order
        return self


class TimelineBlock(_Block):
    """What was in use after some of the steps."""

    seconds: Annotated[list[Number], Field(max_length=MAX_TIMELINE)]
    pages_in_use: Annotated[list[Number], Field(max_length=MAX_TIMELINE)]
    running: Annotated[list[Number], Field(max_length=MAX_TIMELINE)]
    waiting: Annotated[list[Number], Field(max_length=MAX_TIMELINE)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = {name: len(getattr(self, name)) for name in type(self).model_fields}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise ValueError(f"found {found}, expected as many of each")
        return self


class SpreadBlock(_Block):
    """``trtllm_mla.benchmark.spread.Spread``."""

    median: Number
    p10: Number
    p90: Number
    minimum: Number
    maximum: Number
    count: Count


class IntervalBlock(_Block):
    """``trtllm_mla.benchmark.spread.MedianInterval``."""

    median: SignedNumber
    low: SignedNumber
    high: SignedNumber
    confidence: Annotated[float, Field(ge=0, le=1)]


class ThresholdRow(_Block):
    """The workload at one threshold."""

    threshold: Count
    prefill_ms: SpreadBlock
    decode_step_ms: SpreadBlock
    context_tokens: Count
    absorbed_tokens: Count


class ChunkRow(_Block):
    """A chunk in both forms of attention."""

    history: Count
    num_tokens: Count
    absorbed_ms: SpreadBlock
    decompressed_ms: SpreadBlock
    difference_ms: IntervalBlock


class PredictedRow(_Block):
    """Break-even by operations alone, with some history."""

    history: Count
    num_tokens: Number | None = None


class RecommendationBlock(_Block):
    """What ``bench threshold`` advises."""

    threshold: Count
    low: Count
    high: Count | None = None
    is_decided: bool
    text: Text


class ThresholdBlock(_Block):
    """What ``bench threshold`` measured."""

    configured: Count
    workloads: Annotated[list[ThresholdRow], Field(max_length=MAX_ROWS)]
    chunks: Annotated[list[ChunkRow], Field(max_length=MAX_ROWS)]
    predicted: Annotated[list[PredictedRow], Field(max_length=MAX_ROWS)] = []
    predicted_limit: Number | None = None
    recommendation: RecommendationBlock


class MetricBlock(_Block):
    """A quantity of one subject of a comparison, and how it stands to the first subject's."""

    value: Number
    low: Number | None = None
    high: Number | None = None
    ratio: Number | None = None
    ratio_low: Number | None = None
    ratio_high: Number | None = None


class SubjectRow(_Block):
    """One subject of a comparison."""

    name: Text
    description: Text | None = None
    same_tokens: Annotated[float, Field(ge=0, le=1)] | None = None
    metrics: Annotated[dict[Text, MetricBlock], Field(max_length=MAX_ROWS)]


class CompareBlock(_Block):
    """What ``bench compare`` measured or read."""

    mode: Literal["run", "files"]
    metrics: Annotated[dict[Text, Text], Field(max_length=MAX_ROWS)]
    subjects: Annotated[list[SubjectRow], Field(min_length=1, max_length=MAX_RESULTS)]


class OwnBlock(_Block):
    """The block that is not trtllm-bench's."""

    format: int
    kind: ResultKind
    executor: Text | None = None
    timer: Text | None = None
    sha256: Any = None
    kernels_sha256: Any = None
    versions: Any = None
    options: Any = None
    machine: Any = None
    num_layers: Count | None = None
    page_size: Count | None = None
    num_pages: Count | None = None
    cache_bytes_per_token: Any = None
    cache_bytes_pool: Number | None = None
    pages_peak: Count | None = None
    num_preemptions: Count | None = None
    reused_tokens: Count | None = None
    chunks: Any = None
    requests: Annotated[list[RequestRow], Field(max_length=MAX_REQUESTS)] = []
    timeline: TimelineBlock | None = None
    threshold: ThresholdBlock | None = None
    compare: CompareBlock | None = None


class BenchResult(_Block):
    """A result, in trtllm-bench's blocks and ours."""

    engine: EngineBlock = EngineBlock()
    request_info: RequestInfoBlock | None = None
    performance: PerformanceBlock | None = None
    streaming_metrics: StreamingBlock | None = None
    own: Annotated[OwnBlock, Field(alias=BLOCK)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = self.own.kind
        needed: dict[str, _Block | None] = {"performance": self.performance, "request_info": self.request_info}
        if kind is ResultKind.THRESHOLD:
            needed = {f"{BLOCK}.threshold": self.own.threshold}
        if kind is ResultKind.COMPARE:
            needed = {f"{BLOCK}.compare": self.own.compare}
        missing = [name for name, block in needed.items() if block is None]
        if missing:
            raise ValueError(f"{missing[0]}: missing, expected in a result of kind {kind}")
        return self

    @property
    def asked_concurrency(self) -> int | None:
        """The limit on requests in flight that was asked for."""
        options: object = self.own.options
        if not isinstance(options, dict):
            return None
        # A batch is a limit too.
        asked = options.get("concurrency", options.get("batch_size"))
        in_range = isinstance(asked, int) and not isinstance(asked, bool) and 0 < asked <= MAX_REQUESTS
        return asked if in_range else None

    @property
    def concurrency(self) -> float | None:
        """Requests served at a time: what was asked for, or else the average that was seen."""
        if self.asked_concurrency is not None:
            return float(self.asked_concurrency)
        return self.request_info.avg_num_concurrent_requests if self.request_info else None

    @cached_property
    def completed(self) -> list[RequestRecord]:
        """The requests that came to their end."""
        return [record for record in (row.record for row in self.own.requests) if record.is_completed]

    @property
    def ttft_ms(self) -> list[float]:
        """Time to first token of each request that has one."""
        return [record.ttft * _MS for record in self.completed if record.ttft is not None]

    @property
    def tpot_ms(self) -> list[float]:
        """Time per output token after the first, of each request with two or more."""
        return [record.tpot * _MS for record in self.completed if record.tpot is not None]

    @property
    def latency_ms(self) -> list[float]:
        """Latency of each request."""
        return [record.latency * _MS for record in self.completed]


def load_result(path: Path) -> BenchResult:
    """Reads a result.

    Raises:
        UserError: The file is missing, too large, or no result of ``bench``.
    """
    values = read_table(path, max_bytes=MAX_RESULT_BYTES)
    own = values.get(BLOCK)
    if not isinstance(own, dict) or "kind" not in own:
        raise UserError(
            f"{path}: found no block '{BLOCK}' with a 'kind', expected a result that trtllm-mla bench wrote with "
            "--json. Measure again, or name another file."
        )
    if own.get("format") != RESULT_FORMAT:
        raise UserError(
            f"{path}: {BLOCK}.format: found {own.get('format')!r:.80}, expected {RESULT_FORMAT}. Measure again "
            "with this version."
        )
    return parse_config(values, BenchResult, source=str(path))


def load_results(paths: Sequence[Path]) -> dict[str, BenchResult]:
    """Reads results.

    Args:
        paths: Their files, one or more.

    Returns:
        Each result by a name of its own: its file's name without the extension, with its directory's where two
        files have the same, or else its number.

    Raises:
        UserError: As ``load_result``, or there are too many.
    """
    if len(paths) > MAX_RESULTS:
        raise UserError(f"Found {len(paths)} results, expected at most {MAX_RESULTS}. Name fewer files.")
    return dict(zip(_unique_names(paths), map(load_result, paths), strict=True))


def _unique_names(paths: Sequence[Path]) -> list[str]:
    stems = [path.stem for path in paths]
    longer = [f"{path.absolute().parent.name}/{path.stem}" for path in paths]
    numbered = [f"{number}: {stem}" for number, stem in enumerate(stems, 1)]
    return next(names for names in (stems, longer, numbered) if len(set(names)) == len(names))
