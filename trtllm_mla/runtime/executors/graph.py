"""What an executor reads off a network's graph, and the pools it makes for it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import CACHE_DTYPE_KEY, LOGITS, history_inputs, past_latent
from trtllm_mla.ops.row_codec import decode_rows
from trtllm_mla.runtime.executors.base import Float32Array
from trtllm_mla.runtime.step import Int32Array, StepInputs

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GraphSignature:
    """Sizes and types of a network, as its inputs and outputs declare them.

    Attributes:
        dtype: Type of activations and weights.
        layout: A row of the latent cache.
        latent_scales: Outer scale of each layer's latents.
        vocab_size: Columns of the logits.
        absorption: Whether there is a generation group.
        context_passes: Passes of the context group's attention.
    """

    dtype: DType
    layout: RowLayout
    latent_scales: tuple[float, ...]
    vocab_size: int
    absorption: bool
    context_passes: int = 1

    @classmethod
    def of(cls, model: onnx.ModelProto) -> GraphSignature:
        """Reads the signature of a network that ``network.graph.build_network`` made."""
        inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        outputs = {value.name: value.type.tensor_type for value in model.graph.output}
        scales = {
            node.input[0]: next(item.f for item in node.attribute if item.name == "latent_scale")
            for node in model.graph.node
            if node.op_type == "AppendLatent"
        }
        passes = 1
        while history_inputs(passes)[0].name in inputs:
            passes += 1
        metadata = {item.key: item.value for item in model.metadata_props}
        # A layer's first row of k_up has an element for each of the latent.
        *_, kv_lora_rank = (dim.dim_value for dim in inputs["model.layers.0.self_attn.k_up"].shape.dim)
        *_, rope_dim = (dim.dim_value for dim in inputs["rotary_cos_sin"].shape.dim)
        return cls(
            dtype=_dtype(inputs["model.norm.weight"].elem_type),
            layout=CacheDType(metadata[CACHE_DTYPE_KEY]).layout(kv_lora_rank, rope_dim),
            latent_scales=tuple(scales[past_latent(layer)] for layer in range(len(scales))),
            vocab_size=outputs[LOGITS].shape.dim[1].dim_value,
            absorption="generation_position_ids" in inputs,
            context_passes=passes,
        )

    def arrays(self, step: StepInputs) -> dict[str, Int32Array]:
        """A step's arrays by input name; see ``StepInputs.arrays``."""
        return step.arrays(absorption=self.absorption, context_passes=self.context_passes)

    def make_pools(self, num_pages: int, page_size: int) -> list[Array]:
        """One pool a layer, [num_pages, page_size, layout.width], full of NaN: reading an unwritten slot shows.

        The bytes of a quantised pool are all ones: scales and rotary keys are NaN then.

        Raises:
            UserError: They are larger than this machine's memory.
        """
        shape = (num_pages, page_size, self.layout.width)
        dtype = self.layout.dtype
        needed = math.prod(shape) * dtype.itemsize * len(self.latent_scales)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise UserError(
                f"A latent cache of {num_pages} pages of {page_size} tokens takes {needed:,} bytes, and this machine "
                f"has {memory:,} bytes of memory. Ask for fewer or shorter requests."
            )
        poison = -1 if dtype.is_quantized else np.nan
        return [np.full(shape, poison, dtype.numpy) for _ in self.latent_scales]

    def read_pool(self, layer: int, pool: Array) -> Float32Array:
        """A layer's pool in fp32: [..., kv_lora_rank + rope_dim]."""
        return decode_rows(pool, self.layout, self.latent_scales[layer])


def _dtype(elem_type: int) -> DType:
    return next(dtype for dtype in DType if int(dtype.onnx) == elem_type)
