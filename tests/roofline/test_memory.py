"""Cache, workspace and numbers of GPUs, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.configs import published_spec
from trtllm_mla.checkpoint.spec import Fp8Spec, ModelSpec
from trtllm_mla.checkpoint.trtllm_layout import RankGrid
from trtllm_mla.checkpoint.weights import build_weight_map
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import effective_plugin
from trtllm_mla.roofline.gpus import GPUS, Gpu
from trtllm_mla.roofline.memory import Deployment, cache_memory, fit_gpus, workspace_memory

GIB = 1 << 30


def deployment(
    spec: ModelSpec, *, context: int = 4096, batch_size: int = 16, config: BuildConfig | None = None, **plugin: Any
) -> Deployment:
    limits = config or BuildConfig(max_seq_len=context, max_batch_size=batch_size)
    effective = effective_plugin(MlaPluginConfig(**plugin), spec)
    weights = build_weight_map(spec)
    return Deployment(spec, effective, spec.num_hidden_layers, weights, limits, context, batch_size)


def gpu(gib: float, target: str = "sm_90") -> Gpu:
    return dataclasses.replace(GPUS["h100"], memory_bytes=int(gib * GIB), target=target)


def test_the_cache_of_pages_in_every_format(make_spec: Callable[..., ModelSpec]) -> None:
    found = cache_memory(deployment(make_spec(), context=1001, batch_size=3, page_size=32, kv_cache_dtype="fp8"))
    assert [item.dtype for item in found] == ["fp8", "bf16", "nvfp4"]
    assert [item.row_bytes for item in found] == [656, 1152, 416]
    for item in found:
        assert item.bytes_per_token == 60 * item.row_bytes
        assert item.num_bytes == 3 * 1024 * item.bytes_per_token


def test_what_is_bound_in_each_step(make_spec: Callable[..., ModelSpec]) -> None:
    config = BuildConfig(max_batch_size=3, max_num_tokens=500, max_seq_len=1000, max_context_kv_tokens=700)
    found = workspace_memory(deployment(make_spec(), context=9, batch_size=2, config=config), "sm_90", RankGrid(1))
    assert found.rotary_bytes == 1000 * 64 * 4
    assert found.logits_bytes == 3 * 129_280 * 4
    assert found.decompressed_bytes == 700 * 65_536
    context = 500 + 700 + 4 + 4 + 3 * 500 + 3 * 700
    # 1000 tokens of a request are beyond 700: all new tokens may be in the generation group.
    generation = 500 + 4 + 3 + 3 * 500 + 3 * 16
    assert found.step_input_bytes == 4 * (1000 + 1000 + 500 + context + generation)
    parts = found.rotary_bytes + found.logits_bytes + found.step_input_bytes
    assert found.num_bytes == parts + found.activation_bytes
    assert not found.activations_planned


def test_an_engines_plan_takes_the_estimates_place_on_one_gpu(make_spec: Callable[..., ModelSpec]) -> None:
    planned = dataclasses.replace(deployment(make_spec()), planned_bytes=123_456_789)
    one, two = (workspace_memory(planned, "sm_90", RankGrid(count)) for count in (1, 2))
    assert (one.activation_bytes, one.activations_planned) == (123_456_789, True)
    assert not two.activations_planned


def test_more_gpus_have_a_part_of_the_heads_each(make_spec: Callable[..., ModelSpec]) -> None:
    whole, part = (workspace_memory(deployment(make_spec()), "sm_90", RankGrid(count)) for count in (1, 8))
    assert part.decompressed_bytes == whole.decompressed_bytes // 8
    assert part.activation_bytes < whole.activation_bytes
    assert (part.logits_bytes, part.step_input_bytes) == (whole.logits_bytes, whole.step_input_bytes)


def test_the_cache_has_its_share_of_what_is_left(make_spec: Callable[..., ModelSpec]) -> None:
    model = deployment(make_spec(), context=1000, batch_size=5)
    (fit,) = fit_gpus(model, [gpu(200)], free_fraction=0.5)
    assert fit.workspace_bytes == workspace_memory(model, "sm_90", RankGrid(1)).num_bytes
    free = 200 * GIB - fit.weight_bytes - fit.workspace_bytes
    assert fit.max_tokens == free // 2 // (64 * 60 * 1152) * 64
    assert fit.tokens_left == fit.max_tokens - 5 * 1024
    assert (fit.num_gpus, fit.problem) == (1, None)


def test_one_page_too_many_takes_another_gpu(make_spec: Callable[..., ModelSpec]) -> None:
    spec = make_spec()
    config = BuildConfig(max_seq_len=1 << 20, max_batch_size=1)
    (fit,) = fit_gpus(deployment(spec, context=1, batch_size=1, config=config), [gpu(100)], free_fraction=0.9)
    for extra, expected in ((0, 1), (1, 2)):
        full = deployment(spec, context=fit.max_tokens + extra, batch_size=1, config=config)
        (found,) = fit_gpus(full, [gpu(100)], free_fraction=0.9)
        assert found.num_gpus == expected
    assert fit.max_tokens > 10_000


@pytest.mark.parametrize(
    ("name", "quantization", "expected"),
    # DeepSeek-V3 is released in FP8 for 8 H200 or 16 H100; in 16 bits it is twice as large.
    [
        ("deepseek_v3", Fp8Spec(), {"h100": 16, "h200": 8, "b200": 4}),
        ("deepseek_v3", None, {"h100": 32, "h200": 16, "b200": 8}),
        ("kimi_k2", Fp8Spec(), {"h100": 16, "h200": 8, "b200": 8}),
        ("deepseek_v2_lite", None, {"a100": 1, "l40s": 1, "rtx4090": 2}),
    ],
)
def test_released_models(name: str, quantization: Fp8Spec | None, expected: dict[str, int]) -> None:
    spec = dataclasses.replace(published_spec(name), quantization=quantization)
    fits = fit_gpus(deployment(spec), [GPUS[item] for item in expected], free_fraction=0.9)
    assert {fit.gpu: fit.num_gpus for fit in fits} == expected


def test_experts_are_dealt_out_whole_as_far_as_they_go() -> None:
    spec = published_spec("deepseek_v3")
    assert spec.moe is not None
    moe = dataclasses.replace(spec.moe, num_experts=24, n_group=1, topk_group=1)
    (fit,) = fit_gpus(deployment(dataclasses.replace(spec, moe=moe)), [gpu(20)], free_fraction=0.9)
    assert (fit.num_gpus, fit.moe_ep_size) == (16, 8)


def test_heads_that_cannot_be_shared_are_the_limit(make_spec: Callable[..., ModelSpec]) -> None:
    spec = make_spec(num_attention_heads=12, num_key_value_heads=12)
    (fit,) = fit_gpus(deployment(spec), [gpu(2)], free_fraction=0.9)
    assert fit.num_gpus is None
    assert fit.problem is not None
    assert fit.problem.startswith("4 GPUs lack at least ")
    assert "8 are too many: num_attention_heads 12, which 8 ranks cannot share evenly" in fit.problem


def test_kernels_that_do_not_fit_a_gpu_are_its_problem(make_spec: Callable[..., ModelSpec]) -> None:
    spec = make_spec(kv_lora_rank=1024, num_hidden_layers=1, dtype="float32")
    small, large = fit_gpus(deployment(spec), [gpu(80, "sm_86"), gpu(80, "sm_90")], free_fraction=0.9)
    assert (small.num_gpus, small.workspace_bytes, small.max_tokens) == (None, None, 0)
    assert "shared memory" in str(small.problem)
    assert (large.num_gpus, large.problem) == (1, None)


def test_limits_beyond_32_bits_are_refused(make_spec: Callable[..., ModelSpec]) -> None:
    with pytest.raises(UserError, match="slots are 32-bit numbers"):
        fit_gpus(deployment(make_spec(), context=1 << 30, batch_size=4), [gpu(80)], free_fraction=0.9)
