from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.checks import DTYPES, Guarded, interpret, torch_dtype
from tests.ops.gather_latent.test_plan import PROBLEM
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.targets import TARGETS

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def gather(
    cache: torch.Tensor, slots: list[int], *, rope_dim: int, model_dtype: DType, cache_dtype: DType
) -> tuple[torch.Tensor, ...]:
    return interpret(
        GATHER_LATENT,
        {"latent_cache": cache, "kv_slots": torch.tensor(slots, dtype=torch.int32)},
        {"kv_lora_rank": cache.shape[-1] - rope_dim, "rope_dim": rope_dim},
        model_dtype=model_dtype,
        cache_dtype=cache_dtype,
    )


@pytest.mark.parametrize(("model_dtype", "cache_dtype"), list(product(DTYPES, DTYPES)))
def test_every_type_against_float64(model_dtype: DType, cache_dtype: DType) -> None:
    """Values are those of the cache, rounded once; rows that are not asked for hold NaN."""
    slots = [0, 15, 16, 47, 31, 31, 7, 22, 40]
    cache = torch.full((3, 16, 128), float("nan"))
    cache.view(48, 128)[slots] = torch.randn(len(slots), 128)
    cache = cache.to(torch_dtype(cache_dtype))
    found = gather(cache, slots, rope_dim=32, model_dtype=model_dtype, cache_dtype=cache_dtype)
    expected = reference.gather_latent(cache, torch.tensor(slots), kv_lora_rank=96, rope_dim=32)
    for part, expected_part in zip(found, expected, strict=True):
        assert torch.equal(part, expected_part.to(torch_dtype(model_dtype)))


@pytest.mark.parametrize(("kv_lora_rank", "rope_dim", "page_size"), [(512, 64, 64), (448, 48, 32), (1, 3, 16)])
@pytest.mark.parametrize("keys", [1, 8, 9])
def test_sizes_that_are_no_powers_of_two(kv_lora_rank: int, rope_dim: int, page_size: int, keys: int) -> None:
    cache = torch.randn(2, page_size, kv_lora_rank + rope_dim).bfloat16()
    slots = torch.randint(0, 2 * page_size, (keys,)).tolist()
    latent, k_pe = gather(cache, slots, rope_dim=rope_dim, model_dtype=DType.BFLOAT16, cache_dtype=DType.BFLOAT16)
    rows = cache.view(2 * page_size, -1)[slots]
    assert torch.equal(latent, rows[:, :kv_lora_rank])
    assert torch.equal(k_pe, rows[:, kv_lora_rank:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_outside_the_pool_give_zeros_and_read_nothing(dtype: DType) -> None:
    pool = Guarded(torch.randn(3, 16, 128).to(torch_dtype(dtype)))
    slots = [-1, 48, 5, 49, INT_MAX, INT_MIN, -17, 47, 80]
    latent, k_pe = gather(pool.tensor, slots, rope_dim=32, model_dtype=dtype, cache_dtype=dtype)
    rows = torch.zeros(len(slots), 128, dtype=torch_dtype(dtype))
    rows[2], rows[7] = pool.tensor.view(48, 128)[5], pool.tensor.view(48, 128)[47]
    assert torch.equal(torch.cat([latent, k_pe], dim=-1), rows)
    pool.assert_margins_untouched()


def test_no_keys_and_no_pages() -> None:
    types = {"model_dtype": DType.FLOAT32, "cache_dtype": DType.FLOAT32}
    latent, k_pe = gather(torch.randn(3, 16, 128), [], rope_dim=32, **types)
    assert (latent.shape, k_pe.shape) == ((0, 96), (0, 32))
    latent, k_pe = gather(torch.randn(0, 16, 128), [0, 3], rope_dim=32, **types)
    assert not latent.any()
    assert not k_pe.any()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_widening_is_exact_for_every_bit_pattern(dtype: DType) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch_dtype(dtype))
    cache = patterns.view(4, 128, 128)
    latent, k_pe = gather(cache, list(range(512)), rope_dim=64, model_dtype=DType.FLOAT32, cache_dtype=dtype)
    found, expected = torch.cat([latent, k_pe], dim=-1).flatten(), patterns.float()
    assert torch.equal(found.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(found[finite].view(torch.int32), expected[finite].view(torch.int32))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_narrowing_rounds_to_nearest_even(dtype: DType) -> None:
    """Random bit patterns, and every value in the middle between two neighbours of the narrow type."""
    narrow = torch_dtype(dtype)
    below = torch.arange(-(2**15), 2**15 - 1, dtype=torch.int16).view(narrow)
    above = torch.arange(-(2**15) + 1, 2**15, dtype=torch.int16).view(narrow)
    middles = ((below.double() + above.double()) / 2).float()
    random_bits = torch.randint(-(2**31), 2**31, (2**16,), dtype=torch.int64).int().view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.9, 65520.0, 3.4e38, 1e-45])
    values = torch.cat([middles, random_bits, special, torch.tensor([-1], dtype=torch.int32).view(torch.float32)])
    values = torch.nn.functional.pad(values, (0, -len(values) % 2048))
    latent, k_pe = gather(
        values.view(-1, 16, 128),
        list(range(len(values) // 128)),
        rope_dim=64,
        model_dtype=dtype,
        cache_dtype=DType.FLOAT32,
    )
    found, expected = torch.cat([latent, k_pe], dim=-1).flatten(), values.to(narrow)
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers].view(torch.int16), expected[numbers].view(torch.int16))


@pytest.mark.parametrize("target", ["sm_80", "sm_120"])
def test_compiles_ahead_of_time(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    problem = replace(PROBLEM, target=TARGETS[target])
    for variant in GATHER_LATENT.variants(problem):
        compiled = compile_variant(variant, problem.target, tmp_path)
        assert compiled.stack_bytes == 0
        assert compiled.shared_memory_bytes == 0
        # A thread moves four vectors of a latent in and out.
        assert compiled.wide_accesses >= 8
