"""A random checkpoint, its network, and executors on it, broken on purpose where a test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import torch

from tests.support.hf import HfCheckpoint, make_checkpoint
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.rope import rotary_cos_sin
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import bind
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.directory import NetworkDirectory, convert, store_latent_scales
from trtllm_mla.runtime.executors.graph import Array
from trtllm_mla.runtime.executors.onnxruntime import OnnxRuntimeExecutor
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.validation.reference import ReferenceModel

NUM_PAGES = 40
PAGE_SIZE = 16
MAX_SEQ_LEN = 320

Corruption = Callable[[onnx.ModelProto, dict[str, Array]], None]


@dataclass(frozen=True)
class Case:
    """A checkpoint and its network."""

    checkpoint: HfCheckpoint
    network: NetworkDirectory

    @property
    def spec(self) -> ModelSpec:
        """The model, with the layers of the network."""
        return replace(self.network.spec, num_hidden_layers=self.network.num_layers)

    @property
    def config(self) -> SchedulerConfig:
        build = BuildConfig(max_seq_len=MAX_SEQ_LEN, mla_plugin=self.network.plugin)
        return SchedulerConfig.from_build_config(
            build, self.network.plugin, vocab_size=self.spec.vocab_size, num_pages=NUM_PAGES
        )

    def load_reference(self) -> ReferenceModel:
        return _load_reference(self.checkpoint.path, self.spec)

    def executor(self, corrupt: Corruption | None = None) -> OnnxRuntimeExecutor:
        model = self.network.model()
        weights: dict[str, Array] = dict(
            bind(self.network.weights, Checkpoint.open(self.checkpoint.path), self.network.dtype)
        )
        if corrupt is not None:
            corrupt(model, weights)
        return OnnxRuntimeExecutor(
            model,
            weights,
            rotary_cos_sin(self.spec.rope, MAX_SEQ_LEN),
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_threads=1,
        )


@cache
def _load_reference(path: Path, spec: ModelSpec) -> ReferenceModel:
    return ReferenceModel.load(path, spec)


def make_case(
    directory: Path,
    model_type: Any = "deepseek_v3",
    *,
    dtype: DType = DType.FLOAT32,
    absorption: bool = True,
    context_passes: int = 1,
    kept_layers: int | None = None,
    kv_cache_dtype: Any = "auto",
    latent_scales: Sequence[float] | None = None,
    page_size: Any = PAGE_SIZE,
    **checkpoint: Any,
) -> Case:
    torch.set_num_threads(1)
    made = make_checkpoint(directory / "checkpoint", model_type, **checkpoint)
    plugin = MlaPluginConfig(
        page_size=page_size,
        enable_matrix_absorption=absorption,
        max_context_passes=context_passes,
        kv_cache_dtype=kv_cache_dtype,
    )
    network = convert(made.path, directory / "network", plugin=plugin, dtype=dtype, num_layers=kept_layers)
    return Case(made, network if latent_scales is None else store_latent_scales(network, latent_scales))
