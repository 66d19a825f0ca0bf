"""Networks of random checkpoints, ready for an executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnx_ir
import torch

from tests.support.hf import make_checkpoint
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.rope import rotary_cos_sin
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import bind, build_weight_map
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.graph import build_network
from trtllm_mla.runtime.executors.graph import Array
from trtllm_mla.runtime.executors.interpreter import InterpreterExecutor, KernelSettings
from trtllm_mla.runtime.executors.onnxruntime import OnnxRuntimeExecutor
from trtllm_mla.targets import get_target

MAX_POSITIONS = 512
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "yarn": {"rope": "yarn", "seed": 1},
    "half_split": {"rope": "yarn", "rope_interleave": False, "q_lora_rank": None, "attention_bias": True, "seed": 2},
    "youtu": {"model_type": "youtu", "seed": 3},
    "linear": {"model_type": "youtu", "rope": "linear", "tie": False, "num_layers": 1, "seed": 4},
    "deepseek_v2": {"model_type": "deepseek_v2", "rope": "yarn", "seed": 11},
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        "rope": "yarn",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "seed": 6,
    },
    "deepseek_v3_experts": {"rope": "yarn", "first_k_dense_replace": 1, "num_layers": 3, "seed": 7},
    "axk1": {"model_type": "axk1", "rope": "yarn", "seed": 14},
    "longcat_flash": {"model_type": "longcat_flash", "num_layers": 4, "seed": 15},
    "mistral4": {"model_type": "mistral4", "rope": "mistral", "seed": 13},
    "minicpm3": {"model_type": "minicpm3", "rope": "longrope", "seed": 12},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", "seed": 8},
    "kimi_k2": {"model_type": "kimi_k2", "rope": "yarn", "seed": 9},
    "sarvam_mla": {"model_type": "sarvam_mla", "rope": "yarn", "q_lora_rank": None, "seed": 10},
}


@dataclass(frozen=True)
class Network:
    """A network in one type, its weights, and the transformers model they come from."""

    hf_model: Any
    spec: ModelSpec
    model: onnx.ModelProto
    weights: dict[str, Array]
    rotary_cos_sin: Array

    def onnxruntime(self, *, num_pages: int, page_size: int, **values: Any) -> OnnxRuntimeExecutor:
        return OnnxRuntimeExecutor(
            self.model,
            self.weights,
            self.rotary_cos_sin,
            num_pages=num_pages,
            page_size=page_size,
            num_threads=1,
            **values,
        )

    def interpreter(self, *, num_pages: int, page_size: int) -> InterpreterExecutor:
        return InterpreterExecutor(
            self.model,
            self.weights,
            self.rotary_cos_sin,
            num_pages=num_pages,
            page_size=page_size,
            settings=KernelSettings(get_target("sm_90"), tile_s=16, num_stages=2),
        )

    def hf_greedy(self, prompt: list[int], max_new_tokens: int, eos_token_id: int | None = None) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self.hf_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=eos_token_id,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()

    def hf_logits(self, tokens: list[int]) -> Array:
        with torch.inference_mode():
            return self.hf_model(torch.tensor([tokens])).logits[0].float().numpy()


@cache
def make_network(
    checkpoint: str,
    *,
    dtype: DType = DType.FLOAT32,
    absorption: bool = True,
    kv_cache_dtype: str = "auto",
    context_passes: int = 1,
) -> Network:
    """The network of one of ``CHECKPOINTS``; see ``network_of``."""
    return network_of(
        CHECKPOINTS[checkpoint],
        dtype=dtype,
        absorption=absorption,
        kv_cache_dtype=kv_cache_dtype,
        context_passes=context_passes,
    )


def network_of(
    checkpoint: Mapping[str, Any],
    *,
    dtype: DType = DType.FLOAT32,
    absorption: bool = True,
    kv_cache_dtype: str = "auto",
    context_passes: int = 1,
) -> Network:
    """The network of a random checkpoint, whose stored weights are rounded to ``dtype``."""
    with TemporaryDirectory() as directory:
        path, hf_model = make_checkpoint(Path(directory), dtype=dtype.value, **checkpoint)
        opened = Checkpoint.open(path)
        spec = read_model_spec(opened)
        plugin = MlaPluginConfig(
            enable_matrix_absorption=absorption, kv_cache_dtype=kv_cache_dtype, max_context_passes=context_passes
        )
        model = build_network(spec, plugin, dtype, num_layers=spec.num_hidden_layers)
        weights = dict(bind(build_weight_map(spec), opened, dtype))
    table = rotary_cos_sin(spec.rope, MAX_POSITIONS)
    return Network(hf_model, spec, onnx_ir.to_proto(model), weights, table)
