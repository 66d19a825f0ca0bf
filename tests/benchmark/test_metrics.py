"""Metrics against an independent recount from the request log."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest

from tests.benchmark.recount import flatten, read_log, recount
from trtllm_mla.benchmark import metrics
from trtllm_mla.benchmark.records import RequestRecord, write_request_log
from trtllm_mla.errors import UserError

BLOCKS = {
    "request_info": metrics.request_info,
    "performance": metrics.performance,
    "streaming_metrics": metrics.streaming_metrics,
}
PERCENTILES = {"p50", "p90", "p95", "p99", "minimum", "maximum", "average"}


def make_record(generator, number, *, coarse, reason="length", streamed=True, max_tokens=12):
    """A random record; on a coarse clock many moments coincide."""

    def moments(size):
        gaps = generator.exponential(0.3, size=size)
        return np.round(gaps * 4) / 4 if coarse else gaps

    tokens = int(generator.integers(1, max_tokens + 1))
    arrival = float(moments(1)[0] * number)
    times = arrival + 0.25 + np.cumsum(moments(tokens))
    return RequestRecord(
        task_id=number,
        input_tokens=int(generator.integers(1, 200)),
        output_tokens=tokens,
        arrival=arrival,
        token_times=tuple(times.tolist()) if streamed else (),
        end=float(times[-1]),
        finish_reason=reason,
    )


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 19, 20, 100, 101, 357])
def test_blocks_are_those_of_a_recount(tmp_path, count, coarse):
    generator = np.random.default_rng([count, coarse])
    reasons = ["length", "stop", "cancelled", "error"]
    records = [
        make_record(generator, number, coarse=coarse, reason="stop" if number == 0 else reasons[number % 4])
        for number in range(count)
    ]
    write_request_log(tmp_path / "log.jsonl", records)
    expected = recount(read_log(tmp_path / "log.jsonl"))
    for name, block in BLOCKS.items():
        found = json.loads(json.dumps(block(records), allow_nan=False))
        assert flatten(found) == pytest.approx(flatten(expected[name]), rel=1e-9), name


def test_requests_of_one_token_have_no_time_per_output_token(tmp_path):
    generator = np.random.default_rng(3)
    records = [make_record(generator, number, coarse=False, max_tokens=1) for number in range(9)]
    block = metrics.streaming_metrics(records)
    assert block["avg_ttft_ms"] == pytest.approx(statistics.mean(record.ttft for record in records) * 1e3)
    for key in ("avg_tpot_ms", "tpot_percentiles", "token_output_speed_tok_s", "gen_tps_percentiles"):
        assert block[key] is None


def test_one_of_several_requests_has_one_token():
    records = [
        RequestRecord(0, 1, 1, 0.0, (1.0,), 1.0, "length"),
        RequestRecord(1, 1, 3, 0.0, (1.0, 2.0, 5.0), 5.0, "length"),
    ]
    block = metrics.streaming_metrics(records)
    assert block["avg_tpot_ms"] == 2000.0
    assert block["token_output_speed_tok_s"] == 0.5
    assert block["avg_ttft_ms"] == 1000.0


def test_without_streaming_there_is_no_first_token():
    generator = np.random.default_rng(4)
    records = [make_record(generator, number, coarse=False, streamed=False) for number in range(5)]
    assert set(metrics.streaming_metrics(records).values()) == {None}
    assert metrics.performance(records)["avg_request_latency_ms"] > 0


def test_tokens_at_one_moment_have_no_speed():
    records = [RequestRecord(0, 1, 2, 0.0, (1.0, 1.0), 1.0, "length")]
    block = metrics.streaming_metrics(records)
    assert block["avg_tpot_ms"] == 0.0
    assert block["token_output_speed_tok_s"] is None


def test_cancelled_requests_change_nothing_but_are_needed_for_nothing():
    kept = [
        RequestRecord(0, 10, 2, 1.0, (2.0, 3.0), 3.0, "length"),
        RequestRecord(1, 20, 2, 1.0, (2.0, 4.0), 4.0, "stop"),
    ]
    others = [RequestRecord(2, 5, 1, 0.0, (0.5,), 9.0, "cancelled"), RequestRecord(3, 5, 0, 0.0, (), 9.0, "error")]
    for block in BLOCKS.values():
        assert block(kept + others) == block(kept)


def test_nothing_completed():
    with pytest.raises(UserError, match="No request was completed"):
        metrics.performance([RequestRecord(0, 5, 0, 0.0, (), 9.0, "error")])


def test_a_benchmark_without_duration_is_a_broken_clock():
    with pytest.raises(ValueError, match="took 0"):
        metrics.performance([RequestRecord(0, 5, 1, 2.0, (2.0,), 2.0, "length")])


def test_gpus_share_the_output():
    records = [RequestRecord(0, 10, 4, 0.0, (1.0, 2.0), 2.0, "length")]
    assert metrics.performance(records, world_size=4)["output_throughput_per_gpu_tok_s"] == 0.5


def test_issue_rate():
    def at(*moments):
        return [RequestRecord(0, 1, 1, moment, (moment,), moment + 1, "length") for moment in moments]

    assert metrics.issue_rate(at(0.0, 1.0, 4.0)) == 0.5
    assert metrics.issue_rate(at(2.0, 2.0)) is None
    assert metrics.issue_rate(at(1.0)) is None


def test_dataset_block():
    block = metrics.dataset([(3, 10), (5, 2), (4, 6)])
    assert block["num_requests"] == 3
    assert block["isl_stats"] | {"p50": 4, "minimum": 3, "maximum": 5, "average": 4} == block["isl_stats"]
    assert block["osl_stats"] | {"p50": 6, "minimum": 2, "maximum": 10, "average": 6} == block["osl_stats"]
    # Sums of each request, not of the sorted columns.
    assert block["seq_len_stats"] | {"p50": 10, "minimum": 7, "maximum": 13, "p99": 13} == block["seq_len_stats"]
    assert all(set(block[key]) == PERCENTILES for key in ("isl_stats", "osl_stats", "seq_len_stats"))
