"""Runs a network in ONNX Runtime with a transformers model's weights, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import torch

from tests.support.hf import HfCheckpoint
from tests.support.ort import from_ort, to_ort, torch_dtype
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.rope import rotary_cos_sin
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import build_weight_map
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.contract import LOGITS, past_latent, present_latent
from trtllm_mla.network.graph import build_network, strip_plugin_attributes
from trtllm_mla.runtime.step import Chunk, LogitRows, build_step


def graph_weights(model: Any, spec: ModelSpec, dtype: DType) -> dict[str, torch.Tensor]:
    """The graph's weight inputs, cut from a transformers model's own state."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias") and spec.moe is not None and not spec.moe.correction_bias:
            continue
        # transformers renames it when it loads a checkpoint.
        name = name.replace(".mlp.post_mlp_layernorm.", ".post_mlp_layernorm.")
        if spec.model_type == "longcat_flash":
            name = _longcat_name(name)
            if name.endswith("experts.gate_up_proj"):
                # transformers gives experts without weights a gate that it never uses.
                tensor = tensor[: spec.moe.num_experts] if spec.moe is not None else tensor
        if name.endswith("kv_b_proj.weight"):
            heads = tensor.reshape(spec.num_attention_heads, -1, spec.kv_lora_rank)
            prefix = name.removesuffix("kv_b_proj.weight")
            weights[f"{prefix}k_up"] = heads[:, : spec.qk_nope_head_dim]
            weights[f"{prefix}v_up"] = heads[:, spec.qk_nope_head_dim :]
        elif not (name == "lm_head.weight" and spec.tie_word_embeddings):
            weights[name] = tensor
    dtypes = build_weight_map(spec).dtypes(dtype)
    return {name: tensor.to(torch_dtype(dtypes[name])).contiguous() for name, tensor in weights.items()}


def _longcat_name(name: str) -> str:
    """What the network calls a parameter: each half of a layer is a layer there."""
    name = name.replace(".mlp.router.classifier.", ".mlp.gate.").replace(".mlp.router.", ".mlp.gate.")
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return name
    halves = [index for index, part in enumerate(parts[4:], 4) if part in ("0", "1")]
    half = int(parts.pop(halves[0])) if halves else 0
    parts[2] = str(2 * int(parts[2]) + half)
    return ".".join("mlp" if part == "mlps" else part for part in parts)


@dataclass
class OrtRequest:
    """A request's tokens so far, and its pages."""

    pages: np.ndarray[Any, Any]
    length: int = 0


@dataclass
class OrtNetwork:
    """A session with one buffer per layer bound as past and present, which is NaN wherever no token was written."""

    checkpoint: HfCheckpoint
    plugin: MlaPluginConfig = field(default_factory=lambda: MlaPluginConfig(page_size=16))
    dtype: DType = DType.FLOAT32
    num_pages: int = 24
    seed: int = 0
    native: bool = False

    def __post_init__(self) -> None:
        self.spec = read_model_spec(Checkpoint.open(self.checkpoint.path))
        self.layers = self.spec.num_hidden_layers
        model = build_network(self.spec, self.plugin, self.dtype, num_layers=self.layers)
        if self.native:
            strip_plugin_attributes(model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            onnx_ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        cache_dtype = getattr(torch, self.plugin.cache_dtype(self.dtype).storage)
        pool = torch.full((self.num_pages, self.plugin.page_size, self.spec.latent_width), float("nan"))
        self.pools = [to_ort(pool.to(cache_dtype).clone()) for _ in range(self.layers)]
        weights = graph_weights(self.checkpoint.model, self.spec, self.dtype)
        self.constants = {name: to_ort(tensor) for name, tensor in weights.items()}
        positions = self.spec.max_position_embeddings
        self.constants["rotary_cos_sin"] = onnxruntime.OrtValue.ortvalue_from_numpy(
            rotary_cos_sin(self.spec.rope, positions)
        )
        self._free = list(np.random.default_rng(self.seed).permutation(self.num_pages))

    def request(self, tokens: int) -> OrtRequest:
        """A request with scattered pages for so many tokens."""
        count = -(-tokens // self.plugin.page_size)
        return OrtRequest(np.array([self._free.pop() for _ in range(count)], dtype=np.int32))

    def step(
        self,
        context: Sequence[tuple[OrtRequest, Sequence[int]]] = (),
        generation: Sequence[tuple[OrtRequest, Sequence[int]]] = (),
        rows: LogitRows = LogitRows.ALL,
    ) -> list[torch.Tensor]:
        """Runs new tokens; returns each request's logits, context group first."""

        def chunks(group: Sequence[tuple[OrtRequest, Sequence[int]]]) -> list[Chunk]:
            return [
                Chunk(np.array(tokens, dtype=np.int32), request.length, request.pages, rows)
                for request, tokens in group
            ]

        inputs = build_step(
            chunks(context), chunks(generation), page_size=self.plugin.page_size, num_pages=self.num_pages
        )
        binding = self.session.io_binding()
        for name, array in inputs.arrays(absorption=self.plugin.enable_matrix_absorption).items():
            if name == "kv_cache_block_offsets":
                # Two more columns than needed, and wild numbers behind each request's last page.
                array = np.pad(array, ((0, 0), (0, 2)), constant_values=2_000_000_000)
                for row, (request, tokens) in enumerate(generation):
                    array[row, -(-(request.length + len(tokens)) // self.plugin.page_size) :] = 2_000_000_000
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for name, value in self.constants.items():
            binding.bind_ortvalue_input(name, value)
        for layer, pool in enumerate(self.pools):
            binding.bind_ortvalue_input(past_latent(layer), pool)
            binding.bind_ortvalue_output(present_latent(layer), pool)
        binding.bind_output(LOGITS)
        self.session.run_with_iobinding(binding)
        *self.presents, logits_value = binding.get_outputs()
        logits = from_ort(logits_value)
        for request, tokens in (*context, *generation):
            request.length += len(tokens)
        counts = [len(tokens) for _, tokens in (*context, *generation)]
        return list(logits.split([count if rows == LogitRows.ALL else int(rows) for count in counts]))

    def rows(self, layer: int, request: OrtRequest) -> torch.Tensor:
        """A request's cached rows: [tokens, latent_width]."""
        pages = from_ort(self.pools[layer])[torch.from_numpy(request.pages).long()]
        return pages.reshape(-1, self.spec.latent_width)[: request.length]
