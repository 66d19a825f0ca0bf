"""Executor that runs a network with ONNX Runtime on the CPU, the MLA operations as their function bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import LOGITS, past_latent, present_latent
from trtllm_mla.runtime.executors.base import Float32Array
from trtllm_mla.runtime.executors.graph import Array, GraphSignature
from trtllm_mla.runtime.step import StepInputs

if TYPE_CHECKING:
    import onnx
    import onnxruntime


class OnnxRuntimeExecutor:
    """Runs a network with ONNX Runtime.

    One buffer a layer is bound as the cache's input and its output, so that it is updated in place.

    Args:
        model: A float32 or float16 network; ONNX Runtime has no bfloat16 products on CPUs.
        weights: Weight inputs by name; held by reference where they are contiguous.
        rotary_cos_sin: float32 [positions, qk_rope_head_dim].
        num_pages: Pages in each layer's pool.
        page_size: Tokens in a page.
        twin_of: Type of the network that ``model`` stands in for, if it is another.
        num_threads: Threads of an operator; None leaves the number to ONNX Runtime.

    Raises:
        UserError: ONNX Runtime refuses the network, or the pools are larger than this machine's memory.
    """

    name = "onnxruntime"

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Mapping[str, Array],
        rotary_cos_sin: Float32Array,
        *,
        num_pages: int,
        page_size: int,
        twin_of: DType | None = None,
        num_threads: int | None = None,
    ) -> None:
        import onnxruntime

        self.num_pages = num_pages
        self.page_size = page_size
        self._signature = GraphSignature.of(model)
        self.dtype, self.cache_dtype = self._signature.dtype, self._signature.layout.dtype
        what = f"{self._signature.dtype} network" if twin_of is None else f"float32 twin of the {twin_of} network"
        self.description = f"ONNX Runtime {onnxruntime.__version__}, CPU, {what}"

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads or 0
        # A memory pattern is kept for every combination of input shapes, and shapes differ from step to step.
        options.enable_mem_pattern = False
        try:
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            raise UserError(
                f"ONNX Runtime {onnxruntime.__version__} cannot load the network: {error}. Convert the checkpoint "
                "again."
            ) from error
        self._binding = self._session.io_binding()
        for name, array in weights.items():
            self._binding.bind_ortvalue_input(name, _ort_value(array))
        self._binding.bind_ortvalue_input("rotary_cos_sin", _ort_value(rotary_cos_sin))
        self._pools = self._signature.make_pools(num_pages, page_size)
        for layer, pool in enumerate(self._pools):
            value = _ort_value(pool)
            self._binding.bind_ortvalue_input(past_latent(layer), value)
            self._binding.bind_ortvalue_output(present_latent(layer), value)

    def run(self, step: StepInputs) -> Float32Array:
        """Runs one step; see ``Executor.run``."""
        for name, array in self._signature.arrays(step).items():
            self._binding.bind_ortvalue_input(name, _ort_value(array))
        logits = np.empty((len(step.last_token_ids), self._signature.vocab_size), np.float32)
        self._binding.bind_ortvalue_output(LOGITS, _ort_value(logits))
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # as in __init__; a step may need more memory than there is
            raise UserError(f"ONNX Runtime cannot run the network: {error}.") from error
        return logits

    def read_cache(self, layer: int) -> Float32Array:
        """A copy of a layer's pool; see ``Executor.read_cache``."""
        return self._signature.read_pool(layer, self._pools[layer])

    def close(self) -> None:
        """Frees the session, the pools and the references to the weights."""
        del self._binding, self._session
        self._pools.clear()


def _ort_value(array: Array) -> onnxruntime.OrtValue:
    """A value on the memory of a contiguous array, which it keeps alive."""
    from onnxruntime import OrtValue

    if not array.flags.c_contiguous:
        raise ValueError(f"found strides {array.strides}, expected a contiguous array")
    if array.dtype == DType.BFLOAT16.numpy:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(DType.BFLOAT16.onnx))
    return OrtValue.ortvalue_from_numpy(array)
