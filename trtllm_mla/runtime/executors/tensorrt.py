"""Executor that runs an engine on a GPU, with TensorRT or TensorRT-RTX.

Weights, ``rotary_cos_sin`` and the pools lie on the GPU for good; a step's inputs are copied there, and its logits
back. Each pool is bound as the cache's input and its output, so that the plugins update it in place. Decode steps are
launched as CUDA graphs (``decode_graphs``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trtllm_mla.dtypes import DType
from trtllm_mla.engine.backend import Backend, load_backend
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.engine.launcher import CudaDriver, Device, Launcher
from trtllm_mla.engine.logs import capture_logs, trt_logger
from trtllm_mla.engine.plugin import PluginLibrary, plugin_library
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import LOGITS, past_latent, present_latent
from trtllm_mla.ops.row_codec import decode_rows
from trtllm_mla.runtime.decode_buckets import DecodeBuckets
from trtllm_mla.runtime.executors.base import Float32Array
from trtllm_mla.runtime.executors.decode_graphs import DecodeGraphs, GraphStatistics
from trtllm_mla.runtime.executors.engine_context import EngineContext, Shape
from trtllm_mla.runtime.executors.graph import Array
from trtllm_mla.runtime.step import Int32Array, StepInputs

if TYPE_CHECKING:
    import tensorrt as trt

# TensorRT wants an address for an empty tensor too.
_MIN_BUFFER_BYTES = 256
_NAN_BYTE = 0xFF
# Name of a buffer that is no tensor's.
_SCRATCH = "scratch memory"


class WeightParts(Protocol):
    """Where weights come from; ``BoundWeights`` is one."""

    def parts(self, name: str) -> Iterable[Array]:
        """The elements of one input in order, as contiguous arrays."""


class TensorRTExecutor:
    """Runs an engine. Any thread may call it, one at a time.

    Args:
        engine: The engine directory.
        weights: Weight inputs by name, each in its type; copied to the GPU one part after the other.
        rotary_cos_sin: float32 [positions, qk_rope_head_dim]; rows beyond the engine's ``max_seq_len`` are left out.
        num_pages: Pages in each layer's pool.
        use_cuda_graph: Whether decode steps are captured in CUDA graphs. Without matrix absorption they cannot be,
            because a step's shapes follow its lengths.
        device: The GPU; None is the first.
        backend: The TensorRT library; None is the one that built the engine.

    Raises:
        MissingDependencyError: TensorRT or ``cuda.core`` is not installed.
        UserError: There is no usable GPU, the engine was not built for this one or by this version of TensorRT, or
            ``num_pages`` is more than the engine accepts.
    """

    name = "tensorrt"

    def __init__(
        self,
        engine: EngineDirectory,
        weights: WeightParts,
        rotary_cos_sin: Float32Array,
        *,
        num_pages: int,
        use_cuda_graph: bool = True,
        device: Device | None = None,
        backend: Backend | None = None,
    ) -> None:
        config, network = engine.config, engine.network
        most_pages = config.max_batch_size * config.pages_per_request
        if num_pages > most_pages:
            raise UserError(
                f"num_pages: found {num_pages}, expected at most {most_pages}: the engine was built for "
                f"max_batch_size {config.max_batch_size} and max_seq_len {config.max_seq_len}. Use a smaller pool, "
                "or build again."
            )
        self.num_pages = num_pages
        self.page_size = config.mla_plugin.page_size
        self._absorption = network.plugin.enable_matrix_absorption
        self._context_passes = network.plugin.max_context_passes
        self._vocab_size, self._num_layers = network.spec.vocab_size, network.num_layers
        self.dtype, self.cache_dtype = network.dtype, network.row_layout.dtype
        self._layout, self._latent_scales = network.row_layout, network.latent_scales
        self._pool_shape = (num_pages, self.page_size, network.row_layout.width)

        self._backend = backend or load_backend(engine.info.backend)
        self._device = device or CudaDriver()
        self._check_target(engine)
        self._stream = self._device.create_stream()
        self._buffers: dict[str, Any] = {}
        # Where the inputs are that are the same in every step, and their shapes.
        self._fixed: dict[str, tuple[int, Shape]] = {}
        self._plugins: PluginLibrary | None = None
        self._engine, context = self._load(engine)
        self.description = (
            f"{self._backend.name} {self._backend.version} on {self._device.device_name}, {network.dtype} network, "
            f"{'native layers' if engine.info.native else 'MLA plugins'}"
        )
        self._check_inputs_and_outputs(engine)
        for name, shape in network.weights.shapes.items():
            self._fixed[name] = (self._upload(name, shape, weights.parts(name)), shape)
        table = np.ascontiguousarray(rotary_cos_sin[: config.max_seq_len])
        self._fixed["rotary_cos_sin"] = (self._upload("rotary_cos_sin", table.shape, [table]), table.shape)
        for layer in range(self._num_layers):
            self._make_pool(layer)
        self._context = self._bind_fixed(context)
        self._graphs: DecodeGraphs | None = None
        if use_cuda_graph and self._absorption:
            # The operations' function bodies write a cache row for every token.
            buckets = DecodeBuckets(
                config.max_batch_size, config.pages_per_request, pad_requests=not engine.info.native
            )
            self._graphs = DecodeGraphs(
                self._device,
                self._stream,
                buckets,
                make_context=self._make_context_for_capture,
                arrays=self._arrays,
                vocab_size=self._vocab_size,
            )

    @property
    def graph_statistics(self) -> GraphStatistics | None:
        """How decode steps were run; None where no CUDA graphs are used."""
        return None if self._graphs is None else self._graphs.statistics

    def run(self, step: StepInputs) -> Float32Array:
        """Runs one step; see ``Executor.run``."""
        self._device.make_current()
        if self._graphs is not None and (logits := self._graphs.run(step)) is not None:
            return logits
        for name, array in self._arrays(step).items():
            self._context.bind(name, self._upload(name, array.shape, [array]), array.shape)
        logits = np.empty((len(step.last_token_ids), self._vocab_size), np.float32)
        self._context.bind(LOGITS, self._buffer(LOGITS, logits.nbytes))
        self._context.enqueue(int(self._stream.handle))
        if logits.size:
            self._device.copy_to_host(logits, self._address(LOGITS), self._stream)
        else:
            self._stream.sync()
        return logits

    def read_cache(self, layer: int) -> Float32Array:
        """A copy of a layer's pool; see ``Executor.read_cache``."""
        self._device.make_current()
        pool = np.empty(self._pool_shape, self.cache_dtype.numpy)
        self._device.copy_to_host(pool, self._address(past_latent(layer)), self._stream)
        return decode_rows(pool, self._layout, self._latent_scales[layer])

    def close(self) -> None:
        """Frees the engine and all device memory."""
        self._device.make_current()
        self._stream.sync()
        # Contexts refer to the engine, the engine to the runtime, and all to the memory.
        if self._graphs is not None:
            self._graphs.close()
        del self._graphs, self._context, self._engine, self._runtime
        self._buffers.clear()

    def _check_target(self, engine: EngineDirectory) -> None:
        built = [item.target for item in engine.info.targets]
        target = self._device.target
        if target.name not in built:
            raise UserError(
                f"{engine.path}: the engine was built for {', '.join(built)}, found {self._device.device_name} "
                f"({target.name}). Build it again with --targets {target.name}."
            )

    def _load(self, engine: EngineDirectory) -> tuple[trt.ICudaEngine, trt.IExecutionContext]:
        serialized = engine.read_engine()
        with ExitStack() as stack:
            log = stack.enter_context(capture_logs(self._backend))
            if not engine.info.native:
                self._plugins = plugin_library(self._backend)
                stack.enter_context(self._plugins.loading(Launcher(self._device, engine.kernels())))
            # An engine needs its runtime as long as it lives.
            self._runtime = self._backend.module.Runtime(trt_logger(self._backend))
            loaded = self._runtime.deserialize_cuda_engine(serialized)
            context = None if loaded is None else self._backend.create_context(loaded, for_capture=False)
            failures = [*(self._plugins.take_failures() if self._plugins else ()), *log.errors]
            if context is None or failures:
                info = engine.info
                raise UserError(
                    f"{engine.path}: {self._backend.name} {self._backend.version} cannot load the engine, which "
                    f"{info.backend} {info.backend_version} built: {'; '.join(failures) or 'no reason given'}. "
                    "Build it again with the version that runs it."
                )
        return loaded, context

    def _check_inputs_and_outputs(self, engine: EngineDirectory) -> None:
        """Raises ValueError where the engine's inputs and outputs are not the network's."""
        network = engine.network
        expected = {name: str(dtype) for name, dtype in network.weights.dtypes(network.dtype).items()}
        expected |= {item.name: item.dtype for item in network.step_inputs}
        for layer in range(network.num_layers):
            expected |= dict.fromkeys((past_latent(layer), present_latent(layer)), self.cache_dtype.storage)
        expected[LOGITS] = DType.FLOAT32
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        found = {name: self._engine.get_tensor_dtype(name) for name in names}
        wanted = {name: self._backend.data_type(dtype) for name, dtype in expected.items()}
        if found != wanted:
            name = min(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            raise ValueError(f"tensor '{name}': found {found.get(name)}, expected {wanted.get(name)}")

    def _arrays(self, step: StepInputs) -> dict[str, Int32Array]:
        return step.arrays(absorption=self._absorption, context_passes=self._context_passes)

    def _upload(self, name: str, shape: Shape, parts: Iterable[Array]) -> int:
        """Copies an input part by part, so that the host holds no more than one of them, and returns its address."""
        size = math.prod(shape) * self._engine.get_tensor_dtype(name).itemsize
        address, position = self._buffer(name, size), 0
        for part in parts:
            if self._engine.get_tensor_dtype(name) != self._backend.data_type(_type_name(part)):
                raise ValueError(f"input '{name}': found {part.dtype}, expected {self._engine.get_tensor_dtype(name)}")
            if not part.flags.c_contiguous:
                raise ValueError(f"input '{name}': found strides {part.strides}, expected a contiguous array")
            if part.nbytes:
                self._device.copy_to_device(address + position, part, self._stream)
            position += part.nbytes
        if position != size:
            raise ValueError(f"input '{name}': found {position} bytes, expected {size}")
        return address

    def _make_pool(self, layer: int) -> None:
        name = past_latent(layer)
        self._buffer(name, math.prod(self._pool_shape) * self.cache_dtype.itemsize)
        # Reading a slot that was never written shows.
        self._device.fill(self._buffers[name], _NAN_BYTE, self._stream)

    def _make_context_for_capture(self) -> EngineContext:
        with capture_logs(self._backend) as log:
            context = self._backend.create_context(self._engine, for_capture=True)
        if context is None:
            raise RuntimeError(f"{self._backend.name} makes no execution context: {log.summary()}")
        return self._bind_fixed(context)

    def _bind_fixed(self, context: trt.IExecutionContext) -> EngineContext:
        """Gives a context scratch memory, which all contexts share, and what is the same in every step."""
        size = max(self._engine.device_memory_size_v2, _MIN_BUFFER_BYTES)
        context.set_device_memory(self._buffer(_SCRATCH, size), size)
        bound = EngineContext(self._backend, self._engine, context, self._plugins)
        for name, (address, shape) in self._fixed.items():
            bound.bind(name, address, shape)
        for layer in range(self._num_layers):
            bound.bind_pool(layer, self._address(past_latent(layer)), self._pool_shape)
        return bound

    def _address(self, name: str) -> int:
        return int(self._buffers[name].handle)

    def _buffer(self, name: str, size: int) -> int:
        """Address of the tensor's buffer, which is replaced by a larger one where it is too small."""
        size = max(size, _MIN_BUFFER_BYTES)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = self._device.allocate(size, self._stream)
        return self._address(name)


def _type_name(array: Array) -> str:
    return next((str(dtype) for dtype in DType if dtype.numpy == array.dtype), str(array.dtype))
