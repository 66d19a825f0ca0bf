from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import check_plan
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.targets import TARGETS

PROBLEM = Problem(
    dims={"pages": 7, "page_size": 64, "width": 576, "keys": 17},
    attributes={"kv_lora_rank": 512, "rope_dim": 64},
    model_dtype=DType.BFLOAT16,
    cache_dtype=DType.BFLOAT16,
    target=TARGETS["sm_90"],
    tile_s=64,
    num_stages=2,
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_lora_rank, rope_dim = draw(st.integers(1, 1024)), draw(st.integers(1, 128))
    return Problem(
        dims={
            "pages": draw(st.integers(0, 10**8)),
            "page_size": draw(st.sampled_from([16, 32, 64, 128])),
            "width": kv_lora_rank + rope_dim,
            "keys": draw(st.integers(0, 10**8)),
        },
        attributes={"kv_lora_rank": kv_lora_rank, "rope_dim": rope_dim},
        model_dtype=draw(st.sampled_from(DType)),
        cache_dtype=draw(st.sampled_from(DType)),
        target=draw(st.sampled_from(list(TARGETS.values()))),
        tile_s=64,
        num_stages=2,
    )


@settings(max_examples=1000, deadline=None)
@given(problems(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_plans_are_well_formed_and_need_only_the_listed_variants(problem: Problem, keys: int, pages: int) -> None:
    plan = check_plan(GATHER_LATENT, problem)
    assert bool(plan.launches) == (problem.dims["keys"] > 0)
    other_step = {**problem.dims, "keys": keys, "pages": pages}
    assert GATHER_LATENT.variants(replace(problem, dims=other_step)) == GATHER_LATENT.variants(problem)


def test_programs_cover_the_keys_once() -> None:
    (launch,) = check_plan(GATHER_LATENT, PROBLEM).launches
    assert launch.grid == (3, 1, 1)


def test_width_must_be_latent_and_rotary_key() -> None:
    with pytest.raises(ValueError, match="found width 577"):
        GATHER_LATENT.plan(replace(PROBLEM, dims={**PROBLEM.dims, "width": 577}))
