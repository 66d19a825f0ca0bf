from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.checks import (
    DTYPES,
    LOG_SUM_EXP_TOLERANCE,
    TOLERANCE,
    Guarded,
    as_cache_dtype,
    relative_error,
    torch_dtype,
)
from tests.ops.latent_attention.pieces import parts_of, pieces_of
from tests.ops.latent_attention.test_plan import PROBLEM
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.interpreter import run_op, run_plan
from trtllm_mla.ops.latent_attention import LATENT_ATTENTION
from trtllm_mla.ops.latent_attention.plan import default_tile, shared_memory_bytes
from trtllm_mla.ops.plan import LaunchPlan, WorkspaceArgument
from trtllm_mla.targets import TARGETS, Target

Inputs = dict[str, torch.Tensor]
NAN = float("nan")
BEYOND_EVERY_POOL = 2147480000


def make_inputs(
    requests: list[tuple[int, int]],
    dtype: DType,
    *,
    cache_dtype: DType | None = None,
    heads: int = 5,
    kv_lora_rank: int = 96,
    rope_dim: int = 32,
    page_size: int = 16,
    spare_pages: int = 2,
    padding: int = BEYOND_EVERY_POOL,
) -> Inputs:
    """Random inputs for requests of (new tokens, cached tokens).

    Pages are dealt in random order. Every slot without a token, and every page of no request, holds NaN; entries of
    the page table behind a request's last page hold ``padding``.
    """
    queries, lengths = [pair[0] for pair in requests], [pair[1] for pair in requests]
    used = [-(-length // page_size) for length in lengths]
    pages = torch.randperm(sum(used) + spare_pages).tolist()
    cache = torch.full((len(pages), page_size, kv_lora_rank + rope_dim), NAN).to(torch_dtype(cache_dtype or dtype))
    block_offsets = torch.full((len(requests), max(used, default=0) + 1), padding, dtype=torch.int32)
    for request, length in enumerate(lengths):
        for index in range(used[request]):
            page = pages.pop()
            block_offsets[request, index] = page
            rows = min(page_size, length - index * page_size)
            cache[page, :rows] = torch.randn(rows, kv_lora_rank + rope_dim).to(cache.dtype)
    tokens = sum(queries)
    return {
        "q_latent": torch.randn(tokens, heads, kv_lora_rank).to(torch_dtype(dtype)),
        "q_pe": torch.randn(tokens, heads, rope_dim).to(torch_dtype(dtype)),
        "latent_cache": cache,
        "block_offsets": block_offsets,
        "sequence_length": torch.tensor(lengths, dtype=torch.int32),
        "query_offsets": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        # Only its shape counts for the plan.
        "query_index": torch.full((len(requests), max(queries, default=0)), -1, dtype=torch.int32),
    }


def device(multiprocessors: int, shared_memory_bytes: int = TARGETS["sm_90"].shared_memory_bytes) -> Target:
    """A device whose size sets how often keys are split."""
    return Target("sm_90", shared_memory_bytes, multiprocessors, "a test")


ONE_MULTIPROCESSOR = device(1)
MANY_MULTIPROCESSORS = device(40)


def attend(
    inputs: Inputs,
    dtype: DType,
    *,
    cache_dtype: DType | None = None,
    softmax_scale: float = 0.11,
    target: Target = MANY_MULTIPROCESSORS,
    tile: tuple[int, int] = (16, 2),
) -> tuple[torch.Tensor, torch.Tensor]:
    output, log_sum_exp = run_op(
        LATENT_ATTENTION,
        list(inputs.values()),
        {"softmax_scale": softmax_scale, "latent_scale": 1.0},
        model_dtype=dtype,
        cache_dtype=as_cache_dtype(cache_dtype or dtype),
        target=target,
        tile_s=tile[0],
        num_stages=tile[1],
    )
    return output, log_sum_exp


def plan_for(
    inputs: Inputs,
    dtype: DType,
    *,
    softmax_scale: float = 0.11,
    target: Target = MANY_MULTIPROCESSORS,
    tile: tuple[int, int] = (16, 2),
) -> LaunchPlan:
    """The plan that ``attend`` runs."""
    dims = LATENT_ATTENTION.resolve_dims({name: tuple(tensor.shape) for name, tensor in inputs.items()})
    attributes = {"softmax_scale": softmax_scale, "latent_scale": 1.0}
    return LATENT_ATTENTION.plan(Problem(dims, attributes, dtype, as_cache_dtype(dtype), target, *tile))


def can_split(plan: LaunchPlan) -> bool:
    """Whether a plan has a workspace for pieces, and a launch that merges them."""
    return len(plan.launches) == 2


def assert_close(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], dtype: DType
) -> None:
    """Compares with float64: whole output, each row's log-sum-exp, and which rows see no key."""
    output, log_sum_exp = found
    expected_output, expected_log_sum_exp = expected
    blind = expected_log_sum_exp.isneginf()
    assert torch.equal(log_sum_exp.isneginf(), blind)
    assert (output[blind] == 0).all()
    assert not output.isnan().any()
    if not blind.all():
        assert relative_error(output, expected_output) <= TOLERANCE[dtype]
        difference = (log_sum_exp.double() - expected_log_sum_exp)[~blind]
        assert difference.abs().max() <= LOG_SUM_EXP_TOLERANCE


def check(inputs: Inputs, dtype: DType, *, softmax_scale: float = 0.11, **settings) -> None:  # type: ignore[no-untyped-def]
    expected = reference.latent_attention(**inputs, softmax_scale=softmax_scale)
    assert_close(attend(inputs, dtype, softmax_scale=softmax_scale, **settings), expected, dtype)


# A single token, an empty request, a padding token, page edges, several tokens, fewer keys than tokens.
MIXED = [(1, 1), (0, 0), (1, 0), (1, 15), (1, 16), (1, 17), (3, 64), (7, 100), (4, 2), (0, 40), (1, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [ONE_MULTIPROCESSOR, device(6), MANY_MULTIPROCESSORS], ids=["1", "6", "40"])
def test_mixed_requests_against_float64(dtype: DType, target: Target) -> None:
    check(make_inputs(MIXED, dtype), dtype, target=target)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("tile", [(16, 2), (32, 3), (64, 1), (128, 2)])
def test_page_sizes_and_tiles(page_size: int, tile: tuple[int, int]) -> None:
    """Tiles smaller than a page, as large, and across several pages; one key more or less than full pages."""
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1]
    inputs = make_inputs([(1, length) for length in lengths], DType.FLOAT16, page_size=page_size)
    check(inputs, DType.FLOAT16, tile=tile)
    check(inputs, DType.FLOAT16, tile=tile, target=ONE_MULTIPROCESSOR)


@pytest.mark.parametrize(
    ("heads", "kv_lora_rank", "rope_dim"), [(5, 96, 32), (6, 448, 32), (20, 64, 64), (1, 32, 16), (17, 40, 10)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_are_no_powers_of_two(dtype: DType, heads: int, kv_lora_rank: int, rope_dim: int) -> None:
    requests = [(1, 40), (3, 50), (2, 2)]
    inputs = make_inputs(requests, dtype, heads=heads, kv_lora_rank=kv_lora_rank, rope_dim=rope_dim)
    check(inputs, dtype)
    check(inputs, dtype, target=ONE_MULTIPROCESSOR)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deepseek_sizes_and_scale(dtype: DType) -> None:
    """192^-0.5 times mscale squared, as in DeepSeek-V3: scores of a standard deviation of 3."""
    inputs = make_inputs([(1, 70)], dtype, heads=128, kv_lora_rank=512, rope_dim=64, page_size=64)
    tile = (16, 2) if dtype is DType.FLOAT32 else (64, 2)
    check(inputs, dtype, softmax_scale=0.135234, tile=tile, target=TARGETS["sm_90"])


def test_fp32_sums_keep_their_digits_over_many_keys() -> None:
    """A fixed draw: one in some thirty has a score so large that its rounding alone exceeds the bound."""
    torch.manual_seed(0)
    inputs = make_inputs([(1, 500)], DType.FLOAT32, heads=16, kv_lora_rank=512, rope_dim=64, page_size=64)
    for target in (ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS):
        check(inputs, DType.FLOAT32, softmax_scale=0.135234, target=target)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (DType.FLOAT32, DType.BFLOAT16),
        (DType.FLOAT32, DType.FLOAT16),
        (DType.FLOAT16, DType.BFLOAT16),
        (DType.BFLOAT16, DType.FLOAT16),
        (DType.BFLOAT16, DType.FLOAT32),
    ],
)
def test_a_cache_of_another_type_is_converted(dtype: DType, cache_dtype: DType) -> None:
    inputs = make_inputs([(1, 60), (2, 33)], dtype, cache_dtype=cache_dtype)
    converted = inputs | {"latent_cache": inputs["latent_cache"].to(torch_dtype(dtype))}
    expected = reference.latent_attention(**converted, softmax_scale=0.11)
    assert_close(attend(inputs, dtype, cache_dtype=cache_dtype), expected, dtype)


@pytest.mark.parametrize("target", [ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS], ids=["1", "40"])
def test_chunks_of_many_tokens(target: Target) -> None:
    """Several row blocks a request, beside single tokens, so that row blocks are found by search."""
    requests = [(1, 30), (70, 90), (1, 1), (0, 0), (45, 45), (2, 50)]
    inputs = make_inputs(requests, DType.BFLOAT16, heads=3, kv_lora_rank=32, rope_dim=16)
    check(inputs, DType.BFLOAT16, target=target)


def test_every_request_finds_its_rows() -> None:
    """Many requests of random lengths, so that the search over the offsets meets every kind of neighbour."""
    queries, extra = torch.randint(0, 12, (40,)).tolist(), torch.randint(0, 9, (40,)).tolist()
    requests = [(count, count + more) for count, more in zip(queries, extra, strict=True)]
    inputs = make_inputs(requests, DType.FLOAT32, heads=3, kv_lora_rank=16, rope_dim=16)
    check(inputs, DType.FLOAT32, target=ONE_MULTIPROCESSOR)


def test_pieces_are_those_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds each piece's largest score and sum where the rule says, and nothing in other slots."""
    requests = [(1, 500), (1, 1), (40, 260), (2, 17), (0, 90), (1, 0), (1, 250)]
    inputs = make_inputs(requests, DType.FLOAT32, heads=3, kv_lora_rank=32, rope_dim=16)
    plan = plan_for(inputs, DType.FLOAT32, target=device(6))
    workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8)
    outputs = {"output": torch.empty_like(inputs["q_latent"]), "log_sum_exp": torch.empty(46, 3)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "full", lambda *_, **__: workspace)
        run_plan(plan, inputs | outputs)
    output, largest, total = (
        workspace[argument.offset :][: argument.elements * 4].view(torch.float32)
        for argument in plan.launches[0].arguments
        if isinstance(argument, WorkspaceArgument)
    )
    block_m = dict(plan.launches[0].variant.constants)["BLOCK_M"]
    largest, total, output = largest.view(-1, block_m), total.view(-1, block_m), output.view(-1, block_m, 32)

    used = 0
    for piece in pieces_of(plan, requests):
        if piece.slot is None:
            continue
        used += 1
        count, length = requests[piece.request]
        table = inputs["block_offsets"][piece.request]
        keys = [inputs["latent_cache"][table[key // 16], key % 16].double() for key in range(length)]
        for row in range(block_m):
            token, head = divmod(piece.row_block * block_m + row, 3)
            if token >= count:
                assert largest[piece.slot, row].isnan()
                continue
            at = inputs["query_offsets"][piece.request] + token
            query = torch.cat([inputs["q_latent"][at, head], inputs["q_pe"][at, head]]).double()
            seen = keys[piece.tiles.start * 16 : min(piece.tiles.stop * 16, length - count + token + 1)]
            if not seen:
                assert largest[piece.slot, row] == -torch.inf
                assert output[piece.slot, row].isnan().all()
                continue
            scores = torch.stack(seen) @ query
            weights = torch.exp((scores - scores.max()) * 0.11)
            assert abs(largest[piece.slot, row] - scores.max()) <= 1e-5
            assert total[piece.slot, row] == pytest.approx(float(weights.sum()), rel=1e-5)
            expected = weights @ torch.stack(seen)[:, :32]
            assert (output[piece.slot, row] - expected).abs().max() <= 1e-5 * weights.sum()
    assert used > 12
    assert largest[used:].isnan().all()
    assert_close(
        (outputs["output"], outputs["log_sum_exp"]),
        reference.latent_attention(**inputs, softmax_scale=0.11),
        DType.FLOAT32,
    )


def test_pieces_of_keys_that_a_row_block_does_not_see() -> None:
    """Row blocks of early tokens have pieces without a visible key, and must not show it."""
    requests = [(60, 300), (1, 1), (1, 0), (70, 70), (1, 250)]
    inputs = make_inputs(requests, DType.FLOAT32, heads=2, kv_lora_rank=32, rope_dim=16)
    assert parts_of(plan_for(inputs, DType.FLOAT32), requests) == [7, 1, 1, 2, 6]
    check(inputs, DType.FLOAT32)


@pytest.mark.parametrize("multiprocessors", [3, 40])
def test_more_requests_than_a_program_looks_at_together(multiprocessors: int) -> None:
    """Split and whole requests, and some without rows or keys, on both sides of the 128th."""
    generator = torch.Generator().manual_seed(multiprocessors)
    lengths = torch.randint(0, 60, (140,), generator=generator).tolist()
    queries = torch.randint(0, 3, (140,), generator=generator).tolist()
    for request in (0, 127, 128, 139):
        queries[request], lengths[request] = 1, 200
    requests = list(zip(queries, lengths, strict=True))
    inputs = make_inputs(requests, DType.FLOAT32, heads=1, kv_lora_rank=16, rope_dim=16)
    parts = parts_of(plan_for(inputs, DType.FLOAT32, target=device(multiprocessors)), requests)
    assert parts[127] == parts[128] == parts[139]
    assert (parts[127] > 1) == (multiprocessors > 3)
    check(inputs, DType.FLOAT32, target=device(multiprocessors))


def test_many_pieces_of_one_request() -> None:
    requests = [(1, 2400)]
    inputs = make_inputs(requests, DType.FLOAT32, heads=2, kv_lora_rank=200, rope_dim=16)
    assert parts_of(plan_for(inputs, DType.FLOAT32), requests) == [75]
    check(inputs, DType.FLOAT32)


def test_a_single_key_gives_its_latent_and_its_score() -> None:
    inputs = make_inputs([(1, 1), (1, 1)], DType.FLOAT32)
    output, log_sum_exp = attend(inputs, DType.FLOAT32)
    for request in range(2):
        row = inputs["latent_cache"][inputs["block_offsets"][request, 0], 0].double()
        assert torch.equal(output[request], row[:96].float().expand(5, 96))
        query = torch.cat([inputs["q_latent"][request], inputs["q_pe"][request]], dim=-1).double()
        assert (log_sum_exp[request] - query @ row * 0.11).abs().max() <= LOG_SUM_EXP_TOLERANCE


@pytest.mark.parametrize(("columns", "is_split"), [(1, False), (40, True)], ids=["whole", "split"])
def test_requests_without_keys_give_zeros(columns: int, is_split: bool) -> None:
    inputs = make_inputs([(1, 0), (2, 0), (0, 0)], DType.BFLOAT16)
    inputs["block_offsets"] = torch.full((3, columns), BEYOND_EVERY_POOL, dtype=torch.int32)
    assert can_split(plan_for(inputs, DType.BFLOAT16)) == is_split
    output, log_sum_exp = attend(inputs, DType.BFLOAT16)
    assert torch.equal(output, torch.zeros_like(output))
    assert log_sum_exp.isneginf().all()


@pytest.mark.parametrize("requests", [[], [(0, 0)], [(0, 30), (0, 0)]])
def test_a_step_without_tokens(requests: list[tuple[int, int]]) -> None:
    output, log_sum_exp = attend(make_inputs(requests, DType.BFLOAT16), DType.BFLOAT16)
    assert (output.shape, log_sum_exp.shape) == ((0, 5, 96), (0, 5))


@pytest.mark.parametrize("padding", [BEYOND_EVERY_POOL, -1, -(2**31), 0])
def test_padding_of_the_page_table_is_never_used(padding: int) -> None:
    """Page 0 is as good as any: behind the last page even a valid number must not be looked up."""
    check(make_inputs([(1, 20), (2, 49)], DType.FLOAT16, padding=padding), DType.FLOAT16, tile=(64, 2))


@pytest.mark.parametrize("wild", [-1, -(2**31), 9, BEYOND_EVERY_POOL])
@pytest.mark.parametrize("tile", [(16, 2), (64, 2)])
def test_pages_outside_the_pool_contribute_no_key(wild: int, tile: tuple[int, int]) -> None:
    """The pool lies between NaN, where pages -1 and 9 of this pool of 9 would be."""
    inputs = make_inputs([(1, 90)], DType.FLOAT32, spare_pages=3)
    assert inputs["latent_cache"].shape[0] == 9
    expected_output = torch.empty(1, 5, 96, dtype=torch.float64)
    expected_log_sum_exp = torch.empty(1, 5, dtype=torch.float64)
    kept = [inputs["latent_cache"][page] for page in inputs["block_offsets"][0, :6].tolist()]
    keys = torch.cat([*kept[:1], *kept[2:]])[: 90 - 16]
    for head in range(5):
        query = torch.cat([inputs["q_latent"][0, head], inputs["q_pe"][0, head]])
        expected = reference.attend(query, keys, keys[:, :96], 0.11)
        expected_output[0, head], expected_log_sum_exp[0, head] = expected
    inputs["block_offsets"][0, 1] = wild
    inputs["latent_cache"] = Guarded(inputs["latent_cache"]).tensor
    for target in (ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS):
        found = attend(inputs, DType.FLOAT32, target=target, tile=tile)
        assert_close(found, (expected_output, expected_log_sum_exp), DType.FLOAT32)


@pytest.mark.parametrize("tile", [(16, 2), (64, 2)])
def test_a_length_beyond_the_page_table_ends_with_it(tile: tuple[int, int]) -> None:
    """Such a request is the caller's error; the keys that exist are used. Behind the table lie good page numbers."""
    inputs = make_inputs([(1, 32)], DType.FLOAT16)
    table = inputs["block_offsets"][0, :2]
    inputs["block_offsets"] = table.repeat(8)[:2].view(1, 2)
    expected = reference.latent_attention(**inputs, softmax_scale=0.11)
    inputs["sequence_length"][0] = 2**31 - 1
    assert_close(attend(inputs, DType.FLOAT16, tile=tile), expected, DType.FLOAT16)


@pytest.mark.parametrize("seed", range(6))
def test_arbitrary_integers_touch_nothing_outside(seed: int) -> None:
    """A builder may time kernels on arbitrary integers. All that is written lies in the outputs, and what is read in
    the pool and the queries: around them lies NaN."""
    inputs = make_inputs([(9, 30), (1, 12), (20, 25)], DType.FLOAT32, heads=2, spare_pages=0)
    inputs["latent_cache"] = torch.randn(inputs["latent_cache"].shape)
    bound = 2**31 if seed % 2 else 40
    for name in ("query_offsets", "sequence_length", "block_offsets"):
        inputs[name] = torch.randint(-bound, bound, inputs[name].shape, dtype=torch.int64).int()
    for name in ("q_latent", "q_pe", "latent_cache"):
        inputs[name] = Guarded(inputs[name]).tensor
    output = Guarded(torch.full((30, 2, 96), 7.0), margin=1 << 16)
    log_sum_exp = Guarded(torch.full((30, 2), 7.0), margin=1 << 16)
    for target in (ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS):
        plan = plan_for(inputs, DType.FLOAT32, target=target)
        assert can_split(plan)
        run_plan(plan, inputs | {"output": output.tensor, "log_sum_exp": log_sum_exp.tensor})
        output.assert_margins_untouched()
        log_sum_exp.assert_margins_untouched()
        assert not output.tensor.isnan().any()
        assert not log_sum_exp.tensor.isnan().any()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_requests_do_not_leak(dtype: DType) -> None:
    """NaN in all queries and keys of the neighbours changes no bit of a request's result."""
    inputs = make_inputs([(2, 25), (3, 50), (1, 45)], dtype)
    expected = attend(inputs, dtype)
    poisoned = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("q_latent", "q_pe"):
        poisoned[name][:2] = poisoned[name][5:] = NAN
    own = set(inputs["block_offsets"][1, :4].tolist())
    for page in set(range(len(inputs["latent_cache"]))) - own:
        poisoned["latent_cache"][page] = NAN
    for found, before in zip(attend(poisoned, dtype), expected, strict=True):
        assert torch.equal(found[2:5], before[2:5])


@pytest.mark.parametrize("tile", [(16, 2), (128, 2)], ids=["split", "whole"])
def test_a_request_alone_gives_the_same_bits_as_in_a_batch(tile: tuple[int, int]) -> None:
    """Promised where row block and pieces are the same."""
    inputs = make_inputs([(2, 40), (2, 77), (2, 90)], DType.BFLOAT16)
    alone = inputs | {
        "q_latent": inputs["q_latent"][2:4].contiguous(),
        "q_pe": inputs["q_pe"][2:4].contiguous(),
        "block_offsets": inputs["block_offsets"][1:2].contiguous(),
        "sequence_length": inputs["sequence_length"][1:2].contiguous(),
        "query_offsets": torch.tensor([0, 2], dtype=torch.int32),
        "query_index": torch.zeros(1, 2, dtype=torch.int32),
    }
    plans = [plan_for(step, DType.BFLOAT16, tile=tile) for step in (inputs, alone)]
    assert plans[0].launches[0].variant == plans[1].launches[0].variant
    parts = [parts_of(plans[0], [(2, 40), (2, 77), (2, 90)])[1], parts_of(plans[1], [(2, 77)])[0]]
    assert parts == ([3, 3] if tile[0] == 16 else [1, 1])
    batch, single = attend(inputs, DType.BFLOAT16, tile=tile), attend(alone, DType.BFLOAT16, tile=tile)
    assert torch.equal(batch[0][2:4], single[0])
    assert torch.equal(batch[1][2:4], single[1])


def test_later_keys_are_not_seen() -> None:
    """Changing a key changes no earlier query, and every later one."""
    inputs = make_inputs([(20, 40)], DType.FLOAT32)
    changed = inputs | {"latent_cache": inputs["latent_cache"].clone()}
    changed["latent_cache"][inputs["block_offsets"][0, 1], 12] += 1.0
    before, after = attend(inputs, DType.FLOAT32)[0], attend(changed, DType.FLOAT32)[0]
    assert torch.equal(before[:8], after[:8])
    assert (before[8:] != after[8:]).flatten(1).any(dim=1).all()


def test_large_scores_do_not_overflow() -> None:
    """Scores of 100, which fp32 holds to 4e-6: the log-sum-exp can be no closer than a few of those steps."""
    inputs = make_inputs([(2, 60)], DType.FLOAT16)
    for target in (ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS):
        output, log_sum_exp = attend(inputs, DType.FLOAT16, softmax_scale=3.0, target=target)
        expected_output, expected_log_sum_exp = reference.latent_attention(**inputs, softmax_scale=3.0)
        assert relative_error(output, expected_output) <= TOLERANCE[DType.FLOAT16]
        assert ((log_sum_exp - expected_log_sum_exp).abs() <= expected_log_sum_exp.abs() * 2**-21).all()


@pytest.mark.parametrize("tile", [(16, 2), (64, 2)], ids=["within_a_page", "across_pages"])
def test_pools_beyond_32_bit_offsets(tile: tuple[int, int]) -> None:
    """Slots whose element offset exceeds 2^31. The pool's untouched pages take no memory: they are never committed."""
    page_size, kv_lora_rank, rope_dim = 16, 96, 32
    inputs = make_inputs([(1, 40), (1, 16)], DType.BFLOAT16, page_size=page_size, spare_pages=0)
    width = kv_lora_rank + rope_dim
    pages = 2**31 // (page_size * width) + 100
    pool = torch.empty(pages, page_size, width, dtype=torch.bfloat16)
    small, table = inputs["latent_cache"], inputs["block_offsets"]
    moved = {page: pages - 1 - page for page in range(len(small))}
    assert min(moved.values()) * page_size * width > 2**31
    for page, far in moved.items():
        pool[far] = small[page]
    expected = reference.latent_attention(**inputs, softmax_scale=0.11)
    inputs["latent_cache"] = pool
    inputs["block_offsets"] = table.clone().apply_(lambda page: moved.get(page, page))
    assert_close(attend(inputs, DType.BFLOAT16, tile=tile), expected, DType.BFLOAT16)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int) -> None:
    """Sizes, types, tiles, devices and requests drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    dtype = DTYPES[seed % 3]
    requests = []
    for _ in range(draw(1, 6)):
        count = draw(0, 9) if draw(0, 1) else 1
        requests.append((count, draw(0, 120) if draw(0, 4) == 0 else count + draw(0, 120)))
    inputs = make_inputs(
        requests,
        dtype,
        heads=draw(1, 21),
        kv_lora_rank=draw(1, 130),
        rope_dim=draw(1, 40),
        page_size=16 << draw(0, 3),
        spare_pages=draw(0, 3),
    )
    check(inputs, dtype, target=device(draw(1, 40)), tile=(16 << draw(0, 2), draw(1, 3)), softmax_scale=0.2)


@pytest.mark.parametrize(
    ("target", "dtype", "cache_dtype", "kernels"),
    [
        ("sm_89", DType.BFLOAT16, CacheDType.BF16, {"attend", "combine"}),
        ("sm_90", DType.BFLOAT16, CacheDType.BF16, {"attend", "combine"}),
        ("sm_89", DType.FLOAT32, CacheDType.FP32, {"attend"}),
        ("sm_80", DType.BFLOAT16, CacheDType.FP8, {"attend"}),
        ("sm_90", DType.BFLOAT16, CacheDType.FP8, {"attend"}),
        ("sm_89", DType.BFLOAT16, CacheDType.NVFP4, {"attend"}),
        ("sm_90", DType.BFLOAT16, CacheDType.NVFP4, {"attend"}),
    ],
)
@pytest.mark.slow
def test_compiles_ahead_of_time_within_the_budget(
    target: str, dtype: DType, cache_dtype: CacheDType, kernels: set[str], tmp_path: Path
) -> None:
    """Some seconds for each kernel: with the default tile no registers are spilled, shared memory is within the bound
    that plans go by, loads are 16 bytes wide, and 64 rows on sm_90, of queries or keys, use the warpgroup's MMA."""
    device = TARGETS[target]
    tile_s, num_stages = default_tile(
        kv_lora_rank=512, rope_dim=64, model_dtype=dtype, cache_dtype=cache_dtype, target=device
    )
    problem = replace(
        PROBLEM,
        dims={**PROBLEM.dims, "width": cache_dtype.layout(512, 64).width},
        model_dtype=dtype,
        cache_dtype=cache_dtype,
        target=device,
        tile_s=tile_s,
        num_stages=num_stages,
    )
    for variant in LATENT_ATTENTION.variants(problem):
        if variant.kernel not in kernels:
            continue
        compiled = compile_variant(variant, device, tmp_path)
        assert compiled.stack_bytes == 0, variant
        assert compiled.wide_accesses >= 8, variant
        block_m = dict(variant.constants).get("BLOCK_M")
        if block_m is not None:
            sizes = {"kv_lora_rank": 512, "rope_dim": 64, "model_dtype": dtype, "cache_dtype": problem.cache_dtype}
            bound = shared_memory_bytes(block_m, tile_s, num_stages, **sizes, target=device)
            assert 0.75 * bound <= compiled.shared_memory_bytes <= bound <= device.shared_memory_bytes
            is_warpgroup = target == "sm_90" and not cache_dtype.is_quantized
            assert ("wgmma.mma_async" in compiled.ptx) == is_warpgroup
            assert dict(variant.constants)["KEYS_AS_M"] == (is_warpgroup and block_m < 64)
