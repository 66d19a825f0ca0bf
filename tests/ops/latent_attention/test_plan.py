from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import check_plan
from trtllm_mla.config import check_tile
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.latent_attention import LATENT_ATTENTION
from trtllm_mla.ops.latent_attention.plan import (
    default_tile,
    max_workspace_bytes,
    split_count,
)
from trtllm_mla.ops.plan import Launch, ScalarArgument
from trtllm_mla.targets import TARGETS

PROBLEM = Problem(
    dims={
        "tokens": 8,
        "heads": 128,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "width": 576,
        "pages": 4096,
        "page_size": 64,
        "requests": 8,
        "pages_per_request": 64,
        "longest_query": 1,
    },
    attributes={"softmax_scale": 0.135},
    model_dtype=DType.BFLOAT16,
    cache_dtype=DType.BFLOAT16,
    target=TARGETS["sm_90"],
    tile_s=64,
    num_stages=2,
)


def random_dims(rng: random.Random) -> dict[str, int]:
    """Dynamic dimensions from none to very many, whether or not they belong together."""
    return {
        "tokens": rng.choice([0, 1, rng.randint(0, 64), rng.randint(0, 10**6)]),
        "pages": rng.randint(0, 10**8),
        "requests": rng.choice([0, 1, rng.randint(0, 64), rng.randint(0, 4096)]),
        "pages_per_request": rng.choice([0, 1, rng.randint(0, 64), rng.randint(0, 10**5)]),
        "longest_query": rng.choice([0, 1, rng.randint(0, 4), rng.randint(0, 2000)]),
    }


def random_problem(rng: random.Random) -> Problem:
    """Any sizes that some tile fits, with one tile of those that fit."""
    while True:
        sizes = {
            "kv_lora_rank": rng.choice([512, rng.randint(1, 600)]),
            "rope_dim": rng.choice([64, rng.randint(1, 128)]),
        }
        problem = Problem(
            {
                **sizes,
                **random_dims(rng),
                "width": sum(sizes.values()),
                "heads": rng.choice([16, 128, rng.randint(1, 200)]),
                "page_size": rng.choice([16, 32, 64, 128]),
            },
            {"softmax_scale": rng.uniform(0.01, 1.0)},
            rng.choice(list(DType)),
            rng.choice(list(DType)),
            rng.choice(list(TARGETS.values())),
            *rng.choice([(16, 1), (16, 2), (16, 4), (32, 2), (64, 1), (64, 2), (64, 3), (128, 2)]),
        )
        try:
            LATENT_ATTENTION.variants(problem)
        except UserError:
            continue
        return problem


