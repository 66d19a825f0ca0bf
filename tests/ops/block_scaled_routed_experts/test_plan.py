from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import check_plan
from tests.ops.routed_experts import test_plan as unquantized
from tests.ops.routed_experts.test_plan import kernels, static_dims, tokens_of
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import FP8_BLOCK_SIZE, DType
from trtllm_mla.ops.block_scaled_routed_experts import BLOCK_SCALED_ROUTED_EXPERTS
from trtllm_mla.ops.block_scaled_routed_experts.plan import PRODUCTS, shared_memory_bytes, tile_choices
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.plan import TensorArgument, ceil_div
from trtllm_mla.ops.routed_experts import ROUTED_EXPERTS
from trtllm_mla.ops.routed_experts.plan import COLUMN_STEP
from trtllm_mla.targets import TARGETS


def with_dims(**dims: int) -> Problem:
    """A problem of DeepSeek-V3's sizes, but for the given ones."""
    problem = unquantized.with_dims(**dims)
    hidden_blocks, intermediate_blocks = (
        ceil_div(problem.dims[name], FP8_BLOCK_SIZE) for name in ("hidden_size", "intermediate_size")
    )
    blocks = {
        "hidden_blocks": hidden_blocks,
        "intermediate_blocks": intermediate_blocks,
        "gate_up_blocks": 2 * intermediate_blocks,
    }
    return replace(problem, dims={**problem.dims, **blocks})


PROBLEM = with_dims()


@settings(max_examples=300, deadline=None)
@given(tokens_of, tokens_of, static_dims, st.sampled_from(DType), st.sampled_from(list(TARGETS.values())))
def test_plans_are_well_formed_and_need_only_the_listed_variants(tokens, fewer, static, dtype, target) -> None:  # type: ignore[no-untyped-def]
    op = BLOCK_SCALED_ROUTED_EXPERTS
    problem = replace(
        with_dims(**static, tokens=tokens), model_dtype=dtype, cache_dtype=CacheDType.of(dtype), target=target
    )
    plan = check_plan(op, problem)
    assert bool(plan.launches) == (tokens > 0)
    assert plan.workspace_bytes <= op.max_workspace_bytes(problem)
    step = replace(problem, dims={**problem.dims, "tokens": min(fewer, tokens)})
    assert op.variants(step) == op.variants(problem)
    assert op.plan(step).workspace_bytes <= op.max_workspace_bytes(problem)


def test_all_but_the_products_are_the_kernels_of_routed_experts() -> None:
    """An engine that has both operations stores them once."""
    problem = with_dims(tokens=64)
    plan, plain = BLOCK_SCALED_ROUTED_EXPERTS.plan(problem), ROUTED_EXPERTS.plan(problem)
    assert kernels(plan) == kernels(plain) == ["sort_slots", "gate_up", "down", "weighted_sum"]
    assert [launch.variant.op for launch in plan.launches] == [
        "RoutedExperts",
        "BlockScaledRoutedExperts",
        "BlockScaledRoutedExperts",
        "RoutedExperts",
    ]
    assert [plan.launches[index] == plain.launches[index] for index in range(4)] == [True, False, False, True]
    read = [item.name for launch in plan.launches for item in launch.arguments if isinstance(item, TensorArgument)]
    assert sorted({*read}) == sorted(
        item.name for item in (*BLOCK_SCALED_ROUTED_EXPERTS.inputs, *BLOCK_SCALED_ROUTED_EXPERTS.outputs)
    )


def test_a_decode_step() -> None:
    """One token asks for 8 of 256 experts: programs for 8 row blocks, not for 256."""
    plan = BLOCK_SCALED_ROUTED_EXPERTS.plan(with_dims(tokens=1))
    assert [launch.grid for launch in plan.launches] == [
        (256, 1, 1),
        (8 * 2048 // 64, 1, 1),
        (8 * 7168 // 64, 1, 1),
        (7168 // 512, 1, 1),
    ]


@pytest.mark.parametrize(("tokens", "block_m"), [(1, 16), (512, 16), (513, 64), (2048, 64), (2049, 128)])
def test_row_blocks_follow_the_slots_an_expert(tokens: int, block_m: int) -> None:
    assert PRODUCTS.choose_tiles(with_dims(tokens=tokens)).block_m == block_m


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", DType)
def test_tiles_fit_the_shared_memory_the_blocks_and_each_other(target, dtype) -> None:  # type: ignore[no-untyped-def]
    choices = tile_choices(dtype, target)
    assert [tiles.block_m for tiles in choices] == sorted({tiles.block_m for tiles in choices})
    for tiles in choices:
        assert tiles.down.block_m == tiles.gate_up.block_m <= 128
        assert COLUMN_STEP % tiles.down.block_n == 0
        for tile, weight_tiles in ((tiles.gate_up, 2), (tiles.down, 1)):
            assert FP8_BLOCK_SIZE % tile.block_n == FP8_BLOCK_SIZE % tile.block_k == 0
            assert shared_memory_bytes(tile, weight_tiles, dtype) <= target.shared_memory_bytes


def changed(**dims: int) -> Problem:
    """The problem with sizes that contradict each other."""
    return replace(PROBLEM, dims={**PROBLEM.dims, **dims})


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (changed(gate_up_size=4095), "BlockScaledRoutedExperts: found gate_up_proj of 4095 rows"),
        (changed(hidden_blocks=55), "found 55 hidden_blocks, expected 56 for hidden_size 7168"),
        (changed(intermediate_blocks=17), "found 17 intermediate_blocks, expected 16"),
        # As many as for gate and up in one, whose blocks would straddle the two.
        (
            changed(intermediate_size=192, gate_up_size=384, intermediate_blocks=2, gate_up_blocks=3),
            "found 3 gate_up_blocks, expected 4 for hidden_size 7168 and intermediate_size 192",
        ),
        (replace(PROBLEM, attributes={"first_expert": -1}), "found first_expert -1 of 256 experts"),
        (with_dims(tokens=2**28), "found 268435456 tokens of 8 choices"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(problem: Problem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK_SCALED_ROUTED_EXPERTS.plan(problem)
