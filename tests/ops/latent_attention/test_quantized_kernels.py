"""LatentAttention over quantised caches, against float64 attention over the dequantised rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops import reference
from tests.ops.checks import DTYPES
from tests.ops.latent_attention.test_kernels import (
    MANY_MULTIPROCESSORS,
    MIXED,
    ONE_MULTIPROCESSOR,
    Inputs,
    assert_close,
    can_split,
    make_inputs,
)
from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.interpreter import run_op
from trtllm_mla.ops.latent_attention import LATENT_ATTENTION
from trtllm_mla.targets import Target

QUANTIZED = [CacheDType.FP8, CacheDType.NVFP4]
SCALE = 0.11


def quantize(inputs: Inputs, layout: RowLayout, latent_scale: float = 1.0) -> tuple[Inputs, torch.Tensor]:
    """Inputs with a quantised pool, and the pool's values, float64, over the outer scale.

    Bytes of slots without a token are 0xFF: their scales and rotary keys would be NaN.
    """
    rows = inputs["latent_cache"].float().flatten(0, 1).numpy()
    used = ~np.isnan(rows).any(-1)
    pool = np.full((len(rows), layout.width), 0xFF, np.uint8)
    pool[used] = reference.quantize_rows(rows[used], layout, latent_scale)
    values = np.full(rows.shape, np.nan)
    values[used] = reference.dequantize_rows(pool[used], layout)
    shape = inputs["latent_cache"].shape[:2]
    quantized = torch.from_numpy(pool.view(np.int8)).view(*shape, layout.width)
    return inputs | {"latent_cache": quantized}, torch.from_numpy(values).view(*shape, -1)


def attend(
    inputs: Inputs,
    dtype: DType,
    cache_dtype: CacheDType,
    *,
    latent_scale: float = 1.0,
    target: Target = MANY_MULTIPROCESSORS,
    tile: tuple[int, int] = (16, 2),
) -> tuple[torch.Tensor, torch.Tensor]:
    output, log_sum_exp = run_op(
        LATENT_ATTENTION,
        list(inputs.values()),
        {"softmax_scale": SCALE, "latent_scale": latent_scale},
        model_dtype=dtype,
        cache_dtype=cache_dtype,
        target=target,
        tile_s=tile[0],
        num_stages=tile[1],
    )
    return output, log_sum_exp


def expected_of(inputs: Inputs, values: torch.Tensor, latent_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the scaled query, rounded as the operation says, and the scaled output."""
    query = inputs["q_latent"]
    scaled = inputs | {"latent_cache": values, "q_latent": (query.float() * latent_scale).to(query.dtype)}
    output, log_sum_exp = reference.latent_attention(**scaled, softmax_scale=SCALE)
    return output * latent_scale, log_sum_exp


def check(
    inputs: Inputs,
    dtype: DType,
    cache_dtype: CacheDType,
    *,
    latent_scale: float = 1.0,
    target: Target = MANY_MULTIPROCESSORS,
    tile: tuple[int, int] = (16, 2),
) -> None:
    kv_lora_rank, rope_dim = inputs["q_latent"].shape[-1], inputs["q_pe"].shape[-1]
    quantized, values = quantize(inputs, cache_dtype.layout(kv_lora_rank, rope_dim), latent_scale)
    found = attend(quantized, dtype, cache_dtype, latent_scale=latent_scale, target=target, tile=tile)
    assert_close(found, expected_of(inputs, values, latent_scale), dtype)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_requests_against_float64(dtype: DType, cache_dtype: CacheDType) -> None:
    inputs = make_inputs(MIXED, dtype)
    check(inputs, dtype, cache_dtype, target=ONE_MULTIPROCESSOR)
    check(inputs, dtype, cache_dtype, target=MANY_MULTIPROCESSORS)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize(("page_size", "tile"), [(16, (64, 2)), (32, (32, 3)), (64, (16, 1)), (128, (64, 2))])