def scalars(launch: Launch) -> dict[str, int | float]:
    """The numbers a launch passes, by parameter."""
    return {
        name: argument.value
        for (name, _), argument in zip(launch.variant.signature, launch.arguments, strict=True)
        if isinstance(argument, ScalarArgument)
    }


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_well_formed_and_need_only_the_listed_variants(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    for _ in range(500):
        problem = random_problem(rng)
        plan = check_plan(LATENT_ATTENTION, problem)
        assert bool(plan.launches) == (problem.dims["tokens"] > 0 and problem.dims["requests"] > 0)
        other_step = replace(problem, dims={**problem.dims, **random_dims(rng)})
        assert LATENT_ATTENTION.variants(other_step) == LATENT_ATTENTION.variants(problem)


@pytest.mark.parametrize("seed", range(4))
def test_the_workspace_of_every_smaller_step_stays_within_the_bound(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    used = 0
    for _ in range(300):
        problem = random_problem(rng)
        bound = max_workspace_bytes(problem)
        assert LATENT_ATTENTION.plan(problem).workspace_bytes <= bound
        for _ in range(30):
            smaller = {name: rng.randint(0, problem.dims[name]) for name in sorted(LATENT_ATTENTION.dynamic_dims)}
            found = LATENT_ATTENTION.plan(replace(problem, dims={**problem.dims, **smaller})).workspace_bytes
            assert found <= bound
            used += found > 0
    assert used > 100, used


def test_the_workspace_bound_does_not_grow_with_the_step() -> None:
    large = replace(PROBLEM, dims={**PROBLEM.dims, "tokens": 10**6, "requests": 4096})
    assert max_workspace_bytes(large) == 4 * 132 * 64 * (512 + 2) * 4


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 130), st.sampled_from([16, 32, 64]))
def test_every_request_has_enough_row_blocks(queries: list[int], heads: int, block_m: int) -> None:
    """The arithmetic behind the grid: request r's row blocks begin at offsets[r] * heads // BLOCK_M + r."""
    offsets = [sum(queries[:request]) for request in range(len(queries) + 1)]
    first = [offset * heads // block_m + request for request, offset in enumerate(offsets)]
    for request, count in enumerate(queries):
        assert first[request] + max(1, math.ceil(count * heads / block_m)) <= first[request + 1]
    assert first[-1] == offsets[-1] * heads // block_m + len(queries)


@pytest.mark.parametrize(
    ("tokens", "requests", "longest_query", "row_blocks", "blocks_per_request"),
    [
        (8, 8, 1, 16, 2),
        (24, 8, 3, 48, 6),
        (255, 1, 255, 510, 510),
        # A chunk among single tokens: requests of equal size would need 16 * 510 row blocks.
        (270, 16, 255, 540 + 16, 0),
        # A longest query that cannot be: requests of one token would not hold them all.
        (100, 2, 1, 200 + 2, 0),
    ],
)
def test_grid(tokens: int, requests: int, longest_query: int, row_blocks: int, blocks_per_request: int) -> None:
    dims = {"tokens": tokens, "requests": requests, "longest_query": longest_query, "pages_per_request": 1}
    (launch,) = check_plan(LATENT_ATTENTION, replace(PROBLEM, dims={**PROBLEM.dims, **dims})).launches
    assert launch.grid == (row_blocks, 1, 1)
    assert scalars(launch)["blocks_per_request"] == blocks_per_request
    assert 2 ** scalars(launch)["scale_log2e"] == pytest.approx(math.exp(0.135), rel=1e-12)


@pytest.mark.parametrize(
    ("heads", "longest_query", "block_m"),
    [(16, 1, 16), (16, 2, 32), (16, 4, 64), (20, 1, 32), (5, 3, 16), (128, 1, 64)],
)
def test_row_blocks_follow_the_rows_of_a_request(heads: int, longest_query: int, block_m: int) -> None:
    dims = {**PROBLEM.dims, "heads": heads, "longest_query": longest_query, "tokens": 8 * longest_query}
    launch = LATENT_ATTENTION.plan(replace(PROBLEM, dims=dims)).launches[0]
    assert dict(launch.variant.constants)["BLOCK_M"] == block_m


def test_keys_are_split_to_fill_the_device_and_not_beyond() -> None:
    def splits(row_blocks: int, pages_per_request: int) -> int:
        dims = {**PROBLEM.dims, "pages_per_request": pages_per_request}
        return split_count(replace(PROBLEM, dims=dims), 64, row_blocks)

    assert splits(2, 2048) == 64
    assert splits(16, 64) == 8
    assert splits(2, 1) == 1
    assert splits(2, 4) == 1
    assert splits(2, 8) == 4
    assert splits(132, 2048) == 1
    assert splits(10**6, 2048) == 1
    # 70 row blocks leave half of 132 multiprocessors idle; 490 keep 93 % of four waves busy.
    assert splits(70, 2048) == 7


def test_split_launches_share_the_partial_results() -> None:
    plan = check_plan(LATENT_ATTENTION, PROBLEM)
    attend, combine = plan.launches
    assert (attend.variant.kernel, combine.variant.kernel) == ("attend_split", "combine")
    assert attend.grid == (16, 8, 1)
    assert combine.grid == (8 * 128, 1, 1)
    assert scalars(combine)["splits"] == 8
    assert attend.arguments[6:9] == combine.arguments[:3]
    rows = 8 * 8 * 128
    assert [argument.elements for argument in combine.arguments[:3]] == [rows * 512, rows, rows]  # type: ignore[union-attr]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("model_dtype", DType)
@pytest.mark.parametrize("cache_dtype", DType)
@pytest.mark.parametrize(("kv_lora_rank", "rope_dim"), [(512, 64), (256, 64), (448, 32), (96, 32), (16, 16)])
def test_the_default_tile_passes_the_check_and_has_a_plan(  # type: ignore[no-untyped-def]
    target, model_dtype, cache_dtype, kv_lora_rank, rope_dim
) -> None:
    sizes = {"kv_lora_rank": kv_lora_rank, "rope_dim": rope_dim}
    tile = default_tile(**sizes, model_dtype=model_dtype, cache_dtype=cache_dtype, target=target)
    check_tile(*tile, (kv_lora_rank + rope_dim) * cache_dtype.itemsize, target)
    problem = replace(
        PROBLEM,
        dims={**PROBLEM.dims, **sizes, "width": kv_lora_rank + rope_dim},
        model_dtype=model_dtype,
        cache_dtype=cache_dtype,
        target=target,
        tile_s=tile[0],
        num_stages=tile[1],
    )
    check_plan(LATENT_ATTENTION, problem)


def test_default_tiles_at_deepseek_sizes() -> None:
    def tile(target: str, dtype: DType) -> tuple[int, int]:
        return default_tile(
            kv_lora_rank=512, rope_dim=64, model_dtype=dtype, cache_dtype=dtype, target=TARGETS[target]
        )

    found = {target: tile(target, DType.BFLOAT16) for target in TARGETS}
    assert found == {
        "sm_80": (32, 3),
        "sm_86": (32, 2),
        "sm_89": (32, 2),
        "sm_90": (64, 2),
        "sm_100": (64, 2),
        "sm_120": (32, 2),
        "sm_121": (32, 2),
    }
    assert {tile(target, DType.FLOAT32) for target in TARGETS} == {(16, 2)}


def test_the_tile_of_the_issued_config_runs_on_sm_90() -> None:
    """64 x 3 at 512 + 64 in bf16: 216 KiB by the rule users see; with 64 rows it would not fit."""
    check_tile(64, 3, 1152, TARGETS["sm_90"])
    found = {dict(v.constants).get("BLOCK_M") for v in LATENT_ATTENTION.variants(replace(PROBLEM, num_stages=3))}
    assert found == {16, 32, None}


def test_fp32_networks_use_smaller_tiles_than_the_config_asks_for() -> None:
    """A config made for bf16 also runs the fp32 twin of its network, on every target."""
    for target in TARGETS.values():
        for cache_dtype in DType:
            problem = replace(PROBLEM, model_dtype=DType.FLOAT32, cache_dtype=cache_dtype, num_stages=3, target=target)
            for variant in LATENT_ATTENTION.variants(problem)[:-1]:
                assert (dict(variant.constants)["BLOCK_N"], variant.num_stages) == (16, 2)


def test_tiles_that_do_not_fit_are_the_users_mistake() -> None:
    with pytest.raises(
        UserError, match=r"tile_s 128 with num_stages 4 takes \d+ bytes.*Use tile_s 32 with num_stages 2"
    ):
        LATENT_ATTENTION.variants(replace(PROBLEM, tile_s=128, num_stages=4, target=TARGETS["sm_89"]))
    with pytest.raises(UserError, match="too wide for sm_89"):
        default_tile(
            kv_lora_rank=4096,
            rope_dim=64,
            model_dtype=DType.BFLOAT16,
            cache_dtype=DType.BFLOAT16,
            target=TARGETS["sm_89"],
        )


@pytest.mark.parametrize("softmax_scale", [0.0, -0.1, math.inf, math.nan])
def test_the_scale_must_be_positive(softmax_scale: float) -> None:
    with pytest.raises(ValueError, match="found softmax_scale"):
        LATENT_ATTENTION.plan(replace(PROBLEM, attributes={"softmax_scale": softmax_scale}))


def test_rows_must_hold_latent_and_rotary_key() -> None:
    with pytest.raises(ValueError, match="found rows of width 577"):
        LATENT_ATTENTION.variants(replace(PROBLEM, dims={**PROBLEM.dims, "width": 577}))
