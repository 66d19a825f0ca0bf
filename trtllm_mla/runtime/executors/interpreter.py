"""Executor that runs a network's graph on the CPU with the MLA operations' launch plans and Triton kernels.

ONNX's reference evaluator walks the graph; each MLA node plans and launches its real kernels in Triton's interpreter.
It is slow, and meant for small models: what it shows is that plans and kernels are right in a whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from trtllm_mla.network.contract import LOGITS, past_latent
from trtllm_mla.ops import DOMAIN, OPS, OpDefinition
from trtllm_mla.ops.interpreter import check_installed, run_op
from trtllm_mla.runtime.executors.base import Float32Array
from trtllm_mla.runtime.executors.graph import Array, GraphSignature
from trtllm_mla.runtime.step import StepInputs
from trtllm_mla.targets import Target

if TYPE_CHECKING:
    import onnx
    import torch
    from onnx.reference.op_run import OpRun


@dataclass(frozen=True)
class KernelSettings:
    """What launch plans depend on besides shapes and types.

    Attributes:
        target: GPU generation whose plans are run.
        tile_s: Cached tokens a kernel works on at once.
        num_stages: Tiles in flight.
    """

    target: Target
    tile_s: int
    num_stages: int


class InterpreterExecutor:
    """Runs a network with ONNX's reference evaluator and Triton's interpreter.

    Products, norms and the sigmoid compute in fp32 and round their result once, as GPU libraries do; the evaluator's
    own operators round every intermediate value of a 16-bit type.

    Args:
        model: The network, of any type.
        weights: Weight inputs by name; held by reference.
        rotary_cos_sin: float32 [positions, qk_rope_head_dim].
        num_pages: Pages in each layer's pool.
        page_size: Tokens in a page.
        settings: Whose launch plans are run.

    Raises:
        MissingDependencyError: PyTorch or Triton is not installed.
    """

    name = "interpreter"

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Mapping[str, Array],
        rotary_cos_sin: Float32Array,
        *,
        num_pages: int,
        page_size: int,
        settings: KernelSettings,
    ) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        check_installed()
        self.num_pages = num_pages
        self.page_size = page_size
        self._signature = GraphSignature.of(model)
        self.dtype, self.cache_dtype = self._signature.dtype, self._signature.layout.dtype
        self.description = (
            f"launch plans and Triton kernels for {settings.target.name} in Triton's interpreter, the rest in ONNX "
            f"{onnx.__version__}'s reference evaluator, CPU, {self._signature.dtype} network"
        )
        graph = onnx.ModelProto()
        graph.CopyFrom(model)
        del graph.functions[:]  # the bodies that the kernels stand in for
        operators = [_fp32_operator(name, function) for name, function in _FP32_FUNCTIONS.items()]
        operators += [_kernel_operator(op, self._signature, settings) for op in OPS.values()]
        self._evaluator = ReferenceEvaluator(graph, new_ops=operators)
        self._pools = self._signature.make_pools(num_pages, page_size)
        pools = {past_latent(layer): pool for layer, pool in enumerate(self._pools)}
        self._fixed = {**weights, **pools, "rotary_cos_sin": rotary_cos_sin}

    def run(self, step: StepInputs) -> Float32Array:
        """Runs one step; see ``Executor.run``."""
        inputs = {**self._fixed, **self._signature.arrays(step)}
        (logits,) = self._evaluator.run([LOGITS], inputs)
        return np.asarray(logits, dtype=np.float32)

    def read_cache(self, layer: int) -> Float32Array:
        """A copy of a layer's pool; see ``Executor.read_cache``."""
        return self._signature.read_pool(layer, self._pools[layer])

    def close(self) -> None:
        """Frees the pools and the references to the weights."""
        self._fixed.clear()
        self._pools.clear()


def _gemm(a: Array, b: Array, c: Array | None = None, *, alpha: float, beta: float, transA: int, transB: int) -> Array:
    product: Array = alpha * np.matmul(a.T if transA else a, b.T if transB else b)
    return product if c is None else product + beta * c


def _rms_norm(x: Array, scale: Array, *, axis: int, epsilon: float, stash_type: int) -> Array:
    axes = tuple(range(axis % x.ndim, x.ndim))
    normalised: Array = x / np.sqrt(np.mean(x * x, axis=axes, keepdims=True) + np.float32(epsilon))
    return normalised * scale


def _sigmoid(x: Array) -> Array:
    result: Array = np.exp(-np.logaddexp(np.float32(0), -x))
    return result


_FP32_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "Gemm": _gemm,
    "MatMul": np.matmul,
    "RMSNormalization": _rms_norm,
    "Sigmoid": _sigmoid,
}


def _fp32_operator(name: str, function: Callable[..., Array]) -> type[OpRun]:
    from onnx.reference.op_run import OpRun

    def run(self: OpRun, *inputs: Array, **attributes: Any) -> tuple[Array]:
        result = function(*(value.astype(np.float32, copy=False) for value in inputs), **attributes)
        return (result.astype(inputs[0].dtype, copy=False),)

    return type(name, (OpRun,), {"op_domain": "", "_run": run})


def _kernel_operator(op: OpDefinition, signature: GraphSignature, settings: KernelSettings) -> type[OpRun]:
    from onnx.reference.op_run import OpRun

    def run(self: OpRun, *inputs: Array, **attributes: Any) -> tuple[Array, ...]:
        tensors = [_to_torch(value) for value in inputs]
        outputs = run_op(
            op,
            tensors,
            {name: kind(attributes[name]) for name, kind in op.attributes.items()},
            model_dtype=signature.dtype,
            cache_dtype=signature.layout.dtype,
            target=settings.target,
            tile_s=settings.tile_s,
            num_stages=settings.num_stages,
        )
        for output, source in op.aliases.items():
            if outputs[output].data_ptr() != inputs[source].ctypes.data:
                raise ValueError(f"{op.name}: output {output} is not the memory of input {source}")
        return tuple(_to_numpy(value) for value in outputs)

    return type(op.name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def _to_torch(array: Array) -> torch.Tensor:
    """A contiguous tensor; it shares the memory of a contiguous array that may be written to."""
    import torch

    # PyTorch has no tensors that are read only, such as weights in a mapped file.
    array = np.require(array, requirements=["C", "W"])
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: torch.Tensor) -> Array:
    """An array on the memory of a tensor."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array
