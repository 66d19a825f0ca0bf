"""Function bodies for quantised caches: rows bit for bit in ONNX Runtime, and as native layers of TensorRT-RTX."""

from __future__ import annotations

import time

import numpy as np
import onnxruntime
import pytest
import torch

from tests.ops import reference
from tests.ops.checks import relative_error, torch_dtype
from tests.ops.quantized import POISON, QUANTIZED, RANKS, hard_latents, hard_rotary_keys, poisoned_pool, rotated
from tests.ops.test_bodies import build_native, index_matrix, prefix_sums, run_model, single_op_model
from tests.support.ort import to_ort
from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import DType
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Attribute, BodyTypes
from trtllm_mla.ops.row_codec import encode_rows

HEADS, POSITIONS, PAGE_SIZE = 5, 50, 16
SCALE = 0.11


def attributes(name: str, layout: RowLayout, **values: Attribute) -> dict[str, Attribute]:
    known: dict[str, Attribute] = {
        "rope_interleave": 1,
        "kv_lora_rank": layout.kv_lora_rank,
        "rope_dim": layout.rope_dim,
        "softmax_scale": SCALE,
        "latent_scale": 1.0,
    }
    return {key: {**known, **values}[key] for key in OPS[name].attributes}


def run(
    name: str,
    layout: RowLayout,
    inputs: list[torch.Tensor],
    *,
    model_dtype: DType = DType.FLOAT32,
    **values: Attribute,
) -> list[torch.Tensor]:
    model = single_op_model(OPS[name], BodyTypes(model_dtype, layout), attributes(name, layout, **values))
    return run_model(OPS[name], model, inputs)


