"""Against published tables at DeepSeek-V3's attention sizes, and arithmetic written out by hand at others."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.configs import published_spec
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.footprint import weight_footprint
from trtllm_mla.errors import UserError
from trtllm_mla.roofline.formats import FORMATS, RowFormat, default_formats
from trtllm_mla.roofline.gpus import GPUS
from trtllm_mla.roofline.model import format_report, make_roofline, row_floor

GIB = 1 << 30


@pytest.fixture
def v3(make_spec):
    return make_spec()


def roofline(spec, gpu="h200", *, formats=None, contexts=(1000,), batch_size=3, memory_bytes=None, free_fraction=0.9):
    device = replace(GPUS[gpu], memory_bytes=memory_bytes or GPUS[gpu].memory_bytes)
    return make_roofline(
        spec,
        device,
        formats=formats or default_formats(spec),
        contexts=contexts,
        batch_size=batch_size,
        free_fraction=free_fraction,
    )


def only(items, **values):
    found = [item for item in items if all(getattr(item, name) == value for name, value in values.items())]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("cache", "intensities"),
    [
        ("bf16", (241.8, 120.9, 60.4, 30.2)),
        ("fp8", (424.6, 212.3, 106.1, 53.1)),
        ("nvfp4", (669.5, 334.8, 167.4, 83.7)),
    ],
)
def test_arithmetic_intensity(v3, cache, intensities):
    rows = roofline(v3).rows
    for heads, intensity in zip((128, 64, 32, 16), intensities, strict=True):
        row = only(rows, cache=cache, num_heads=heads)
        assert row.tensor_parallel == 128 // heads
        assert row.flops == 2176 * heads
        assert row.intensity == pytest.approx(intensity, abs=0.06)


@pytest.mark.parametrize(
    ("cache", "heads"), [("bf16", (156, 109, 149)), ("fp8", (89, 62, 85)), ("nvfp4", (56.5, 39.4, 53.8))]
)
def test_heads_at_which_memory_and_mma_break_even(v3, cache, heads):
    for gpu, expected in zip(("h100", "h200", "b200"), heads, strict=True):
        found = only(roofline(v3, gpu).formats, name=cache).break_even_heads
        assert found == pytest.approx(expected, abs=0.5 if cache != "nvfp4" else 0.06)


@pytest.mark.parametrize(
    ("cache", "picoseconds"), [("bf16", 240.0), ("fp8", 656 / 4.8), ("nvfp4", 86.7)], ids=["bf16", "fp8", "nvfp4"]
)
def test_memory_time_on_h200(v3, cache, picoseconds):
    for row in roofline(v3).rows:
        if row.cache == cache:
            assert row.memory_seconds * 1e12 == pytest.approx(picoseconds, abs=0.05)


def test_mma_time_on_h200(v3):
    rows = roofline(v3).rows
    for heads, picoseconds in ((128, 281.5), (64, 140.8), (32, 70.4), (16, 35.2)):
        for row in rows:
            if row.num_heads == heads:
                assert row.mma_seconds * 1e12 == pytest.approx(picoseconds, abs=0.06)


def test_the_mma_time_of_64_heads_is_34_cycles_on_hopper(v3):
    """As FlashMLA's authors give it."""
    gpu = GPUS["h100"]
    row = row_floor(v3, gpu, FORMATS["bf16"], 2)
    assert row.mma_seconds * gpu.clock_hz * gpu.multiprocessors == pytest.approx(34, abs=0.05)


@pytest.mark.parametrize(("cache", "cycles"), [("bf16", 55.6), ("nvfp4", 20.1)])
def test_cycles_that_memory_leaves_at_a_clock_of_1755_mhz(v3, cache, cycles):
    gpu = replace(GPUS["h200"], clock_hz=1.755e9)
    assert format_report(v3, gpu, FORMATS[cache]).memory_cycles == pytest.approx(cycles, abs=0.05)


@pytest.mark.parametrize(("gpu", "speedups"), [("h100", (1.22, 2.44, 2.77, 2.77)), ("h200", (1.00, 1.71, 2.77, 2.77))])
def test_largest_speedup_of_nvfp4_over_bf16(v3, gpu, speedups):
    for ranks, speedup in zip((1, 2, 4, 8), speedups, strict=True):
        bf16, nvfp4 = (row_floor(v3, GPUS[gpu], FORMATS[name], ranks) for name in ("bf16", "nvfp4"))
        assert bf16.seconds / nvfp4.seconds == pytest.approx(speedup, abs=0.006)


