"""Latency measurement: the arithmetic on an executor of known speed, and a whole run from directories."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from tests.benchmark.recount import flatten, recount
from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor
from tests.support.hf import make_checkpoint
from trtllm_mla.benchmark.latency import LatencyOptions, bench_executor, bench_latency, pages_for_latency
from trtllm_mla.benchmark.report import print_latency_report
from trtllm_mla.benchmark.subject import Subject
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.scheduler import SchedulerConfig

OPTIONS = LatencyOptions(input_len=19, output_len=7, batch_size=3, warmup=1, iterations=4, seed=5)
PAGE_SIZE = 16
STEP_SECONDS = 0.004


class PacedExecutor(FakeExecutor):
    """Takes so long for a step, and twice as long where there is a context group."""

    dtype = DType.FLOAT16
    cache_dtype = CacheDType.FP16

    def run(self, step):
        time.sleep(STEP_SECONDS * (2 if len(step.context_position_ids) else 1))
        return super().run(step)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", rope="yarn", dtype="bfloat16").path


@pytest.fixture(scope="module")
def subject(checkpoint):
    return Subject("tiny", "path", "engine", "0" * 64, read_model_spec(Checkpoint.open(checkpoint)))


def _config(options=OPTIONS, **limits):
    build = BuildConfig(max_seq_len=64, max_num_tokens=128)
    plugin = MlaPluginConfig(page_size=PAGE_SIZE, prefill_absorption_threshold=1)
    num_pages = pages_for_latency(options, PAGE_SIZE)
    config = SchedulerConfig.from_build_config(build, plugin, vocab_size=VOCAB_SIZE, num_pages=num_pages)
    return replace(config, **limits)


def _bench(subject, options=OPTIONS, **limits):
    config = _config(options, **limits)
    executor = PacedExecutor(config.num_pages, PAGE_SIZE)
    return bench_executor(executor, subject, config, options), executor


def test_prefill_and_decode_are_timed_apart(subject):
    report, executor = _bench(subject)
    batches = OPTIONS.warmup + OPTIONS.iterations
    assert len(executor.steps) == batches * OPTIONS.output_len
    step_ms = STEP_SECONDS * 1e3
    assert 2 * step_ms <= report.prefill.executor_ms.minimum <= report.prefill.latency_ms.minimum
    assert step_ms <= report.decode.executor_ms.minimum < 2 * step_ms
    assert report.prefill.steps == 1
    assert report.prefill.tokens == 3 * 19
    assert report.decode.tokens == 3
    assert report.decode.past_kv_length == (19, 24)
    assert report.prefill.tokens_per_second == pytest.approx(57 / report.prefill.latency_ms.median * 1e3)
    assert report.ttft_ms.maximum == report.prefill.latency_ms.maximum
    assert step_ms <= report.tpot_ms.minimum
    assert report.request_ms.minimum >= 8 * step_ms
    assert report.total_ms >= OPTIONS.iterations * 8 * step_ms
    assert report.total_ms >= OPTIONS.iterations * report.request_ms.minimum


def test_every_batch_has_its_own_prompts_and_the_seed_decides_them(subject):
    def prompts(seed):
        _, executor = _bench(subject, replace(OPTIONS, seed=seed))
        return [tuple(step.input_ids) for step in executor.steps if len(step.context_position_ids)]

    first = prompts(5)
    assert len(set(first)) == len(first) == 5
    assert prompts(5) == first != prompts(6)
    assert all(0 <= token < VOCAB_SIZE for prompt in first for token in prompt)


def test_prefill_in_several_steps(subject):
    report, _ = _bench(subject, max_num_tokens=19)
    # One prompt a step; the first two requests decode along, so the prompts' last tokens wait for another step.
    assert report.prefill.steps > 3
    assert report.prefill.executor_ms.minimum >= 3 * 2 * STEP_SECONDS * 1e3
    assert report.decode.executor_ms.minimum < 2 * STEP_SECONDS * 1e3
    assert report.ttft_ms.minimum < report.ttft_ms.maximum


def test_no_full_decode_step_is_an_error(subject):
    with pytest.raises(UserError, match="No decode step served the whole batch"):
        _bench(subject, replace(OPTIONS, output_len=2), max_num_tokens=19)


def test_json_has_the_keys_of_trtllm_bench(subject):
    report, _ = _bench(subject)
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert list(values) == [
        "engine",
        "machine",
        "world_info",
        "request_info",
        "performance",
        "streaming_metrics",
        "dataset",
        "trtllm_mla",
    ]
    assert values["engine"]["kv_cache_dtype"] == "fp16"
    assert values["engine"]["max_sequence_length"] == 64
    # The three of a batch start together and end within moments of each other.
    assert values["request_info"] == {
        "num_requests": 12,
        "avg_num_concurrent_requests": pytest.approx(3, rel=0.05),
        "avg_input_length": 19,
        "avg_output_length": 7,
    }
    performance = values["performance"]
    seconds = performance["total_latency_ms"] / 1e3
    assert performance["request_throughput_req_s"] == pytest.approx(12 / seconds)
    assert performance["system_output_throughput_tok_s"] == pytest.approx(84 / seconds)
    assert performance["system_total_throughput_tok_s"] == pytest.approx(12 * 26 / seconds)
    assert performance["avg_request_latency_ms"] == report.request_ms.average
    assert set(performance["request_latency_percentiles_ms"]) == {
        *("p50", "p90", "p95", "p99", "minimum", "maximum", "average")
    }
    recounted = recount(log_of(report))
    assert flatten({name: values[name] for name in recounted}) == pytest.approx(flatten(recounted), rel=1e-9)
    assert values["streaming_metrics"]["avg_ttft_ms"] == report.ttft_ms.average
    ours = values["trtllm_mla"]
    assert ours["decode"]["past_kv_length"] == [19, 24]
    assert "scheduling" in ours["timer"]
    assert ours["options"]["warmup"] == 1
    assert (ours["format"], ours["kind"]) == (1, "latency")
    assert ours["prompt_tokens"] == 12 * 19
    assert ours["chunks"]["decodes"] == 12 * 6
    assert len(ours["timeline"]["seconds"]) == 4 * 7
    assert ours["timeline"]["seconds"] == sorted(ours["timeline"]["seconds"])
    assert max(ours["timeline"]["running"]) == 3
    # float16 rows of 96 + 32 elements in 2 layers; 26 tokens take 2 pages of 16.
    assert ours["cache_bytes_per_token"]["latent"] == 2 * 128 * 2
    assert ours["cache_bytes_used"] == 3 * 2 * 16 * 512


def log_of(report):
    return [json.loads(json.dumps(record.to_json())) for record in report.records]


def test_printed_report(subject):
    report, _ = _bench(subject)
    out = StringIO()
    print_latency_report(report, Console(file=out, width=160))
    text = out.getvalue()
    for part in (
        "ENGINE DETAILS",
        "MACHINE DETAILS",
        "REQUEST DETAILS",
        "PERFORMANCE OVERVIEW",
        "Request Throughput (req/sec)",
        "Total Output Throughput (tokens/sec)",
        "Per User Output Throughput [w/ ctx] (tps/user)",
        "decode: a step of 3 tokens at a past KV length of 19 to 24",
        "p99",
        f"{report.ttft_ms.average:.3f}",
        f"{report.decode.latency_ms.p99:.3f}",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_len": 0}, "input_len: found 0, expected at least 1"),
        ({"output_len": 1}, "output_len: found 1, expected at least 2"),
        ({"batch_size": 0}, "batch_size: found 0"),
        ({"warmup": -1}, "warmup: found -1"),
        ({"iterations": 0}, "iterations: found 0"),
        ({"seed": -1}, "seed: found -1"),
    ],
)
def test_options_are_checked(values, message):
    with pytest.raises(UserError, match=message):
        replace(OPTIONS, **values)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 2}, "batch_size: found 3, expected at most max_batch_size = 2"),
        ({"num_pages": 5}, "needs 6 pages"),
        ({"max_seq_len": 25}, "max_seq_len = 25"),
        ({"max_input_len": 18}, "max_input_len = 18"),
    ],
)
def test_batches_beyond_the_limits_are_refused_before_anything_runs(subject, limits, message):
    config = _config(**limits)
    executor = PacedExecutor(config.num_pages, PAGE_SIZE)
    with pytest.raises(UserError, match=message):
        bench_executor(executor, subject, config, OPTIONS)
    assert not executor.steps


def test_from_directories(checkpoint, tmp_path):
    network = convert(checkpoint, tmp_path / "network", plugin=MlaPluginConfig(), num_layers=1)
    lines = []
    report = bench_latency(
        network.path,
        checkpoint,
        "onnxruntime",
        OPTIONS,
        build=BuildConfig(mla_plugin=MlaPluginConfig(page_size=32)),
        num_threads=1,
        on_progress=lines.append,
    )
    assert report.subject.model == "tiny"
    assert report.subject.spec.num_hidden_layers == 1
    assert report.subject.sha256 == hashlib.sha256((tmp_path / "network" / "network.onnx").read_bytes()).hexdigest()
    assert "twin" in report.executor.description
    # A bfloat16 network runs as its float32 twin, whose cache is float32 too: the bytes are those in memory.
    assert (report.executor.dtype, report.executor.cache_dtype) == (DType.FLOAT32, CacheDType.FP32)
    assert report.cache.footprint.latent == 128 * 4
    assert report.config.page_size == 32
    assert lines[1:] == ["warm-up 1 of 1", *(f"iteration {index} of 4" for index in range(1, 5))]
    assert np.isfinite(report.decode.latency_ms.median)


def test_weights_are_needed(checkpoint, tmp_path):
    network = convert(checkpoint, tmp_path / "network", plugin=MlaPluginConfig())
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(UserError, match="no weights"):
        bench_latency(network.path, tmp_path / "bare", "onnxruntime", OPTIONS)
