import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import check_plan
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.ops.context_attention import CONTEXT_ATTENTION
from trtllm_mla.ops.context_attention.plan import HeadBlocks, choose_tile, shared_memory_bytes
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.plan import ScalarArgument
from trtllm_mla.targets import TARGETS

PROBLEM = Problem(
    dims={
        "tokens": 300,
        "keys": 1000,
        "requests": 3,
        "longest_query": 200,
        "longest_key": 700,
        "heads": 128,
        "nope_dim": 128,
        "rope_dim": 64,
        "v_dim": 128,
    },
    attributes={"softmax_scale": 0.135, "causal": 1},
    model_dtype=DType.BFLOAT16,
    cache_dtype=DType.BFLOAT16,
    target=TARGETS["sm_90"],
    tile_s=64,
    num_stages=2,
)

dynamic_dims = st.fixed_dictionaries(
    {
        "tokens": st.integers(0, 10**6),
        "keys": st.integers(0, 10**7),
        "requests": st.integers(0, 4096),
        "longest_query": st.integers(0, 10**6),
        "longest_key": st.integers(0, 10**6),
    }
)
static_dims = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 200),
        "nope_dim": st.integers(1, 256),
        "rope_dim": st.integers(1, 64),
        "v_dim": st.integers(1, 256),
    }
)


@settings(max_examples=1000, deadline=None)
@given(dynamic_dims, dynamic_dims, static_dims, st.sampled_from(DType), st.sampled_from(list(TARGETS.values())))
def test_plans_are_well_formed_and_need_only_the_listed_variants(dynamic, other, static, dtype, target) -> None:  # type: ignore[no-untyped-def]
    problem = replace(PROBLEM, dims={**dynamic, **static}, model_dtype=dtype, cache_dtype=dtype, target=target)
    plan = check_plan(CONTEXT_ATTENTION, problem)
    assert bool(plan.launches) == (dynamic["tokens"] > 0 and dynamic["requests"] > 0)
    other_step = replace(problem, dims={**other, **static})
    assert CONTEXT_ATTENTION.variants(other_step) == CONTEXT_ATTENTION.variants(problem)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([16, 64, 128]))
def test_row_blocks_of_requests_do_not_overlap_and_fit_the_grid(queries: list[int], block_m: int) -> None:
    """The arithmetic behind the grid: request r owns the blocks from offsets[r] // BLOCK_M + r on."""
    offsets = [sum(queries[:request]) for request in range(len(queries) + 1)]
    first = [offset // block_m + request for request, offset in enumerate(offsets)]
    for request, count in enumerate(queries):
        assert first[request] + max(1, math.ceil(count / block_m)) <= first[request + 1]
    row_blocks = offsets[-1] // block_m + len(queries)
    assert first[-1] == row_blocks


def test_grid_and_scale() -> None:
    (launch,) = check_plan(CONTEXT_ATTENTION, PROBLEM).launches
    block_m = dict(launch.variant.constants)["BLOCK_M"]
    assert launch.grid == ((300 // block_m + 3) * 128, 1, 1)
    scale = launch.arguments[-1]
    assert isinstance(scale, ScalarArgument)
    assert 2**scale.value == pytest.approx(math.exp(0.135), rel=1e-12)


def test_one_kernel_serves_both_kinds_of_passes() -> None:
    over_history = replace(PROBLEM, attributes={**PROBLEM.attributes, "causal": 0})
    (first,), (second,) = (check_plan(CONTEXT_ATTENTION, problem).launches for problem in (PROBLEM, over_history))
    assert (first.variant, first.grid) == (second.variant, second.grid)
    names = [name for name, _ in first.variant.signature]
    pairs = zip(names, first.arguments, second.arguments, strict=True)
    assert [(name, one, other) for name, one, other in pairs if one != other] == [
        ("causal", ScalarArgument(1), ScalarArgument(0))
    ]


@pytest.mark.parametrize("causal", [-1, 2])
def test_causal_is_one_or_zero(causal: int) -> None:
    with pytest.raises(ValueError, match=f"found causal {causal}, expected 0 or 1"):
        CONTEXT_ATTENTION.plan(replace(PROBLEM, attributes={**PROBLEM.attributes, "causal": causal}))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", DType)
def test_tiles_fit_the_shared_memory(target, dtype) -> None:  # type: ignore[no-untyped-def]
    for head in (HeadBlocks(128, 64, 128), HeadBlocks(64, 32, 64), HeadBlocks(256, 64, 256), HeadBlocks(16, 16, 16)):
        tile = choose_tile(head, dtype, target)
        assert shared_memory_bytes(tile, head, dtype, target) <= target.shared_memory_bytes


def test_larger_heads_get_smaller_tiles_and_then_an_error() -> None:
    target = TARGETS["sm_89"]
    rows = [choose_tile(HeadBlocks(width, 64, width), DType.BFLOAT16, target).block_m for width in (128, 256, 512)]
    assert rows == sorted(rows, reverse=True)
    with pytest.raises(UserError, match=r"need \d+ bytes of shared memory; sm_89 has 101376"):
        choose_tile(HeadBlocks(4096, 64, 4096), DType.BFLOAT16, target)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.1])
def test_the_scale_must_be_positive(softmax_scale: float) -> None:
    with pytest.raises(ValueError, match="found softmax_scale"):
        CONTEXT_ATTENTION.plan(replace(PROBLEM, attributes={**PROBLEM.attributes, "softmax_scale": softmax_scale}))
