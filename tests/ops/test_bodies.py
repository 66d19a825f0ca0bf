"""ONNX function bodies in ONNX Runtime against float64, and as native layers of TensorRT-RTX."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch

from tests.ops import reference
from tests.ops.block_scaled_routed_experts.test_kernels import dequantized
from tests.ops.block_scaled_routed_experts.test_kernels import make_inputs as block_scaled_experts_inputs
from tests.ops.checks import TOLERANCE, as_cache_dtype, relative_error
from tests.support.ort import from_ort, to_ort, torch_dtype
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import DOMAIN, Attribute, BodyTypes, OpDefinition, TensorContract, split_dim
from trtllm_mla.ops.functions import OPSET

HEADS, NOPE, LATENT, ROPE, V = 5, 48, 96, 32, 40
SCALE = 0.37
ATTRIBUTES: dict[str, dict[str, Attribute]] = {
    "AppendLatent": {"rope_interleave": 1, "latent_scale": 1.0},
    "GatherLatent": {"kv_lora_rank": LATENT, "rope_dim": ROPE, "latent_scale": 1.0},
    "LatentAttention": {"softmax_scale": SCALE, "latent_scale": 1.0},
    "ContextAttention": {"softmax_scale": SCALE, "causal": 1},
    "RoutedExperts": {"first_expert": 2},
    "BlockScaledMatMul": {},
    "BlockScaledRoutedExperts": {"first_expert": 2},
}
# Sizes fixed when an engine is built.
STATIC = {
    "heads": HEADS,
    "nope_dim": NOPE,
    "kv_lora_rank": LATENT,
    "rope_dim": ROPE,
    "width": LATENT + ROPE,
    "v_dim": V,
    "page_size": 16,
    "experts": 7,
    "top_k": 3,
    "hidden_size": 100,
    "intermediate_size": 52,
    "gate_up_size": 104,
    "hidden_blocks": 1,
    "intermediate_blocks": 1,
    "gate_up_blocks": 2,
    "in_features": 200,
    "out_features": 300,
    "scale_rows": 3,
    "scale_columns": 2,
}
TYPES = [
    (DType.FLOAT32, DType.FLOAT32),
    (DType.FLOAT32, DType.BFLOAT16),
    (DType.FLOAT32, DType.FLOAT16),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.FLOAT16, DType.BFLOAT16),
]
# Half a unit in the last place, relative.
ROUNDING = {DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}


def single_op_model(
    op: OpDefinition, types: BodyTypes, attributes: Mapping[str, Attribute], static: Mapping[str, int] | None = None
) -> onnx.ModelProto:
    """A model of one node, without the attributes that make TensorRT look for a plugin."""
    element_types = {
        "model": types.model_dtype.onnx,
        "cache": types.cache_dtype.onnx,
        "int8": onnx_ir.DataType.INT8,
        "int32": onnx_ir.DataType.INT32,
        "float32": onnx_ir.DataType.FLOAT,
    }
    sizes = static or {}

    def value(tensor: TensorContract) -> onnx_ir.Value:
        shape = [dim if isinstance(dim, int) else sizes.get(dim, dim) for dim in tensor.dims]
        shape = [dim.replace("+", "_plus_") if isinstance(dim, str) else dim for dim in shape]
        return onnx_ir.val(tensor.name, element_types[tensor.element_type], shape)

    inputs = [value(tensor) for tensor in op.inputs]
    outputs = [value(tensor) for tensor in op.outputs]
    node = onnx_ir.node(op.name, inputs, dict(attributes), domain=DOMAIN, outputs=outputs)
    graph = onnx_ir.Graph(inputs, outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: 1}, name=op.name)
    function = op.build_body(types, attributes)
    for name in ("plugin_namespace", "plugin_version"):
        del function.attributes[name]
    model = onnx_ir.to_proto(onnx_ir.Model(graph, ir_version=10, functions=[function]))
    onnx.checker.check_model(model)
    return model


def body_types(model_dtype: DType, cache_dtype: DType | CacheDType) -> BodyTypes:
    return BodyTypes(model_dtype, as_cache_dtype(cache_dtype).layout(LATENT, ROPE))


def run_body(
    name: str, inputs: Sequence[torch.Tensor], *, model_dtype: DType, cache_dtype: DType, **attributes: Attribute
) -> list[torch.Tensor]:
    """Runs a body in ONNX Runtime on the CPU."""
    types = body_types(model_dtype, cache_dtype)
    return run_model(OPS[name], single_op_model(OPS[name], types, {**ATTRIBUTES[name], **attributes}), inputs)


def run_model(op: OpDefinition, model: onnx.ModelProto, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a model of one node in ONNX Runtime on the CPU."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for tensor, contract in zip(inputs, op.inputs, strict=True):
        binding.bind_ortvalue_input(contract.name, to_ort(tensor))
    for contract in op.outputs:
        binding.bind_output(contract.name)
    session.run_with_iobinding(binding)
    return [from_ort(value) for value in binding.get_outputs()]


def prefix_sums(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)


def index_matrix(counts: Sequence[int]) -> torch.Tensor:
    """Packed rows of each request, padded with 0 to at least one column."""
    longest = max([1, *counts])
    index = torch.zeros(len(counts), longest, dtype=torch.int32)
    first = 0
    for request, count in enumerate(counts):
        index[request, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return index


def paged_requests(
    lengths: Sequence[int], *, page_size: int, pages: int, columns: int, generator: torch.Generator, dtype: DType
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool that is NaN wherever no token is, and a page table padded with numbers far outside the pool."""
    pool = torch.full((pages, page_size, LATENT + ROPE), float("nan"))
    table = torch.full((len(lengths), columns), 2_000_000_000, dtype=torch.int32)
    free = torch.randperm(pages, generator=generator).tolist()
    for request, length in enumerate(lengths):
        for column in range(-(-length // page_size)):
            page = free.pop()
            table[request, column] = page
            count = min(page_size, length - column * page_size)
            pool[page, :count] = torch.randn(count, LATENT + ROPE, generator=generator)
    return pool.to(torch_dtype(dtype)), table


def latent_attention_inputs(
    queries: Sequence[int],
    lengths: Sequence[int],
    *,
    model_dtype: DType = DType.FLOAT32,
    cache_dtype: DType = DType.FLOAT32,
    page_size: int = 16,
    columns: int | None = None,
    seed: int = 0,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    columns = max([1, *(-(-length // page_size) for length in lengths)]) + 1 if columns is None else columns
    pages = sum(-(-length // page_size) for length in lengths) + 2
    pool, table = paged_requests(
        lengths, page_size=page_size, pages=pages, columns=columns, generator=generator, dtype=cache_dtype
    )
    tokens = sum(queries)
    model = torch_dtype(model_dtype)
    return [
        torch.randn(tokens, HEADS, LATENT, generator=generator).to(model),
        torch.randn(tokens, HEADS, ROPE, generator=generator).to(model),
        pool,
        table,
        torch.tensor(lengths, dtype=torch.int32),
        prefix_sums(queries),
        index_matrix(queries),
    ]


def context_attention_inputs(
    queries: Sequence[int], lengths: Sequence[int], *, model_dtype: DType = DType.FLOAT32, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, keys = sum(queries), sum(lengths)
    shapes = [(tokens, HEADS, NOPE), (tokens, HEADS, ROPE), (keys, HEADS, NOPE), (keys, ROPE), (keys, HEADS, V)]
    return [
        *(torch.randn(*shape, generator=generator).to(torch_dtype(model_dtype)) for shape in shapes),
        prefix_sums(queries),
        prefix_sums(lengths),
        index_matrix(queries),
        index_matrix(lengths),
    ]


def rotary_table(positions: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, ROPE, 2).float() / ROPE))
    return 1.1 * torch.cat([angles.cos(), angles.sin()], dim=-1)


def append_latent_inputs(
    tokens: int, *, model_dtype: DType, cache_dtype: DType, page_size: int = 16, pages: int = 7, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = torch_dtype(model_dtype)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    return [
        torch.randn(pages, page_size, LATENT + ROPE, generator=generator).to(torch_dtype(cache_dtype)),
        torch.randn(tokens, LATENT, generator=generator).to(model),
        torch.randn(tokens, ROPE, generator=generator).to(model),
        torch.randn(tokens, HEADS, ROPE, generator=generator).to(model),
        torch.randint(0, 300, (tokens,), generator=generator, dtype=torch.int32),
        slots.int(),
        rotary_table(300),
    ]


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, dtype: DType, *, slack: float = 1e-6) -> None:
    """Checks that values are the float64 ones, rounded to ``dtype``, but for ``slack`` of the largest."""
    assert torch.isfinite(found).all()
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = expected.abs() * ROUNDING[dtype] + slack * max(1.0, largest)
    assert ((found.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("name", list(OPS))
def test_function_signature_is_the_contract(name: str) -> None:
    op = OPS[name]
    function = op.build_body(body_types(DType.FLOAT32, DType.BFLOAT16), ATTRIBUTES[name])
    assert (function.domain, function.name) == (DOMAIN, name)
    assert [value.name for value in function.inputs] == [tensor.name for tensor in op.inputs]
    assert len(function.outputs) == len(op.outputs)
    assert set(function.attributes) == {*op.attributes, "plugin_namespace", "plugin_version"}


@pytest.mark.parametrize(("model_dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize("interleave", [0, 1])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_append_latent(model_dtype: DType, cache_dtype: DType, interleave: int, tokens: int) -> None:
    inputs = append_latent_inputs(tokens, model_dtype=model_dtype, cache_dtype=cache_dtype, seed=tokens)
    present, rotated = run_body(
        "AppendLatent", inputs, model_dtype=model_dtype, cache_dtype=cache_dtype, rope_interleave=interleave
    )
    expected_present, expected_rotated = reference.append_latent(*inputs, rope_interleave=interleave)
    assert present.dtype == torch_dtype(cache_dtype)
    assert rotated.dtype == torch_dtype(model_dtype)
    assert_rounded(present, expected_present, cache_dtype)
    assert_rounded(rotated, expected_rotated, model_dtype)


def test_append_latent_writes_in_place_where_past_and_present_share_a_buffer() -> None:
    types = body_types(DType.FLOAT32, DType.BFLOAT16)
    session = onnxruntime.InferenceSession(
        single_op_model(OPS["AppendLatent"], types, ATTRIBUTES["AppendLatent"]).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    seconds = {}
    for pages in (8, 8192):
        inputs = append_latent_inputs(3, model_dtype=DType.FLOAT32, cache_dtype=DType.BFLOAT16, pages=pages)
        expected, _ = reference.append_latent(*inputs, rope_interleave=1) if pages == 8 else (None, None)
        values = [to_ort(tensor) for tensor in inputs]
        binding = session.io_binding()
        for value, contract in zip(values, OPS["AppendLatent"].inputs, strict=True):
            binding.bind_ortvalue_input(contract.name, value)
        binding.bind_ortvalue_output("present_latent", values[0])
        binding.bind_output("rotated_q_pe")
        runs = []
        for _ in range(5):
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            runs.append(time.perf_counter() - start)
        seconds[pages] = min(runs)
        assert binding.get_outputs()[0].data_ptr() == values[0].data_ptr()
        if expected is not None:
            assert_rounded(from_ort(values[0]), expected, DType.BFLOAT16)
    # A copy of the larger pool, 33 MB, takes milliseconds.
    assert seconds[8192] < seconds[8] + 2e-3


@pytest.mark.parametrize(("model_dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize("keys", [0, 1, 45])
def test_gather_latent(model_dtype: DType, cache_dtype: DType, keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    pool, table = paged_requests([keys], page_size=16, pages=6, columns=6, generator=generator, dtype=cache_dtype)
    positions = torch.arange(keys)
    slots = (table[0, positions // 16] * 16 + positions % 16).int()
    found = run_body("GatherLatent", [pool, slots], model_dtype=model_dtype, cache_dtype=cache_dtype)
    expected = reference.gather_latent(pool, slots, kv_lora_rank=LATENT, rope_dim=ROPE)
    for value, exact in zip(found, expected, strict=True):
        assert value.dtype == torch_dtype(model_dtype)
        assert_rounded(value, exact, model_dtype, slack=0.0)


@pytest.mark.parametrize(("model_dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize(
    ("queries", "lengths", "page_size"),
    [
        pytest.param([1], [1], 16, id="one token"),
        pytest.param([1, 1, 1], [15, 16, 17], 16, id="page edges"),
        pytest.param([5, 1, 3], [5, 40, 70], 32, id="different lengths"),
        pytest.param([2, 0, 1], [20, 0, 9], 16, id="request without tokens"),
        pytest.param([4, 2], [2, 1], 16, id="queries without visible keys"),
        pytest.param([0], [33], 16, id="keys without queries"),
        pytest.param([], [], 16, id="no requests"),
    ],
)
def test_latent_attention(
    model_dtype: DType, cache_dtype: DType, queries: list[int], lengths: list[int], page_size: int
) -> None:
    inputs = latent_attention_inputs(
        queries, lengths, model_dtype=model_dtype, cache_dtype=cache_dtype, page_size=page_size
    )
    found, found_lse = run_body("LatentAttention", inputs, model_dtype=model_dtype, cache_dtype=cache_dtype)
    expected, expected_lse = reference.latent_attention(*inputs, softmax_scale=SCALE)
    assert found.dtype == torch_dtype(model_dtype)
    assert_rounded(found, expected, model_dtype, slack=2e-6)
    torch.testing.assert_close(found_lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("model_dtype", [DType.FLOAT32, DType.FLOAT16])
@pytest.mark.parametrize(
    ("queries", "lengths"),
    [
        pytest.param([1], [1], id="one token"),
        pytest.param([7, 1, 3], [7, 30, 19], id="different lengths"),
        pytest.param([2, 0, 1], [6, 0, 9], id="request without tokens"),
        pytest.param([4, 2], [2, 1], id="queries without visible keys"),
        pytest.param([3, 2], [3, 0], id="request without keys"),
        pytest.param([3, 2], [0, 0], id="no keys"),
        pytest.param([9, 1], [4, 30], id="more queries than keys"),
        pytest.param([], [], id="no requests"),
    ],
)
@pytest.mark.parametrize("causal", [1, 0])
def test_context_attention(model_dtype: DType, queries: list[int], lengths: list[int], causal: int) -> None:
    inputs = context_attention_inputs(queries, lengths, model_dtype=model_dtype)
    found, found_lse = run_body(
        "ContextAttention", inputs, model_dtype=model_dtype, cache_dtype=DType.FLOAT32, causal=causal
    )
    expected, expected_lse = reference.context_attention(*inputs, softmax_scale=SCALE, causal=causal)
    assert found.dtype == torch_dtype(model_dtype)
    assert_rounded(found, expected, model_dtype, slack=2e-6)
    torch.testing.assert_close(found_lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([], id="no tokens"),
        pytest.param([[3, 8]], id="one token"),
        pytest.param([[2, 3], [8, 2], [5, 3], [3, 8], [2, 5]], id="experts without tokens"),
        pytest.param([[4, 6]] * 9, id="the same experts for all"),
        pytest.param([[4, 4], [3, 4], [4, 3]], id="an expert twice"),
        pytest.param([[1, 2], [9, 0], [-1, 8], [-(2**31), 2**31 - 1], [5, -3]], id="ids outside"),
    ],
)
def test_routed_experts(dtype: DType, ids: list[list[int]]) -> None:
    """Weights of experts that were not chosen are NaN."""
    generator = torch.Generator().manual_seed(len(ids))
    experts, hidden_size, intermediate_size = (
        STATIC[name] for name in ("experts", "hidden_size", "intermediate_size")
    )
    expert_ids = torch.tensor(ids, dtype=torch.int32).reshape(len(ids), 2)
    unused = sorted(set(range(experts)) - {expert_id - 2 for token in ids for expert_id in token})
    gate_up_proj = torch.randn(experts, 2 * intermediate_size, hidden_size, generator=generator) * hidden_size**-0.5
    down_proj = torch.randn(experts, hidden_size, intermediate_size, generator=generator) * intermediate_size**-0.5
    gate_up_proj[unused] = down_proj[unused] = float("nan")
    hidden = torch.randn(len(ids), hidden_size, generator=generator)
    inputs = [value.to(torch_dtype(dtype)) for value in (hidden, gate_up_proj, down_proj)]
    inputs += [expert_ids, torch.rand(len(ids), 2, generator=generator) + 0.1]
    (found,) = run_body("RoutedExperts", inputs, model_dtype=dtype, cache_dtype=DType.FLOAT32)
    expected = reference.routed_experts(*inputs, first_expert=2)
    assert (found.dtype, found.shape) == (torch_dtype(dtype), (len(ids), hidden_size))
    assert torch.isfinite(found).all()
    assert (found[(expected == 0).all(dim=1)] == 0).all()
    if ids:
        assert relative_error(found, expected) <= TOLERANCE[dtype]


def experts_tolerance(dtype: DType, hidden_size: int, intermediate_size: int) -> float:
    """Bound of the relative error of an expert: that of the type, or of three sums in fp32 one after the other.

    A running sum of n terms is rounded n times by at most 2^-24 of itself; roundings of either sign add up like a
    random walk, to the square root of n.
    """
    return max(TOLERANCE[dtype], 2**-24 * (2 * hidden_size + intermediate_size) ** 0.5)


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "intermediate_size"),
    [
        (DType.FLOAT32, 140, 131),
        (DType.FLOAT32, 128, 192),
        (DType.FLOAT32, 3, 2),
        (DType.FLOAT16, 140, 131),
        (DType.FLOAT16, 128, 192),
    ],
)
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([], id="no tokens"),
        pytest.param([[3, 4]], id="one token"),
        pytest.param([[2, 3], [4, 4], [1, 3], [-(2**31), 2**31 - 1], [9, 2]], id="ids outside, an expert twice"),
    ],
)
def test_block_scaled_routed_experts(
    dtype: DType, hidden_size: int, intermediate_size: int, ids: list[list[int]]
) -> None:
    """Codes and scales of experts that were not chosen are NaN. In fp32 it has the bits of dequantised weights."""
    expert_ids = torch.tensor(ids, dtype=torch.int32).reshape(len(ids), 2)
    inputs = block_scaled_experts_inputs(
        expert_ids,
        dtype,
        experts=5,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        first_expert=2,
    )
    (found,) = run_body(
        "BlockScaledRoutedExperts", list(inputs.values()), model_dtype=dtype, cache_dtype=DType.FLOAT32
    )
    expected = reference.block_scaled_routed_experts(**inputs, first_expert=2)
    assert (found.dtype, found.shape) == (torch_dtype(dtype), (len(ids), hidden_size))
    assert torch.isfinite(found).all()
    assert (found[(expected == 0).all(dim=1)] == 0).all()
    if ids:
        assert relative_error(found, expected) <= experts_tolerance(dtype, hidden_size, intermediate_size)
    if dtype is DType.FLOAT32:
        same = list(dequantized(inputs, dtype).values())
        (plain,) = run_body("RoutedExperts", same, model_dtype=dtype, cache_dtype=DType.FLOAT32)
        assert torch.equal(found, plain)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize(("out_features", "in_features"), [(300, 200), (128, 256), (1, 1), (576, 130)])
def test_block_scaled_mat_mul(dtype: DType, rows: int, out_features: int, in_features: int) -> None:
    """Every code but NaN, which stays NaN."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.tensor([code for code in range(-128, 128) if code & 0x7F != 0x7F], dtype=torch.int8)
    weight = codes[torch.randint(len(codes), (out_features, in_features), generator=generator)]
    scale = torch.rand(-(-out_features // 128), -(-in_features // 128), generator=generator) + 0.01
    x = torch.randn(rows, in_features, generator=generator).to(torch_dtype(dtype))
    (found,) = run_body("BlockScaledMatMul", [x, weight, scale], model_dtype=dtype, cache_dtype=DType.FLOAT32)
    expected = reference.block_scaled_mat_mul(x, weight, scale)
    assert (found.dtype, found.shape) == (torch_dtype(dtype), expected.shape)
    if rows:
        assert relative_error(found, expected) <= TOLERANCE[dtype]
        weight[0, 0] = 0x7F
        (found,) = run_body("BlockScaledMatMul", [x, weight, scale], model_dtype=dtype, cache_dtype=DType.FLOAT32)
        assert found[:, 0].isnan().all()
        assert found[:, 1:].isfinite().all()


# Least, usual and greatest sizes of the other dimensions.
DYNAMIC = {
    "tokens": (0, 8, 64),
    "rows": (0, 8, 64),
    "keys": (0, 8, 128),
    "requests": (0, 2, 8),
    "longest_query": (0, 4, 16),
    "longest_key": (0, 8, 32),
    "pages": (1, 8, 64),
    "pages_per_request": (1, 4, 16),
    "positions": (1, 64, 64),
}


def parse_native(model: onnx.ModelProto) -> tuple[Any, Any]:
    """TensorRT-RTX's builder and network of a model."""
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    errors = [] if parser.parse(model.SerializeToString()) else [parser.get_error(0).desc()]
    assert not errors
    return builder, network


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", list(OPS))
def test_tensorrt_builds_the_body_from_its_own_layers(name: str, dtype: DType) -> None:
    op, types = OPS[name], body_types(dtype, DType.BFLOAT16)
    build_native(op, single_op_model(op, types, ATTRIBUTES[name], STATIC), STATIC)


def build_native(op: OpDefinition, model: onnx.ModelProto, static: Mapping[str, int]) -> None:
    """Asserts that TensorRT-RTX builds a model of one node, for DYNAMIC sizes, from layers that are no plugins."""
    trt = pytest.importorskip("tensorrt_rtx")
    builder, network = parse_native(model)
    layers = [network.get_layer(index).type for index in range(network.num_layers)]
    assert not {trt.LayerType.PLUGIN, trt.LayerType.PLUGIN_V2, trt.LayerType.PLUGIN_V3} & set(layers)
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for tensor in op.inputs:
        sizes = []
        for dim in tensor.dims:
            dim_name, offset = split_dim(dim)
            fixed = static.get(str(dim_name))
            sizes.append(DYNAMIC[str(dim_name)] if fixed is None else (fixed,) * 3)
            sizes[-1] = tuple(size + offset for size in sizes[-1])
        profile.set_shape(tensor.name, *zip(*sizes, strict=True))
    assert config.add_optimization_profile(profile) == 0
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    assert builder.build_serialized_network(network, config) is not None


@pytest.mark.parametrize("interleave", [0, 1])
def test_tensorrt_takes_attributes_from_the_node(interleave: int) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    types = body_types(DType.FLOAT32, DType.FLOAT32)
    _, network = parse_native(
        single_op_model(OPS["AppendLatent"], types, {"rope_interleave": interleave, "latent_scale": 1.0}, STATIC)
    )
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    rotations = [layer for layer in layers if layer.type == trt.LayerType.ROTARY_EMBEDDING]
    assert len(rotations) == 2
    for layer in rotations:
        layer.__class__ = trt.IRotaryEmbeddingLayer
        assert layer.interleaved == bool(interleave)
