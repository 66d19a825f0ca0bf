"""CUDA graphs of decode steps, one for each bucket of ``trtllm_mla.runtime.decode_buckets``.

A graph repeats launches with the shapes and addresses of its capture. TensorRT's guide ("CUDA Graphs") asks for one
execution context for each captured graph, since a graph is undefined once its context has been changed, and for one
enqueue with the same shapes before the capture. So each graph has a context that is bound once, with buffers of its
own for the step's inputs, which are never moved; contexts share their scratch memory, because they run on one stream.

Nothing on the host outlives a capture: CUDA copies kernel parameters when a launch is captured, and plans depend on
shapes alone, while lengths, pages and slots are read on the device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.engine.launcher import Device
from trtllm_mla.network.contract import LOGITS
from trtllm_mla.ops.plan import ceil_div
from trtllm_mla.runtime.decode_buckets import DecodeBucket, DecodeBuckets, pad_decode
from trtllm_mla.runtime.executors.base import Float32Array
from trtllm_mla.runtime.executors.engine_context import EngineContext
from trtllm_mla.runtime.step import Int32Array, StepInputs

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64
# What TensorRT asks of scratch memory; of tensors its documentation says nothing.
_ALIGNMENT = 256
_NAN_BYTE = 0xFF
# Norm of the difference between logits of a graph and of an enqueue, over their norm. Kernels that TensorRT chooses
# anew may round differently, in 16-bit networks by a percent; a graph that lacks launches is off by everything.
_MAX_DIFFERENCE = 0.05


@dataclass(frozen=True)
class GraphStatistics:
    """How decode steps were run.

    Attributes:
        num_captured: Graphs captured, those that were dropped for others included.
        num_replayed: Decode steps that were run by launching a graph.
        num_eager: Decode steps that were enqueued launch by launch: the first of each graph, and those without one.
    """

    num_captured: int = 0
    num_replayed: int = 0
    num_eager: int = 0


@dataclass(frozen=True)
class _Inputs:
    """A step's inputs in one block of host memory and one of the GPU's, so that one copy takes all.

    Attributes:
        arrays: Views of the host's block by input name.
        offsets: Where each lies in a block, in bytes.
        block: The host's block.
        buffer: The GPU's.
    """

    arrays: Mapping[str, Int32Array]
    offsets: Mapping[str, int]
    block: npt.NDArray[np.uint8]
    buffer: Any

    @classmethod
    def like(cls, arrays: Mapping[str, Int32Array], allocate: Callable[[int], Any]) -> _Inputs:
        offsets, size = {}, 0
        for name, array in arrays.items():
            offsets[name] = size
            size += ceil_div(max(array.nbytes, 1), _ALIGNMENT) * _ALIGNMENT
        block = np.zeros(size, np.uint8)
        views = {
            name: block[offsets[name] : offsets[name] + array.nbytes].view(np.int32).reshape(array.shape)
            for name, array in arrays.items()
        }
        return cls(views, offsets, block, allocate(size))

    def address(self, name: str) -> int:
        return int(self.buffer.handle) + self.offsets[name]

    def fill(self, arrays: Mapping[str, Int32Array]) -> None:
        """Takes a step's arrays, whose shapes are those of the first step."""
        for name, view in self.arrays.items():
            if arrays[name].shape != view.shape:
                raise ValueError(f"input '{name}': found the shape {arrays[name].shape}, captured {view.shape}")
            view[...] = arrays[name]


@dataclass(frozen=True)
class _Decode:
    """What a bucket's steps run with.

    Attributes:
        context: Its context, bound for good.
        inputs: The step's inputs.
        logits: The GPU's memory for logits, shared by the buckets of as many requests.
        graph: The captured graph.
    """

    context: EngineContext
    inputs: _Inputs
    logits: Any
    graph: Any


