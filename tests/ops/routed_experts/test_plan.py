from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import check_plan
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.plan import LaunchPlan, ScalarArgument, WorkspaceArgument
from trtllm_mla.ops.routed_experts import ROUTED_EXPERTS
from trtllm_mla.ops.routed_experts.plan import (
    BAND_BYTES,
    COLUMN_STEP,
    choose_tiles,
    row_block_bound,
    shared_memory_bytes,
    tile_choices,
)
from trtllm_mla.targets import TARGETS

# DeepSeek-V3.
PROBLEM = Problem(
    dims={
        "tokens": 64,
        "top_k": 8,
        "experts": 256,
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "gate_up_size": 4096,
    },
    attributes={"first_expert": 0},
    model_dtype=DType.BFLOAT16,
    cache_dtype=CacheDType.BF16,
    target=TARGETS["sm_90"],
    tile_s=64,
    num_stages=2,
)


def with_dims(**dims: int) -> Problem:
    dims = {**PROBLEM.dims, **dims}
    return replace(PROBLEM, dims={**dims, "gate_up_size": 2 * dims["intermediate_size"]})


def kernels(plan: LaunchPlan) -> list[str]:
    return [launch.variant.kernel for launch in plan.launches]


def argument(plan: LaunchPlan, launch: int, name: str) -> int | float:
    names = [parameter for parameter, _ in plan.launches[launch].variant.signature]
    found = plan.launches[launch].arguments[names.index(name)]
    assert isinstance(found, ScalarArgument)
    return found.value


static_dims = st.fixed_dictionaries(
    {
        "top_k": st.integers(1, 12),
        "experts": st.integers(1, 600),
        "hidden_size": st.integers(1, 8000),
        "intermediate_size": st.integers(1, 3000),
    }
)
tokens_of = st.integers(0, 300) | st.integers(0, 100_000)


@settings(max_examples=500, deadline=None)
@given(tokens_of, tokens_of, static_dims, st.sampled_from(DType), st.sampled_from(list(TARGETS.values())))
def test_plans_are_well_formed_and_need_only_the_listed_variants(tokens, fewer, static, dtype, target) -> None:  # type: ignore[no-untyped-def]
    problem = replace(
        with_dims(**static, tokens=tokens), model_dtype=dtype, cache_dtype=CacheDType.of(dtype), target=target
    )
    plan = check_plan(ROUTED_EXPERTS, problem)
    assert bool(plan.launches) == (tokens > 0)
    assert plan.workspace_bytes <= ROUTED_EXPERTS.max_workspace_bytes(problem)
    step = replace(problem, dims={**problem.dims, "tokens": min(fewer, tokens)})
    assert ROUTED_EXPERTS.variants(step) == ROUTED_EXPERTS.variants(problem)
    assert ROUTED_EXPERTS.plan(step).workspace_bytes <= ROUTED_EXPERTS.max_workspace_bytes(problem)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("experts", [1, 3, 5])
def test_the_workspace_of_every_smaller_step_stays_within_the_bound(top_k: int, experts: int) -> None:
    """Step by step across the changes of tiles and of bands."""
    problem = with_dims(tokens=400, top_k=top_k, experts=experts, hidden_size=150_000, intermediate_size=8)
    bounds = []
    for tokens in range(401):
        step = replace(problem, dims={**problem.dims, "tokens": tokens})
        bounds.append(ROUTED_EXPERTS.max_workspace_bytes(step))
        assert ROUTED_EXPERTS.plan(step).workspace_bytes <= bounds[-1]
    assert bounds == sorted(bounds)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([16, 64, 128]))
def test_row_blocks_are_enough_for_every_distribution(counts: list[int], block_m: int) -> None:
    needed = sum(-(-count // block_m) for count in counts)
    bound = row_block_bound(sum(counts), len(counts), block_m)
    assert needed <= bound <= sum(counts)


@pytest.mark.parametrize(("slots", "experts"), [(5, 9), (9, 9), (200, 9), (1000, 1)])
def test_some_distribution_needs_all_row_blocks(slots: int, experts: int) -> None:
    """One slot for each expert that has any, and the rest for one of them."""
    counts = [1] * min(slots, experts)
    counts[0] += slots - len(counts)
    assert sum(-(-count // 16) for count in counts) == row_block_bound(slots, experts, 16)


def test_a_decode_step() -> None:
    """One token asks for 8 of 256 experts: programs for 8 row blocks, not for 256."""
    plan = ROUTED_EXPERTS.plan(with_dims(tokens=1))
    assert kernels(plan) == ["sort_slots", "gate_up", "down", "weighted_sum"]
    assert [launch.grid for launch in plan.launches] == [
        (256, 1, 1),
        (8 * 2048 // 64, 1, 1),
        (8 * 7168 // 64, 1, 1),
        (7168 // 512, 1, 1),
    ]
    assert argument(plan, 1, "row_blocks") == argument(plan, 2, "row_blocks") == 8


@pytest.mark.parametrize(
    ("tokens", "block_m"), [(1, 16), (512, 16), (513, 64), (2048, 64), (2049, 128), (100_000, 128)]
)
def test_row_blocks_follow_the_slots_an_expert(tokens: int, block_m: int) -> None:
    problem = with_dims(tokens=tokens)
    assert choose_tiles(problem).block_m == block_m
    assert argument(ROUTED_EXPERTS.plan(problem), 0, "block_m") == block_m


def test_bands_cover_the_columns_once_and_bound_the_workspace() -> None:
    tokens = 8192
    plan = ROUTED_EXPERTS.plan(with_dims(tokens=tokens))
    bands = (len(plan.launches) - 2) // 2
    assert kernels(plan) == ["sort_slots", "gate_up", *["down", "weighted_sum"] * bands]
    begin = 0
    for launch in range(2, len(plan.launches), 2):
        for index in (launch, launch + 1):
            assert argument(plan, index, "first_step") == begin
            assert argument(plan, index, "band_steps") == argument(plan, launch, "band_steps")
        begin += int(argument(plan, launch, "band_steps"))
    assert begin == 7168 // COLUMN_STEP
    partial = plan.launches[2].arguments[5]
    assert isinstance(partial, WorkspaceArgument)
    assert partial.elements * 4 <= BAND_BYTES
    # All columns at once would take 1.9 GB beside 268 MB of gated activations.
    assert plan.workspace_bytes < 0.55e9
    assert bands == 7


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", DType)
def test_tiles_fit_the_shared_memory_and_each_other(target, dtype) -> None:  # type: ignore[no-untyped-def]
    choices = tile_choices(dtype, target)
    assert [tiles.block_m for tiles in choices] == sorted({tiles.block_m for tiles in choices})
    for tiles in choices:
        assert tiles.down.block_m == tiles.gate_up.block_m <= 128
        assert COLUMN_STEP % tiles.down.block_n == 0
        for tile, weight_tiles in ((tiles.gate_up, 2), (tiles.down, 1)):
            assert shared_memory_bytes(tile, weight_tiles, dtype, target) <= target.shared_memory_bytes


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (replace(PROBLEM, dims={**PROBLEM.dims, "gate_up_size": 4095}), "found gate_up_proj of 4095 rows"),
        (replace(PROBLEM, attributes={"first_expert": -1}), "found first_expert -1 of 256 experts"),
        (replace(PROBLEM, attributes={"first_expert": 2**31 - 256}), "found first_expert 2147483392"),
        (with_dims(tokens=2**28), "found 268435456 tokens of 8 choices"),
    ],
)
def test_sizes_that_kernels_cannot_count_are_refused(problem: Problem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ROUTED_EXPERTS.plan(problem)
