"""An execution context of TensorRT, whose refusals become exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_mla.engine.backend import Backend
from trtllm_mla.engine.launcher import POINTER_ALIGNMENT
from trtllm_mla.engine.logs import capture_logs
from trtllm_mla.engine.plugin import PluginLibrary
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import past_latent, present_latent

if TYPE_CHECKING:
    import tensorrt as trt

Shape = tuple[int, ...]


class EngineContext:
    """An execution context: the shapes and addresses of tensors that an engine runs with.

    Args:
        backend: The TensorRT library.
        engine: The engine.
        context: TensorRT's context.
        plugins: The library's plugins; None if the engine has none.
    """

    def __init__(
        self,
        backend: Backend,
        engine: trt.ICudaEngine,
        context: trt.IExecutionContext,
        plugins: PluginLibrary | None,
    ) -> None:
        self._backend, self._engine, self._context, self._plugins = backend, engine, context, plugins

    def bind(self, name: str, address: int, shape: Shape | None = None) -> None:
        """Says where a tensor is, and of an input how large.

        Raises:
            UserError: The engine was not built for this shape.
            ValueError: TensorRT does not accept the address.
        """
        if not self._context.set_tensor_address(name, address):
            raise ValueError(f"tensor '{name}': TensorRT does not accept the address {address:#x}")
        if shape is not None and not self._context.set_input_shape(name, shape):
            least, _, greatest = (tuple(limit) for limit in self._engine.get_tensor_profile_shape(name, 0))
            raise UserError(
                f"Input '{name}' of the engine: found the shape {shape}, expected {least} to {greatest}. Stay within "
                "the limits of the engine's build config, or build again with others."
            )

    def bind_pool(self, layer: int, address: int, shape: Shape) -> None:
        """Binds a layer's pool as the cache's input and its output.

        Raises:
            ValueError: Kernels could not read the cache there, or TensorRT binds it elsewhere.
        """
        if address % POINTER_ALIGNMENT:
            raise ValueError(
                f"layer {layer}: the cache lies at {address:#x}, expected a multiple of {POINTER_ALIGNMENT} bytes"
            )
        names = (past_latent(layer), present_latent(layer))
        self.bind(names[0], address, shape)
        self.bind(names[1], address)
        bound = [self._context.get_tensor_address(name) for name in names]
        if bound != [address, address]:
            raise ValueError(f"layer {layer}: the cache is bound at {bound}, expected one address, {address}")

    def enqueue(self, stream: int) -> None:
        """Enqueues the engine.

        Args:
            stream: Address of the CUDA stream.

        Raises:
            RuntimeError: TensorRT or a plugin reports a failure.
        """
        with capture_logs(self._backend) as log:
            done = self._context.execute_async_v3(stream)
        failures = [*(self._plugins.take_failures() if self._plugins else ()), *log.errors]
        if not done or failures:
            raise RuntimeError(
                f"{self._backend.name} could not run a step: {'; '.join(failures) or 'no reason given'}"
            )

    def is_capturable(self, stream: int) -> bool:
        """Whether ``enqueue`` can be captured in a CUDA graph."""
        return self._backend.is_capturable(self._context, stream)
