"""Polygraphy runners: the Hugging Face model, and any executor of this package.

Both take a scenario as arrays (``Scenario.to_arrays``) and return, text after text, ``logits`` [tokens, vocab_size]
and, for each layer, the cached rows ``latent_{layer}`` [tokens, kv_lora_rank + qk_rope_head_dim]. So any two of them
can be compared, and each with what polygraphy brings along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.dtypes import DType
from trtllm_mla.network.contract import LOGITS
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.generation import read_cached_rows, run_forced
from trtllm_mla.validation.reference import ReferenceModel
from trtllm_mla.validation.scenarios import forced_sequences, split_texts

LATENT_PREFIX = "latent_"

Outputs = dict[str, npt.NDArray[np.float32]]


class HuggingFaceRunner(BaseRunner):  # type: ignore[misc]
    """Runs each text whole, through transformers.

    Args:
        load: Loads the model when the runner is activated.
        name: Name in polygraphy's output.
    """

    def __init__(self, load: Callable[[], ReferenceModel], *, name: str = "huggingface") -> None:
        super().__init__(name=name, prefix="huggingface-runner")
        self._load = load

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, spec: ModelSpec, dtype: DType = DType.FLOAT32) -> HuggingFaceRunner:
        """A runner that loads a checkpoint directory; see ``ReferenceModel.load``."""
        return cls(lambda: ReferenceModel.load(checkpoint, spec, dtype))

    def activate_impl(self) -> None:
        """Loads the model."""
        self.model = self._load()

    def get_input_metadata_impl(self) -> TensorMetadata:
        """The texts; how they are cut does not concern this runner."""
        return TensorMetadata().add("input_ids", np.int64, (None,)).add("sequence_lengths", np.int64, (None,))

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> Outputs:
        """Runs the texts one by one."""
        begin = time.perf_counter()
        results = [self.model.run(text) for text in split_texts(dict(feed_dict))]
        self.inference_time = time.perf_counter() - begin
        outputs = {LOGITS: np.concatenate([result.logits for result in results])}
        for layer in range(len(results[0].latents)):
            outputs[f"{LATENT_PREFIX}{layer}"] = np.concatenate([result.latents[layer] for result in results])
        return outputs

    def deactivate_impl(self) -> None:
        """Drops the model."""
        del self.model


class ExecutorRunner(BaseRunner):  # type: ignore[misc]
    """Runs the texts through an executor, cut into steps as the scenario says.

    The executor belongs to the caller, who closes it.

    Args:
        executor: What runs the steps; its whole pool is used.
        num_layers: Layers whose cache is read.
        name: Name in polygraphy's output; left out, the executor's.
    """

    def __init__(self, executor: Executor, num_layers: int, *, name: str | None = None) -> None:
        super().__init__(name=name or executor.name, prefix="executor-runner")
        self._executor = executor
        self._num_layers = num_layers
        self._page_seed = 0

    def get_input_metadata_impl(self) -> TensorMetadata:
        """The texts and their cuts."""
        return (
            TensorMetadata()
            .add("input_ids", np.int64, (None,))
            .add("sequence_lengths", np.int64, (None,))
            .add("first_steps", np.int64, (None,))
            .add("chunks", np.int64, (None, 3))
        )

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> Outputs:
        """Runs the steps, then reads the cache."""
        sequences = forced_sequences(dict(feed_dict))
        begin = time.perf_counter()
        # Each run hands out pages in another order.
        results = run_forced(self._executor, sequences, page_seed=self._page_seed)
        self.inference_time = time.perf_counter() - begin
        self._page_seed += 1
        outputs = {LOGITS: np.concatenate([result.logits for result in results])}
        for layer in range(self._num_layers):
            rows = [
                read_cached_rows(self._executor, layer, result.pages, len(sequence.token_ids))
                for sequence, result in zip(sequences, results, strict=True)
            ]
            outputs[f"{LATENT_PREFIX}{layer}"] = np.concatenate(rows)
        return outputs