def test_page_sizes_and_tiles(page_size: int, tile: tuple[int, int], cache_dtype: CacheDType) -> None:
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size + 1]
    inputs = make_inputs([(1, length) for length in lengths], DType.BFLOAT16, page_size=page_size, kv_lora_rank=160)
    check(inputs, DType.BFLOAT16, cache_dtype, tile=tile)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize(
    ("heads", "kv_lora_rank", "rope_dim"), [(6, 448, 32), (17, 40, 10), (3, 17, 16), (1, 300, 22), (40, 16, 64)]
)
def test_latents_that_do_not_fill_their_blocks(
    heads: int, kv_lora_rank: int, rope_dim: int, cache_dtype: CacheDType
) -> None:
    inputs = make_inputs(
        [(1, 40), (3, 50), (2, 2)], DType.FLOAT32, heads=heads, kv_lora_rank=kv_lora_rank, rope_dim=rope_dim
    )
    check(inputs, DType.FLOAT32, cache_dtype)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_deepseek_sizes(cache_dtype: CacheDType) -> None:
    inputs = make_inputs([(1, 150)], DType.BFLOAT16, heads=128, kv_lora_rank=512, rope_dim=64, page_size=64)
    check(inputs, DType.BFLOAT16, cache_dtype, tile=(64, 2))


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("latent_scale", [0.37, 2.0, 40.0])
def test_the_outer_scale_belongs_to_query_and_output(
    latent_scale: float, dtype: DType, cache_dtype: CacheDType
) -> None:
    """Whole row blocks and split ones; scores have a standard deviation of 1 whatever the scale is."""
    inputs = make_inputs([(1, 90), (3, 20)], dtype)
    kv_lora_rank = inputs["q_latent"].shape[-1]
    inputs["latent_cache"][..., :kv_lora_rank] *= latent_scale
    inputs["q_latent"] /= latent_scale
    check(inputs, dtype, cache_dtype, latent_scale=latent_scale, target=ONE_MULTIPROCESSOR)
    check(inputs, dtype, cache_dtype, latent_scale=latent_scale)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_a_block_whose_scale_is_nan_shows_and_only_where_it_is_seen(cache_dtype: CacheDType) -> None:
    inputs = make_inputs([(1, 30), (2, 33)], DType.BFLOAT16)
    layout = cache_dtype.layout(96, 32)
    quantized, _ = quantize(inputs, layout)
    before = attend(quantized, DType.BFLOAT16, cache_dtype)
    # The last key of the second request: its first token does not see it.
    page, offset = int(inputs["block_offsets"][1, 2]), 0
    quantized["latent_cache"][page, offset, layout.scale_offset : layout.scale_offset + 4] = -1
    output, _ = attend(quantized, DType.BFLOAT16, cache_dtype)
    assert output[2].isnan().any()
    assert torch.equal(output[:1], before[0][:1])


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("wild", [-1, -(2**31), 2147480000])
def test_pages_outside_the_pool_are_not_read(wild: int, cache_dtype: CacheDType) -> None:
    inputs = make_inputs([(1, 16), (1, 40)], DType.FLOAT32)
    inputs["block_offsets"][1, :3] = wild
    quantized, values = quantize(inputs, cache_dtype.layout(96, 32))
    output, log_sum_exp = attend(quantized, DType.FLOAT32, cache_dtype)
    first = {name: tensor for name, tensor in inputs.items() if name != "query_index"}
    for name in ("q_latent", "q_pe", "block_offsets", "sequence_length"):
        first[name] = inputs[name][:1]
    first["query_offsets"] = inputs["query_offsets"][:2]
    assert_close((output[:1], log_sum_exp[:1]), expected_of(first, values), DType.FLOAT32)
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    assert log_sum_exp[1].isneginf().all()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_arbitrary_bytes_and_integers_write_nothing_outside(cache_dtype: CacheDType) -> None:
    """A builder may time kernels on anything."""
    inputs = make_inputs([(9, 30), (1, 12)], DType.BFLOAT16, heads=2)
    quantized, _ = quantize(inputs, cache_dtype.layout(96, 32))
    shape = quantized["latent_cache"].shape
    quantized["latent_cache"] = torch.randint(-128, 128, shape, dtype=torch.int8)
    for name in ("query_offsets", "sequence_length", "block_offsets"):
        quantized[name] = torch.randint(-(2**31), 2**31, quantized[name].shape, dtype=torch.int64).int()
    attend(quantized, DType.BFLOAT16, cache_dtype)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_an_outer_scale_that_is_no_positive_number_is_refused(cache_dtype: CacheDType) -> None:
    quantized, _ = quantize(make_inputs([(1, 3)], DType.BFLOAT16), cache_dtype.layout(96, 32))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="latent_scale"):
            attend(quantized, DType.BFLOAT16, cache_dtype, latent_scale=scale)


def test_the_scale_reaches_the_kernels_as_an_argument() -> None:
    """One kernel serves every layer's scale."""
    inputs, _ = quantize(make_inputs([(1, 90)], DType.BFLOAT16), CacheDType.NVFP4.layout(96, 32))
    dims = LATENT_ATTENTION.resolve_dims({name: tuple(tensor.shape) for name, tensor in inputs.items()})
    plans = [
        LATENT_ATTENTION.plan(
            Problem(
                dims,
                {"softmax_scale": SCALE, "latent_scale": scale},
                DType.BFLOAT16,
                CacheDType.NVFP4,
                MANY_MULTIPROCESSORS,
                16,
                2,
            )
        )
        for scale in (1.0, 2.5)
    ]
    assert can_split(plans[0])
    assert plans[0] != plans[1]
    assert [launch.variant for launch in plans[0].launches] == [launch.variant for launch in plans[1].launches]
