"""A polygraphy runner with given outputs."""

from __future__ import annotations

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence
from trtllm_mla.runtime.step import ONE_PASS
from trtllm_mla.validation.scenarios import Scenario

SCENARIOS = tuple(
    Scenario(name, "two tokens", (ForcedSequence((1, 2), (ForcedChunk(2, False),)),), ONE_PASS)
    for name in ("first", "second")
)


class StubRunner(BaseRunner):
    """Returns what it was given, one table of outputs a scenario."""

    def __init__(self, name, tables):
        super().__init__(name=name)
        self._tables = iter(tables)

    def get_input_metadata_impl(self):
        return TensorMetadata().add("input_ids", np.int64, (None,))

    def infer_impl(self, feed_dict):
        assert feed_dict["input_ids"].tolist() == [1, 2]
        self.inference_time = 0.0
        return next(self._tables)
