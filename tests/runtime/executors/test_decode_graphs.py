"""The cache of CUDA graphs, on stand-ins that keep what is captured and read the GPU's memory when it is launched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.runtime.fake_tensorrt import SCRATCH_BYTES, STREAM, VOCAB, FakeContext, FakeDevice, FakeTensorRT, rtx
from trtllm_mla.network.contract import step_inputs
from trtllm_mla.runtime.decode_buckets import DecodeBucket, DecodeBuckets, pad_decode
from trtllm_mla.runtime.executors.decode_graphs import DecodeGraphs, GraphStatistics
from trtllm_mla.runtime.executors.engine_context import EngineContext
from trtllm_mla.runtime.step import Chunk, LogitRows, StepInputs, build_step

PAGE_SIZE, NUM_PAGES = 16, 64
BUCKETS = DecodeBuckets(max_requests=12, max_pages=20)
INPUTS = [item for item in step_inputs(absorption=True) if item.name != "rotary_cos_sin"]


class Harness:
    """Graphs of an engine that has a step's inputs and logits only."""

    def __init__(self, **options: Any) -> None:
        self.device = FakeDevice()
        dtypes = {item.name: rtx.DataType.INT32 for item in INPUTS}
        self.tensorrt = FakeTensorRT({**dtypes, "logits": rtx.DataType.FLOAT}, self.device)
        self.stream = self.device.create_stream()
        self.scratch = self.device.allocate(SCRATCH_BYTES, self.stream)
        self.prepare: Callable[[FakeContext], None] = lambda context: None
        self.graphs = DecodeGraphs(
            self.device,
            self.stream,
            BUCKETS,
            make_context=self.make_context,
            arrays=lambda step: step.arrays(absorption=True),
            vocab_size=VOCAB,
            **options,
        )

    def make_context(self) -> EngineContext:
        engine: Any = self.tensorrt.engine
        backend = self.tensorrt.backend()
        context: Any = backend.create_context(engine, for_capture=True)
        context.set_device_memory(self.scratch.handle, SCRATCH_BYTES)
        self.prepare(context)
        return EngineContext(backend, engine, context, None)


@pytest.fixture
def harness() -> Harness:
    return Harness()


