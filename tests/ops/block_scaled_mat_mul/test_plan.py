from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import check_plan
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import FP8_BLOCK_SIZE, DType
from trtllm_mla.ops.block_scaled_mat_mul import BLOCK_SCALED_MAT_MUL
from trtllm_mla.ops.block_scaled_mat_mul.plan import (
    choose_split,
    choose_tile,
    shared_memory_bytes,
    tile_choices,
)
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.plan import LaunchPlan, ceil_div
from trtllm_mla.targets import TARGETS

# o_proj of DeepSeek-V3.
PROBLEM = Problem(
    dims={"rows": 64, "out_features": 7168, "in_features": 16384, "scale_rows": 56, "scale_columns": 128},
    attributes={},
    model_dtype=DType.BFLOAT16,
    cache_dtype=CacheDType.BF16,
    target=TARGETS["sm_90"],
    tile_s=64,
    num_stages=2,
)


def with_dims(**dims: int) -> Problem:
    dims = {**PROBLEM.dims, **dims}
    scales = {
        "scale_rows": ceil_div(dims["out_features"], FP8_BLOCK_SIZE),
        "scale_columns": ceil_div(dims["in_features"], FP8_BLOCK_SIZE),
    }
    return replace(PROBLEM, dims={**dims, **scales})


def kernels(plan: LaunchPlan) -> list[str]:
    return [launch.variant.kernel for launch in plan.launches]


static_dims = st.fixed_dictionaries({"out_features": st.integers(1, 20_000), "in_features": st.integers(1, 20_000)})
rows_of = st.integers(0, 300) | st.integers(0, 100_000)


@settings(max_examples=500, deadline=None)
@given(rows_of, rows_of, static_dims, st.sampled_from(DType), st.sampled_from(list(TARGETS.values())))
def test_plans_are_well_formed_and_need_only_the_listed_variants(rows, fewer, static, dtype, target) -> None:  # type: ignore[no-untyped-def]
    problem = replace(with_dims(**static, rows=rows), model_dtype=dtype, target=target)
    plan = check_plan(BLOCK_SCALED_MAT_MUL, problem)
    assert bool(plan.launches) == (rows > 0)
    assert plan.workspace_bytes <= BLOCK_SCALED_MAT_MUL.max_workspace_bytes(problem)
    step = replace(problem, dims={**problem.dims, "rows": min(fewer, rows)})
    assert BLOCK_SCALED_MAT_MUL.variants(step) == BLOCK_SCALED_MAT_MUL.variants(problem)
    assert BLOCK_SCALED_MAT_MUL.plan(step).workspace_bytes <= BLOCK_SCALED_MAT_MUL.max_workspace_bytes(problem)


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 400), static_dims, st.integers(1, 300))
def test_splits_cover_all_steps_and_none_is_empty(rows, static, multiprocessors) -> None:  # type: ignore[no-untyped-def]
    problem = with_dims(**static, rows=rows)
    problem = replace(problem, target=replace(problem.target, multiprocessors=multiprocessors))
    tile = choose_tile(problem)
    split, steps = choose_split(problem, tile), ceil_div(static["in_features"], tile.block_k)
    assert (split.parts - 1) * split.steps < steps <= split.parts * split.steps


@pytest.mark.parametrize("out_features", [64, 576, 1536])
def test_the_workspace_of_every_smaller_step_stays_within_the_bound(out_features: int) -> None:
    problem = with_dims(rows=600, out_features=out_features, in_features=7168)
    bounds = []
    for rows in range(601):
        step = replace(problem, dims={**problem.dims, "rows": rows})
        bounds.append(BLOCK_SCALED_MAT_MUL.max_workspace_bytes(step))
        assert BLOCK_SCALED_MAT_MUL.plan(step).workspace_bytes <= bounds[-1]
    assert bounds == sorted(bounds)
    assert 0 < bounds[-1] < 2 * 132 * 128 * 128 * 4 + 256


def test_a_decode_step() -> None:
    """kv_a_proj_with_mqa has 9 tiles for 132 multiprocessors, each of 56 steps: 14 parts of 4 steps share a tile."""
    problem = with_dims(rows=1, out_features=576, in_features=7168)
    plan = BLOCK_SCALED_MAT_MUL.plan(problem)
    assert kernels(plan) == ["multiply", "sum_splits"]
    assert [launch.grid for launch in plan.launches] == [(9 * 14, 1, 1), (2, 1, 1)]
    assert plan.workspace_bytes == 14 * 576 * 4


def test_enough_tiles_are_not_split() -> None:
    plan = BLOCK_SCALED_MAT_MUL.plan(with_dims(rows=16, out_features=24576, in_features=1536))
    assert kernels(plan) == ["multiply"]
    assert plan.launches[0].grid == (24576 // 64, 1, 1)
    assert plan.workspace_bytes == 0


@pytest.mark.parametrize(("rows", "block_m"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 128), (10_000, 128)])
def test_tiles_follow_the_rows(rows: int, block_m: int) -> None:
    assert choose_tile(with_dims(rows=rows)).block_m == block_m


def test_weights_of_many_sizes_share_kernels() -> None:
    """DeepSeek-V3's are multiples of 128, but for one."""
    sizes = [(1536, 7168), (24576, 1536), (7168, 16384), (18432, 7168), (7168, 18432), (2048, 7168), (7168, 2048)]
    found = {BLOCK_SCALED_MAT_MUL.variants(with_dims(out_features=o, in_features=i)) for o, i in sizes}
    assert len(found) == 1
    assert BLOCK_SCALED_MAT_MUL.variants(with_dims(out_features=576, in_features=7168)) not in found


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", DType)
def test_tiles_fit_the_shared_memory_and_the_blocks(target, dtype) -> None:  # type: ignore[no-untyped-def]
    choices = tile_choices(dtype, target)
    assert [tile.block_m for tile in choices] == sorted({tile.block_m for tile in choices})
    for tile in choices:
        assert FP8_BLOCK_SIZE % tile.block_n == FP8_BLOCK_SIZE % tile.block_k == 0
        assert shared_memory_bytes(tile, dtype) <= target.shared_memory_bytes


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (replace(PROBLEM, dims={**PROBLEM.dims, "scale_rows": 55}), "found 55 scale rows, expected 56 for 7168"),
        (replace(PROBLEM, dims={**PROBLEM.dims, "scale_columns": 129}), "found 129 scale columns, expected 128"),
        (with_dims(rows=2**31 - 1), "found 2147483647 rows"),
        (with_dims(rows=2**31 - 300, out_features=2**20), "found grid"),
    ],
)
def test_sizes_that_kernels_cannot_count_are_refused(problem: Problem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK_SCALED_MAT_MUL.plan(problem)