def append_inputs(
    layout: RowLayout,
    tokens: int,
    *,
    model_dtype: DType = DType.FLOAT32,
    pages: int = 6,
    latent_scale: float = 1.0,
) -> list[torch.Tensor]:
    rng = np.random.default_rng(tokens)
    model = torch_dtype(model_dtype)
    angles = rng.uniform(0, 6.3, (POSITIONS, layout.rope_dim // 2))
    return [
        poisoned_pool(layout, pages, PAGE_SIZE),
        torch.from_numpy(hard_latents(layout, tokens, rng, latent_scale)).to(model),
        torch.from_numpy(hard_rotary_keys(layout, tokens, rng)).to(model),
        torch.from_numpy(rng.standard_normal((tokens, HEADS, layout.rope_dim))).to(model),
        torch.from_numpy(rng.integers(0, POSITIONS, tokens)).int(),
        torch.from_numpy(rng.permutation(pages * PAGE_SIZE)[:tokens]).int(),
        torch.from_numpy(1.1 * np.concatenate([np.cos(angles), np.sin(angles)], 1)).float(),
    ]


def expected_pool(
    inputs: list[torch.Tensor], layout: RowLayout, *, interleave: bool = True, latent_scale: float = 1.0
) -> torch.Tensor:
    pool, latent, k_pe, _, position_ids, slots, rotary_cos_sin = inputs
    cos_sin = rotary_cos_sin[position_ids.long()].numpy()
    keys = rotated(k_pe.float().numpy(), cos_sin, interleave=interleave)
    rows = reference.quantize_rows(np.concatenate([latent.float().numpy(), keys], 1), layout, latent_scale)
    expected = pool.clone()
    expected.view(-1, layout.row_bytes)[slots.long()] = torch.from_numpy(rows.view(np.int8))
    return expected


@pytest.mark.parametrize("latent_scale", [1.0, 0.37])
@pytest.mark.parametrize("kv_lora_rank", RANKS)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_append_latent_has_the_bits_of_the_reference(
    cache_dtype: CacheDType, kv_lora_rank: int, latent_scale: float
) -> None:
    layout = cache_dtype.layout(kv_lora_rank, 6)
    inputs = append_inputs(layout, 33, latent_scale=latent_scale)
    present, _ = run("AppendLatent", layout, inputs, latent_scale=latent_scale)
    assert torch.equal(present, expected_pool(inputs, layout, latent_scale=latent_scale))


@pytest.mark.parametrize("model_dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("interleave", [1, 0])
@pytest.mark.parametrize("tokens", [0, 1, 14])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_append_latent_of_every_network_type_and_pair_order(
    cache_dtype: CacheDType, tokens: int, interleave: int, model_dtype: DType
) -> None:
    layout = cache_dtype.layout(96, 32)
    inputs = append_inputs(layout, tokens, model_dtype=model_dtype)
    present, rotated_q_pe = run("AppendLatent", layout, inputs, model_dtype=model_dtype, rope_interleave=interleave)
    assert torch.equal(present, expected_pool(inputs, layout, interleave=bool(interleave)))
    expected = reference.rotate(inputs[3], inputs[4], inputs[6], rope_interleave=bool(interleave))
    torch.testing.assert_close(rotated_q_pe, expected.to(torch_dtype(model_dtype)), rtol=1e-2, atol=1e-5)


def test_every_bfloat16_becomes_its_bytes_and_is_read_back() -> None:
    """All patterns but those of NaN, as rotary keys that are not rotated."""
    layout = CacheDType.NVFP4.layout(16, 256)
    bits = np.arange(65536, dtype=np.uint16)
    values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().view(256, 256)
    inputs = [
        poisoned_pool(layout, 16, PAGE_SIZE),
        torch.zeros(256, 16),
        values,
        torch.zeros(256, 1, 256),
        torch.zeros(256, dtype=torch.int32),
        torch.arange(256, dtype=torch.int32),
        torch.cat([torch.ones(1, 128), torch.zeros(1, 128)], 1),
    ]
    # x * 1 - y * 0 is x but for -0, and for x next to a y that is not finite.
    finite = values.isfinite().all(1)
    inputs[2] = torch.where(finite[:, None], values, 0.0)
    (present, _) = run("AppendLatent", layout, inputs)
    _, k_pe = run("GatherLatent", layout, [present, inputs[5]])
    assert torch.equal(k_pe[finite], values[finite])
    rows = present.view(256, -1)[:, layout.rope_offset :].contiguous().numpy().view(np.uint16)
    not_zero = (finite[:, None] & (values != 0)).numpy()
    assert not_zero.sum() > 65000
    np.testing.assert_array_equal(rows[not_zero], bits.reshape(256, 256)[not_zero])

    raw = poisoned_pool(layout, 16, PAGE_SIZE)
    raw.view(256, -1)[:, layout.rope_offset :] = torch.from_numpy(bits.view(np.int8)).view(256, 512)
    _, k_pe = run("GatherLatent", layout, [raw, inputs[5]])
    torch.testing.assert_close(k_pe, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("model_dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("latent_scale", [1.0, 0.37])
@pytest.mark.parametrize("kv_lora_rank", RANKS)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_gather_latent(cache_dtype: CacheDType, kv_lora_rank: int, latent_scale: float, model_dtype: DType) -> None:
    layout = cache_dtype.layout(kv_lora_rank, 6)
    inputs = append_inputs(layout, 12)
    pool = expected_pool(inputs, layout, latent_scale=latent_scale)
    unused = next(slot for slot in range(96) if slot not in inputs[5].tolist())
    slots = torch.tensor([*inputs[5].tolist(), unused], dtype=torch.int32)
    latent, k_pe = run("GatherLatent", layout, [pool, slots], model_dtype=model_dtype, latent_scale=latent_scale)
    values = reference.dequantize_rows(pool.view(96, -1)[slots.long()].numpy(), layout)
    expected_latent, expected_k_pe = torch.from_numpy(values).float().split([kv_lora_rank, 6], dim=1)
    expected_latent = expected_latent * np.float32(latent_scale)
    for found, expected in ((latent, expected_latent), (k_pe, expected_k_pe)):
        assert found[-1].isnan().all()
        torch.testing.assert_close(found, expected.to(torch_dtype(model_dtype)), rtol=0, atol=0, equal_nan=True)


def attention_inputs(
    layout: RowLayout, queries: list[int], lengths: list[int], latent_scale: float, model_dtype: DType
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The operation's inputs; and a pool of fp32 values [pages, page_size, width] instead of the quantised one.

    Pages are poison behind each request's end, and page tables hold wild numbers there.
    """
    rng = np.random.default_rng(sum(lengths))
    model = torch_dtype(model_dtype)
    columns = max([1, *(-(-length // PAGE_SIZE) for length in lengths)]) + 1
    pages = sum(-(-length // PAGE_SIZE) for length in lengths) + 2
    pool = poisoned_pool(layout, pages, PAGE_SIZE)
    values = torch.full((pages, PAGE_SIZE, layout.kv_lora_rank + layout.rope_dim), float("nan"), dtype=torch.float64)
    table = torch.full((len(lengths), columns), 2_000_000_000, dtype=torch.int32)
    free = rng.permutation(pages).tolist()
    for request, length in enumerate(lengths):
        for column in range(-(-length // PAGE_SIZE)):
            page, count = free.pop(), min(PAGE_SIZE, length - column * PAGE_SIZE)
            rows = encode_rows(rng.standard_normal((count, values.shape[-1])), layout, latent_scale)
            table[request, column] = page
            pool[page, :count] = torch.from_numpy(rows)
            values[page, :count] = torch.from_numpy(reference.dequantize_rows(rows, layout))
    values[..., : layout.kv_lora_rank] *= latent_scale
    tokens = sum(queries)
    inputs = [
        torch.from_numpy(rng.standard_normal((tokens, HEADS, layout.kv_lora_rank))).to(model),
        torch.from_numpy(rng.standard_normal((tokens, HEADS, layout.rope_dim))).to(model),
        pool,
        table,
        torch.tensor(lengths, dtype=torch.int32),
        prefix_sums(queries),
        index_matrix(queries),
    ]
    return inputs, values


@pytest.mark.parametrize(
    ("queries", "lengths"),
    [
        pytest.param([1], [1], id="one token"),
        pytest.param([1, 1, 1], [15, 16, 17], id="page edges"),
        pytest.param([5, 1, 3], [5, 40, 70], id="different lengths"),
        pytest.param([2, 0, 1], [20, 0, 9], id="request without tokens"),
        pytest.param([4, 2], [2, 1], id="queries without visible keys"),
        pytest.param([0], [33], id="keys without queries"),
        pytest.param([], [], id="no requests"),
    ],
)
@pytest.mark.parametrize(
    ("model_dtype", "latent_scale", "tolerance"),
    # The query is rounded once more after it is scaled.
    [(DType.FLOAT32, 1.0, 1e-6), (DType.FLOAT32, 0.37, 1e-6), (DType.FLOAT16, 0.37, 1.5e-3)],
)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_latent_attention(
    cache_dtype: CacheDType,
    model_dtype: DType,
    latent_scale: float,
    tolerance: float,
    queries: list[int],
    lengths: list[int],
) -> None:
    layout = cache_dtype.layout(96, 32)
    inputs, values = attention_inputs(layout, queries, lengths, latent_scale, model_dtype)
    found, log_sum_exp = run("LatentAttention", layout, inputs, model_dtype=model_dtype, latent_scale=latent_scale)
    plain = [*inputs[:2], values, *inputs[3:]]
    expected, expected_log_sum_exp = reference.latent_attention(*plain, softmax_scale=SCALE)
    assert found.isfinite().all()
    if expected.any():
        assert relative_error(found, expected) <= tolerance
    torch.testing.assert_close(log_sum_exp.double(), expected_log_sum_exp, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_append_latent_writes_in_place_where_past_and_present_share_a_buffer(cache_dtype: CacheDType) -> None:
    layout = cache_dtype.layout(96, 32)
    model = single_op_model(OPS["AppendLatent"], BodyTypes(DType.FLOAT32, layout), attributes("AppendLatent", layout))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = append_inputs(layout, 3)
    expected = expected_pool(inputs, layout)
    values = [to_ort(tensor) for tensor in inputs]
    binding = session.io_binding()
    for value, contract in zip(values, OPS["AppendLatent"].inputs, strict=True):
        binding.bind_ortvalue_input(contract.name, value)
    binding.bind_ortvalue_output("present_latent", values[0])
    binding.bind_output("rotated_q_pe")
    session.run_with_iobinding(binding)
    assert binding.get_outputs()[0].data_ptr() == values[0].data_ptr()
    assert torch.equal(torch.from_numpy(values[0].numpy()), expected)
    assert (expected == POISON).any()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_rows_of_a_prefill_chunk_are_made_in_reasonable_time(cache_dtype: CacheDType) -> None:
    """256 tokens take some milliseconds on an idle core; the bound allows for a busy machine."""
    layout = cache_dtype.layout(512, 64)
    model = single_op_model(OPS["AppendLatent"], BodyTypes(DType.FLOAT32, layout), attributes("AppendLatent", layout))
    inputs = append_inputs(layout, 256, pages=32)
    run_model(OPS["AppendLatent"], model, inputs)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {contract.name: value.numpy() for contract, value in zip(OPS["AppendLatent"].inputs, inputs, strict=True)}
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1


@pytest.mark.parametrize("kv_lora_rank", [512, 448])
@pytest.mark.parametrize("model_dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", ["AppendLatent", "GatherLatent", "LatentAttention"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_tensorrt_builds_the_body_from_its_own_layers(
    cache_dtype: CacheDType, name: str, model_dtype: DType, kv_lora_rank: int
) -> None:
    layout = cache_dtype.layout(kv_lora_rank, 64)
    static = {
        "heads": HEADS,
        "kv_lora_rank": kv_lora_rank,
        "rope_dim": 64,
        "width": layout.width,
        "page_size": PAGE_SIZE,
    }
    values = attributes(name, layout, latent_scale=0.37)
    build_native(OPS[name], single_op_model(OPS[name], BodyTypes(model_dtype, layout), values, static), static)
