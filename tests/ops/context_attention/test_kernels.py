from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.checks import DTYPES, LOG_SUM_EXP_TOLERANCE, TOLERANCE, Guarded, interpret, relative_error, torch_dtype
from tests.ops.context_attention.test_plan import PROBLEM
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.context_attention import CONTEXT_ATTENTION
from trtllm_mla.ops.context_attention.plan import HeadBlocks, Tile, shared_memory_bytes
from trtllm_mla.targets import TARGETS

# New tokens and cached tokens (the new ones included) of each request.
Requests = Sequence[tuple[int, int]]


def make_inputs(
    requests: Requests,
    dtype: DType,
    *,
    heads: int = 3,
    nope_dim: int = 48,
    rope_dim: int = 32,
    v_dim: int = 40,
) -> dict[str, torch.Tensor]:
    """Random inputs for packed requests."""
    queries, lengths = [pair[0] for pair in requests], [pair[1] for pair in requests]
    tokens, keys = sum(queries), sum(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch_dtype(dtype))

    return {
        "q_nope": random(tokens, heads, nope_dim),
        "q_pe": random(tokens, heads, rope_dim),
        "k_nope": random(keys, heads, nope_dim),
        "k_pe": random(keys, rope_dim),
        "v": random(keys, heads, v_dim),
        "query_offsets": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "key_offsets": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        # Only their shapes count for the plan.
        "query_index": torch.full((len(requests), max(queries, default=0)), -1, dtype=torch.int32),
        "key_index": torch.full((len(requests), max(lengths, default=0)), -1, dtype=torch.int32),
    }


def attend(
    inputs: dict[str, torch.Tensor],
    dtype: DType,
    *,
    softmax_scale: float = 0.11,
    causal: int = 1,
    target: str = "sm_90",
) -> tuple[torch.Tensor, torch.Tensor]:
    attributes = {"softmax_scale": softmax_scale, "causal": causal}
    output, log_sum_exp = interpret(CONTEXT_ATTENTION, inputs, attributes, model_dtype=dtype, target=target)
    return output, log_sum_exp


