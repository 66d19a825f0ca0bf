"""Executors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.rope import MAX_POSITIONS, rotary_cos_sin
from trtllm_mla.checkpoint.weights import bind
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.engine.operation import TargetTile
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.ops.plan import MAX_INT32
from trtllm_mla.runtime.executors.base import Executor, Float32Array
from trtllm_mla.runtime.executors.interpreter import InterpreterExecutor, KernelSettings
from trtllm_mla.runtime.executors.onnxruntime import OnnxRuntimeExecutor
from trtllm_mla.runtime.executors.tensorrt import TensorRTExecutor
from trtllm_mla.targets import get_target

INTERPRETER_TARGET = "sm_90"
MAX_THREADS = 1024


@dataclass(frozen=True)
class _Settings:
    """The arguments of ``make_executor`` that an executor may use or not."""

    num_pages: int
    num_threads: int | None
    use_cuda_graph: bool


def make_executor(
    name: str,
    directory: NetworkDirectory,
    checkpoint: Checkpoint,
    *,
    num_pages: int,
    num_threads: int | None = None,
    use_cuda_graph: bool = True,
) -> Executor:
    """Makes an executor for a network or an engine.

    Args:
        name: A key of ``EXECUTORS``.
        directory: The network or engine directory; its plugin config says how large a page is.
        checkpoint: Whose weights are bound.
        num_pages: Pages in each layer's pool.
        num_threads: Threads of an operator, where the executor computes on the CPU; None leaves the number to it.
        use_cuda_graph: Whether decode steps are captured in CUDA graphs, where the executor computes on a GPU.

    Raises:
        UserError: There is no such executor, the pool's size is out of range, the checkpoint does not fit the
            network, or the executor cannot run here.
    """
    if name not in EXECUTORS:
        raise UserError(f"executor: found '{name}', expected one of {', '.join(EXECUTORS)}.")
    page_size = directory.plugin.page_size
    most = MAX_INT32 // page_size
    if not 1 <= num_pages <= most:
        raise UserError(f"num_pages: found {num_pages}, expected 1 to {most} pages of {page_size} tokens.")
    if num_threads is not None and not 1 <= num_threads <= MAX_THREADS:
        raise UserError(f"num_threads: found {num_threads}, expected 1 to {MAX_THREADS}.")
    directory.check_model(checkpoint)
    return EXECUTORS[name](directory, checkpoint, _Settings(num_pages, num_threads, use_cuda_graph))


def make_float32_twin(
    directory: NetworkDirectory, checkpoint: Checkpoint, *, num_pages: int, num_threads: int | None = None
) -> OnnxRuntimeExecutor:
    """Makes an executor of a network's float32 twin in ONNX Runtime; see ``NetworkDirectory.float32_twin``.

    Raises:
        UserError: The checkpoint does not fit the network, or ONNX Runtime refuses the twin.
    """
    return OnnxRuntimeExecutor(
        directory.float32_twin(),
        bind(directory.weights, checkpoint, DType.FLOAT32),
        rotary_table(directory, num_pages),
        num_pages=num_pages,
        page_size=directory.plugin.page_size,
        twin_of=directory.dtype if directory.dtype is not DType.FLOAT32 else None,
        num_threads=num_threads,
    )


def rotary_table(directory: NetworkDirectory, num_pages: int) -> Float32Array:
    """The input ``rotary_cos_sin`` for every position that a request can reach in a pool of ``num_pages``."""
    slots = num_pages * directory.plugin.page_size
    return rotary_cos_sin(directory.spec.rope, min(slots, MAX_POSITIONS))


def _make_onnxruntime(directory: NetworkDirectory, checkpoint: Checkpoint, settings: _Settings) -> Executor:
    # ONNX Runtime has no bfloat16 products on CPUs.
    if directory.dtype is DType.BFLOAT16:
        return make_float32_twin(directory, checkpoint, num_pages=settings.num_pages, num_threads=settings.num_threads)
    return OnnxRuntimeExecutor(
        directory.model(),
        bind(directory.weights, checkpoint, directory.dtype),
        rotary_table(directory, settings.num_pages),
        num_pages=settings.num_pages,
        page_size=directory.plugin.page_size,
        num_threads=settings.num_threads,
    )


def _make_interpreter(directory: NetworkDirectory, checkpoint: Checkpoint, settings: _Settings) -> Executor:
    plugin = directory.plugin
    return InterpreterExecutor(
        directory.model(),
        bind(directory.weights, checkpoint, directory.dtype),
        rotary_table(directory, settings.num_pages),
        num_pages=settings.num_pages,
        page_size=plugin.page_size,
        settings=_kernel_settings(directory),
    )


def _make_tensorrt(directory: NetworkDirectory, checkpoint: Checkpoint, settings: _Settings) -> Executor:
    return TensorRTExecutor(
        EngineDirectory.load(directory.path),
        bind(directory.weights, checkpoint, directory.dtype),
        rotary_table(directory, settings.num_pages),
        num_pages=settings.num_pages,
        use_cuda_graph=settings.use_cuda_graph,
    )


def _kernel_settings(directory: NetworkDirectory) -> KernelSettings:
    """Whose plans are interpreted: those of an engine's first target, or what a network would get on one."""
    if EngineDirectory.is_engine(directory.path):
        tile = EngineDirectory.load(directory.path).info.tiles[0]
    else:
        tile = TargetTile.choose(directory.spec, directory.plugin, get_target(INTERPRETER_TARGET))
    return KernelSettings(get_target(tile.target), tile.tile_s, tile.num_stages)


_Maker = Callable[[NetworkDirectory, Checkpoint, _Settings], Executor]

EXECUTORS: Mapping[str, _Maker] = MappingProxyType(
    {"onnxruntime": _make_onnxruntime, "interpreter": _make_interpreter, "tensorrt": _make_tensorrt}
)
