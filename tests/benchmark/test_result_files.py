"""Reading results: those of ``bench`` pass, everything else is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmark.synthetic_results import (
    make_compare_result,
    make_records,
    make_result,
    make_threshold_result,
)
from trtllm_mla.benchmark import result_files
from trtllm_mla.benchmark.result_files import load_result, load_results
from trtllm_mla.errors import UserError


def _write(path, values):
    path.write_text(json.dumps(values))
    return path


def _with(result, keys, value):
    inner = result
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return result


def test_a_result_of_throughput(tmp_path):
    result = load_result(_write(tmp_path / "a.json", make_result(3, concurrency=4)))
    completed = make_records(120, 3, slowness=1.25)[:-1]  # the last one was cancelled
    assert result.concurrency == 4
    assert result.latency_ms == pytest.approx([(record.end - record.arrival) * 1e3 for record in completed])
    assert result.ttft_ms == pytest.approx([(item.token_times[0] - item.arrival) * 1e3 for item in completed])
    longer = [record for record in completed if record.output_tokens > 1]
    assert len(longer) < len(completed)
    assert result.tpot_ms == pytest.approx(
        [(item.end - item.token_times[0]) / (item.output_tokens - 1) * 1e3 for item in longer]
    )
    assert result.performance.request_latency_percentiles_ms.p50 == pytest.approx(
        sorted(result.latency_ms)[len(completed) // 2]
    )


def test_concurrency_without_a_limit_is_the_average_that_was_seen(tmp_path):
    values = make_result(3)
    values["trtllm_mla"]["options"]["concurrency"] = None
    result = load_result(_write(tmp_path / "a.json", values))
    assert result.concurrency == values["request_info"]["avg_num_concurrent_requests"]


@pytest.mark.parametrize("make", [make_threshold_result, make_compare_result])
def test_results_without_requests(make, tmp_path):
    result = load_result(_write(tmp_path / "a.json", make()))
    assert result.latency_ms == []
    assert result.concurrency in (None, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "found a list at the top level"),
        ("{}", "found no block 'trtllm_mla'"),
        ('{"trtllm_mla": {"prefill": 1}}', "found no block 'trtllm_mla' with a 'kind'"),
        ('{"trtllm_mla": {"kind": "latency", "format": 2}}', "format: found 2, expected 1"),
        ('{"trtllm_mla": {"kind": "latency"}}', "format: found None, expected 1"),
        ('{"trtllm_mla": {"kind": "speed", "format": 1}}', "trtllm_mla.kind: found 'speed'"),
        ('{"trtllm_mla": {"kind": "latency", "format": 1}}', "performance: missing, expected in a result of kind"),
        ('{"trtllm_mla": {"kind": "compare", "format": 1}}', "trtllm_mla.compare: missing"),
        ('{"trtllm_mla": {"kind": "threshold", "format": 1}}', "trtllm_mla.threshold: missing"),
        ('{"a": 1, "a": 2}', "appears twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_what_is_no_result_is_one_line(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as raised:
        load_result(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("performance", "total_latency_ms"), float("nan"), "total_latency_ms"),
        (("performance", "total_latency_ms"), -1, "total_latency_ms"),
        (("performance", "total_latency_ms"), 10**300, "total_latency_ms"),
        (("performance", "request_latency_percentiles_ms"), [], "request_latency_percentiles_ms"),
        (("engine", "model"), {"a": 1}, "engine.model"),
        (("engine", "model"), "x" * 20_000, "engine.model"),
        (("trtllm_mla", "timeline", "running"), [1.0], "1 running"),
        (("trtllm_mla", "timeline", "running"), [1.0] * 200_000, "trtllm_mla.timeline.running"),
        (("trtllm_mla", "requests", 0, "end_s"), -5.0, "expected none before the one it follows"),
        (("trtllm_mla", "requests", 0, "finish_reason"), "bored", "finish_reason"),
        (("trtllm_mla", "num_pages"), 1 << 70, "num_pages"),
    ],
)
def test_values_that_bench_never_writes(keys, value, message, tmp_path):
    path = _write(tmp_path / "a.json", _with(make_result(1), keys, value))
    with pytest.raises(UserError, match=message):
        load_result(path)


def test_sizes_are_limited(tmp_path, monkeypatch):
    path = _write(tmp_path / "a.json", make_result(1))
    monkeypatch.setattr(result_files, "MAX_RESULT_BYTES", 1000)
    with pytest.raises(UserError, match="expected at most 1000"):
        load_result(path)
    with pytest.raises(UserError, match="Found 65 results, expected at most 64"):
        load_results([path] * 65)


def test_every_result_has_a_name_of_its_own(tmp_path):
    paths = []
    for name in ("a/run.json", "b/run.json", "b/other.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        paths.append(_write(tmp_path / name, make_result(len(paths))))
    assert list(load_results(paths[1:])) == ["run", "other"]
    assert list(load_results(paths)) == ["a/run", "b/run", "b/other"]
    assert list(load_results([paths[0], Path(paths[0])])) == ["1: run", "2: run"]


@pytest.mark.parametrize("number", [-(2**63), -1, 2**63 - 1])
def test_any_number_that_a_dataset_may_give_a_request(tmp_path, number):
    values = _with(make_result(1), ("trtllm_mla", "requests", 0, "task_id"), number)
    assert load_result(_write(tmp_path / "a.json", values)).own.requests[0].task_id == number
