"""The only code that touches a GPU: loads cubins, launches plans, moves memory.

``Launcher`` turns a launch plan into driver calls, and ``CudaDriver`` makes them, through ``cuda.core``. Between them
stands the ``Driver`` protocol, so that what is launched can be checked without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.ops.plan import Argument, Launch, LaunchPlan, ScalarArgument, TensorArgument
from trtllm_mla.targets import KIB, TARGETS, Target

if TYPE_CHECKING:
    from trtllm_mla.engine.kernel_store import Cubin, KernelStore

WARP_SIZE = 32
# Kernels are compiled for pointers that are multiples of this (``kernel_compiler``), which widens loads to 16 bytes.
POINTER_ALIGNMENT = 16
# More dynamic shared memory has to be asked for: CUDA C++ Programming Guide, "Shared Memory" of each generation.
_SHARED_BYTES_WITHOUT_OPT_IN = 48 * KIB
# Triton 3.5 and later append a global and a profile scratch pointer to the parameters; the kernels use neither.
NUM_NULL_POINTERS = 2

# Types of fixed width, so that a parameter takes as many bytes as its kernel reads.
Parameter = np.uint64 | np.int32 | np.float32
Grid = tuple[int, int, int]


class Driver(Protocol):
    """What launching needs of a GPU."""

    @property
    def target(self) -> Target:
        """The GPU's generation, with its number of multiprocessors."""

    def load(self, cubin: bytes, entry: str, *, shared_bytes: int, opt_in: bool) -> Any:
        """Loads a kernel.

        Args:
            cubin: Its machine code.
            entry: Its name in it.
            shared_bytes: Dynamic shared memory of each block.
            opt_in: Whether that is more than a kernel has without asking.

        Returns:
            A handle for ``launch``.
        """

    def launch(
        self, kernel: Any, grid: Grid, block: int, shared_bytes: int, parameters: Sequence[Parameter], stream: int
    ) -> None:
        """Launches a kernel.

        Args:
            kernel: What ``load`` returned.
            grid: Blocks along x, y and z.
            block: Threads of a block.
            shared_bytes: Dynamic shared memory of each block.
            parameters: The kernel's parameters, in order. CUDA copies them, also when the launch is captured.
            stream: Address of the CUDA stream.
        """


class Device(Driver, Protocol):
    """What running an engine needs of a GPU besides: memory and a stream, as ``cuda.core`` has them."""

    @property
    def device_name(self) -> str:
        """The GPU's name."""

    def make_current(self) -> None:
        """Makes the GPU that of the calling thread; it is that of the thread that made this object."""

    def create_stream(self) -> Any:
        """A new stream; ``int(stream.handle)`` is its address."""

    def allocate(self, size: int, stream: Any) -> Any:
        """Allocates device memory, in the order of ``stream``; ``int(buffer.handle)`` is its address.

        Args:
            size: Bytes, at least one.
            stream: The stream.
        """

    def fill(self, buffer: Any, byte: int, stream: Any) -> None:
        """Sets every byte of a buffer."""

    def copy_to_device(self, address: int, source: npt.NDArray[Any], stream: Any) -> None:
        """Copies a contiguous array to an address; the array may be changed when this returns."""

    def copy_to_host(self, destination: npt.NDArray[Any], address: int, stream: Any) -> None:
        """Fills a contiguous array from an address, and waits until that is done."""

    def capture(self, enqueue: Callable[[], None], stream: Any) -> Any:
        """Captures what is enqueued on a stream in a CUDA graph, instead of running it.

        Args:
            enqueue: Enqueues it. It may not allocate memory, copy from the host, or wait.
            stream: The stream.

        Returns:
            The graph. ``graph.launch(stream)`` runs it, while all memory that it names exists; ``graph.close()`` frees
            it.
        """


class Launcher:
    """Runs launch plans with the cubins of one engine.

    Args:
        driver: The GPU.
        store: The engine's kernels.

    Raises:
        UserError: The store has no kernels for the GPU's generation.
    """

    def __init__(self, driver: Driver, store: KernelStore) -> None:
        self._driver = driver
        self._cubins = store.for_target(driver.target)
        self._kernels: dict[str, Any] = {}

    @property
    def target(self) -> Target:
        """The GPU's generation, with its number of multiprocessors."""
        return self._driver.target

    def run(self, plan: LaunchPlan, tensors: Mapping[str, int], workspace: int, stream: int) -> None:
        """Enqueues a plan's launches.

        Args:
            plan: The plan.
            tensors: Address of each input and output of the operation, by name.
            workspace: Address of ``plan.workspace_bytes`` of scratch memory.
            stream: Address of the CUDA stream.

        Raises:
            ValueError: A kernel is not in the store, or an address is not aligned; nothing of the plan was launched.
        """
        calls = [
            (launch, self._cubin(launch), self._parameters(launch, tensors, workspace)) for launch in plan.launches
        ]
        for launch, cubin, parameters in calls:
            block = WARP_SIZE * launch.variant.num_warps
            self._driver.launch(self._kernel(cubin), launch.grid, block, cubin.shared_bytes, parameters, stream)

    def _cubin(self, launch: Launch) -> Cubin:
        try:
            return self._cubins[launch.variant.key]
        except KeyError:
            raise ValueError(
                f"{launch.variant.op}: kernel {launch.variant.key} is not among the engine's kernels for "
                f"{self.target.name}; the engine was built by a different version of this package"
            ) from None

    def _kernel(self, cubin: Cubin) -> Any:
        if cubin.key not in self._kernels:
            self._kernels[cubin.key] = self._driver.load(
                cubin.read(),
                cubin.entry,
                shared_bytes=cubin.shared_bytes,
                opt_in=cubin.shared_bytes > _SHARED_BYTES_WITHOUT_OPT_IN,
            )
        return self._kernels[cubin.key]

    def _parameters(self, launch: Launch, tensors: Mapping[str, int], workspace: int) -> tuple[Parameter, ...]:
        parameters = [
            _parameter(launch, name, parameter_type, argument, tensors, workspace)
            for (name, parameter_type), argument in zip(launch.variant.signature, launch.arguments, strict=True)
        ]
        return (*parameters, *(np.uint64(0),) * NUM_NULL_POINTERS)


