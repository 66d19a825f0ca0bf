"""TensorRT and TensorRT-RTX behind one object: their Python modules have one API, and what differs stands here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trtllm_mla.config import BackendName
from trtllm_mla.engine.launcher import CudaDriver
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.targets import TARGETS, Target, get_target

if TYPE_CHECKING:
    import tensorrt as trt

_MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_EXTRAS = {"tensorrt-rtx": "rtx", "tensorrt": "tensorrt"}
# The two newest desktop generations: each target costs some seconds of compilation.
RTX_DEFAULT_TARGETS = ("sm_89", "sm_120")


@dataclass(frozen=True)
class Backend:
    """A TensorRT library.

    Attributes:
        name: Name on the command line and in configs.
        module: The Python module, ``tensorrt_rtx`` or ``tensorrt``.
        ahead_of_time_targets: Targets it builds for without a GPU; empty where it builds for the GPU at hand.
        default_targets: Targets where none are named; empty for the GPU at hand.
    """

    name: BackendName
    module: ModuleType
    ahead_of_time_targets: tuple[str, ...]
    default_targets: tuple[str, ...]

    @property
    def version(self) -> str:
        """The library's version."""
        return str(self.module.__version__)

    def resolve_targets(self, names: Sequence[str] | None) -> tuple[Target, ...]:
        """Targets to build for, each once, in the order named.

        Args:
            names: Their names; None or empty for the default.

        Raises:
            UserError: A target is unknown or the backend cannot build for it, or it needs a GPU and finds none.
        """
        if self.ahead_of_time_targets:
            targets = tuple(get_target(name) for name in dict.fromkeys(names or self.default_targets))
            refused = [target for target in targets if target.name not in self.ahead_of_time_targets]
            if refused:
                raise UserError(
                    f"{self.name} {self.version} cannot build for {', '.join(map(_describe, refused))}. "
                    f"It builds for {', '.join(self.ahead_of_time_targets)}; for other GPUs use --backend tensorrt on "
                    "a machine that has one."
                )
            return targets
        device = CudaDriver().target
        refused = [get_target(name) for name in dict.fromkeys(names or ()) if name != device.name]
        if refused:
            raise UserError(
                f"{self.name} builds for the GPU at hand, which is {_describe(device)}; found the target "
                f"{', '.join(map(_describe, refused))}. Leave the targets out, or use --backend "
                "tensorrt-rtx, which builds for other GPUs."
            )
        return (device,)

    def data_type(self, name: str) -> trt.DataType:
        """TensorRT's element type for ``int8``, ``int32`` or one of ``DType``."""
        attribute = {
            "float32": "FLOAT",
            "float16": "HALF",
            "bfloat16": "BF16",
            "int32": "INT32",
            "int8": "INT8",
        }[name]
        data_type: trt.DataType = getattr(self.module.DataType, attribute)
        return data_type

    def network_flags(self) -> int:
        """Flags of ``Builder.create_network``: strongly typed, so that types are those of the network."""
        # From TensorRT 11 on every network is, and the flag may be absent.
        flag = getattr(self.module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return 0 if flag is None else 1 << int(flag)

    def configure(self, config: trt.IBuilderConfig, targets: Sequence[Target]) -> None:
        """Sets what every build of this package needs.

        Args:
            config: The builder's config.
            targets: What to build for, as ``resolve_targets`` returned it.
        """
        config.set_preview_feature(self.module.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        if self.ahead_of_time_targets:
            # TensorRT-RTX only: the attributes below are not in TensorRT's API.
            rtx_config: Any = config
            # TensorRT-RTX captures no engine in a CUDA graph that may allocate memory when it runs.
            rtx_config.set_flag(self.module.BuilderFlag.REQUIRE_USER_ALLOCATION)
            rtx_config.num_compute_capabilities = len(targets)
            for index, target in enumerate(targets):
                capability = getattr(self.module.ComputeCapability, f"SM{target.compute_capability}")
                rtx_config.set_compute_capability(capability, index)

    def create_context(self, engine: trt.ICudaEngine, *, for_capture: bool) -> trt.IExecutionContext | None:
        """Makes an execution context, which needs ``set_device_memory`` before it runs.

        Args:
            engine: The engine.
            for_capture: Whether it is to be captured in a CUDA graph. With TensorRT-RTX it then waits for the kernels
                of its shapes to be compiled, which would otherwise take over from others at some later step.

        Returns:
            The context; None where TensorRT makes none, and logs why.
        """
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self.module.ExecutionContextAllocationStrategy.USER_MANAGED)
        if for_capture and self.ahead_of_time_targets:
            rtx_config: Any = config
            strategy = self.module.DynamicShapesKernelSpecializationStrategy.EAGER
            rtx_config.dynamic_shapes_kernel_specialization_strategy = strategy
        return engine.create_execution_context(config)

    def is_capturable(self, context: trt.IExecutionContext, stream: int) -> bool:
        """Whether a context's next enqueue can be captured in a CUDA graph, as far as the library tells.

        Args:
            context: The context.
            stream: Address of the CUDA stream.
        """
        if not self.ahead_of_time_targets:
            return True
        rtx_context: Any = context
        return bool(rtx_context.is_stream_capturable(stream))


@functools.cache
def load_backend(name: BackendName) -> Backend:
    """Imports a TensorRT library.

    Raises:
        MissingDependencyError: It is not installed.
        UserError: It is installed and cannot work; the message says what to mend.
    """
    module = _import_module(name)
    if name == "tensorrt":
        return Backend(name, module, (), ())
    _link_library()
    capabilities = module.ComputeCapability.__members__
    ahead_of_time = tuple(
        target.name for target in TARGETS.values() if f"SM{target.compute_capability}" in capabilities
    )
    return Backend(name, module, ahead_of_time, RTX_DEFAULT_TARGETS)


def _import_module(name: BackendName) -> ModuleType:
    module_name = _MODULES[name]
    purpose = f"build or run engines with the backend '{name}'"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(module_name, purpose, _EXTRAS[name]) from error
    except (ImportError, OSError) as error:
        raise UserError(f"The package '{module_name}' is installed but does not load: {error}.") from error
    # A folder of type stubs alone imports as an empty namespace package.
    if not hasattr(module, "Builder"):
        raise MissingDependencyError(module_name, purpose, _EXTRAS[name])
    return module


def _link_library() -> None:
    """Lets TensorRT-RTX's ONNX parser find the library under the name it looks for.

    The parser opens ``libtensorrt_rtx.so`` when it adds its first plugin, and the process aborts where that is absent.
    Wheels up to 1.7.1 ship ``libtensorrt_rtx.so.1`` only. The parser looks beside itself first.

    Raises:
        UserError: The link is missing and cannot be made.
    """
    try:
        libraries = importlib.import_module("tensorrt_rtx_libs")
    except ModuleNotFoundError:
        return  # The libraries come from the system.
    folder = Path(str(libraries.__file__)).resolve().parent
    link, library = folder / "libtensorrt_rtx.so", folder / "libtensorrt_rtx.so.1"
    if link.exists() or not library.exists():
        return
    try:
        link.symlink_to(library.name)
    except FileExistsError:
        return  # Another process was faster.
    except OSError as error:
        raise UserError(
            f"TensorRT-RTX looks for '{link}', which its package lacks, and it cannot be made here: {error.strerror}. "
            f"Run once, with the rights to write there: ln -s {library.name} {link}"
        ) from error


def _describe(target: Target) -> str:
    return f"{target.name} ({target.example})"
