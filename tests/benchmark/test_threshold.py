"""The threshold's benchmark: routing, turns, words, and a run from directories."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor
from tests.support.hf import make_checkpoint
from trtllm_mla.benchmark.chunk_cost import ChunkCost, ChunkSizes, Recommendation
from trtllm_mla.benchmark.formatting import show_number
from trtllm_mla.benchmark.latency import LatencyOptions
from trtllm_mla.benchmark.result_files import BenchResult
from trtllm_mla.benchmark.spread import Spread
from trtllm_mla.benchmark.subject import Subject
from trtllm_mla.benchmark.tables import print_threshold_report
from trtllm_mla.benchmark.threshold import ThresholdOptions, bench_threshold, measure_thresholds
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.scheduler import SchedulerConfig

WORKLOAD = LatencyOptions(input_len=21, output_len=5, batch_size=2, warmup=1, iterations=6, seed=4)
OPTIONS = ThresholdOptions(WORKLOAD, thresholds=(1, 8, 22, 64), max_chunk_tokens=16)
SIZES = ChunkSizes((0, 20), (4, 12))
CONTEXT_SECONDS = 0.003


class PacedExecutor(FakeExecutor):
    """Takes time where there is a context group."""

    name = "paced"
    dtype = DType.FLOAT32
    cache_dtype = CacheDType.FP32

    def run(self, step):
        if len(step.context_position_ids):
            time.sleep(CONTEXT_SECONDS)
        return super().run(step)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", rope="yarn").path


@pytest.fixture(scope="module")
def subject(checkpoint):
    return Subject("tiny", "path", "engine", "0" * 64, read_model_spec(Checkpoint.open(checkpoint)))


@pytest.fixture(scope="module")
def measured(subject):
    """A report and its executor."""
    build = BuildConfig(max_seq_len=64, max_num_tokens=128)
    config = SchedulerConfig.from_build_config(
        build,
        MlaPluginConfig(page_size=16),
        vocab_size=VOCAB_SIZE,
        num_pages=8,
        max_chunk_tokens=OPTIONS.max_chunk_tokens,
        enable_block_reuse=False,
    )
    executor = PacedExecutor(8, 16)
    return measure_thresholds(executor, subject, config, OPTIONS, SIZES), executor


def test_the_threshold_decides_which_way_prompt_tokens_go(measured):
    """Two prompts of 21 tokens in chunks of 16 and 5."""
    report, _ = measured
    routed = {item.threshold: (item.context_tokens, item.absorbed_tokens) for item in report.workloads}
    assert routed == {1: (42, 0), 8: (32, 10), 22: (0, 42), 64: (0, 42)}


def test_prefill_and_decode_are_timed_apart(measured):
    report, _ = measured
    prefill = {item.threshold: Spread.of(item.prefill_ms) for item in report.workloads}
    assert prefill[1].minimum >= 2 * CONTEXT_SECONDS * 1e3
    assert prefill[8].minimum >= CONTEXT_SECONDS * 1e3
    assert prefill[64].median < CONTEXT_SECONDS * 1e3
    for item in report.workloads:
        assert len(item.prefill_ms) == len(item.decode_step_ms) == WORKLOAD.iterations
        assert Spread.of(item.decode_step_ms).median < CONTEXT_SECONDS * 1e3


def test_thresholds_take_turns_on_the_same_prompts(measured):
    _, executor = measured
    first_steps = [
        step
        for step in executor.steps
        if len(step.input_ids) == 32
        and set(step.context_position_ids) | set(step.generation_position_ids) == set(range(16))
    ]
    turns = len(OPTIONS.thresholds)
    assert len(first_steps) == turns * (WORKLOAD.warmup + WORKLOAD.iterations)
    prompts, orders = [], []
    for start in range(0, len(first_steps), turns):
        iteration = first_steps[start : start + turns]
        inputs = {tuple(step.input_ids) for step in iteration}
        assert len(inputs) == 1
        prompts.append(inputs.pop())
        orders.append(tuple(len(step.context_position_ids) for step in iteration))
    assert len(set(prompts)) == len(prompts)
    assert len(set(orders)) > 1
    assert all(sorted(order) == [0, 0, 32, 32] for order in orders)


def test_the_recommendation_follows_from_the_chunks(measured):
    """Decompressed chunks take 3 ms, absorbed ones nothing: all that was measured should be absorbed."""
    report, _ = measured
    assert report.recommendation.threshold == SIZES.lengths[-1] + 1
    assert report.recommendation.is_decided
    verdict, certainty, configured, prediction = report.advice
    assert verdict == "Recommended prefill_absorption_threshold for paced with tiny on this machine: 13."
    assert certainty == "Not told apart from it: any from 13 on."
    assert configured == "The directory's own, 256, is as good within noise."
    assert "By operations alone (roofline) the forms break even at" in prediction


def _chunks(absorbed, decompressed):
    return tuple(ChunkCost(0, length, (absorbed,) * 6, (decompressed,) * 6) for length in (16, 64))


@pytest.mark.parametrize(
    ("recommendation", "words"),
    [
        (Recommendation(40, 17, 64, (), ()), ("machine: 40.", "any from 17 to 64.", "take 50.0% more time")),
        (Recommendation(40, 1, 64, (16,), ()), ("Within noise: chunks of 16 tokens.",)),
        (Recommendation(40, 17, 64, (), (128, 256)), ("No threshold suits all lengths: chunks of 128, 256 tokens",)),
        (Recommendation(40, 1, None, (16, 64), ()), ("No recommendation", "noise of 6 repetitions", "as good within")),
    ],
)
def test_words(measured, recommendation, words):
    """With threshold 40, chunks of 16 are absorbed (3 ms) and those of 64 not (1 ms): 4 ms. With 256, 3 + 3 ms."""
    report = replace(measured[0], recommendation=recommendation, chunks=_chunks(3.0, 1.0))
    text = " ".join(report.advice)
    assert all(word in text for word in words)


def test_json_is_a_result_that_can_be_read_again(measured):
    report, _ = measured
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    block = BenchResult.model_validate(values).own.threshold
    assert [row.threshold for row in block.workloads] == [1, 8, 22, 64]
    assert block.configured == 256
    assert [(row.history, row.num_tokens) for row in block.chunks] == [(0, 4), (0, 12), (20, 4), (20, 12)]
    assert block.recommendation.threshold == 13
    assert block.recommendation.high is None
    assert values["trtllm_mla"]["kind"] == "threshold"
    assert values["engine"]["backend"] == "paced"
    assert len(values["trtllm_mla"]["threshold"]["chunks"][0]["absorbed_samples_ms"]) == WORKLOAD.iterations


def test_printed_report(measured):
    report, _ = measured
    out = StringIO()
    print_threshold_report(report, Console(file=out, width=160))
    text = out.getvalue()
    for part in ("2 x 21 prompt tokens, 5 new ones each", *report.advice, "decode step, ms", "absorbed"):
        assert part in text
    assert show_number(Spread.of(report.workloads[0].prefill_ms).median) in text


def test_from_directories(checkpoint, tmp_path):
    network = convert(checkpoint, tmp_path / "network", plugin=MlaPluginConfig(page_size=16), dtype=DType.FLOAT32)
    lines = []
    report = bench_threshold(
        network.path,
        checkpoint,
        "onnxruntime",
        ThresholdOptions(
            replace(WORKLOAD, iterations=2), thresholds=(1, 64), histories=(0, 33), chunk_lengths=(5, 40)
        ),
        build=BuildConfig(max_seq_len=128),
        num_threads=1,
        on_progress=lines.append,
    )
    assert [item.threshold for item in report.workloads] == [1, 64]
    assert [(item.context_tokens, item.absorbed_tokens) for item in report.workloads] == [(42, 0), (0, 42)]
    assert all(value > 0 for chunk in report.chunks for value in (*chunk.absorbed_ms, *chunk.decompressed_ms))
    assert not report.recommendation.is_decided, "two iterations cannot tell"
    assert report.predicted[33] > 0
    assert np.isfinite(report.predicted_limit)
    assert lines[0] == "executor onnxruntime: loading"
    assert "chunks: 2 of 2" in lines
    assert lines[-1] == "workload: 2 of 2"


def test_a_network_without_absorption_has_no_threshold(checkpoint, tmp_path):
    plugin = MlaPluginConfig(enable_matrix_absorption=False)
    network = convert(checkpoint, tmp_path / "network", plugin=plugin)
    with pytest.raises(UserError, match="converted without enable_matrix_absorption"):
        bench_threshold(network.path, checkpoint, "onnxruntime", OPTIONS)


@pytest.mark.parametrize(
    ("thresholds", "message"), [((), "found none"), ((4, -1), "found -1"), ((2**40,), "found 10995")]
)
def test_thresholds_are_checked(thresholds, message):
    with pytest.raises(UserError, match=f"--thresholds: {message}"):
        ThresholdOptions(WORKLOAD, thresholds=thresholds)
