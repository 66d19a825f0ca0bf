"""Networks of FP8 checkpoints against transformers, with the weights that the FP8 numbers stand for."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fp8 import quantize_checkpoint
from tests.support.hf import HfCheckpoint, make_checkpoint
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.weights import fp8_inputs
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory, convert
from trtllm_mla.network.graph import count_operations
from trtllm_mla.ops import DOMAIN
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence, run_forced

TOKENS = np.random.default_rng(5).integers(0, 131, 23).tolist()
# A chunk of the context group, of the generation group, one token; and another sequence beside it.
SEQUENCES = (
    ForcedSequence(TOKENS, [ForcedChunk(17, False), ForcedChunk(5, True), ForcedChunk(1, True)]),
    ForcedSequence(TOKENS[::-1][:6], [ForcedChunk(2, True), ForcedChunk(4, False)], first_step=1),
)
# Weights of several blocks, the last of them short: 150 and 300 columns; and of one block that is short.
SIZES: dict[str, Any] = {"hidden_size": 150, "intermediate_size": 300, "rope": "yarn"}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"num_layers": 1},
    "experts": {"first_k_dense_replace": 1},
    "experts of short blocks": {"first_k_dense_replace": 0, "moe_intermediate_size": 192, "num_layers": 1},
    "direct queries, biases": {"q_lora_rank": None, "attention_bias": True, "num_layers": 1},
    "deepseek_v2": {"model_type": "deepseek_v2"},
    "odd sizes": {"hidden_size": 131, "intermediate_size": 259, "num_layers": 1},
}


def make(
    tmp_path: Path, kind: str, dtype: DType | None = None, **options: Any
) -> tuple[HfCheckpoint, NetworkDirectory]:
    arguments: dict[str, Any] = SIZES | KINDS[kind]
    checkpoint = quantize_checkpoint(make_checkpoint(tmp_path / "checkpoint", **arguments), **options)
    network = convert(checkpoint.path, tmp_path / "network", plugin=MlaPluginConfig(page_size=16), dtype=dtype)
    return checkpoint, network


def run(checkpoint: HfCheckpoint, network: NetworkDirectory, executor: str) -> list[np.ndarray[Any, Any]]:
    made = make_executor(executor, network, Checkpoint.open(checkpoint.path), num_pages=6, num_threads=1)
    return [result.logits for result in run_forced(made, list(SEQUENCES))]


def reference(model: Any) -> list[np.ndarray[Any, Any]]:
    with torch.inference_mode():
        return [model(torch.tensor([item.token_ids])).logits[0].float().numpy() for item in SEQUENCES]


def relative_error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("executor", ["onnxruntime", "interpreter"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, kind: str, executor: str) -> None:
    checkpoint, network = make(tmp_path, kind)
    for found, expected in zip(run(checkpoint, network, executor), reference(checkpoint.model), strict=True):
        assert np.abs(found - expected).max() <= 2e-4
        assert np.array_equal(found.argmax(-1), expected.argmax(-1))


def test_modules_that_stay_are_ordinary_products(tmp_path: Path) -> None:
    checkpoint, network = make(tmp_path, "dense", exclude=("o_proj", "kv_b_proj", "up_proj"))
    nodes = [node for node in network.model().graph.node if node.op_type == "BlockScaledMatMul"]
    assert len(nodes) == len(fp8_inputs(network.spec)) == 5
    for found, expected in zip(run(checkpoint, network, "onnxruntime"), reference(checkpoint.model), strict=True):
        assert np.abs(found - expected).max() <= 2e-4


@pytest.mark.parametrize("kind", ["dense", "experts", "experts of short blocks"])
def test_a_bfloat16_network_is_as_exact_as_transformers(tmp_path: Path, kind: str) -> None:
    """Products of FP8 weights are rounded once, and the weights never: better than to round them to bfloat16."""
    checkpoint, network = make(tmp_path, kind, DType.BFLOAT16)
    peer = copy.deepcopy(checkpoint.model).bfloat16()
    for layer in peer.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.float()  # as transformers loads it, whatever the model's type
    for found, rounded, expected in zip(
        run(checkpoint, network, "interpreter"), reference(peer), reference(checkpoint.model), strict=True
    ):
        assert 0 < relative_error(found, expected) < 1.5 * relative_error(rounded, expected)


@pytest.mark.parametrize(
    ("kind", "module", "order"),
    [
        ("dense", r"mlp\.down_proj", (slice(None), [0, 2, 1])),
        ("experts of short blocks", r"mlp\.experts\.\d+\.down_proj", (slice(None), [1, 0])),
        ("experts of short blocks", r"mlp\.experts\.\d+\.up_proj", ([1, 0], slice(None))),
        ("experts of short blocks", r"mlp\.experts\.\d+\.gate_proj", ([1, 0], slice(None))),
    ],
)
def test_each_scale_matters(tmp_path: Path, kind: str, module: str, order: tuple[Any, Any]) -> None:
    """Otherwise agreement with transformers would say little about where scales are applied."""
    checkpoint, network = make(tmp_path, kind)
    plain = run(checkpoint, network, "onnxruntime")[0]
    arguments: dict[str, Any] = SIZES | KINDS[kind]
    again = make_checkpoint(tmp_path / "other", **arguments)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if re.fullmatch(rf"model\.layers\.0\.{module}\.weight_scale_inv", name)]
        assert names
        for name in names:
            tensors[name] = tensors[name][order].clone()

    changed = run(quantize_checkpoint(again, edit=swap), network, "onnxruntime")[0]
    assert np.abs(changed - plain).max() > 100 * 2e-4


def test_operations_are_counted(tmp_path: Path) -> None:
    _, network = make(tmp_path, "experts")
    nodes = [node for node in network.model().graph.node if node.domain == DOMAIN]
    assert len(nodes) == count_operations(network.spec, network.plugin, num_layers=2) == 2 * 4 + 1 + 14
    assert len({node.name for node in nodes}) == len(nodes)
    names = {node.name for node in nodes if node.op_type.startswith("BlockScaled")}
    assert "layers.0/kv_a_proj_with_mqa/BlockScaledMatMul" in names
    assert "layers.1/BlockScaledRoutedExperts" in names


def test_a_network_is_not_that_of_another_quantisation(tmp_path: Path) -> None:
    checkpoint, network = make(tmp_path, "dense")
    plain = make_checkpoint(tmp_path / "plain", **SIZES, num_layers=1)
    for first, second in ((network, plain), (convert_plain(tmp_path, plain), checkpoint)):
        with pytest.raises(UserError, match="quantization: found"):
            make_executor("onnxruntime", first, Checkpoint.open(second.path), num_pages=2)


def convert_plain(tmp_path: Path, checkpoint: HfCheckpoint) -> NetworkDirectory:
    return convert(checkpoint.path, tmp_path / "plain network", plugin=MlaPluginConfig(page_size=16))


def test_the_directory_says_what_is_fp8(tmp_path: Path) -> None:
    _, network = make(tmp_path, "dense", exclude=("o_proj",))
    config = json.loads((network.path / "config.json").read_text())
    assert config["pretrained_config"]["quantization"] == {
        "quant_algo": "FP8_BLOCK_SCALES",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["o_proj"],
    }
    assert NetworkDirectory.load(network.path) == network
