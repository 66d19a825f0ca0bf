"""Engines of networks with experts: the plugin, and inputs of two types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import make_network
from trtllm_mla.config import BuildConfig
from trtllm_mla.engine.builder import build
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.targets import get_target

rtx = pytest.importorskip("tensorrt_rtx")

EXPERTS = {
    "moe_intermediate_size": 36,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
    },
    "deepseek_v3": {"n_group": 4, "topk_group": 2},
    "kimi_k2": {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    # Whose gate and up projections have two blocks of rows each, the second one short.
    "fp8": {
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 192,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
}


@pytest.fixture(scope="module", params=list(KINDS))
def moe_network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NetworkDirectory:
    return make_network(tmp_path_factory.mktemp("network"), **EXPERTS | KINDS[request.param])


@pytest.mark.parametrize("native", [False, True])
def test_engine(
    moe_network: NetworkDirectory, tmp_path: Path, build_config: BuildConfig, cache_dir: Path, native: bool
) -> None:
    report = build(
        moe_network.path,
        tmp_path / "engine",
        config=build_config,
        targets=("sm_120",),
        native=native,
        cache_dir=cache_dir,
    )
    info = report.directory.info
    # FP8: of each layer 4 projections of attention, and 3 of the MLP or the shared experts.
    linear = 0 if moe_network.spec.quantization is None else 2 * 7
    assert info.num_plugin_layers == (0 if native else 4 * 2 + 1 + linear)
    assert info.engine_bytes > 10_000
    assert report.directory.network.spec == moe_network.spec
    if not native:
        cubins = report.directory.kernels().for_target(get_target("sm_120"))
        used = {cubin.variant.op for cubin in cubins.values()}
        assert ("BlockScaledRoutedExperts" in used) == bool(linear)
        # Whose kernels sort the slots and add up in either case.
        assert "RoutedExperts" in used
