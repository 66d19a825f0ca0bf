from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.append_latent.test_plan import PROBLEM
from tests.ops.checks import DTYPES, TOLERANCE, Guarded, interpret, relative_error, torch_dtype
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.targets import TARGETS

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def make_inputs(
    model_dtype: DType,
    cache_dtype: DType,
    *,
    tokens: int = 7,
    heads: int = 5,
    kv_lora_rank: int = 96,
    rope_dim: int = 32,
    pages: int = 3,
    page_size: int = 16,
    positions: int = 300,
) -> dict[str, torch.Tensor]:
    """Random inputs; the pool holds NaN."""
    model = torch_dtype(model_dtype)
    angles = torch.rand(positions, rope_dim // 2) * 6.3
    return {
        "past_latent": torch.full(
            (pages, page_size, kv_lora_rank + rope_dim), float("nan"), dtype=torch_dtype(cache_dtype)
        ),
        "latent": torch.randn(tokens, kv_lora_rank).to(model),
        "k_pe": torch.randn(tokens, rope_dim).to(model),
        "q_pe": torch.randn(tokens, heads, rope_dim).to(model),
        "position_ids": torch.randint(0, positions, (tokens,), dtype=torch.int32),
        "slot_mapping": torch.randperm(pages * page_size)[:tokens].int(),
        "rotary_cos_sin": 1.1 * torch.cat([angles.cos(), angles.sin()], dim=-1),
    }


def check(
    inputs: dict[str, torch.Tensor], *, interleave: bool, model_dtype: DType, cache_dtype: DType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the operation and compares every output element with float64."""
    expected_cache, expected_q_pe = reference.append_latent(**inputs, rope_interleave=interleave)
    attributes = {"rope_interleave": int(interleave)}
    pool = Guarded(inputs["past_latent"])
    present, rotated_q_pe = interpret(
        APPEND_LATENT,
        {**inputs, "past_latent": pool.tensor},
        attributes,
        model_dtype=model_dtype,
        cache_dtype=cache_dtype,
    )
    pool.assert_margins_untouched()
    assert present.data_ptr() == pool.tensor.data_ptr()
    written = ~expected_cache.isnan()
    assert torch.equal(present.isnan(), ~written)
    if len(inputs["latent"]):
        assert relative_error(rotated_q_pe, expected_q_pe) <= TOLERANCE[model_dtype]
    if written.any():
        kv_lora_rank = inputs["latent"].shape[-1]
        rank_part, rope_part = slice(None, kv_lora_rank), slice(kv_lora_rank, None)
        assert_nearest(present[..., rank_part], expected_cache[..., rank_part], slack=0.0)
        # A rotation in fp32 has three roundings, of terms no larger than the row's norm times the factor.
        norm = 1.1 * float(inputs["k_pe"].double().abs().max()) * 2
        assert_nearest(present[..., rope_part], expected_cache[..., rope_part], slack=norm * 2**-23)
    return present, rotated_q_pe


def assert_nearest(found: torch.Tensor, expected: torch.Tensor, *, slack: float) -> None:
    """Asserts that found values are those nearest to float64 values.

    Where a float64 value is within ``slack`` of the middle between two values of the type, either is right.
    """
    mask = ~expected.isnan()
    found, expected = found[mask], expected[mask]
    nearest = expected.float().to(found.dtype)
    differs = found != nearest
    if found.dtype == torch.float32:
        assert ((found.double() - expected).abs() <= slack + expected.abs() * 2**-24).all()
        return
    middle = (found[differs].double() + nearest[differs].double()) / 2
    assert ((expected[differs] - middle).abs() <= slack).all()
    if differs.any():
        towards = nearest[differs]
        assert torch.equal(torch.nextafter(found[differs], towards), towards)
    assert differs.sum() <= 1 + 0.01 * differs.numel()


@pytest.mark.parametrize(("model_dtype", "cache_dtype"), list(product(DTYPES, DTYPES)))
@pytest.mark.parametrize("interleave", [True, False])
def test_every_type_and_pair_order_against_float64(model_dtype: DType, cache_dtype: DType, interleave: bool) -> None:
    inputs = make_inputs(model_dtype, cache_dtype)
    present, _ = check(inputs, interleave=interleave, model_dtype=model_dtype, cache_dtype=cache_dtype)
    if model_dtype == cache_dtype:
        rows = present.view(-1, present.shape[-1])[inputs["slot_mapping"].long()]
        assert torch.equal(rows[:, :96], inputs["latent"])


@pytest.mark.parametrize(
    ("heads", "kv_lora_rank", "rope_dim", "page_size"),
    [(20, 512, 64, 64), (1, 16, 2, 16), (17, 100, 48, 32), (3, 448, 6, 128)],
)
@pytest.mark.parametrize("interleave", [True, False])
def test_sizes_that_are_no_powers_of_two(
    heads: int, kv_lora_rank: int, rope_dim: int, page_size: int, interleave: bool
) -> None:
    sizes = {"heads": heads, "kv_lora_rank": kv_lora_rank, "rope_dim": rope_dim, "page_size": page_size}
    inputs = make_inputs(DType.FLOAT32, DType.BFLOAT16, tokens=3, **sizes)
    check(inputs, interleave=interleave, model_dtype=DType.FLOAT32, cache_dtype=DType.BFLOAT16)


def test_rotation_is_the_formula_of_the_pairs() -> None:
    """A quarter turn maps (x, y) to (-y, x): elements 2i and 2i + 1 interleaved, i and i + 2 otherwise."""
    quarter = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    inputs = make_inputs(DType.FLOAT32, DType.FLOAT32, tokens=1, heads=1, rope_dim=4) | {
        "q_pe": torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]),
        "position_ids": torch.tensor([0], dtype=torch.int32),
        "rotary_cos_sin": quarter,
    }
    for interleave, expected in ((1, [-2.0, 1.0, -4.0, 3.0]), (0, [-3.0, -4.0, 1.0, 2.0])):
        _, rotated = interpret(APPEND_LATENT, inputs, {"rope_interleave": interleave}, model_dtype=DType.FLOAT32)
        assert rotated.flatten().tolist() == expected


def test_slots_at_page_edges() -> None:
    inputs = make_inputs(DType.BFLOAT16, DType.BFLOAT16, tokens=6)
    inputs["slot_mapping"] = torch.tensor([0, 15, 16, 31, 32, 47], dtype=torch.int32)
    check(inputs, interleave=True, model_dtype=DType.BFLOAT16, cache_dtype=DType.BFLOAT16)


@pytest.mark.parametrize("interleave", [True, False])
def test_slots_outside_the_pool_are_not_written(interleave: bool) -> None:
    inputs = make_inputs(DType.FLOAT32, DType.FLOAT32, tokens=7)
    inputs["slot_mapping"] = torch.tensor([-1, 48, 5, 49, INT_MAX, INT_MIN, -17], dtype=torch.int32)
    present, _ = check(inputs, interleave=interleave, model_dtype=DType.FLOAT32, cache_dtype=DType.FLOAT32)
    written = (~present.isnan()).any(dim=-1).flatten().nonzero().flatten()
    assert written.tolist() == [5]


def test_positions_outside_the_table_read_nothing() -> None:
    inputs = make_inputs(DType.FLOAT32, DType.FLOAT32, tokens=5)
    inputs["position_ids"] = torch.tensor([-1, 300, 299, INT_MAX, INT_MIN], dtype=torch.int32)
    table = Guarded(inputs["rotary_cos_sin"])
    present, rotated_q_pe = interpret(
        APPEND_LATENT,
        {**inputs, "rotary_cos_sin": table.tensor},
        {"rope_interleave": 1},
        model_dtype=DType.FLOAT32,
    )
    rows = present.view(-1, present.shape[-1])[inputs["slot_mapping"].long()]
    outside = [0, 1, 3, 4]
    assert (rotated_q_pe[outside] == 0).all()
    assert (rows[outside][:, 96:] == 0).all()
    assert torch.equal(rows[:, :96], inputs["latent"])
    expected = reference.rotate(
        inputs["q_pe"][2:3], inputs["position_ids"][2:3], inputs["rotary_cos_sin"], rope_interleave=True
    )
    assert relative_error(rotated_q_pe[2:3], expected) <= TOLERANCE[DType.FLOAT32]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 3), (0, 0), (1, 3), (2, 0)])
def test_empty_and_single(tokens: int, pages: int) -> None:
    inputs = make_inputs(DType.FLOAT16, DType.FLOAT16, tokens=tokens, pages=max(pages, 1))
    if not pages:
        inputs["past_latent"] = inputs["past_latent"][:0]
    check(inputs, interleave=True, model_dtype=DType.FLOAT16, cache_dtype=DType.FLOAT16)


@pytest.mark.parametrize("target", ["sm_80", "sm_120"])
def test_compiles_ahead_of_time(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    problem = replace(PROBLEM, target=TARGETS[target], dims={**PROBLEM.dims, "heads": 128})
    for variant in APPEND_LATENT.variants(problem):
        compiled = compile_variant(variant, problem.target, tmp_path)
        assert compiled.stack_bytes == 0
        # Row in, row out, and each rotated part in and out.
        assert compiled.wide_accesses >= 4