def decode(*lengths: int, seed: int = 0) -> StepInputs:
    """A decode step of requests that have so many tokens after it."""
    generator = np.random.default_rng([seed, *lengths])
    pages = iter(generator.permutation(NUM_PAGES).astype(np.int32))
    chunks = [
        Chunk(
            generator.integers(1, VOCAB, 1, dtype=np.int32),
            length - 1,
            np.array([next(pages) for _ in range(-(-length // PAGE_SIZE))], np.int32),
        )
        for length in lengths
    ]
    return build_step([], chunks, page_size=PAGE_SIZE, num_pages=NUM_PAGES)


def expected_logits(step: StepInputs) -> Any:
    return step.input_ids[:, None] * 1000 + np.arange(VOCAB)


def check_run(run: dict[str, Any], step: StepInputs) -> None:
    bucket = BUCKETS.find(step)
    assert bucket is not None
    arrays = pad_decode(step, bucket).arrays(absorption=True)
    assert run.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(run[name], array, err_msg=name)


def test_the_first_step_of_a_bucket_is_enqueued_and_captured(harness: Harness) -> None:
    step = decode(40, 3, 17)
    np.testing.assert_array_equal(harness.graphs.run(step), expected_logits(step))
    (context,) = harness.tensorrt.contexts
    assert context.streams == [STREAM, STREAM]
    # The step, and the check of the graph.
    assert len(context.runs) == 2
    for run in context.runs:
        check_run(run, step)
    assert harness.graphs.statistics == GraphStatistics(num_captured=1, num_eager=1)


def test_further_steps_launch_the_graph(harness: Harness) -> None:
    harness.graphs.run(decode(40, 3, 17))
    (context,) = harness.tensorrt.contexts
    bound = dict(context.addresses), dict(context.shapes)
    harness.device.uploads.clear()
    # Other lengths, pages and tokens; four requests instead of three.
    steps = [decode(47, 48, 1), decode(64, 33, 60, 2), decode(41, 4, 18)]
    for step in steps:
        np.testing.assert_array_equal(harness.graphs.run(step), expected_logits(step))
        check_run(context.runs[-1], step)
    assert len(context.runs) == 5
    assert len(context.streams) == 2
    assert (context.addresses, context.shapes) == bound
    # One copy a step.
    assert harness.device.uploads == [context.addresses["input_ids"]] * 3
    assert harness.graphs.statistics == GraphStatistics(num_captured=1, num_replayed=3, num_eager=1)


def test_buckets_have_contexts_of_their_own(harness: Harness) -> None:
    steps = [decode(5), decode(30), decode(5, 6), decode(30, 31), decode(*range(1, 12))]
    for step in steps:
        harness.graphs.run(step)
    assert len(harness.tensorrt.contexts) == len(steps)
    for step, context in zip(steps, harness.tensorrt.contexts, strict=True):
        check_run(context.runs[0], step)
    for step in reversed(steps):
        np.testing.assert_array_equal(harness.graphs.run(step), expected_logits(step))
    assert harness.graphs.statistics == GraphStatistics(len(steps), len(steps), len(steps))
    inputs = [address for context in harness.tensorrt.contexts for address in context.addresses.items()]
    assert len({address for name, address in inputs if name != "logits"}) == len(steps) * len(INPUTS)
    assert {context.scratch for context in harness.tensorrt.contexts} == {(harness.scratch.handle, SCRATCH_BYTES)}
    # Logits of a bucket are read before another one runs, so that as many requests share them: 1, 2 and 12.
    assert len({address for name, address in inputs if name == "logits"}) == 3


def test_kernels_are_final_when_they_are_captured(harness: Harness) -> None:
    harness.graphs.run(decode(5))
    assert harness.tensorrt.engine is not None
    (config,) = harness.tensorrt.engine.configs
    strategy = rtx.DynamicShapesKernelSpecializationStrategy.EAGER
    assert config.dynamic_shapes_kernel_specialization_strategy == strategy


PREFILL, DECODE = Chunk(np.arange(3), 0, np.array([3])), Chunk(np.array([7]), 4, np.array([2]))


@pytest.mark.parametrize(
    ("context", "generation"),
    [
        ([PREFILL], []),
        ([PREFILL], [DECODE]),
        ([], [PREFILL]),
        ([], [replace(DECODE, logits=LogitRows.NONE)]),
        ([], []),
    ],
    ids=["prefill", "mixed", "absorbed prefill", "no logits", "empty"],
)
def test_other_steps_are_left_to_the_caller(harness: Harness, context: list[Chunk], generation: list[Chunk]) -> None:
    step = build_step(context, generation, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    assert harness.graphs.run(step) is None
    assert not harness.device.uploads
    assert harness.graphs.statistics == GraphStatistics()


def test_the_least_recently_used_graph_is_dropped() -> None:
    harness = Harness(max_graphs=2)
    one, two, four = decode(5), decode(5, 6), decode(5, 6, 7, 8)
    for step in (one, two, one, four):
        harness.graphs.run(step)
    assert [graph.is_closed for graph in harness.device.graphs] == [False, True, False]
    harness.graphs.run(one)
    np.testing.assert_array_equal(harness.graphs.run(two), expected_logits(two))
    assert [graph.is_closed for graph in harness.device.graphs] == [False, True, True, False]
    assert harness.graphs.statistics == GraphStatistics(num_captured=4, num_replayed=2, num_eager=4)


def test_close_frees_the_graphs(harness: Harness) -> None:
    harness.graphs.run(decode(5))
    harness.graphs.run(decode(5, 6))
    harness.graphs.close()
    assert [graph.is_closed for graph in harness.device.graphs] == [True, True]


class TestFailures:
    """Whatever fails, the caller runs the step, one warning says why, and nothing else is captured."""

    def check(self, harness: Harness, reason: str, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            for step in (decode(5), decode(5), decode(5, 6)):
                assert harness.graphs.run(step) is None
        assert [record.getMessage() for record in caplog.records] == [
            f"decode steps run without CUDA graphs: {reason}"
        ]
        assert harness.graphs.statistics == GraphStatistics(num_eager=3)
        assert harness.device.captured is None

    def test_a_capture_that_tensorrt_refuses(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        harness.prepare = lambda context: setattr(context, "fails_in_capture", True)
        self.check(harness, "tensorrt-rtx could not run a step: no reason given", caplog)

    def test_an_engine_that_cannot_be_captured(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        assert harness.tensorrt.engine is not None
        harness.tensorrt.engine.capturable = False
        self.check(harness, "TensorRT cannot capture this engine", caplog)
        assert not harness.device.graphs

    def test_a_graph_that_lacks_launches(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        """TensorRT may enqueue to another stream, and nothing says so."""
        harness.device.loses_captures = True
        self.check(harness, "a captured graph gives other logits: they differ by nan in norm", caplog)
        assert [graph.is_closed for graph in harness.device.graphs] == [True]

    def test_a_graph_that_reads_other_inputs(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        other = harness.device.allocate(4096, harness.stream)

        def move_inputs(context: FakeContext) -> None:
            if harness.device.captured is not None:
                context.addresses["input_ids"] = other.handle

        harness.prepare = lambda context: setattr(context, "on_enqueue", move_inputs)
        step = decode(5)
        difference = np.linalg.norm(step.input_ids[:, None] * 1000.0 * np.ones(VOCAB))
        self.check(harness, f"a captured graph gives other logits: they differ by {difference:.3g} in norm", caplog)

    def test_no_context(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        def refuse(context: FakeContext) -> None:
            raise RuntimeError("out of memory")

        harness.prepare = refuse
        self.check(harness, "out of memory", caplog)

    def test_graphs_from_before_go_on(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        step = decode(5)
        harness.graphs.run(step)
        harness.prepare = lambda context: setattr(context, "fails_in_capture", True)
        assert harness.graphs.run(decode(5, 6)) is None
        np.testing.assert_array_equal(harness.graphs.run(step), expected_logits(step))
        assert harness.graphs.statistics == GraphStatistics(num_captured=1, num_replayed=1, num_eager=2)


def test_a_step_of_other_shapes_than_the_captured_ones_is_refused(harness: Harness) -> None:
    """Shapes that a bucket does not fix are those of an empty context group, the same in every decode step."""
    step = decode(5)
    harness.graphs.run(step)
    other = replace(decode(5), context_key_index=np.zeros((0, 2), np.int32))
    assert BUCKETS.find(other) == DecodeBucket(1, 1)
    with pytest.raises(ValueError, match=r"input 'context_key_index': found the shape \(0, 2\), captured \(0, 1\)"):
        harness.graphs.run(other)