def _parameter(
    launch: Launch, name: str, parameter_type: str, argument: Argument, tensors: Mapping[str, int], workspace: int
) -> Parameter:
    if isinstance(argument, ScalarArgument) != (parameter_type in ("i32", "fp32")):
        raise ValueError(f"{launch.variant.op}: parameter '{name}' is a {parameter_type}, found {argument}")
    if isinstance(argument, ScalarArgument):
        return np.int32(argument.value) if parameter_type == "i32" else np.float32(argument.value)
    if isinstance(argument, TensorArgument):
        address, what = tensors[argument.name], f"tensor '{argument.name}'"
    else:
        address, what = workspace + argument.offset, f"workspace at byte {argument.offset}"
    if address % POINTER_ALIGNMENT:
        raise ValueError(
            f"{launch.variant.op}: {what} lies at address {address:#x}, expected a multiple of {POINTER_ALIGNMENT} "
            "bytes: kernels load that many at once"
        )
    return np.uint64(address)


class CudaDriver:
    """A GPU, through ``cuda.core`` and, for what that lacks, the driver's own functions in ``cuda.bindings``.

    Args:
        device_id: Its number.

    Raises:
        MissingDependencyError: ``cuda.core`` or ``cuda.bindings`` is not installed.
        UserError: There is no NVIDIA driver or no GPU, or its generation is unknown.
    """

    def __init__(self, device_id: int = 0) -> None:
        try:
            import cuda.bindings.driver
            import cuda.core
        except ImportError as error:
            raise MissingDependencyError("cuda.core", "run engines on a GPU", "gpu") from error
        self._core, self._bindings = cuda.core, cuda.bindings.driver
        try:
            self._device = cuda.core.Device(device_id)
            self._device.set_current()
        except Exception as error:  # cuda.core documents no exception types for a missing driver or GPU.
            raise UserError(
                f"No NVIDIA GPU can be used: {error} Expected an NVIDIA driver and GPU number {device_id}. "
                "Without one, engines can be built with --backend tensorrt-rtx, and networks run with --executor "
                "onnxruntime."
            ) from error
        self._target = self._find_target()

    def _find_target(self) -> Target:
        name = f"sm_{self._device.arch}"
        if name not in TARGETS:
            raise UserError(
                f"GPU {self._device.device_id} ({self._device.name}) is of generation {name}; expected one of "
                f"{', '.join(TARGETS)}."
            )
        known = TARGETS[name]
        multiprocessors = self._device.properties.multiprocessor_count
        return Target(known.name, known.shared_memory_bytes, multiprocessors, known.example)

    @property
    def target(self) -> Target:
        """The GPU's generation, with its number of multiprocessors."""
        return self._target

    @property
    def device_name(self) -> str:
        """The GPU's name."""
        return str(self._device.name)

    def load(self, cubin: bytes, entry: str, *, shared_bytes: int, opt_in: bool) -> Any:
        """See ``Driver.load``."""
        kernel = self._core.ObjectCode.from_cubin(cubin, name=entry).get_kernel(entry)
        if opt_in:
            attribute = self._bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(
                self._bindings.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, self._device.device_id)
            )
        return kernel

    def launch(
        self, kernel: Any, grid: Grid, block: int, shared_bytes: int, parameters: Sequence[Parameter], stream: int
    ) -> None:
        """See ``Driver.launch``."""
        # A Python integer passes as a pointer, and numpy's scalars in their own width.
        config = self._core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)
        self._core.launch(self._core.Stream.from_handle(stream), config, kernel, *parameters)

    def make_current(self) -> None:
        """See ``Device.make_current``."""
        self._core.Device(self._device.device_id).set_current()

    def create_stream(self) -> Any:
        """See ``Device.create_stream``."""
        return self._device.create_stream()

    def allocate(self, size: int, stream: Any) -> Any:
        """See ``Device.allocate``."""
        return self._device.allocate(size, stream=stream)

    def fill(self, buffer: Any, byte: int, stream: Any) -> None:
        """See ``Device.fill``."""
        buffer.fill(byte, stream=stream)

    def copy_to_device(self, address: int, source: npt.NDArray[Any], stream: Any) -> None:
        """See ``Device.copy_to_device``."""
        # From pageable memory, the driver returns when it has taken a copy.
        self._check(self._bindings.cuMemcpyHtoDAsync(address, source.ctypes.data, source.nbytes, stream.handle))

    def copy_to_host(self, destination: npt.NDArray[Any], address: int, stream: Any) -> None:
        """See ``Device.copy_to_host``."""
        pointer, size = destination.ctypes.data, destination.nbytes
        self._check(self._bindings.cuMemcpyDtoHAsync(pointer, address, size, stream.handle))
        stream.sync()

    def capture(self, enqueue: Callable[[], None], stream: Any) -> Any:
        """See ``Device.capture``."""
        builder = stream.create_graph_builder()
        try:
            # TensorRT's own tools capture in this mode: calls of other threads do not matter.
            builder.begin_building("thread_local")
            enqueue()
            return builder.end_building().complete()
        finally:
            # This also ends a capture that failed, and then reports the failure once more.
            with suppress(Exception):
                builder.close()

    def _check(self, result: tuple[Any, ...]) -> None:
        status = result[0]
        if status != self._bindings.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver reports {status.name}")
