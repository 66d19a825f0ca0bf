"""Engines of the architectures whose networks are built nowhere else; some have operators of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import make_network, write_config
from tests.support.hf import EXPERTS, ONE_GROUP, ROPE_PARAMETERS
from trtllm_mla.config import BuildConfig
from trtllm_mla.engine.builder import build
from trtllm_mla.network.graph import count_operations

rtx = pytest.importorskip("tensorrt_rtx")

KINDS: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {**EXPERTS, **ONE_GROUP, "architectures": ["Glm4MoeLiteForCausalLM"]},
    "sarvam_mla": {**EXPERTS, **ONE_GROUP, "architectures": ["SarvamMLAForCausalLM"], "q_lora_rank": None},
    "youtu": {"architectures": ["YoutuForCausalLM"], "tie_word_embeddings": True},
    "minicpm3": {
        "architectures": ["MiniCPM3ForCausalLM"],
        "rope_scaling": ROPE_PARAMETERS["longrope"],
        "tie_word_embeddings": True,
        "scale_emb": 3,
        "scale_depth": 1.4,
        "dim_model_base": 32,
    },
    "mistral4": {
        **EXPERTS,
        "architectures": ["Mistral4ForCausalLM"],
        "rope_parameters": ROPE_PARAMETERS["mistral"],
    },
    "longcat_flash": {
        "architectures": ["LongcatFlashForCausalLM"],
        "head_dim": 32,
        "expert_ffn_hidden_size": 36,
        "n_routed_experts": 9,
        "zero_expert_num": 5,
        "moe_topk": 4,
    },
    "axk1": {**EXPERTS, "architectures": ["AXK1ForCausalLM"]},
}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("model_type", list(KINDS))
def test_engine(tmp_path: Path, build_config: BuildConfig, cache_dir: Path, model_type: str, native: bool) -> None:
    network = make_network(tmp_path, **{"model_type": model_type, "first_k_dense_replace": 1} | KINDS[model_type])
    report = build(
        network.path, tmp_path / "engine", config=build_config, targets=("sm_120",), native=native, cache_dir=cache_dir
    )
    info = report.directory.info
    plugins = count_operations(network.spec, network.plugin, num_layers=network.num_layers)
    assert info.num_plugin_layers == (0 if native else plugins)
    assert info.engine_bytes > 10_000
    assert report.directory.network.spec == network.spec


@pytest.mark.parametrize(
    ("model_type", "text_type", "architecture"),
    [
        ("mistral3", "mistral4", "Mistral3ForConditionalGeneration"),
        ("kimi_k25", "kimi_k2", "KimiK25ForConditionalGeneration"),
    ],
)
def test_engine_of_a_language_model(
    tmp_path: Path, build_config: BuildConfig, cache_dir: Path, model_type: str, text_type: str, architecture: str
) -> None:
    """One inside a model that also sees."""
    values = {"model_type": text_type, "first_k_dense_replace": 1, **EXPERTS, **ONE_GROUP}
    if text_type == "mistral4":
        values["rope_parameters"] = ROPE_PARAMETERS["mistral"]
    text = json.loads((write_config(tmp_path / "text", **values) / "config.json").read_text())
    network = make_network(tmp_path, model_type=model_type, architectures=[architecture], text_config=text)
    report = build(
        network.path, tmp_path / "engine", config=build_config, targets=("sm_120",), native=False, cache_dir=cache_dir
    )
    plugins = count_operations(network.spec, network.plugin, num_layers=network.num_layers)
    assert report.directory.info.num_plugin_layers == plugins
    assert report.directory.network.spec == network.spec
