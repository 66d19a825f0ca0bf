"""Serving datasets: options, counts, warm-up, and whole runs on the example, recounted from their logs."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from tests.benchmark.recount import flatten, read_log, recount
from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor, greedy
from trtllm_mla.benchmark.dataset import DatasetEntry
from trtllm_mla.benchmark.driver import PROGRESS_SECONDS, Progress
from trtllm_mla.benchmark.prepare_dataset import DatasetRecipe, RandomTokens, UniformLength, write_dataset
from trtllm_mla.benchmark.records import write_request_log
from trtllm_mla.benchmark.report import ServingProgress, print_serving_report
from trtllm_mla.benchmark.throughput import ServingOptions, bench_dataset, pages_for_entries, serve_entries
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.scheduler import SchedulerConfig, SchedulingPolicy

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"
PAGE_SIZE = 16
# The keys of trtllm-bench's report, block by block.
PERCENTILES = {"p50", "p90", "p95", "p99", "minimum", "maximum", "average"}
TRTLLM_BENCH = {
    "engine": {
        *("model", "model_path", "engine_dir", "version", "backend", "dtype", "kv_cache_dtype", "quantization"),
        *("max_input_length", "max_sequence_length"),
    },
    "machine": {"name", "memory.total", "clocks.mem"},
    "world_info": {
        *("tp_size", "pp_size", "ep_size", "world_size", "max_batch_size", "max_num_tokens", "scheduling_policy"),
        *("kv_cache_percentage", "issue_rate"),
    },
    "request_info": {"num_requests", "avg_num_concurrent_requests", "avg_input_length", "avg_output_length"},
    "performance": {
        *("total_latency_ms", "avg_request_latency_ms", "request_throughput_req_s", "system_output_throughput_tok_s"),
        *("system_total_throughput_tok_s", "output_throughput_per_user_tok_s", "output_throughput_per_gpu_tok_s"),
        "request_latency_percentiles_ms",
    },
    "streaming_metrics": {
        *("token_output_speed_tok_s", "avg_ttft_ms", "avg_tpot_ms", "tpot_percentiles", "ttft_percentiles"),
        "gen_tps_percentiles",
    },
    "dataset": {"isl_stats", "osl_stats", "seq_len_stats", "num_requests"},
}


def entry(number, input_ids, output_tokens):
    return DatasetEntry(700 - number, array("i", input_ids), output_tokens, number + 1)


def make_config(num_pages=60, **limits):
    build = BuildConfig(max_seq_len=128, max_num_tokens=64, max_batch_size=4)
    plugin = MlaPluginConfig(page_size=PAGE_SIZE, prefill_absorption_threshold=8)
    return replace(
        SchedulerConfig.from_build_config(build, plugin, vocab_size=VOCAB_SIZE, num_pages=num_pages), **limits
    )


ENTRIES = [
    entry(number, [(7 * number + item) % VOCAB_SIZE for item in range(5 + number)], 1 + number % 4)
    for number in range(12)
]


def serve_fake(options, entries=ENTRIES, config=None, **values):
    config = config or make_config()
    executor = FakeExecutor(config.num_pages, PAGE_SIZE)
    return (*serve_entries(executor, config, entries, options, **values), executor)


def test_every_request_gets_its_tokens():
    outcome, counts, _ = serve_fake(ServingOptions(concurrency=3))
    found = [(record.input_tokens, record.output_tokens) for record in outcome.records]
    assert found == [item.lengths for item in ENTRIES]
    assert [record.task_id for record in outcome.records] == [700 - number for number in range(12)]
    assert {record.finish_reason for record in outcome.records} == {"length"}
    prompts, outputs = (sum(column) for column in zip(*(item.lengths for item in ENTRIES), strict=True))
    assert counts.num_prompt_tokens == prompts
    assert counts.num_context_tokens + counts.num_absorbed_tokens + counts.num_reused_tokens == prompts
    assert counts.num_decodes == outputs - len(ENTRIES)


def test_stop_tokens_are_ignored_unless_they_count():
    stop = frozenset(greedy(ENTRIES[3].input_ids, 1))
    ignored, _, _ = serve_fake(ServingOptions(), stop_token_ids=stop)
    assert [record.output_tokens for record in ignored.records] == [item.output_tokens for item in ENTRIES]
    heeded, _, _ = serve_fake(ServingOptions(ignore_eos=False), stop_token_ids=stop)
    expected = [len(greedy(item.input_ids, item.output_tokens, stop)) for item in ENTRIES]
    assert [record.output_tokens for record in heeded.records] == expected
    assert heeded.records[3].finish_reason == "stop"


def test_warmup_runs_first_and_helps_nobody():
    phases = []
    options = ServingOptions(warmup=5)
    outcome, counts, executor = serve_fake(options, on_phase=phases.append)
    _, cold_counts, cold = serve_fake(replace(options, warmup=0))
    assert phases == ["Warming up with 5 requests", "Serving 12 requests"]
    assert len(executor.steps) > len(cold.steps) == outcome.steps.count
    assert counts == cold_counts
    assert [record.reused_tokens for record in outcome.records] == [0] * 12


def test_reuse_and_its_absence():
    alike = [entry(number, [*range(40), number], 3) for number in range(6)]
    outcome, counts, _ = serve_fake(ServingOptions(concurrency=1), alike)
    assert [record.reused_tokens for record in outcome.records] == [0, *[32] * 5]
    assert counts.num_reused_tokens == 5 * 32
    config = make_config(enable_block_reuse=False)
    outcome, counts, _ = serve_fake(ServingOptions(concurrency=1), alike, config)
    assert counts.num_reused_tokens == sum(record.reused_tokens for record in outcome.records) == 0


def test_preemptions_are_counted_request_by_request():
    many = [entry(number, [number + 1] * 30, 40) for number in range(4)]
    config = make_config(num_pages=9, policy=SchedulingPolicy.MAX_UTILIZATION)
    outcome, counts, _ = serve_fake(ServingOptions(warmup=0), many, config)
    assert counts.num_preemptions == sum(record.num_preemptions for record in outcome.records) > 0
    assert counts.peak_pages_in_use == max(outcome.timeline.to_json()["pages_in_use"]) == 9
    assert [record.output_tokens for record in outcome.records] == [40] * 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_requests": 0}, "num_requests: found 0, expected at least 1"),
        ({"concurrency": 0}, "concurrency: found 0, expected at least 1"),
        ({"num_pages": 0}, "num_pages: found 0, expected at least 1"),
        ({"cache_tokens": 0}, "cache_tokens: found 0, expected at least 1"),
        ({"num_pages": 4, "cache_tokens": 9}, "num_pages and cache_tokens: found both"),
        ({"warmup": -1}, "warmup: found -1, expected at least 0"),
        ({"seed": -1}, "seed: found -1, expected at least 0"),
        ({"request_rate": 0.0}, "request_rate: found 0.0, expected requests per second of at least 1e-07"),
        ({"request_rate": 1e-320}, "request_rate: found 1e-320"),
        ({"request_rate": -2.0}, "request_rate: found -2.0"),
        ({"request_rate": math.nan}, "request_rate: found nan"),
    ],
)
def test_options_are_checked(values, message):
    with pytest.raises(UserError, match=message):
        ServingOptions(**values)


def test_options_become_a_load():
    assert ServingOptions(concurrency=4).load(9).arrivals is None
    arrivals = ServingOptions(request_rate=2.0, seed=6).load(9).arrivals
    assert len(arrivals) == 9
    assert arrivals == ServingOptions(request_rate=2.0, seed=6).load(9).arrivals


def test_the_pool_holds_the_largest_requests_together():
    entries = [entry(0, [1] * 15, 1), entry(1, [1] * 16, 1), entry(2, [1] * 40, 9), entry(3, [1], 1)]
    assert pages_for_entries(entries, 16, at_most=1) == 4
    assert pages_for_entries(entries, 16, at_most=3) == 4 + 2 + 1
    assert pages_for_entries(entries, 16, at_most=99) == 4 + 2 + 1 + 1


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("throughput") / "network"
    convert(EXAMPLE, path, plugin=MlaPluginConfig(page_size=PAGE_SIZE, prefill_absorption_threshold=24))
    return path


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("throughput") / "data.jsonl"
    recipe = DatasetRecipe(24, UniformLength(3, 70), UniformLength(1, 12), seed=2, shared_prefix=20)
    write_dataset(path, recipe, RandomTokens(258))
    return path


BUILD = BuildConfig(max_batch_size=5, max_num_tokens=96, max_seq_len=128)


def bench_example(network, dataset, options, **values):
    return bench_dataset(network, EXAMPLE, "onnxruntime", dataset, options, build=BUILD, num_threads=1, **values)


@pytest.mark.parametrize(
    "options",
    [
        ServingOptions(streaming=True, concurrency=3, warmup=1),
        ServingOptions(streaming=True, request_rate=60.0, warmup=0),
        ServingOptions(num_pages=9, policy=SchedulingPolicy.MAX_UTILIZATION, warmup=0, num_requests=15),
    ],
    ids=["concurrency", "rate", "preemption"],
)
def test_the_report_is_that_of_a_recount(network, dataset, tmp_path, options):
    report = bench_example(network, dataset, options)
    write_request_log(tmp_path / "log.jsonl", report.outcome.records)
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    log = read_log(tmp_path / "log.jsonl")
    for row, kept in zip(log, values["trtllm_mla"]["requests"], strict=True):
        times = row.pop("token_times_s")
        assert row == kept
        assert (row["first_token_s"], row["end_s"], row["output_tokens"]) == (times[0], times[-1], len(times))

    expected = recount(log)
    if not options.streaming:
        del expected["streaming_metrics"]
    assert flatten({name: values[name] for name in expected}) == pytest.approx(flatten(expected), rel=1e-9)

    lines = [json.loads(line) for line in dataset.read_text().splitlines()][: options.num_requests]
    asked = [(item["task_id"], len(item["input_ids"]), item["output_tokens"]) for item in lines]
    assert [(row["task_id"], row["input_tokens"], row["output_tokens"]) for row in log] == asked
    assert values["dataset"]["num_requests"] == len(lines)
    assert values["dataset"]["osl_stats"]["maximum"] == max(item["output_tokens"] for item in lines)

    ours = values["trtllm_mla"]
    assert ours["prompt_tokens"] == sum(row["input_tokens"] for row in log)
    assert ours["reused_tokens"] == sum(row["reused_tokens"] for row in log) > 0
    assert ours["num_preemptions"] == sum(row["num_preemptions"] for row in log)
    assert (ours["num_preemptions"] > 0) == (options.num_pages is not None)
    assert max(ours["timeline"]["pages_in_use"]) <= ours["pages_peak"] <= ours["num_pages"]
    # float32 rows of 48 + 16 elements in four layers.
    assert ours["cache_bytes_per_token"]["latent"] == 4 * 64 * 4
    assert ours["cache_bytes_peak"] == ours["pages_peak"] * PAGE_SIZE * 4 * 64 * 4
    assert ours["cache_bytes_pool"] == ours["num_pages"] * PAGE_SIZE * 4 * 64 * 4
    if not ours["num_preemptions"]:
        chunks = ours["chunks"]
        assert chunks["context_tokens"] + chunks["absorbed_tokens"] == ours["prompt_tokens"] - ours["reused_tokens"]
        assert chunks["context"] > 0
        assert chunks["absorbed"] > 0
        assert chunks["decodes"] == sum(row["output_tokens"] - 1 for row in log)
    arrivals = [row["arrival_s"] for row in log]
    rate = values["world_info"]["issue_rate"]
    assert rate == (pytest.approx((len(log) - 1) / max(arrivals)) if max(arrivals) else None)
    assert values["request_info"]["avg_num_concurrent_requests"] <= (options.concurrency or len(log))


@pytest.mark.parametrize("streaming", [False, True])
def test_keys_are_those_of_trtllm_bench(network, dataset, streaming):
    values = bench_example(network, dataset, ServingOptions(streaming=streaming, num_requests=3)).to_json()
    blocks = (
        TRTLLM_BENCH if streaming else {key: item for key, item in TRTLLM_BENCH.items() if key != "streaming_metrics"}
    )
    assert set(values) == {*blocks, "trtllm_mla"}
    assert {name: set(values[name]) for name in blocks} == blocks
    nested = [values["performance"]["request_latency_percentiles_ms"]]
    nested += [values["dataset"][key] for key in ("isl_stats", "osl_stats", "seq_len_stats")]
    if streaming:
        nested += [values["streaming_metrics"][f"{key}_percentiles"] for key in ("ttft", "tpot", "gen_tps")]
    assert all(set(block) == PERCENTILES for block in nested)
    assert values["world_info"]["scheduling_policy"] == "GUARANTEED_NO_EVICT"
    assert (values["world_info"]["max_batch_size"], values["world_info"]["max_num_tokens"]) == (5, 96)
    ours = values["trtllm_mla"]
    assert (ours["format"], ours["kind"]) == (1, "throughput")
    assert ours["sha256"] == hashlib.sha256((network / "network.onnx").read_bytes()).hexdigest()
    assert ours["kernels_sha256"] is None
    assert ours["options"]["dataset_sha256"] == hashlib.sha256(dataset.read_bytes()).hexdigest()
    assert ours["options"]["request_rate"] is None
    assert {"trtllm_mla", "python", "numpy", "onnxruntime"} <= set(ours["versions"])
    assert "not loading" in ours["timer"]
    assert set(ours["timeline"]) == {"seconds", "pages_in_use", "running", "waiting"}
    assert len(set(map(len, ours["timeline"].values()))) == 1


def test_one_request_at_a_time(network, dataset):
    options = ServingOptions(concurrency=1, streaming=True, num_requests=6)
    values = bench_example(network, dataset, options, kind="latency").to_json()
    rows = values["trtllm_mla"]["requests"]
    assert values["trtllm_mla"]["kind"] == "latency"
    for earlier, later in pairwise(rows):
        assert later["arrival_s"] == earlier["end_s"]
    assert values["request_info"]["avg_num_concurrent_requests"] == pytest.approx(1)
    assert max(values["trtllm_mla"]["timeline"]["running"]) <= 1


def test_the_pool_is_as_large_as_asked_for(network, dataset):
    def pages(**values):
        return bench_example(network, dataset, ServingOptions(num_requests=2, warmup=0, **values)).config.num_pages

    assert pages(num_pages=33) == 33
    assert pages(cache_tokens=33 * PAGE_SIZE - 5) == 33
    lengths = [json.loads(line) for line in dataset.read_text().splitlines()[:2]]
    needs = [-(-(len(item["input_ids"]) + item["output_tokens"]) // PAGE_SIZE) for item in lengths]
    assert pages() == sum(needs)
    assert pages(concurrency=1) == max(needs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ServingOptions(num_pages=2), "data.jsonl, line [0-9]+: The request's .* and the pool has 2"),
        (ServingOptions(cache_tokens=20), "data.jsonl, line [0-9]+: The request's .* and the pool has 2"),
    ],
)
def test_a_pool_that_is_too_small_for_one_request(network, dataset, options, message):
    with pytest.raises(UserError, match=message):
        bench_example(network, dataset, options)


def test_requests_beyond_the_limits_are_refused_before_loading(network, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"task_id": 0, "input_ids": [1, 2], "output_tokens": 2**31 - 1}) + "\n")
    phases = []
    with pytest.raises(UserError, match=r"data\.jsonl, line 1: .*output_tokens = 2147483647.*max_seq_len = 128"):
        bench_example(network, path, ServingOptions(), on_phase=phases.append)
    assert phases == ["Reading the dataset"]


def test_printed_report(network, dataset):
    values = bench_example(
        network, dataset, ServingOptions(streaming=True, request_rate=500.0, num_requests=8)
    ).to_json()
    out = StringIO()
    print_serving_report(values, Console(file=out, width=160))
    text = out.getvalue()
    performance, streaming = values["performance"], values["streaming_metrics"]
    for label, value in (
        ("Request Throughput (req/sec)", performance["request_throughput_req_s"]),
        ("Total Output Throughput (tokens/sec)", performance["system_output_throughput_tok_s"]),
        ("Total Token Throughput (tokens/sec)", performance["system_total_throughput_tok_s"]),
        ("Total Latency (ms)", performance["total_latency_ms"]),
        ("Average request latency (ms)", performance["avg_request_latency_ms"]),
        ("Per User Output Throughput [w/ ctx] (tps/user)", performance["output_throughput_per_user_tok_s"]),
        ("Per GPU Output Throughput (tps/gpu)", performance["output_throughput_per_gpu_tok_s"]),
        ("Average time-to-first-token [TTFT] (ms)", streaming["avg_ttft_ms"]),
        ("Average time-per-output-token [TPOT] (ms)", streaming["avg_tpot_ms"]),
        ("Per User Output Speed (tps/user)", streaming["token_output_speed_tok_s"]),
        ("Number of concurrent requests", values["request_info"]["avg_num_concurrent_requests"]),
        ("Issue Rate (req/sec)", values["world_info"]["issue_rate"]),
    ):
        line = next(line for line in text.splitlines() if line.startswith(label))
        assert line.split()[-1] == f"{value:.4f}"
    for part in (
        "WORLD + RUNTIME INFORMATION",
        "500 (Poisson)",
        "ignored",
        f"{streaming['ttft_percentiles']['p99']:.4f}",
        f"{streaming['gen_tps_percentiles']['minimum']:.4f}",
        f"{performance['request_latency_percentiles_ms']['p50']:.4f}",
        f"of {values['trtllm_mla']['prompt_tokens']}",
    ):
        assert part in text


def test_printed_report_without_streaming_and_with_one_token_each(network, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"task_id": 0, "input_ids": [5], "output_tokens": 1}) + "\n" for _ in range(3)))
    for streaming in (False, True):
        out = StringIO()
        values = bench_example(network, path, ServingOptions(streaming=streaming)).to_json()
        json.dumps(values, allow_nan=False)
        print_serving_report(values, Console(file=out, width=160))
        assert ("[TTFT]" in out.getvalue()) == streaming
        assert "GTPS" not in out.getvalue()
        if streaming:
            assert "none" in next(line for line in out.getvalue().splitlines() if "[TPOT]" in line)


def test_progress(network, dataset):
    told = []
    bench_example(network, dataset, ServingOptions(), on_progress=told.append)
    assert (told[-1].done, told[-1].total) == (24, 24)
    assert told[-1].seconds > 0
    assert told[-1].seconds - told[0].seconds >= (len(told) - 2) * PROGRESS_SECONDS


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_terminals_only(terminal):
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=150)
    with ServingProgress(console) as progress:
        progress.phase("Serving 4 requests")
        progress.update(Progress(1, 4, 250, 2.0, 7, 3))
    if not terminal:
        assert out.getvalue() == ""
        return
    for part in ("Serving 4 requests", "1/4", "125 tok/s", "3 running", "7 pages"):
        assert part in out.getvalue()
