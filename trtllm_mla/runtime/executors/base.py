"""What an executor is: something that runs a network's steps and owns its latent cache."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.runtime.step import StepInputs

Float32Array = npt.NDArray[np.float32]


class Executor(Protocol):
    """Runs steps of one network on one pool of pages a layer.

    Steps are run in order, and each reads what those before it wrote to the cache. Which page belongs to whom is the
    caller's business. An executor binds weights, ``rotary_cos_sin`` and the pools once, when it is made.
    """

    @property
    def name(self) -> str:
        """Name on the command line, for example ``onnxruntime``."""

    @property
    def description(self) -> str:
        """One line that says what runs: the library and its version, the device, the arithmetic."""

    @property
    def dtype(self) -> DType:
        """Type of the network that runs: of the twin, where one stands in."""

    @property
    def cache_dtype(self) -> CacheDType:
        """Type of the latent cache."""

    @property
    def num_pages(self) -> int:
        """Pages in each layer's pool."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    def run(self, step: StepInputs) -> Float32Array:
        """Runs one step: appends its tokens to the cache and computes the logits asked for.

        Args:
            step: The step's inputs.

        Returns:
            float32 [logit_rows, vocab_size], in the order of ``step.last_token_ids``. The caller owns the array.
        """

    def read_cache(self, layer: int) -> Float32Array:
        """A copy of a layer's pool.

        Args:
            layer: The layer, from 0.

        Returns:
            float32 [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]: the latent, dequantised, then the rotated
            key, whose pairs stand where the checkpoint has them. Slots that were never written hold anything, NaN
            included.
        """

    def close(self) -> None:
        """Frees what the executor holds; it cannot run afterwards."""
