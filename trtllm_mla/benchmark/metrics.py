"""From the records of a benchmark's requests to the blocks of trtllm-bench's report, with its keys and definitions.

Requests that were cancelled or failed are in no block: neither their latency nor their tokens say how fast requests
are completed. Output tokens include the first one. Moments that do not exist (no time per output token in a request of
one token) are left out of averages and percentiles, where trtllm-bench counts zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from trtllm_mla.benchmark.records import RequestRecord
from trtllm_mla.benchmark.statistics import Percentiles
from trtllm_mla.errors import UserError

_MS = 1e3


def completed(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The records of requests that came to their end.

    Raises:
        UserError: There is none.
    """
    found = [record for record in records if record.is_completed]
    if not found:
        raise UserError("No request was completed, so there is nothing to report. Look at the errors above.")
    return found


def total_seconds(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first arrival to the last end."""
    seconds = max(record.end for record in records) - min(record.arrival for record in records)
    if seconds <= 0:
        raise ValueError(f"found requests that took {seconds} seconds, expected more than 0")
    return seconds


def issue_rate(records: Sequence[RequestRecord]) -> float | None:
    """Requests that arrived per second, between the first and the last arrival; None where all arrived at once."""
    arrivals = [record.arrival for record in records]
    seconds = max(arrivals) - min(arrivals)
    return (len(arrivals) - 1) / seconds if seconds > 0 else None


def request_info(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """The block ``request_info``.

    Requests in flight on average are, by Little's law, all latencies together over the total time.
    """
    done = completed(records)
    return {
        "num_requests": len(done),
        "avg_num_concurrent_requests": sum(record.latency for record in done) / total_seconds(done),
        "avg_input_length": fmean(record.input_tokens for record in done),
        "avg_output_length": fmean(record.output_tokens for record in done),
    }


def performance(records: Iterable[RequestRecord], *, world_size: int = 1) -> dict[str, Any]:
    """The block ``performance``.

    Args:
        records: The requests.
        world_size: GPUs that served them together.
    """
    done = completed(records)
    seconds = total_seconds(done)
    latency_ms = Percentiles.of([record.latency * _MS for record in done])
    output_tokens = sum(record.output_tokens for record in done)
    input_tokens = sum(record.input_tokens for record in done)
    return {
        "total_latency_ms": seconds * _MS,
        "avg_request_latency_ms": latency_ms.average,
        "request_throughput_req_s": len(done) / seconds,
        "system_output_throughput_tok_s": output_tokens / seconds,
        "system_total_throughput_tok_s": (input_tokens + output_tokens) / seconds,
        "output_throughput_per_user_tok_s": fmean(record.output_tokens / record.latency for record in done),
        "output_throughput_per_gpu_tok_s": output_tokens / seconds / world_size,
        "request_latency_percentiles_ms": latency_ms.trtllm_bench(),
    }


def streaming_metrics(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """The block ``streaming_metrics``; a value is None where no request has it.

    ``token_output_speed_tok_s`` is the mean, over requests, of the tokens after the first one per second between the
    first one and the end; ``gen_tps_percentiles`` are its percentiles.
    """
    done = completed(records)
    ttft_ms = _percentiles([record.ttft * _MS for record in done if record.ttft is not None])
    tpots = [record.tpot for record in done if record.tpot is not None]
    tpot_ms = _percentiles([tpot * _MS for tpot in tpots])
    # Several tokens that came at the same moment have no rate.
    generation = _percentiles([1 / tpot for tpot in tpots if tpot > 0])
    return {
        "token_output_speed_tok_s": generation and generation.average,
        "avg_ttft_ms": ttft_ms and ttft_ms.average,
        "avg_tpot_ms": tpot_ms and tpot_ms.average,
        "ttft_percentiles": ttft_ms and ttft_ms.trtllm_bench(),
        "tpot_percentiles": tpot_ms and tpot_ms.trtllm_bench(),
        "gen_tps_percentiles": generation and generation.trtllm_bench(),
    }


def dataset(lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The block ``dataset``: what was asked for.

    Args:
        lengths: Prompt tokens and new tokens of each request.
    """
    return {
        "isl_stats": Percentiles.of([float(prompt) for prompt, _ in lengths]).trtllm_bench(),
        "osl_stats": Percentiles.of([float(output) for _, output in lengths]).trtllm_bench(),
        "seq_len_stats": Percentiles.of([float(prompt + output) for prompt, output in lengths]).trtllm_bench(),
        "num_requests": len(lengths),
    }


def _percentiles(samples: Sequence[float]) -> Percentiles | None:
    return Percentiles.of(samples) if samples else None