@pytest.mark.parametrize(
    ("heads", "cycles", "bound"),
    [(128, 1, "MMA"), (16, 1, "memory"), (16, 60, "dequantisation"), (128, 60, "MMA"), (128, 70, "dequantisation")],
)
def test_the_longest_time_is_the_bound(v3, heads, cycles, bound):
    """On an H200 a 16-bit row of 1152 bytes takes 58 cycles to read, and 68 cycles of MMA for 128 heads."""
    item = RowFormat(CacheDType.BF16, FORMATS["bf16"].compute_dtype, cycles / 512)
    row = row_floor(v3, GPUS["h200"], item, 128 // heads)
    times = {"memory": 1152 / 4.8e12, "MMA": heads * 2176 / 989.4e12, "dequantisation": cycles / (132 * 1.83e9)}
    assert row.bound == bound
    assert row.seconds == pytest.approx(times[bound]) == pytest.approx(max(times.values()))


def test_float32_products_run_on_the_fp32_units(make_spec):
    spec = make_spec(dtype="float32")
    row = only(roofline(spec, formats=[FORMATS["fp32"]]).rows, num_heads=16)
    assert row.mma_seconds == pytest.approx(16 * 2176 / 66.9e12)
    assert row.bound == "MMA"


def test_heads_are_divided_evenly_or_not_at_all(make_spec):
    spec = make_spec(num_attention_heads=20)
    assert [row.num_heads for row in roofline(spec, formats=[FORMATS["bf16"]]).rows] == [20, 10, 5]


def test_so_are_the_widths_of_mlps(make_spec):
    spec = make_spec(intermediate_size=18_434)
    assert [row.num_heads for row in roofline(spec, formats=[FORMATS["bf16"]]).rows] == [128, 64]


UNEVEN = {
    "vocab_size": 101,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 14,
}


@pytest.mark.parametrize("tie", [False, True])
def test_weights_are_those_of_the_transformers_model(make_spec, tie):
    spec = make_spec(**UNEVEN, tie_word_embeddings=tie)
    config = AutoConfig.for_model("deepseek_v3", **UNEVEN, tie_word_embeddings=tie, first_k_dense_replace=3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = weight_footprint(spec)
    parameters = model.num_parameters()
    assert weights.weight_bytes == 2 * parameters
    assert weights.multiplied == parameters - (0 if tie else 101 * 72)
    assert weights.parameters == weights.active_parameters == parameters
    assert weights.read_bytes(1) == weights.read_bytes(5) == 2 * weights.multiplied


@pytest.mark.parametrize("batch_size", [1, 5000])
def test_a_step_by_hand(make_spec, batch_size):
    """5000 requests are past the ridge of the weights, where products take longer than reading."""
    spec = make_spec(**UNEVEN)
    weights = weight_footprint(spec)
    step = only(roofline(spec, "a100", contexts=[77], batch_size=batch_size).steps, num_heads=3, cache="bf16")
    layer = batch_size * 77 * (40 + 12) * 2 / 2.039e12
    bound = 2 / 2.039e12 if batch_size == 1 else 2 * batch_size / 312e12
    seconds = weights.multiplied * bound / 2
    assert step.layer_seconds == pytest.approx(layer)
    assert step.attention_seconds == pytest.approx(3 * layer)
    assert step.weights_seconds == pytest.approx(seconds)
    assert step.attention_tokens_per_second == pytest.approx(batch_size / (3 * layer))
    assert step.tokens_per_second == pytest.approx(batch_size / (3 * layer + seconds))
    assert step.fits


@pytest.mark.parametrize("batch_size", [1, 16, 20_000])
def test_a_step_of_a_mixture_of_experts_by_hand(batch_size):
    """DeepSeek-V3 on 8 GPUs: few requests leave most experts unread, many are multiplied by 37 billion each."""
    spec = published_spec("deepseek_v3")
    result = roofline(spec, formats=[FORMATS["bf16"]], contexts=[100], batch_size=batch_size)
    step = only(result.steps, tensor_parallel=8)
    experts = 58 * 256 * 3 * 7168 * 2048
    weights = weight_footprint(spec)
    read = weights.weight_bytes - 2 * 129280 * 7168 - 2 * experts * (1 - 8 / 256) ** batch_size
    multiplied = 671.03e9 - 129280 * 7168 - experts * 248 / 256
    seconds = max(read / 4.8e12, 2 * batch_size * multiplied / 989.4e12) / 8
    assert step.weights_seconds == pytest.approx(seconds, rel=1e-3)


def test_tensor_parallelism_divides_weights_and_products_but_not_the_cache(v3):
    result = roofline(v3, formats=[FORMATS["bf16"]])
    one, eight = (only(result.steps, tensor_parallel=ranks) for ranks in (1, 8))
    assert eight.weights_seconds == pytest.approx(one.weights_seconds / 8)
    assert eight.layer_seconds == pytest.approx(3 * 1000 * 240e-12)
    rows = {row.tensor_parallel: row for row in result.rows}
    assert rows[8].mma_seconds == pytest.approx(rows[1].mma_seconds / 8)
    assert rows[8].memory_seconds == rows[1].memory_seconds


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("cache", ["bf16", "nvfp4"])
def test_the_capacity_of_deepseek_v3_by_hand(cache, ranks):
    """In 16 bits. A GPU has a part of what heads, widths, experts and vocabulary divide, and the rest whole."""
    hidden, latent, query_latent, vocabulary = 7168, 512, 1536, 129_280
    moe, experts = 58, 256
    norms = 61 * (2 * hidden + query_latent + latent) + hidden
    whole = vocabulary * hidden + 61 * (query_latent + latent + 64) * hidden + norms
    heads = 61 * 128 * ((128 + 64) * query_latent + (128 + 128) * latent + 128 * hidden)
    mlps = 3 * hidden * (3 * 18_432 + moe * 2048)
    shared_out = vocabulary * hidden + heads + mlps + moe * experts * 3 * hidden * 2048
    routers = moe * experts * (hidden + 1)  # with their correction biases, in fp32
    memory = 2000 * GIB
    result = roofline(
        published_spec("deepseek_v3"), formats=[FORMATS[cache]], memory_bytes=memory, free_fraction=0.5, batch_size=5
    )
    room = only(result.capacities, tensor_parallel=ranks)
    assert room.weight_bytes == 2 * (whole + shared_out // ranks) + 4 * routers
    assert room.bytes_per_token == 61 * {"bf16": 1152, "nvfp4": 416}[cache]
    assert room.workspace_bytes > 16_384 * 65_536 // ranks
    free = memory - room.weight_bytes - room.workspace_bytes
    assert room.tokens == free // 2 // (64 * room.bytes_per_token) * 64


def test_requests_fit_in_whole_pages(make_spec):
    """Three requests of 192 tokens take nine pages of 64 tokens; of 193 tokens twelve, as each has a fourth page."""
    spec = make_spec(num_hidden_layers=3)
    options = {"formats": [FORMATS["fp8"]], "contexts": [193, 192, 5], "batch_size": 3, "free_fraction": 1.0}
    room = only(roofline(spec, **options).capacities, tensor_parallel=1)
    page = 64 * 3 * 656
    for size, pages in ((9 * page - 1, 8), (9 * page, 9), (12 * page - 1, 11), (12 * page, 12)):
        memory = room.weight_bytes + room.workspace_bytes + size
        result = roofline(spec, memory_bytes=memory, **options)
        assert only(result.capacities, tensor_parallel=1).tokens == pages * 64
        fits = {step.context: step.fits for step in result.steps if step.tensor_parallel == 1}
        assert fits == {193: pages >= 12, 192: pages >= 9, 5: True}


def test_the_longest_context_sets_the_limits(v3):
    workspaces = [
        only(roofline(v3, formats=[FORMATS["bf16"]], contexts=contexts).capacities, tensor_parallel=8).workspace_bytes
        for contexts in ([512, 16_384], [16_384], [512])
    ]
    assert workspaces[0] == workspaces[1] > workspaces[2]


def test_kernels_that_do_not_fit_a_gpu_leave_nothing(make_spec):
    spec = make_spec(kv_lora_rank=1024, num_hidden_layers=1, dtype="float32")
    result = roofline(spec, "rtx3090", formats=[FORMATS["fp32"]])
    room = only(result.capacities, tensor_parallel=1)
    assert (room.workspace_bytes, room.tokens) == (None, 0)
    assert "shared memory" in room.problem
    assert not any(step.fits for step in result.steps)
    assert all(item.problem is None for item in roofline(spec, "h200", formats=[FORMATS["fp32"]]).capacities)


def test_weights_that_do_not_fit_leave_nothing(v3):
    result = roofline(v3, "rtx4090", formats=[FORMATS["bf16"]])
    assert (only(result.capacities, tensor_parallel=1).tokens, result.capacities[0].workspace_bytes) == (0, None)
    assert not only(result.steps, tensor_parallel=1).fits
    assert only(result.capacities, tensor_parallel=8).tokens > 0


def test_64k_context_batch_16_60_layers(v3):
    sizes = roofline(v3, contexts=[65536], batch_size=16).cache_sizes
    assert only(sizes, form="multi_head").cache_bytes == 3.75 * 1024 * GIB
    assert only(sizes, form="grouped_query_8").cache_bytes == 240 * GIB
    assert only(sizes, form="mla", cache="bf16").cache_bytes == 67.5 * GIB
    assert only(sizes, form="mla", cache="nvfp4").cache_bytes == 67.5 * GIB * 416 / 1152


def test_break_even_prefill(v3, make_spec):
    assert roofline(v3).break_even_queries == pytest.approx(170.67, abs=0.01)
    assert roofline(make_spec(kv_lora_rank=96)).break_even_queries is None


@pytest.mark.parametrize("value", [0, -1, (1 << 40) + 1])
def test_numbers_out_of_range_are_refused(v3, value):
    with pytest.raises(UserError, match=f"--batch-size: found {value}, expected a number from 1"):
        roofline(v3, batch_size=value)
    with pytest.raises(UserError, match=f"--context: found {value}, expected a number from 1"):
        roofline(v3, contexts=[5, value])


def test_caches_beyond_32_bits_are_refused(v3):
    with pytest.raises(UserError, match="slots are 32-bit numbers"):
        roofline(v3, contexts=[1 << 30], batch_size=4)
