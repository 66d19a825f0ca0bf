"""Comparisons: turns, pairs and ratios on contestants of known speed, results of several runs, and real executors."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from rich.console import Console

from tests.benchmark.synthetic_results import make_result, make_threshold_result
from tests.support.hf import make_checkpoint
from trtllm_mla.benchmark.compare import (
    CONTESTANTS,
    Entrant,
    ServedBatch,
    compare_files,
    compare_run,
    parse_contestants,
    take_turns,
)
from trtllm_mla.benchmark.latency import LatencyOptions
from trtllm_mla.benchmark.result_files import BenchResult
from trtllm_mla.benchmark.tables import print_comparison
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import convert

OPTIONS = LatencyOptions(input_len=7, output_len=5, batch_size=2, warmup=1, iterations=9, seed=3)


class KnownContestant:
    """Takes a multiple of a time that grows from batch to batch, and writes down who was served what."""

    description = "known"
    identity = {"sha256": "0" * 64}  # noqa: RUF012

    def __init__(self, factor, log, *, name, vocab_size=50, wrong=0):
        self.vocab_size = vocab_size
        self._factor, self._log, self._name, self._wrong = factor, log, name, wrong
        self._count = 0

    def serve(self, prompts, output_len):
        self._count += 1
        self._log.append((self._name, json.dumps(prompts)))
        seconds = self._factor * 0.01 * self._count**2
        output = [[(index + position) % 7 for position in range(output_len)] for index in range(len(prompts))]
        output[0][: self._wrong] = [99] * self._wrong
        return ServedBatch(3 * seconds, seconds, 7 * seconds, output)

    def close(self):
        pass


@pytest.fixture
def turns():
    log = []
    contestants = {
        "a": KnownContestant(1.0, log, name="a"),
        "b": KnownContestant(2.5, log, name="b", vocab_size=30, wrong=2),
    }
    lines = []
    rows = take_turns(contestants, OPTIONS, on_progress=lines.append)
    return rows, log, lines


def test_ratios_are_formed_within_an_iteration(turns):
    """Times of one contestant differ a hundredfold; its ratio to the other is the same in every iteration."""
    (first, second), _, _ = turns
    times = [0.01 * count**2 * 1e3 for count in range(2, 11)]
    assert first.metrics["decode_step_ms"].value == pytest.approx(median(times))
    assert second.metrics["decode_step_ms"].value == pytest.approx(2.5 * median(times))
    assert first.metrics["decode_step_ms"].low == pytest.approx(times[0])
    for key in ("prefill_ms", "decode_step_ms", "batch_ms"):
        item = second.metrics[key]
        assert (item.ratio, item.ratio_low, item.ratio_high) == pytest.approx((2.5, 2.5, 2.5))
        assert first.metrics[key].ratio == 1
    assert second.metrics["output_tok_s"].ratio == pytest.approx(1 / 2.5)
    assert first.metrics["output_tok_s"].value == pytest.approx(2 * 5 / (7 * median(times) * 1e-3))
    assert len(second.samples["prefill_ms"]) == OPTIONS.iterations


def test_contestants_take_turns_on_the_same_prompts(turns):
    _, log, lines = turns
    assert len(log) == 2 * (OPTIONS.warmup + OPTIONS.iterations)
    pairs = [log[start : start + 2] for start in range(0, len(log), 2)]
    orders = ["".join(name for name, _ in pair) for pair in pairs]
    assert set(orders) == {"ab", "ba"}
    assert all(first[1] == second[1] for first, second in pairs)
    assert len({pair[0][1] for pair in pairs}) == len(pairs)
    # Every contestant knows the tokens.
    assert max(token for _, text in log for prompt in json.loads(text) for token in prompt) < 30
    assert lines == ["warm-up 1 of 1", *(f"iteration {index} of 9" for index in range(1, 10))]


def test_new_tokens_are_compared(turns):
    (first, second), _, _ = turns
    assert first.same_tokens == 1
    assert second.same_tokens == pytest.approx(8 / 10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", rope="yarn").path


@pytest.fixture(scope="module")
def network(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("network") / "network"
    return convert(checkpoint, path, plugin=MlaPluginConfig(page_size=16), dtype=DType.FLOAT32).path


@pytest.fixture(scope="module")
def comparison(checkpoint, network):
    build = BuildConfig(max_seq_len=64)
    entrants = [
        Entrant(name, runner, network, build)
        for name, runner in (("ours", "onnxruntime"), ("kernels", "interpreter"), ("theirs", "huggingface-eager"))
    ]
    return compare_run(entrants, checkpoint, replace(OPTIONS, output_len=3, iterations=2), num_threads=1)


def test_executors_in_one_run(comparison):
    assert [row.name for row in comparison.rows] == ["ours", "kernels", "theirs"]
    assert [row.same_tokens for row in comparison.rows] == [1, 1, 1]
    assert "ONNX Runtime" in comparison.rows[0].description
    assert "transformers" in comparison.rows[2].description
    for row in comparison.rows:
        assert set(row.metrics) == set(comparison.metrics)
        assert row.metrics["batch_ms"].value >= row.metrics["prefill_ms"].value > 0
    # Interpreted kernels are orders of magnitude slower than compiled ones.
    assert comparison.rows[1].metrics["decode_step_ms"].ratio > 5


def test_json_is_a_result_that_can_be_read_again(comparison):
    values = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    block = BenchResult.model_validate(values).own.compare
    assert [subject.name for subject in block.subjects] == ["ours", "kernels", "theirs"]
    assert block.mode == "run"
    assert values["engine"]["model"] == "tiny"
    assert set(values["trtllm_mla"]["sha256"]) == {"ours", "kernels"}
    assert values["trtllm_mla"]["options"]["iterations"] == 2


def test_printed_comparison(comparison):
    out = StringIO()
    print_comparison(comparison, Console(file=out, width=200))
    text = out.getvalue()
    for part in ("2 x 7 prompt tokens, 3 new ones each", "as a multiple of ours", "Decode step, ms", "100.0%"):
        assert part in text
    ratio = comparison.rows[2].metrics["prefill_ms"].ratio
    assert f"x {ratio:.3f}" in text


def test_a_table_is_as_wide_as_its_numbers_where_there_is_no_terminal(comparison):
    texts = {}
    for width in (200, 40):
        out = StringIO()
        print_comparison(comparison, Console(file=out, width=width))
        texts[width] = [line.rstrip() for line in out.getvalue().splitlines()]
    assert texts[40] == texts[200]
    out = StringIO()
    print_comparison(comparison, Console(file=out, width=60, force_terminal=True, color_system=None))
    table = out.getvalue().splitlines()[len(comparison.rows) + 2 :]  # behind descriptions and title
    assert max(map(len, table)) <= 60


def _loaded(**kwargs):
    return BenchResult.model_validate(make_result(**kwargs))


def test_results_of_several_runs():
    results = {"before": _loaded(seed=1, concurrency=1), "after": _loaded(seed=2, concurrency=16, kind="endpoint")}
    found = compare_files(results)
    assert found.model == "tiny-mla"
    first, second = found.rows
    throughput = [result.performance.system_output_throughput_tok_s for result in results.values()]
    item = second.metrics["system_output_throughput_tok_s"]
    assert item.value == throughput[1]
    assert item.ratio == pytest.approx(throughput[1] / throughput[0])
    assert (item.low, item.ratio_low) == (None, None)
    samples = sorted(results["after"].ttft_ms)
    item = second.metrics["ttft_ms"]
    assert item.value == pytest.approx(np.median(samples))
    assert (item.low, item.high) == (samples[int(len(samples) * 0.1)], samples[int(len(samples) * 0.9)])
    assert item.ratio == pytest.approx(np.median(samples) / np.median(results["before"].ttft_ms))
    assert item.ratio_low is None, "runs at different times have no pairs"
    assert first.metrics["tpot_ms"].ratio == 1
    out = StringIO()
    print_comparison(found, Console(file=out, width=160))
    assert "Results side by side" in out.getvalue()
    assert BenchResult.model_validate(found.to_json()).own.compare.mode == "files"


def test_results_without_a_log_have_their_summary():
    bare = _loaded(seed=1, requests=[])
    item = compare_files({"a": bare, "b": bare}).rows[1].metrics["ttft_ms"]
    assert (item.value, item.low, item.ratio) == (bare.streaming_metrics.ttft_percentiles.p50, None, 1)


def test_results_that_cannot_be_compared():
    with pytest.raises(UserError, match="Found one result"):
        compare_files({"a": _loaded(seed=1)})
    with pytest.raises(UserError, match="b: found a result of kind threshold"):
        compare_files({"a": _loaded(seed=1), "b": BenchResult.model_validate(make_threshold_result())})


def test_who_takes_part(network, tmp_path):
    assert parse_contestants([str(network)], ["onnxruntime", "huggingface"]) == [
        ("onnxruntime", "onnxruntime", network),
        ("huggingface", "huggingface", network),
    ]
    # transformers runs the checkpoint, whatever the directory: once.
    names = parse_contestants([str(network), str(tmp_path / "other"), f"x={network}"], ["onnxruntime", "huggingface"])
    assert names == [
        ("network, onnxruntime", "onnxruntime", network),
        ("network, huggingface", "huggingface", network),
        ("other, onnxruntime", "onnxruntime", tmp_path / "other"),
        ("x", "onnxruntime", network),
    ]


def test_a_named_engine_runs_on_a_gpu(network, tmp_path):
    values = json.loads((network / "config.json").read_text())
    for name in ("network.onnx", "weights.json"):
        (tmp_path / name).write_bytes((network / name).read_bytes())
    (tmp_path / "rank0.engine").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(values | {"build_config": {}}))
    assert parse_contestants([f"plugin={tmp_path}"], []) == [("plugin", "tensorrt", tmp_path)]


@pytest.mark.parametrize("names", [["a", "a"], []])
def test_contestants_need_names_of_their_own(names, checkpoint):
    entrants = [Entrant(name, "onnxruntime", Path("network")) for name in names]
    with pytest.raises(UserError, match="expected 1 to 16 with a name of their own each"):
        compare_run(entrants, checkpoint, OPTIONS)


def test_no_directory_and_unknown_executors():
    with pytest.raises(UserError, match="Found no directory"):
        parse_contestants([], ["onnxruntime"])
    with pytest.raises(UserError, match="--executors: found 'vllm', expected some of onnxruntime"):
        parse_contestants(["network"], ["onnxruntime", "vllm"])
    assert {"onnxruntime", "interpreter", "tensorrt", "huggingface", "huggingface-sdpa"} <= set(CONTESTANTS)


def test_a_batch_beyond_the_limits(network, checkpoint):
    entrant = Entrant("a", "onnxruntime", network, BuildConfig(max_seq_len=64))
    with pytest.raises(UserError, match="max_seq_len = 64"):
        compare_run([entrant], checkpoint, replace(OPTIONS, output_len=100))
