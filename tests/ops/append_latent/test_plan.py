from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import check_plan
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.plan import ScalarArgument
from trtllm_mla.targets import TARGETS


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_lora_rank, rope_dim = draw(st.integers(1, 1024)), 2 * draw(st.integers(1, 64))
    cache_dtype = draw(st.sampled_from(CacheDType))
    latent_scale = 0.5 if cache_dtype.is_quantized else 1.0
    return Problem(
        dims={
            "pages": draw(st.integers(0, 10**8)),
            "page_size": draw(st.sampled_from([16, 32, 64, 128])),
            "width": cache_dtype.layout(kv_lora_rank, rope_dim).width,
            "tokens": draw(st.integers(0, 10**6)),
            "kv_lora_rank": kv_lora_rank,
            "rope_dim": rope_dim,
            "heads": draw(st.integers(1, 200)),
            "positions": draw(st.integers(0, 10**6)),
        },
        attributes={
            "rope_interleave": draw(st.integers(0, 1)),
            "latent_scale": latent_scale,
        },
        model_dtype=draw(st.sampled_from(DType)),
        cache_dtype=cache_dtype,
        target=draw(st.sampled_from(list(TARGETS.values()))),
        tile_s=64,
        num_stages=2,
    )


PROBLEM = Problem(
    dims={
        "pages": 7,
        "page_size": 64,
        "width": 576,
        "tokens": 3,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "heads": 20,
        "positions": 100,
    },
    attributes={"rope_interleave": 1, "latent_scale": 1.0},
    model_dtype=DType.BFLOAT16,
    cache_dtype=CacheDType.BF16,
    target=TARGETS["sm_90"],
    tile_s=64,
    num_stages=2,
)


@settings(max_examples=1000, deadline=None)
@given(problems(), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_plans_are_well_formed_and_need_only_the_listed_variants(
    problem: Problem, tokens: int, pages: int, positions: int
) -> None:
    plan = check_plan(APPEND_LATENT, problem)
    assert bool(plan.launches) == (problem.dims["tokens"] > 0)
    other_step = {**problem.dims, "tokens": tokens, "pages": pages, "positions": positions}
    assert APPEND_LATENT.variants(replace(problem, dims=other_step)) == APPEND_LATENT.variants(problem)


def test_grid_has_a_program_for_each_row_and_each_block_of_heads() -> None:
    (launch,) = check_plan(APPEND_LATENT, PROBLEM).launches
    assert launch.grid == (3, 1 + 2, 1)


def test_slots_beyond_int32_do_not_overflow_the_argument() -> None:
    plan = check_plan(APPEND_LATENT, replace(PROBLEM, dims={**PROBLEM.dims, "pages": 2**30}))
    assert plan.launches[0].arguments[8].value == 2**31 - 1  # type: ignore[union-attr]


def test_width_must_be_latent_and_rotary_key() -> None:
    with pytest.raises(ValueError, match="found rows of width 577, expected 576"):
        APPEND_LATENT.plan(replace(PROBLEM, dims={**PROBLEM.dims, "width": 577}))


def test_layers_with_different_scales_share_a_kernel() -> None:
    dims = {**PROBLEM.dims, "width": 656}
    launches = []
    for latent_scale in (0.25, 3.0):
        attributes = {**PROBLEM.attributes, "latent_scale": latent_scale}
        problem = replace(PROBLEM, dims=dims, attributes=attributes, cache_dtype=CacheDType.FP8)
        (launch,) = check_plan(APPEND_LATENT, problem).launches
        names = [name for name, _ in launch.variant.signature]
        assert launch.arguments[names.index("latent_scale")] == ScalarArgument(latent_scale)
        launches.append(launch)
    assert launches[0].variant == launches[1].variant


@pytest.mark.parametrize(
    ("cache_dtype", "latent_scale"), [(CacheDType.BF16, 0.5), (CacheDType.FP8, 0.0), (CacheDType.FP8, float("inf"))]
)
def test_a_scale_that_cannot_be(cache_dtype: CacheDType, latent_scale: float) -> None:
    dims = {**PROBLEM.dims, "width": cache_dtype.layout(512, 64).width}
    attributes = {**PROBLEM.attributes, "latent_scale": latent_scale}
    with pytest.raises(ValueError, match="found latent_scale"):
        APPEND_LATENT.plan(replace(PROBLEM, dims=dims, attributes=attributes, cache_dtype=cache_dtype))
