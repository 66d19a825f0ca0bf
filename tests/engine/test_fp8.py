"""Engines of FP8 networks: the plugin, and weights that are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import make_network
from tests.engine.test_moe import EXPERTS
from tests.support.fp8 import DEEPSEEK_CONFIG
from trtllm_mla.config import BuildConfig
from trtllm_mla.engine.builder import build
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.targets import get_target

rtx = pytest.importorskip("tensorrt_rtx")


@pytest.fixture(scope="module")
def fp8_network(tmp_path_factory: pytest.TempPathFactory) -> NetworkDirectory:
    overrides: dict[str, Any] = EXPERTS | {
        "n_group": 4,
        "topk_group": 2,
        "hidden_size": 200,
        "intermediate_size": 300,
        "quantization_config": DEEPSEEK_CONFIG,
    }
    return make_network(tmp_path_factory.mktemp("network"), **overrides)


@pytest.mark.parametrize("native", [False, True])
def test_engine(
    fp8_network: NetworkDirectory, tmp_path: Path, build_config: BuildConfig, cache_dir: Path, native: bool
) -> None:
    """For a GPU without FP8 types: codes are bytes to TensorRT."""
    report = build(
        fp8_network.path,
        tmp_path / "engine",
        config=build_config,
        targets=("sm_86",),
        native=native,
        cache_dir=cache_dir,
    )
    info = report.directory.info
    assert info.num_plugin_layers == (0 if native else 4 * 2 + 1 + 2 * 7)
    assert report.directory.network.spec == fp8_network.spec
    if not native:
        cubins = report.directory.kernels().for_target(get_target("sm_86"))
        found = {
            (dict(cubin.variant.constants)["OUT_STEP"], dict(cubin.variant.constants)["IN_STEP"])
            for cubin in cubins.values()
            if cubin.variant.kernel == "multiply"
        }
        # What of 128 divides q_lora_rank 56, the latent row 128, hidden_size 200, the queries 400, the MLPs 300 and
        # 72: kernels for these, not for each of the sizes.
        assert found == {(8, 8), (128, 8), (16, 8), (4, 8), (8, 4)}
