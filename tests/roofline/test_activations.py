"""What a step's intermediate values take, against TensorRT's own plan and by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.models import make_network
from tests.support.configs import PUBLISHED, published_spec, write_published
from tests.support.fp8 import DEEPSEEK_CONFIG
from trtllm_mla.checkpoint.spec import Fp8Spec, ModelSpec
from trtllm_mla.config import BuildConfig, MlaPluginConfig, load_config, merge_plugin_configs
from trtllm_mla.network.directory import convert, effective_plugin
from trtllm_mla.roofline.activations import StepMemory, step_memory
from trtllm_mla.targets import get_target

ROOT = Path(__file__).resolve().parents[2]
LIMITS = BuildConfig(max_batch_size=7, max_num_tokens=1000, max_seq_len=3000, max_context_kv_tokens=2000)
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 40,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
}
# Below this size TensorRT-RTX keeps a workspace of its own, whatever the network.
TENSORRT_FLOOR = 1 << 24


def measure(spec: ModelSpec, plugin: MlaPluginConfig, limits: BuildConfig, layers: int, name: str) -> StepMemory:
    return step_memory(spec, effective_plugin(plugin, spec), limits, get_target(name), num_layers=layers)


@pytest.mark.parametrize(
    ("plugin", "overrides", "limits", "max_ratio"),
    [
        ({}, {}, LIMITS, 2),
        ({}, EXPERTS, LIMITS, 2),
        ({"enable_matrix_absorption": False}, {}, LIMITS, 2),
        ({"kv_cache_dtype": "nvfp4"}, EXPERTS, LIMITS, 2),
        ({"max_context_passes": 5}, {}, LIMITS, 3),
        ({}, {"vocab_size": 50_021}, LIMITS, 2),
        ({}, {"vocab_size": 50_022}, LIMITS, 12),
        ({}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, LIMITS, 2),
        ({}, {}, LIMITS.model_copy(update={"max_context_kv_tokens": 100_003, "max_seq_len": 100_003}), 2),
        ({}, {"num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 5_003}, LIMITS, 3),
    ],
)
def test_tensorrts_plan_is_within_the_estimate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plugin: dict[str, Any],
    overrides: dict[str, Any],
    limits: BuildConfig,
    max_ratio: float,
) -> None:
    """And the plugins' workspaces are those that its build asks for."""
    pytest.importorskip("tensorrt_rtx")
    from trtllm_mla.engine import builder
    from trtllm_mla.engine.operation import Operation

    asked: dict[str, int] = {}
    original = Operation.compute_workspace_bytes

    def record(operation: Operation, max_shapes: tuple[tuple[int, ...], ...]) -> int:
        size = original(operation, max_shapes)
        asked[operation.definition.name] = max(asked.get(operation.definition.name, 0), size)
        return size

    monkeypatch.setattr(Operation, "compute_workspace_bytes", record)
    # TensorRT builds without the kernels, which take most of the time.
    monkeypatch.setattr(builder, "compile_kernels", lambda *_, **__: SimpleNamespace(triton_version="none"))
    network = make_network(tmp_path, plugin=MlaPluginConfig(**plugin), **overrides)
    report = builder.build(network.path, tmp_path / "engine", config=limits, targets=("sm_89",))
    info = report.directory.info
    estimate = step_memory(network.spec, network.plugin, limits, get_target("sm_89"), num_layers=network.num_layers)
    # Operations that are equal in several tests of a process have been asked before.
    assert asked.items() <= dict(estimate.workspace_bytes).items()
    assert info.activation_bytes is not None
    assert info.activation_bytes <= estimate.activation_bytes + TENSORRT_FLOOR
    # An estimate that is much too high would pass too. TensorRT casts logits as it makes them, if it can.
    assert estimate.activation_bytes < max_ratio * info.activation_bytes