def check(
    inputs: dict[str, torch.Tensor],
    dtype: DType,
    *,
    softmax_scale: float = 0.11,
    causal: int = 1,
    target: str = "sm_90",
) -> None:
    """Compares with float64: whole output, each row's log-sum-exp, and which rows see no key."""
    output, log_sum_exp = attend(inputs, dtype, softmax_scale=softmax_scale, causal=causal, target=target)
    expected_output, expected_log_sum_exp = reference.context_attention(
        **inputs, softmax_scale=softmax_scale, causal=causal
    )
    blind = expected_log_sum_exp.isneginf()
    assert torch.equal(log_sum_exp.isneginf(), blind)
    assert (output[blind] == 0).all()
    assert not output.isnan().any()
    if not blind.all():
        assert relative_error(output, expected_output) <= TOLERANCE[dtype]
        difference = (log_sum_exp.double() - expected_log_sum_exp)[~blind]
        assert difference.abs().max() <= LOG_SUM_EXP_TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_mixed_requests_against_float64(dtype: DType, target: str) -> None:
    """Without history, with history, empty, one token, one key, and lengths across row blocks and key tiles."""
    requests = [(17, 17), (0, 9), (0, 0), (1, 70), (1, 1), (33, 101), (16, 16), (0, 3)]
    check(make_inputs(requests, dtype), dtype, target=target)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_several_row_blocks_of_one_request(dtype: DType) -> None:
    check(make_inputs([(3, 3), (261, 300), (2, 40)], dtype, heads=1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deepseek_sizes_and_scale(dtype: DType) -> None:
    """192^-0.5 times mscale squared, as in DeepSeek-V3: one-sided weights, scores of up to about 8."""
    inputs = make_inputs([(20, 83), (1, 130)], dtype, heads=2, nope_dim=128, rope_dim=64, v_dim=128)
    check(inputs, dtype, softmax_scale=0.135234)


@pytest.mark.parametrize(("nope_dim", "rope_dim", "v_dim"), [(192, 64, 256), (128, 64, 192), (5, 2, 3), (16, 16, 16)])
def test_other_head_sizes(nope_dim: int, rope_dim: int, v_dim: int) -> None:
    inputs = make_inputs([(5, 40), (7, 7)], DType.FLOAT32, heads=2, nope_dim=nope_dim, rope_dim=rope_dim, v_dim=v_dim)
    check(inputs, DType.FLOAT32)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_tile_edges(length: int) -> None:
    """Fp32 tiles are 16 x 16: one tile more or less at each edge, with all, one and some keys new."""
    check(make_inputs([(length, length), (1, length), (length - 14, length)], DType.FLOAT32, heads=1), DType.FLOAT32)


@pytest.mark.parametrize("history", [0, 1, 2, 14, 15, 16, 17])
def test_history_edges(history: int) -> None:
    """The diagonal of each of three row blocks crosses the tiles elsewhere."""
    check(make_inputs([(40, 40 + history)], DType.FLOAT32, heads=1), DType.FLOAT32)


def test_fewer_keys_than_queries_leaves_blind_rows() -> None:
    """Causality is aligned to the end: the first rows then see nothing."""
    inputs = make_inputs([(20, 3), (18, 0), (5, 5)], DType.FLOAT32)
    _, log_sum_exp = attend(inputs, DType.FLOAT32)
    assert log_sum_exp[:17].isneginf().all()
    assert log_sum_exp[17:20].isfinite().all()
    assert log_sum_exp[20:38].isneginf().all()
    check(inputs, DType.FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_without_causality_every_query_sees_all_keys(dtype: DType, target: str) -> None:
    """More queries than keys, fewer, none of either, and lengths across row blocks and key tiles."""
    requests = [(17, 5), (0, 9), (0, 0), (3, 0), (1, 70), (150, 101), (16, 16), (0, 3), (2, 1)]
    check(make_inputs(requests, dtype), dtype, causal=0, target=target)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_tile_edges_without_causality(length: int) -> None:
    """Fp32 tiles are 16 x 16: one key more or less at each edge, for one, two and more row blocks."""
    requests = [(1, length), (17, length), (50, length - 1)]
    check(make_inputs(requests, DType.FLOAT32, heads=1), DType.FLOAT32, causal=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pass_without_any_key(dtype: DType) -> None:
    """What a pass over older keys is while no history is long: zeros that weigh nothing."""
    inputs = guarded(make_inputs([(20, 0), (1, 0), (0, 0)], dtype))
    output, log_sum_exp = attend(inputs, dtype, causal=0)
    assert (output == 0).all()
    assert log_sum_exp.isneginf().all()
    assert output.shape == (21, 3, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_passes_merged_are_the_attention_over_all_keys(dtype: DType) -> None:
    """Of 90 keys the oldest 41 without causality, the others with it: the same as all 90 with it."""
    inputs = make_inputs([(30, 90)], dtype)
    parts = []
    for keys, causal in ((slice(0, 41), 0), (slice(41, 90), 1)):
        part = {name: inputs[name][keys] for name in ("k_nope", "k_pe", "v")}
        part["key_offsets"] = torch.tensor([0, len(part["v"])], dtype=torch.int32)
        parts.append(attend(inputs | part, dtype, causal=causal))
    weights = torch.softmax(torch.stack([log_sum_exp.double() for _, log_sum_exp in parts]), dim=0)
    merged = (weights[..., None] * torch.stack([output.double() for output, _ in parts])).sum(0)
    expected, _ = reference.context_attention(**inputs, softmax_scale=0.11)
    assert relative_error(merged, expected) <= TOLERANCE[dtype]


def test_first_token_returns_its_own_value() -> None:
    inputs = make_inputs([(1, 1), (1, 1)], DType.FLOAT32)
    output, _ = attend(inputs, DType.FLOAT32)
    assert torch.equal(output, inputs["v"])


def test_every_request_finds_its_rows() -> None:
    """Many requests of random lengths, so that the search over the offsets meets every kind of neighbour."""
    queries = torch.randint(0, 20, (50,)).tolist()
    requests = [(count, count + int(extra)) for count, extra in zip(queries, torch.randint(0, 9, (50,)), strict=True)]
    inputs = make_inputs(requests, DType.FLOAT32, heads=1, nope_dim=4, rope_dim=2, v_dim=3)
    check(inputs, DType.FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_tokens_or_keys(dtype: DType) -> None:
    output, log_sum_exp = attend(make_inputs([], dtype), dtype)
    assert (output.shape, log_sum_exp.shape) == ((0, 3, 40), (0, 3))
    attend(make_inputs([(0, 0), (0, 5)], dtype), dtype)
    check(make_inputs([(2, 0)], dtype), dtype)


@pytest.mark.parametrize("causal", [1, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_requests_and_memory_outside_do_not_leak(dtype: DType, causal: int) -> None:
    """NaN in every row of the neighbouring requests and around the tensors changes no bit of a request's result."""
    requests = [(19, 25), (21, 50), (40, 45)]
    inputs = make_inputs(requests, dtype)
    expected = [tensor[19:40] for tensor in attend(inputs, dtype, causal=causal)]
    poisoned = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("q_nope", "q_pe"):
        poisoned[name][:19] = poisoned[name][40:] = float("nan")
    for name in ("k_nope", "k_pe", "v"):
        poisoned[name][:25] = poisoned[name][75:] = float("nan")
    found = [tensor[19:40] for tensor in attend(poisoned, dtype, causal=causal)]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])

    check(guarded(inputs), dtype, causal=causal)


def test_later_keys_are_not_seen() -> None:
    """Changing a key changes no earlier row, and every later one."""
    inputs = make_inputs([(40, 60)], DType.FLOAT32)
    changed = inputs | {"k_nope": inputs["k_nope"].clone()}
    changed["k_nope"][45] += 1.0
    before, after = attend(inputs, DType.FLOAT32)[0], attend(changed, DType.FLOAT32)[0]
    assert torch.equal(before[:25], after[:25])
    assert (before[25:] != after[25:]).flatten(1).any(dim=1).all()


def test_large_scores_do_not_overflow() -> None:
    """Scores of 100, which fp32 holds to 4e-6: the log-sum-exp can be no closer than a few of those steps."""
    inputs = make_inputs([(20, 40)], DType.FLOAT16)
    output, log_sum_exp = attend(inputs, DType.FLOAT16, softmax_scale=3.0)
    expected_output, expected_log_sum_exp = reference.context_attention(**inputs, softmax_scale=3.0)
    assert relative_error(output, expected_output) <= TOLERANCE[DType.FLOAT16]
    assert ((log_sum_exp - expected_log_sum_exp).abs() <= expected_log_sum_exp.abs() * 2**-21).all()


def guarded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs, with NaN around every tensor of floating-point values."""
    names = ("q_nope", "q_pe", "k_nope", "k_pe", "v")
    return inputs | {name: Guarded(inputs[name]).tensor for name in names}


def test_key_offsets_are_cut_to_the_keys() -> None:
    inputs = make_inputs([(9, 30), (12, 12), (20, 25)], DType.FLOAT32)
    expected = attend(inputs, DType.FLOAT32)
    wild = guarded(inputs) | {"key_offsets": torch.tensor([-5, 30, 42, 90], dtype=torch.int32)}
    for found, tensor in zip(attend(wild, DType.FLOAT32), expected, strict=True):
        assert torch.equal(found, tensor)


def test_query_offsets_that_wrap_around_read_no_key_outside() -> None:
    """The request's length, -3 - (2^31 - 1), is 2^31 - 2 in 32 bits, and its row blocks begin in row 15."""
    inputs = guarded(make_inputs([(41, 67)], DType.FLOAT32))
    inputs["query_offsets"] = torch.tensor([2**31 - 1, -3], dtype=torch.int32)
    output, _ = attend(inputs, DType.FLOAT32)
    assert torch.equal(output.isnan().flatten(1).all(dim=1), torch.arange(41) < 15)
    assert not output[15:].isnan().any()


@pytest.mark.parametrize("seed", range(8))
def test_arbitrary_offsets_do_not_crash(seed: int) -> None:
    """A builder may time a kernel on arbitrary integers: an access 2^31 rows away would end this process."""
    generator = torch.Generator().manual_seed(seed)
    inputs = make_inputs([(9, 30), (12, 12), (20, 25)], DType.FLOAT32, heads=2)
    bound = 2**31 if seed % 2 else 60
    for name in ("query_offsets", "key_offsets"):
        inputs[name] = torch.randint(-bound, bound, (4,), dtype=torch.int64, generator=generator).int()
    for causal in (1, 0):
        attend(guarded(inputs), DType.FLOAT32, causal=causal)


@pytest.mark.parametrize(
    ("target", "dtype", "dims"),
    [
        ("sm_89", DType.BFLOAT16, {}),
        ("sm_90", DType.BFLOAT16, {}),
        ("sm_90", DType.FLOAT16, {"heads": 20, "nope_dim": 192, "v_dim": 256}),
        ("sm_89", DType.BFLOAT16, {"heads": 5, "nope_dim": 48, "rope_dim": 32, "v_dim": 40}),
        ("sm_89", DType.FLOAT32, {"heads": 5, "nope_dim": 48, "rope_dim": 32, "v_dim": 40}),
    ],
)
def test_compiles_ahead_of_time_within_the_budget(
    target: str, dtype: DType, dims: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    problem = replace(PROBLEM, target=TARGETS[target], model_dtype=dtype, dims={**PROBLEM.dims, **dims})
    for variant in CONTEXT_ATTENTION.variants(problem):
        constants = dict(variant.constants)
        compiled = compile_variant(variant, problem.target, tmp_path)
        tile = Tile(constants["BLOCK_M"], constants["BLOCK_N"], variant.num_warps, variant.num_stages)
        head = HeadBlocks(constants["BLOCK_NOPE"], constants["BLOCK_ROPE"], constants["BLOCK_V"])
        budget = shared_memory_bytes(tile, head, problem.model_dtype, problem.target)
        assert compiled.shared_memory_bytes <= budget <= problem.target.shared_memory_bytes
        assert compiled.stack_bytes == 0
        if constants["ROPE_DIM"] == 64:
            # Every key and value tile is copied to shared memory 16 bytes at a time.
            assert "cp.async.cg" in compiled.ptx
            assert "cp.async.ca" not in compiled.ptx
        if dtype is not DType.FLOAT32:
            assert ("wgmma" if target == "sm_90" else "mma.sync") in compiled.ptx
