"""Stand-ins for the GPU, the TensorRT engine and its contexts. Nothing of a network is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import RecordingDriver
from trtllm_mla.engine.backend import Backend
from trtllm_mla.targets import Target, get_target

rtx: Any = pytest.importorskip("tensorrt_rtx")

VOCAB = 131
STREAM = 4242
SCRATCH_BYTES = 5000
MAX_SHAPE = 96

Array = np.ndarray[Any, Any]


@dataclass
class FakeGraph:
    """What was captured: functions that a launch calls."""

    operations: list[Callable[[], None]]
    is_closed: bool = False

    def launch(self, stream: Any) -> None:
        assert stream.handle == STREAM
        assert not self.is_closed
        for operation in self.operations:
            operation()

    def close(self) -> None:
        self.is_closed = True


class FakeDevice(RecordingDriver):
    """A GPU whose memory is a dictionary."""

    device_name = "NVIDIA GeForce RTX 4090"

    def __init__(self, target: Target | None = None) -> None:
        super().__init__(target or get_target("sm_89"))
        self.memory: dict[int, bytearray] = {}
        self.uploads: list[int] = []
        self.graphs: list[FakeGraph] = []
        self.captured: list[Callable[[], None]] | None = None
        self.loses_captures = False
        self.synced = 0
        self.threads = {threading.get_ident()}
        self._next = 0x7F0000000000

    def make_current(self) -> None:
        self.threads.add(threading.get_ident())

    def create_stream(self) -> Any:
        def sync() -> None:
            self.synced += 1

        return SimpleNamespace(handle=STREAM, sync=sync)

    def allocate(self, size: int, stream: Any) -> Any:
        assert stream.handle == STREAM
        assert size > 0
        assert self.captured is None
        address, self._next = self._next, self._next + -(-size // 4096) * 4096
        self.memory[address] = bytearray(size)
        return SimpleNamespace(handle=address, size=size)

    def fill(self, buffer: Any, byte: int, stream: Any) -> None:
        assert self.captured is None
        self.memory[buffer.handle][:] = bytes([byte]) * buffer.size

    def copy_to_device(self, address: int, source: Array, stream: Any) -> None:
        assert self.captured is None
        assert threading.get_ident() in self.threads
        assert source.flags.c_contiguous
        self.uploads.append(address)
        start, offset = self.find(address)
        assert offset + source.nbytes <= len(self.memory[start])
        self.memory[start][offset : offset + source.nbytes] = source.tobytes()

    def copy_to_host(self, destination: Array, address: int, stream: Any) -> None:
        assert self.captured is None
        assert threading.get_ident() in self.threads
        data = bytes(self.memory[address][: destination.nbytes])
        destination[...] = np.frombuffer(data, destination.dtype).reshape(destination.shape)

    def capture(self, enqueue: Callable[[], None], stream: Any) -> FakeGraph:
        assert stream.handle == STREAM
        assert self.captured is None
        self.captured = []
        try:
            enqueue()
            graph = FakeGraph([] if self.loses_captures else self.captured)
        finally:
            self.captured = None
        self.graphs.append(graph)
        return graph

    def find(self, address: int) -> tuple[int, int]:
        """The allocation that an address lies in, and where in it."""
        start = max(handle for handle in self.memory if handle <= address)
        assert address < start + len(self.memory[start])
        return start, address - start

    def read(self, address: int, dtype: Any, shape: tuple[int, ...]) -> Array:
        start, offset = self.find(address)
        count = int(np.prod(shape))
        return np.frombuffer(bytes(self.memory[start]), dtype, count, offset).reshape(shape)


class FakeEngine:
    """An engine with a network's inputs and outputs."""

    device_memory_size_v2 = SCRATCH_BYTES

    def __init__(self, dtypes: dict[str, Any], device: FakeDevice) -> None:
        self.dtypes, self.device = dtypes, device
        self.num_io_tensors = len(dtypes)
        # The first is there before it is asked for, so that a test can change it.
        self.contexts = [FakeContext(self)]
        self.configs: list[Any] = []
        self.most_contexts = 1000
        self.capturable = True

    def get_tensor_name(self, index: int) -> str:
        return list(self.dtypes)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return self.dtypes[name]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(0,), (8,), (MAX_SHAPE,)]

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(dynamic_shapes_kernel_specialization_strategy=None)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(config, "allocation", strategy)
        return config

    def create_execution_context(self, config: Any) -> FakeContext | None:
        assert config.allocation == rtx.ExecutionContextAllocationStrategy.USER_MANAGED
        if len(self.configs) == self.most_contexts:
            return None
        self.configs.append(config)
        if len(self.configs) > len(self.contexts):
            self.contexts.append(FakeContext(self))
        return self.contexts[len(self.configs) - 1]