@pytest.mark.parametrize("quantization", [None, DEEPSEEK_CONFIG])
@pytest.mark.parametrize("config", ["default", "build_configs/deepseek_v3_throughput.json"])
def test_the_plans_that_the_page_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, quantization: dict[str, Any] | None
) -> None:
    tensorrt = pytest.importorskip("tensorrt_rtx")
    from trtllm_mla.engine import builder

    page = (ROOT / "docs" / "memory.md").read_text()
    (row,) = (line.split("|") for line in page.splitlines() if line.startswith(("| `" + config, "| " + config)))
    plan, estimate = (int(item.replace(",", "")) for item in row[2:4])
    assert float(row[4]) == pytest.approx(plan / estimate, abs=0.005)
    path = write_published("deepseek_v3", tmp_path / "v3")
    if quantization is not None:
        (path / "config.json").write_text(json.dumps(PUBLISHED["deepseek_v3"] | {"quantization_config": quantization}))
    network = convert(path, tmp_path / "network", plugin=MlaPluginConfig(), num_layers=4)
    limits = BuildConfig() if config == "default" else load_config(ROOT / config, BuildConfig)
    plugin = merge_plugin_configs(network.plugin, limits.mla_plugin)
    assert estimate == measure(network.spec, plugin, limits, 61, "sm_89").activation_bytes
    version = tensorrt.__version__
    if f"TensorRT-RTX {'.'.join(version.split('.')[:3])}" not in page:
        pytest.skip(f"the page's plans are another version's than {version}")
    monkeypatch.setattr(builder, "compile_kernels", lambda *_, **__: SimpleNamespace(triton_version="none"))
    report = builder.build(network.path, tmp_path / "engine", config=limits, targets=("sm_89", "sm_120"))
    assert report.directory.info.activation_bytes == pytest.approx(plan, rel=0.01)


def test_decompressed_keys_and_values_by_hand(make_spec: Callable[..., ModelSpec]) -> None:
    """With a long history and few new tokens, they and what they are made of are nearly all there is."""
    limits = BuildConfig(max_batch_size=1, max_num_tokens=16, max_seq_len=1 << 16, max_context_kv_tokens=1 << 16)
    found = measure(make_spec(), MlaPluginConfig(), limits, 60, "sm_90")
    keys_and_values = (1 << 16) * 65_536
    latents_and_rotary_keys = (1 << 16) * 2 * (512 + 64)
    assert found.activation_bytes == pytest.approx(
        keys_and_values + latents_and_rotary_keys + found.workspace_bytes["LatentAttention"], rel=0.01
    )


def test_logits_by_hand(make_spec: Callable[..., ModelSpec]) -> None:
    """With a large vocabulary, the head's product and its fp32 copy are nearly all."""
    limits = BuildConfig(max_batch_size=1, max_num_tokens=1000, max_seq_len=1000, max_context_kv_tokens=16)
    spec = make_spec(vocab_size=10_000_019)
    found = measure(spec, MlaPluginConfig(), limits, 60, "sm_90")
    assert found.activation_bytes == pytest.approx(1000 * 10_000_019 * (2 + 4), rel=0.01)


@pytest.mark.parametrize("quantization", [None, Fp8Spec()])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_the_first_layers_of_each_kind_stand_for_all(name: str, quantization: Fp8Spec | None) -> None:
    spec = dataclasses.replace(published_spec(name), quantization=quantization)
    assert spec.moe is not None
    few = measure(spec, MlaPluginConfig(), LIMITS, spec.moe.first_k_dense_replace + 2, "sm_90")
    moved = dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, first_k_dense_replace=9))
    assert few == measure(spec, MlaPluginConfig(), LIMITS, spec.num_hidden_layers, "sm_90")
    assert few == measure(moved, MlaPluginConfig(), LIMITS, 12, "sm_90")


def test_larger_limits_take_more(make_spec: Callable[..., ModelSpec]) -> None:
    spec, small = make_spec(num_hidden_layers=2), BuildConfig(max_batch_size=3, max_num_tokens=100, max_seq_len=400)
    base = measure(spec, MlaPluginConfig(), small, 2, "sm_90")
    for change in ({"max_num_tokens": 200}, {"max_context_kv_tokens": 40_000}):
        more = measure(spec, MlaPluginConfig(), small.model_copy(update=change), 2, "sm_90")
        assert more.activation_bytes > base.activation_bytes
