"""Polygraphy runners: the Hugging Face model, and any executor of this package.

Both take a scenario as arrays (``Scenario.to_arrays``) and return, text after text, ``logits`` [tokens, vocab_size]
and, for each layer, the cached rows ``latent_{layer}`` [tokens, kv_lora_rank + qk_rope_head_dim]. So any two of them
can be compared, and each with what polygraphy brings along.

With a quantised cache, rows come in two outputs, ``latent_{layer}`` [tokens, kv_lora_rank] and ``k_pe_{layer}``
[tokens, qk_rope_head_dim], and the reference reads the rows of the executor, which ran before it, in place of its own.
``unquantized_logits`` are then those of the reference with its own rows, and once more those of the executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from trtllm_mla.validation.comparison import UNQUANTIZED_LOGITS
from trtllm_mla.validation.quantization import LATENT_PREFIX, QuantizedCache
from trtllm_mla.validation.reference import ReferenceModel, ReferenceOutput
from trtllm_mla.validation.scenarios import context_passes, forced_sequences, split_texts

Float32Array = npt.NDArray[np.float32]
Outputs = dict[str, Float32Array]


class HuggingFaceRunner(BaseRunner):  # type: ignore[misc]
    """Runs each text whole, through transformers.

    Args:
        load: Loads the model when the runner is activated.
        teacher: The runner whose quantised rows this one reads. It runs the same texts before.
        name: Name in polygraphy's output.
    """

    def __init__(
        self,
        load: Callable[[], ReferenceModel],
        *,
        teacher: ExecutorRunner | None = None,
        name: str = "huggingface",
    ) -> None:
        super().__init__(name=name, prefix="huggingface-runner")
        self._load = load
        self._teacher = teacher

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
        texts = split_texts(dict(feed_dict))
        results = [self.model.run(text) for text in texts]
        outputs, quantized = {}, None
        if self._teacher is not None:
            outputs[UNQUANTIZED_LOGITS] = np.concatenate([result.logits for result in results])
            quantized = self._teacher.quantized
            results = self._run_taught(texts, self._teacher.rows_of(feed_dict))
        self.inference_time = time.perf_counter() - begin
        rows = [np.concatenate(layer) for layer in zip(*(result.latents for result in results), strict=True)]
        logits = np.concatenate([result.logits for result in results])
        return {LOGITS: logits, **outputs, **_cache_outputs(rows, quantized)}

    def _run_taught(self, texts: Sequence[Sequence[int]], rows: Sequence[Float32Array]) -> list[ReferenceOutput]:
        ends = np.cumsum([len(text) for text in texts])[:-1]
        rows_of_texts = zip(*(np.split(layer, ends) for layer in rows), strict=True)
        return [self.model.run(text, cached_rows=cached) for text, cached in zip(texts, rows_of_texts, strict=True)]

    def deactivate_impl(self) -> None:
        """Drops the model."""
        del self.model


class ExecutorRunner(BaseRunner):  # type: ignore[misc]
    """Runs the texts through an executor, cut into steps as the scenario says.

    The executor belongs to the caller, who closes it.

    Args:
        executor: What runs the steps; its whole pool is used.
        num_layers: Layers whose cache is read.
        quantized: The cache, where it is quantised.
        name: Name in polygraphy's output; left out, the executor's.
    """

    def __init__(
        self,
        executor: Executor,
        num_layers: int,
        *,
        quantized: QuantizedCache | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name or executor.name, prefix="executor-runner")
        self.quantized = quantized
        self._executor = executor
        self._num_layers = num_layers
        self._page_seed = 0
        self._last_texts: list[list[int]] = []
        self._last_rows: list[Float32Array] = []

    def get_input_metadata_impl(self) -> TensorMetadata:
        """The texts and their cuts."""
        return (
            TensorMetadata()
            .add("input_ids", np.int64, (None,))
            .add("sequence_lengths", np.int64, (None,))
            .add("first_steps", np.int64, (None,))
            .add("chunks", np.int64, (None, 3))
            .add("context_passes", np.int64, (2,))
        )

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> Outputs:
        """Runs the steps, then reads the cache."""
        sequences, passes = forced_sequences(dict(feed_dict)), context_passes(dict(feed_dict))
        begin = time.perf_counter()
        # Each run hands out pages in another order.
        results = run_forced(self._executor, sequences, page_seed=self._page_seed, context_passes=passes)
        self.inference_time = time.perf_counter() - begin
        self._page_seed += 1
        logits = np.concatenate([result.logits for result in results])
        outputs = {} if self.quantized is None else {UNQUANTIZED_LOGITS: logits}
        self._last_texts = split_texts(dict(feed_dict))
        self._last_rows = [
            np.concatenate(
                [
                    read_cached_rows(self._executor, layer, result.pages, len(text))
                    for text, result in zip(self._last_texts, results, strict=True)
                ]
            )
            for layer in range(self._num_layers)
        ]
        return {LOGITS: logits, **outputs, **_cache_outputs(self._last_rows, self.quantized)}

    def rows_of(self, feed_dict: Mapping[str, Any]) -> list[Float32Array]:
        """The rows that the last run cached.

        Args:
            feed_dict: Its texts.

        Returns:
            For each layer float32 [tokens of all texts, kv_lora_rank + qk_rope_head_dim].

        Raises:
            ValueError: The last run was one of other texts.
        """
        if split_texts(dict(feed_dict)) != self._last_texts:
            raise ValueError("found a run of other texts, expected the executor to run a text before the reference")
        return self._last_rows


def _cache_outputs(rows: Sequence[Float32Array], quantized: QuantizedCache | None) -> Outputs:
    if quantized is None:
        return {f"{LATENT_PREFIX}{layer}": values for layer, values in enumerate(rows)}
    return {name: part for layer, values in enumerate(rows) for name, part in quantized.split(layer, values).items()}
