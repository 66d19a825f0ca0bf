from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import as_cache_dtype, check_plan
from tests.ops.latent_attention.pieces import Piece, cut, makespan, scalar
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.config import check_tile
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.latent_attention import LATENT_ATTENTION
from trtllm_mla.ops.latent_attention.plan import default_tile, max_workspace_bytes
from trtllm_mla.ops.plan import Launch, LaunchPlan, ScalarArgument, WorkspaceArgument
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
    attributes={"softmax_scale": 0.135, "latent_scale": 1.0},
    model_dtype=DType.BFLOAT16,
    cache_dtype=CacheDType.BF16,
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
        cache_dtype = rng.choice(list(CacheDType))
        problem = Problem(
            {
                **sizes,
                **random_dims(rng),
                "width": cache_dtype.layout(**sizes).width,
                "heads": rng.choice([16, 128, rng.randint(1, 200)]),
                "page_size": rng.choice([16, 32, 64, 128]),
            },
            {"softmax_scale": rng.uniform(0.01, 1.0), "latent_scale": 1.0},
            rng.choice(list(DType)),
            cache_dtype,
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
def test_row_blocks_are_no_more_than_the_grid_has(queries: list[int], heads: int, block_m: int) -> None:
    """The arithmetic behind the grid, from tokens and requests alone."""
    row_blocks = sum(math.ceil(count * heads / block_m) for count in queries)
    assert row_blocks <= sum(queries) * heads // block_m + len(queries)


@pytest.mark.parametrize(
    ("tokens", "requests", "longest_query", "row_blocks"),
    [
        (8, 8, 1, 16),
        (24, 8, 3, 48),
        (255, 1, 255, 510),
        # A chunk among single tokens: requests of equal size would need 16 * 510 row blocks.
        (270, 16, 255, 540 + 16),
        # A longest query that cannot be: requests of one token would not hold them all.
        (100, 2, 1, 200 + 2),
    ],
)
def test_grid(tokens: int, requests: int, longest_query: int, row_blocks: int) -> None:
    dims = {"tokens": tokens, "requests": requests, "longest_query": longest_query, "pages_per_request": 2}
    (launch,) = check_plan(LATENT_ATTENTION, replace(PROBLEM, dims={**PROBLEM.dims, **dims})).launches
    assert launch.grid == (row_blocks, 1, 1)
    assert 2 ** scalars(launch)["scale_log2e"] == pytest.approx(math.exp(0.135), rel=1e-12)

    dims["pages_per_request"] = 3
    attend, combine = check_plan(LATENT_ATTENTION, replace(PROBLEM, dims={**PROBLEM.dims, **dims})).launches
    assert attend.grid == (min(2 * row_blocks, row_blocks + 2 * 132), 1, 1)
    assert combine.grid[0] == min(row_blocks, 2 * 132)
    assert combine.grid[0] * combine.grid[1] <= 4 * 132 + 2 * 132


@pytest.mark.parametrize(
    ("heads", "longest_query", "block_m"),
    [(16, 1, 16), (16, 2, 32), (16, 4, 64), (20, 1, 32), (5, 3, 16), (128, 1, 64)],
)
def test_row_blocks_follow_the_rows_of_a_request(heads: int, longest_query: int, block_m: int) -> None:
    dims = {**PROBLEM.dims, "heads": heads, "longest_query": longest_query, "tokens": 8 * longest_query}
    launch = LATENT_ATTENTION.plan(replace(PROBLEM, dims=dims)).launches[0]
    assert dict(launch.variant.constants)["BLOCK_M"] == block_m


def plan_of(queries: list[int], lengths: list[int], heads: int, target: str = "sm_90") -> LaunchPlan:
    """The plan at DeepSeek's sizes of requests with so many new tokens, whose page table is as wide as the longest."""
    dims = {
        "heads": heads,
        "tokens": sum(queries),
        "requests": len(queries),
        "longest_query": max(queries),
        "pages_per_request": max(1, math.ceil(max(lengths) / 64)),
    }
    return LATENT_ATTENTION.plan(replace(PROBLEM, dims={**PROBLEM.dims, **dims}, target=TARGETS[target]))


def equal_splits(pieces: list[Piece], lengths: list[int], block_n: int, slots: int) -> list[int]:
    """Tiles of each piece if all row blocks were cut into the same number, the best for the page table's width.

    A piece costs two tiles for its partial results, as the search for the number assumed.
    """
    row_blocks = len({(piece.request, piece.row_block) for piece in pieces})
    longest = max(math.ceil(length / block_n) for length in lengths)

    def cost(splits: int) -> int:
        return math.ceil(row_blocks * splits / slots) * (math.ceil(longest / splits) + 2 * (splits > 1))

    splits = min(range(1, max(1, min(64, longest // 2, 4 * slots // row_blocks)) + 1), key=cost)
    durations = []
    for part in range(splits):
        for request, _ in sorted({(piece.request, piece.row_block) for piece in pieces}):
            tiles = math.ceil(lengths[request] / block_n)
            size = math.ceil(tiles / splits)
            durations.append(max(0, min(size, tiles - part * size)) + 2 * (splits > 1))
    return durations


def durations_of(pieces: list[Piece]) -> list[int]:
    """Tiles of each piece, and two more where it has partial results."""
    return [len(piece.tiles) + 2 * (piece.slot is not None) for piece in pieces]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("seed", range(30))
def test_no_batch_takes_longer_than_the_bound(seed: int, heads: int) -> None:
    """Lengths from 1 to 128K in batches of up to 256: pieces cover every key once, grid and workspace hold them, and
    list scheduling ends within half as long again as the ideal and two tiles."""
    rng = random.Random(seed)  # noqa: S311
    requests = rng.choice([1, 2, 7, 16, 33, 70, 128, 256])
    draw = rng.choice(
        [
            lambda: int(2 ** rng.uniform(0, 17)),
            lambda: rng.randint(1, 131072),
            lambda: 131072 if rng.random() < 0.05 else rng.randint(1, 2048),
            lambda: 8192,
        ]
    )
    lengths = [draw() for _ in range(requests)]
    queries = [rng.choice([1, 1, 1, 2]) for _ in range(requests)]
    target = rng.choice(["sm_90", "sm_89"])
    plan = plan_of(queries, lengths, heads, target)
    if len(plan.launches) == 1:
        assert max(lengths) <= 128
        return
    launch = plan.launches[0]
    constants, slots = dict(launch.variant.constants), scalar(plan, "target_pieces") // 2
    assert slots in (TARGETS[target].multiprocessors, 2 * TARGETS[target].multiprocessors)
    pieces = cut(
        queries,
        lengths,
        heads=heads,
        block_m=constants["BLOCK_M"],
        block_n=constants["BLOCK_N"],
        target_pieces=2 * slots,
    )
    covered: dict[tuple[int, int], list[int]] = {}
    for piece in pieces:
        covered.setdefault((piece.request, piece.row_block), []).extend(piece.tiles)
    for request, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        for row_block in range(math.ceil(count * heads / constants["BLOCK_M"])):
            assert covered.pop((request, row_block)) == list(range(math.ceil(length / constants["BLOCK_N"])))
    assert not covered

    in_slots = [piece.slot for piece in pieces if piece.slot is not None]
    assert in_slots == list(range(len(in_slots)))
    assert len(pieces) <= launch.grid[0]
    assert len(in_slots) <= scalar(plan, "slots") <= 4 * slots
    split_blocks = {(piece.request, piece.row_block) for piece in pieces if piece.slot is not None}
    assert len(split_blocks) <= plan.launches[1].grid[0]

    total = sum(len(piece.tiles) for piece in pieces)
    assert makespan((len(piece.tiles) for piece in pieces), slots) <= 1.5 * total / slots + 2
    assert makespan(durations_of(pieces), slots) <= 1.5 * total / slots + 2 + 2 * math.ceil(2 + len(pieces) / slots)


@pytest.mark.parametrize(
    ("lengths", "heads", "ideal", "found", "equal"),
    [
        ([131072] + [1024] * 15, 128, 35, 40, 514),
        ([1024] * 15 + [131072], 128, 35, 40, 514),
        ([8192] * 16, 128, 32, 36, 34),
        ([8192] * 70, 128, 136, 198, 178),
    ],
)
def test_what_the_pieces_gain(lengths: list[int], heads: int, ideal: int, found: int, equal: int) -> None:
    """Tiles until the last piece ends on 132 slots, beside cutting all requests into the same number of pieces."""
    plan = plan_of([1] * len(lengths), lengths, heads)
    slots = scalar(plan, "target_pieces") // 2
    assert slots == 132
    pieces = cut([1] * len(lengths), lengths, heads=heads, block_m=64, block_n=64, target_pieces=2 * slots)
    assert math.ceil(sum(len(piece.tiles) for piece in pieces) / slots) == ideal
    assert makespan(durations_of(pieces), slots) == found
    assert makespan(equal_splits(pieces, lengths, 64, slots), slots) == equal


def test_split_launches_share_the_partial_results() -> None:
    plan = check_plan(LATENT_ATTENTION, PROBLEM)
    attend, combine = plan.launches
    assert (attend.variant.kernel, combine.variant.kernel) == ("attend", "combine")
    assert attend.grid == (16 + 264, 1, 1)
    assert combine.grid == (16, 33, 1)
    assert scalars(combine)["slots"] == scalars(attend)["slots"] == 280
    assert scalars(combine)["target_pieces"] == scalars(attend)["target_pieces"] == 264
    assert scalars(combine)["block_m"] == dict(attend.variant.constants)["BLOCK_M"]
    for name in ("BLOCK_N", "MIN_TILES", "HEADS", "PAGE_SIZE"):
        assert dict(combine.variant.constants)[name] == dict(attend.variant.constants)[name]
    partials = [argument for argument in attend.arguments if isinstance(argument, WorkspaceArgument)]
    assert tuple(partials) == combine.arguments[:3]
    rows = 280 * 64
    assert [argument.elements for argument in partials] == [rows * 512, rows, rows]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("model_dtype", DType)
@pytest.mark.parametrize("cache_dtype", CacheDType)
@pytest.mark.parametrize(("kv_lora_rank", "rope_dim"), [(512, 64), (256, 64), (448, 32), (96, 32), (16, 16)])
def test_the_default_tile_passes_the_check_and_has_a_plan(  # type: ignore[no-untyped-def]
    target, model_dtype, cache_dtype, kv_lora_rank, rope_dim
) -> None:
    sizes = {"kv_lora_rank": kv_lora_rank, "rope_dim": rope_dim}
    layout = cache_dtype.layout(kv_lora_rank, rope_dim)
    tile = default_tile(**sizes, model_dtype=model_dtype, cache_dtype=cache_dtype, target=target)
    check_tile(*tile, layout.row_bytes, target)
    problem = replace(
        PROBLEM,
        dims={**PROBLEM.dims, **sizes, "width": layout.width},
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
            kv_lora_rank=512, rope_dim=64, model_dtype=dtype, cache_dtype=as_cache_dtype(dtype), target=TARGETS[target]
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


@pytest.mark.parametrize("model_dtype", DType)
@pytest.mark.parametrize("cache_dtype", CacheDType)
@pytest.mark.parametrize("tile", [(16, 1), (16, 4), (32, 1), (64, 2), (128, 1)])
def test_tile_and_stages_are_those_asked_for_or_refused(
    model_dtype: DType, cache_dtype: CacheDType, tile: tuple[int, int]
) -> None:
    for target in TARGETS.values():
        width = cache_dtype.layout(512, 64).width
        problem = replace(
            PROBLEM,
            dims={**PROBLEM.dims, "width": width},
            model_dtype=model_dtype,
            cache_dtype=cache_dtype,
            target=target,
            tile_s=tile[0],
            num_stages=tile[1],
        )
        refused = None
        try:
            variants = LATENT_ATTENTION.variants(problem)
        except UserError as error:
            refused = str(error)
        if refused is not None:
            assert re.search(rf"tile_s {tile[0]} with num_stages {tile[1]} takes \d+ bytes of shared", refused)
            continue
        for variant in variants[:-1]:
            assert (dict(variant.constants)["BLOCK_N"], variant.num_stages) == tile
        assert dict(variants[-1].constants)["BLOCK_N"] == tile[0]


def test_the_tile_of_the_issued_config_runs_on_sm_90() -> None:
    """64 x 3 at 512 + 64 in bf16: 216 KiB by the rule users see; with 64 rows it would not fit."""
    check_tile(64, 3, 1152, TARGETS["sm_90"])
    found = {dict(v.constants).get("BLOCK_M") for v in LATENT_ATTENTION.variants(replace(PROBLEM, num_stages=3))}
    assert found == {16, 32, None}


def forms(target: str, tile: tuple[int, int], cache_dtype: CacheDType = CacheDType.BF16, **changes: DType) -> set[str]:
    """Row blocks of a plan's variants, marked where keys are the products' rows."""
    problem = replace(
        PROBLEM,
        dims={**PROBLEM.dims, "width": cache_dtype.layout(512, 64).width},
        cache_dtype=cache_dtype,
        target=TARGETS[target],
        tile_s=tile[0],
        num_stages=tile[1],
        **changes,
    )
    constants = [dict(variant.constants) for variant in LATENT_ATTENTION.variants(problem)[:-1]]
    return {f"{values['BLOCK_M']}{' keys' if values['KEYS_AS_M'] else ''}" for values in constants}


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_keys_fill_the_warpgroups_rows_where_a_row_block_does_not(target: str) -> None:
    assert forms(target, (64, 2)) == {"16 keys", "32 keys", "64"}
    # No 64 keys; no room for a third tile beside two in flight.
    assert forms(target, (32, 2)) == {"16", "32", "64"}
    assert forms(target, (64, 3)) == {"16", "32"}
    assert forms(target, (16, 2), model_dtype=DType.FLOAT32) == {"4", "8", "16"}
    for cache_dtype in (CacheDType.FP8, CacheDType.NVFP4):
        assert forms(target, (64, 2), cache_dtype) == {"16", "32"}


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_120", "sm_121"])
def test_other_targets_have_queries_as_rows(target: str) -> None:
    assert forms(target, (64, 2)) <= {"16", "32", "64"}
    assert forms(target, (32, 2), CacheDType.FP8) == {"16", "32"}
    assert "16" in forms(target, (32, 2), CacheDType.NVFP4)


@pytest.mark.parametrize(
    ("heads", "rows"), [(8, 16), (12, 16), (16, 16), (20, 32), (24, 32), (32, 32), (40, 64), (96, 64), (128, 64)]
)
def test_forms_by_head_count(heads: int, rows: int) -> None:
    """At decode on sm_90; 128 heads are two row blocks of 64."""
    launch = LATENT_ATTENTION.plan(replace(PROBLEM, dims={**PROBLEM.dims, "heads": heads})).launches[0]
    constants = dict(launch.variant.constants)
    assert (constants["BLOCK_M"], constants["KEYS_AS_M"]) == (rows, rows < 64)


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
            cache_dtype=CacheDType.BF16,
            target=TARGETS["sm_89"],
        )


@pytest.mark.parametrize("softmax_scale", [0.0, -0.1, math.inf, math.nan])
def test_the_scale_must_be_positive(softmax_scale: float) -> None:
    with pytest.raises(ValueError, match="found softmax_scale"):
        LATENT_ATTENTION.plan(replace(PROBLEM, attributes={"softmax_scale": softmax_scale, "latent_scale": 1.0}))


def test_rows_must_hold_latent_and_rotary_key() -> None:
    with pytest.raises(ValueError, match="found rows of width 577"):
        LATENT_ATTENTION.variants(replace(PROBLEM, dims={**PROBLEM.dims, "width": 577}))
