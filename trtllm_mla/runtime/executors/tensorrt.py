"""Executor that runs an engine on a GPU, with TensorRT or TensorRT-RTX.

Weights, ``rotary_cos_sin`` and the pools lie on the GPU for good; a step's inputs are copied there, and its logits
back. Each pool is bound as the cache's input and its output, so that the plugins update it in place.
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
from trtllm_mla.engine.launcher import POINTER_ALIGNMENT, CudaDriver, Device, Launcher
from trtllm_mla.engine.logs import capture_logs, trt_logger
from trtllm_mla.engine.plugin import PluginLibrary, plugin_library
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import LOGITS, past_latent, present_latent
from trtllm_mla.ops.row_codec import decode_rows
from trtllm_mla.runtime.executors.base import Float32Array
from trtllm_mla.runtime.executors.graph import Array
from trtllm_mla.runtime.step import StepInputs

if TYPE_CHECKING:
    import tensorrt as trt

# TensorRT wants an address for an empty tensor too.
_MIN_BUFFER_BYTES = 256
_NAN_BYTE = 0xFF


class WeightParts(Protocol):
    """Where weights come from; ``BoundWeights`` is one."""

    def parts(self, name: str) -> Iterable[Array]:
        """The elements of one input in order, as contiguous arrays."""


class TensorRTExecutor:
    """Runs an engine.

    Args:
        engine: The engine directory.
        weights: Weight inputs by name, each in its type; copied to the GPU one part after the other.
        rotary_cos_sin: float32 [positions, qk_rope_head_dim]; rows beyond the engine's ``max_seq_len`` are left out.
        num_pages: Pages in each layer's pool.
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
        self._vocab_size = network.spec.vocab_size
        self.dtype, self.cache_dtype = network.dtype, network.row_layout.dtype
        self._layout, self._latent_scales = network.row_layout, network.latent_scales
        self._pool_shape = (num_pages, self.page_size, network.row_layout.width)

        self._backend = backend or load_backend(engine.info.backend)
        self._device = device or CudaDriver()
        self._check_target(engine)
        self._stream = self._device.create_stream()
        self._buffers: dict[str, Any] = {}
        self._plugins: PluginLibrary | None = None
        self._engine, self._context = self._load(engine)
        self.description = (
            f"{self._backend.name} {self._backend.version} on {self._device.device_name}, {network.dtype} network, "
            f"{'native layers' if engine.info.native else 'MLA plugins'}"
        )
        self._check_inputs_and_outputs(engine)
        for name, shape in network.weights.shapes.items():
            self._bind_parts(name, shape, weights.parts(name))
        self._bind("rotary_cos_sin", np.ascontiguousarray(rotary_cos_sin[: config.max_seq_len]))
        for layer in range(network.num_layers):
            self._bind_pool(layer)

    def run(self, step: StepInputs) -> Float32Array:
        """Runs one step; see ``Executor.run``."""
        for name, array in step.arrays(absorption=self._absorption, context_passes=self._context_passes).items():
            self._bind(name, array)
        logits = np.empty((len(step.last_token_ids), self._vocab_size), np.float32)
        self._set_address(LOGITS, self._buffer(LOGITS, logits.nbytes))
        with capture_logs(self._backend) as log:
            done = self._context.execute_async_v3(int(self._stream.handle))
        failures = [*self._plugin_failures(), *log.errors]
        if not done or failures:
            raise RuntimeError(
                f"{self._backend.name} could not run a step: {'; '.join(failures) or 'no reason given'}"
            )
        if logits.size:
            self._device.copy_to_host(logits, self._address(LOGITS), self._stream)
        else:
            self._stream.sync()
        return logits

    def read_cache(self, layer: int) -> Float32Array:
        """A copy of a layer's pool; see ``Executor.read_cache``."""
        pool = np.empty(self._pool_shape, self.cache_dtype.numpy)
        self._device.copy_to_host(pool, self._address(past_latent(layer)), self._stream)
        return decode_rows(pool, self._layout, self._latent_scales[layer])

    def close(self) -> None:
        """Frees the engine and all device memory."""
        self._stream.sync()
        # The context refers to the engine, the engine to the runtime, and all to the memory.
        del self._context, self._engine, self._runtime
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
            context = None if loaded is None else loaded.create_execution_context()
            failures = [*self._plugin_failures(), *log.errors]
            if context is None or failures:
                info = engine.info
                raise UserError(
                    f"{engine.path}: {self._backend.name} {self._backend.version} cannot load the engine, which "
                    f"{info.backend} {info.backend_version} built: {'; '.join(failures) or 'no reason given'}. "
                    "Build it again with the version that runs it."
                )
        return loaded, context

    def _plugin_failures(self) -> list[str]:
        return self._plugins.take_failures() if self._plugins else []

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

    def _bind(self, name: str, array: Array) -> None:
        """Copies an array to the input's buffer, and tells TensorRT where it is and how large."""
        self._bind_parts(name, array.shape, [array])

    def _bind_parts(self, name: str, shape: tuple[int, ...], parts: Iterable[Array]) -> None:
        """Copies an input part by part, so that the host holds no more than one of them."""
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
        self._set_address(name, address)
        self._set_shape(name, shape)

    def _bind_pool(self, layer: int) -> None:
        name = past_latent(layer)
        address = self._buffer(name, int(np.prod(self._pool_shape)) * self.cache_dtype.itemsize)
        if address % POINTER_ALIGNMENT:
            raise ValueError(
                f"layer {layer}: the cache lies at {address:#x}, expected a multiple of {POINTER_ALIGNMENT} bytes"
            )
        # Reading a slot that was never written shows.
        self._device.fill(self._buffers[name], _NAN_BYTE, self._stream)
        self._set_shape(name, self._pool_shape)
        names = (name, present_latent(layer))
        for tensor in names:
            self._set_address(tensor, address)
        bound = [self._context.get_tensor_address(tensor) for tensor in names]
        if bound != [address, address]:
            raise ValueError(f"layer {layer}: the cache is bound at {bound}, expected one address, {address}")

    def _set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._context.set_input_shape(name, shape):
            least, _, greatest = (tuple(limit) for limit in self._engine.get_tensor_profile_shape(name, 0))
            raise UserError(
                f"Input '{name}' of the engine: found the shape {shape}, expected {least} to {greatest}. Stay within "
                "the limits of the engine's build config, or build again with others."
            )

    def _set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise ValueError(f"tensor '{name}': TensorRT does not accept the address {address:#x}")

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