class DecodeGraphs:
    """Runs decode steps by launching graphs, which are captured when a bucket is first seen.

    Args:
        device: The GPU.
        stream: The stream that everything runs on.
        buckets: The engine's buckets.
        make_context: Makes a context that all tensors but a step's inputs and logits are bound to.
        arrays: A step's inputs by name.
        vocab_size: Columns of the logits.
        max_graphs: Graphs that are kept; the least recently used one is dropped for another.
    """

    def __init__(
        self,
        device: Device,
        stream: Any,
        buckets: DecodeBuckets,
        *,
        make_context: Callable[[], EngineContext],
        arrays: Callable[[StepInputs], Mapping[str, Int32Array]],
        vocab_size: int,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._device, self._stream, self._buckets = device, stream, buckets
        self._make_context, self._arrays = make_context, arrays
        self._vocab_size, self._max_graphs = vocab_size, max_graphs
        self._decodes: OrderedDict[DecodeBucket, _Decode] = OrderedDict()
        self._logits: dict[int, Any] = {}
        self._failed = False
        self._captured = self._replayed = self._eager = 0

    @property
    def statistics(self) -> GraphStatistics:
        """How decode steps were run so far."""
        return GraphStatistics(self._captured, self._replayed, self._eager)

    def run(self, step: StepInputs) -> Float32Array | None:
        """Runs a step if it is a decode step and graphs can be captured here.

        A failed capture is logged, and no other is tried.

        Args:
            step: The step.

        Returns:
            float32 [logit_rows, vocab_size], or None where the caller has to run the step. Running it again is
            harmless: it writes the same cache rows.
        """
        bucket = self._buckets.find(step)
        if bucket is None:
            return None
        if bucket in self._decodes:
            return self._replay(step, bucket)
        self._eager += 1
        if self._failed:
            return None
        try:
            return self._capture(step, bucket)
        except Exception as error:  # cuda.core documents no exception types.
            self._failed = True
            logger.warning("decode steps run without CUDA graphs: %s", error)
            return None

    def close(self) -> None:
        """Frees the graphs, their contexts and their memory."""
        while self._decodes:
            self._drop_oldest()
        self._logits.clear()

    def _replay(self, step: StepInputs, bucket: DecodeBucket) -> Float32Array:
        decode = self._decodes[bucket]
        self._decodes.move_to_end(bucket)
        self._upload(decode.inputs, step, bucket)
        decode.graph.launch(self._stream)
        self._replayed += 1
        return self._download(decode.logits, len(step.last_token_ids))

    def _capture(self, step: StepInputs, bucket: DecodeBucket) -> Float32Array:
        """Runs a bucket's first step, captures a graph, and runs that as well to see that it does the same."""
        context, stream = self._make_context(), int(self._stream.handle)
        inputs = _Inputs.like(self._arrays(pad_decode(step, bucket)), self._allocate)
        for name, view in inputs.arrays.items():
            context.bind(name, inputs.address(name), view.shape)
        logits = self._logits_buffer(bucket.num_requests)
        context.bind(LOGITS, int(logits.handle))

        self._upload(inputs, step, bucket)
        context.enqueue(stream)
        expected = self._download(logits, len(step.last_token_ids))
        if not context.is_capturable(stream):
            raise RuntimeError("TensorRT cannot capture this engine")
        graph = self._device.capture(lambda: context.enqueue(stream), self._stream)
        self._device.fill(logits, _NAN_BYTE, self._stream)
        graph.launch(self._stream)
        difference = np.linalg.norm(self._download(logits, len(expected)) - expected)
        if not difference <= _MAX_DIFFERENCE * np.linalg.norm(expected):
            graph.close()
            raise RuntimeError(f"a captured graph gives other logits: they differ by {difference:.3g} in norm")

        self._captured += 1
        self._decodes[bucket] = _Decode(context, inputs, logits, graph)
        if len(self._decodes) > self._max_graphs:
            self._drop_oldest()
        return expected

    def _drop_oldest(self) -> None:
        _, decode = self._decodes.popitem(last=False)
        decode.graph.close()

    def _upload(self, inputs: _Inputs, step: StepInputs, bucket: DecodeBucket) -> None:
        inputs.fill(self._arrays(pad_decode(step, bucket)))
        self._device.copy_to_device(int(inputs.buffer.handle), inputs.block, self._stream)

    def _download(self, buffer: Any, rows: int) -> Float32Array:
        logits = np.empty((rows, self._vocab_size), np.float32)
        self._device.copy_to_host(logits, int(buffer.handle), self._stream)
        return logits

    def _logits_buffer(self, rows: int) -> Any:
        if rows not in self._logits:
            self._logits[rows] = self._allocate(rows * self._vocab_size * np.dtype(np.float32).itemsize)
        return self._logits[rows]

    def _allocate(self, size: int) -> Any:
        return self._device.allocate(size, self._stream)