class FakeContext:
    """An execution context. A step's logits are made up of its own inputs.

    Attributes:
        runs: The step inputs of each run, read from the GPU's memory as it was then, launched graphs included.
        on_enqueue: Called when the context is enqueued, as plugins are.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch: tuple[int, int] | None = None
        self.streams: list[int] = []
        self.fails = False
        self.fails_in_capture = False
        self.refused: set[str] = set()
        self.misplaced: dict[str, int] = {}
        self.runs: list[dict[str, Array]] = []
        self.on_enqueue: Callable[[FakeContext], None] = lambda context: None

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        assert size <= len(self.engine.device.memory[address])
        assert address % 256 == 0
        self.scratch = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name not in self.refused

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.engine.device.find(address)
        self.addresses[name] = address
        return True

    def get_tensor_address(self, name: str) -> int:
        return self.misplaced.get(name, self.addresses[name])

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream == STREAM
        return self.engine.capturable

    def execute_async_v3(self, stream: int) -> bool:
        assert self.scratch is not None
        assert set(self.addresses) == set(self.engine.dtypes)
        assert set(self.shapes) == {name for name in self.engine.dtypes if name != "logits" and "present" not in name}
        self.streams.append(stream)
        self.on_enqueue(self)
        addresses, shapes = dict(self.addresses), dict(self.shapes)

        def operation() -> None:
            self._compute(addresses, shapes)

        captured = self.engine.device.captured
        if captured is None:
            operation()
            return not self.fails
        captured.append(operation)
        return not self.fails_in_capture

    def _compute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        device = self.engine.device
        steps = [name for name, dtype in self.engine.dtypes.items() if dtype == rtx.DataType.INT32]
        run = {name: device.read(addresses[name], np.int32, shapes[name]) for name in steps}
        self.runs.append(run)
        logits = (run["input_ids"][run["last_token_ids"], None] * 1000 + np.arange(VOCAB)).astype(np.float32)
        device.memory[addresses["logits"]][: logits.nbytes] = logits.tobytes()


class FakeTensorRT:
    """TensorRT-RTX's module, with engines that are stand-ins."""

    def __init__(self, dtypes: dict[str, Any], device: FakeDevice) -> None:
        self.engine: FakeEngine | None = FakeEngine(dtypes, device)
        self.serialized: list[bytes] = []
        self.creators: dict[str, Any] = {}
        self.plugins: list[Any] = []
        self.plugin_fields: dict[str, list[Any]] = {}
        self.module = ModuleType("tensorrt_rtx")
        self.module.__dict__.update(vars(rtx))
        self.module.__dict__.update(Runtime=self.runtime, get_plugin_registry=lambda: self)

    @property
    def contexts(self) -> list[FakeContext]:
        assert self.engine is not None
        return self.engine.contexts

    def backend(self) -> Backend:
        return Backend("tensorrt-rtx", self.module, ("sm_89",), ("sm_89",))

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name] = creator
        return True

    def runtime(self, logger: Any) -> Any:
        def deserialize(serialized: bytes) -> FakeEngine | None:
            self.serialized.append(serialized)
            for op, fields in self.plugin_fields.items():
                phase = rtx.TensorRTPhase.RUNTIME
                self.plugins.append(self.creators[op].create_plugin("layer", fields, phase))
            if self.engine is None:
                logger.log(rtx.ILogger.Severity.ERROR, "the engine is of another version")
            return self.engine

        return SimpleNamespace(deserialize_cuda_engine=deserialize)
