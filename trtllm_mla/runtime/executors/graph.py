"""What an executor reads off a network's graph, and the pools it makes for it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import LOGITS, past_latent

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GraphSignature:
    """Sizes and types of a network, as its inputs and outputs declare them.

    Attributes:
        dtype: Type of activations and weights.
        cache_dtype: Type of the latent cache.
        num_layers: Decoder layers.
        latent_width: Elements of a cached row.
        vocab_size: Columns of the logits.
        absorption: Whether there is a generation group.
    """

    dtype: DType
    cache_dtype: DType
    num_layers: int
    latent_width: int
    vocab_size: int
    absorption: bool

    @classmethod
    def of(cls, model: onnx.ModelProto) -> GraphSignature:
        """Reads the signature of a network that ``network.graph.build_network`` made."""
        inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        outputs = {value.name: value.type.tensor_type for value in model.graph.output}
        cache = inputs[past_latent(0)]
        layer = 0
        while past_latent(layer) in inputs:
            layer += 1
        return cls(
            dtype=_dtype(inputs["model.norm.weight"].elem_type),
            cache_dtype=_dtype(cache.elem_type),
            num_layers=layer,
            latent_width=cache.shape.dim[2].dim_value,
            vocab_size=outputs[LOGITS].shape.dim[1].dim_value,
            absorption="generation_position_ids" in inputs,
        )

    def make_pools(self, num_pages: int, page_size: int) -> list[Array]:
        """One pool a layer, [num_pages, page_size, latent_width], full of NaN: reading an unwritten slot shows.

        Raises:
            UserError: They are larger than this machine's memory.
        """
        shape = (num_pages, page_size, self.latent_width)
        needed = math.prod(shape) * self.cache_dtype.itemsize * self.num_layers
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise UserError(
                f"A latent cache of {num_pages} pages of {page_size} tokens takes {needed:,} bytes, and this machine "
                f"has {memory:,} bytes of memory. Ask for fewer or shorter requests."
            )
        return [np.full(shape, np.nan, self.cache_dtype.numpy) for _ in range(self.num_layers)]


def _dtype(elem_type: int) -> DType:
    return next(dtype for dtype in DType if int(dtype.onnx) == elem_type)
