"""Values that the kernel reads from quantised pools, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.checks import DTYPES, interpret, torch_dtype
from tests.ops.gather_latent.test_plan import PROBLEM
from tests.ops.quantized import QUANTIZED, RANKS, hard_latents, hard_rotary_keys, poisoned_pool
from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.targets import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def make_pool(layout: RowLayout, written: list[int], *, latent_scale: float = 1.0, pages: int = 3) -> torch.Tensor:
    """A pool [pages, 16, row_bytes] that is poison but for some slots."""
    rng = np.random.default_rng(layout.kv_lora_rank)
    rows = np.concatenate(
        [hard_latents(layout, len(written), rng), hard_rotary_keys(layout, len(written), rng)], axis=1
    )
    pool = poisoned_pool(layout, pages, 16)
    quantized = reference.quantize_rows(rows, layout, latent_scale)
    pool.view(pages * 16, -1)[written] = torch.from_numpy(quantized.view(np.int8))
    return pool


def gather(
    pool: torch.Tensor, slots: list[int], layout: RowLayout, *, latent_scale: float = 1.0, model_dtype: DType
) -> tuple[torch.Tensor, ...]:
    return interpret(
        GATHER_LATENT,
        {"latent_cache": pool, "kv_slots": torch.tensor(slots, dtype=torch.int32)},
        {"kv_lora_rank": layout.kv_lora_rank, "rope_dim": layout.rope_dim, "latent_scale": latent_scale},
        model_dtype=model_dtype,
        cache_dtype=layout.dtype,
    )


def expected_values(
    pool: torch.Tensor, slots: list[int], layout: RowLayout, latent_scale: float, dtype: DType
) -> tuple[torch.Tensor, torch.Tensor]:
    values = reference.dequantize_rows(pool.view(-1, layout.row_bytes)[slots].numpy(), layout)
    latent, k_pe = torch.from_numpy(values).float().split([layout.kv_lora_rank, layout.rope_dim], dim=1)
    return (latent * np.float32(latent_scale)).to(torch_dtype(dtype)), k_pe.to(torch_dtype(dtype))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("model_dtype", DTYPES)
@pytest.mark.parametrize("latent_scale", [1.0, 0.37])
@pytest.mark.parametrize("kv_lora_rank", RANKS)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_values_are_those_of_the_reference_rounded_once(
    cache_dtype: CacheDType, kv_lora_rank: int, latent_scale: float, model_dtype: DType
) -> None:
    layout = cache_dtype.layout(kv_lora_rank, 6)
    slots = [0, 15, 16, 47, 31, 31, 7, 22, 40, 1, 2]
    pool = make_pool(layout, slots, latent_scale=latent_scale)
    found = gather(pool, slots, layout, latent_scale=latent_scale, model_dtype=model_dtype)
    for part, expected in zip(found, expected_values(pool, slots, layout, latent_scale, model_dtype), strict=True):
        assert_same(part, expected)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize(("kv_lora_rank", "rope_dim"), [(1, 2), (15, 3), (129, 62), (512, 64)])
def test_widths_that_fill_no_block(cache_dtype: CacheDType, kv_lora_rank: int, rope_dim: int) -> None:
    layout = cache_dtype.layout(kv_lora_rank, rope_dim)
    pool = make_pool(layout, [3, 17])
    found = gather(pool, [17, 3], layout, model_dtype=DType.BFLOAT16)
    for part, expected in zip(found, expected_values(pool, [17, 3], layout, 1.0, DType.BFLOAT16), strict=True):
        assert_same(part, expected)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_poison_reads_as_nan(cache_dtype: CacheDType) -> None:
    layout = cache_dtype.layout(448, 48)
    for part in gather(poisoned_pool(layout, 1, 16), [0, 15], layout, model_dtype=DType.FLOAT16):
        assert part.isnan().all()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_slots_outside_the_pool_give_zeros(cache_dtype: CacheDType) -> None:
    layout = cache_dtype.layout(96, 32)
    slots = [-1, 48, 5, 49, 2**31 - 1, -(2**31), -17, 47, 80]
    pool = make_pool(layout, [5, 47])
    latent, k_pe = gather(pool, slots, layout, model_dtype=DType.FLOAT32)
    expected_latent, expected_k_pe = expected_values(pool, [5, 47], layout, 1.0, DType.FLOAT32)
    inside = [2, 7]
    assert_same(latent[inside], expected_latent)
    assert_same(k_pe[inside], expected_k_pe)
    outside = [index for index in range(len(slots)) if index not in inside]
    assert not latent[outside].any()
    assert not k_pe[outside].any()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_no_keys_and_no_pages(cache_dtype: CacheDType) -> None:
    layout = cache_dtype.layout(96, 32)
    latent, k_pe = gather(make_pool(layout, [0]), [], layout, model_dtype=DType.FLOAT32)
    assert (latent.shape, k_pe.shape) == ((0, 96), (0, 32))
    latent, k_pe = gather(poisoned_pool(layout, 0, 16), [0, 3], layout, model_dtype=DType.FLOAT32)
    assert not latent.any()
    assert not k_pe.any()


@pytest.mark.parametrize("kv_lora_rank", [512, 448])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_compiles_without_spills_to_wide_accesses(
    cache_dtype: CacheDType, target: str, kv_lora_rank: int, tmp_path: Path
) -> None:
    problem = replace(
        PROBLEM,
        dims={**PROBLEM.dims, "width": cache_dtype.layout(kv_lora_rank, 64).width},
        attributes={**PROBLEM.attributes, "kv_lora_rank": kv_lora_rank},
        cache_dtype=cache_dtype,
        target=TARGETS[target],
    )
    for variant in GATHER_LATENT.variants(problem):
        compiled = compile_variant(variant, problem.target, tmp_path)
        assert compiled.stack_bytes == 0
        assert ".ftz" not in compiled.ptx
        # Of 8 rows for 128 threads: the codes, 16 of fp8 or 32 of nvfp4 in an access, and 8 values.
        assert compiled.wide_accesses >= (2 if cache_dtype is CacheDType.FP8 else 1) + 4
