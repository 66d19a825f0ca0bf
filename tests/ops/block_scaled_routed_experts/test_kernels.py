import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.block_scaled_mat_mul.test_kernels import CODES
from tests.ops.block_scaled_routed_experts.test_plan import with_dims
from tests.ops.checks import DTYPES, TOLERANCE, Guarded, interpret, relative_error, torch_dtype
from tests.ops.routed_experts.test_kernels import WILD, CheckedMemory, choose, with_workspace_as_tensors
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.block_scaled_routed_experts import BLOCK_SCALED_ROUTED_EXPERTS
from trtllm_mla.ops.block_scaled_routed_experts.plan import PRODUCTS, shared_memory_bytes
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.ops.plan import ceil_div
from trtllm_mla.ops.routed_experts import ROUTED_EXPERTS
from trtllm_mla.ops.routed_experts.plan import Tile
from trtllm_mla.targets import TARGETS

Inputs = dict[str, torch.Tensor]
WEIGHTS = ("gate_up_proj", "gate_up_scale", "down_proj", "down_scale")
ONE = 0x38  # the code of 1


def make_inputs(
    expert_ids: Sequence[Sequence[int]] | torch.Tensor,
    dtype: DType,
    *,
    experts: int = 7,
    hidden_size: int = 150,
    intermediate_size: int = 140,
    first_expert: int = 0,
) -> Inputs:
    """Random inputs for the given choices: codes from all numbers there are, scales that differ by up to 100.

    Of experts that no token chose, all codes and scales are NaN.
    """
    ids = torch.as_tensor(expert_ids, dtype=torch.int32)
    hidden_blocks, intermediate_blocks = ceil_div(hidden_size, 128), ceil_div(intermediate_size, 128)

    def codes(*shape: int) -> torch.Tensor:
        return CODES[torch.randint(len(CODES), shape)]

    def scales(*shape: int, width: int) -> torch.Tensor:
        return torch.pow(10.0, 2 * torch.rand(shape) - 4) / math.sqrt(width)

    inputs = {
        "hidden": torch.randn(len(ids), hidden_size).to(torch_dtype(dtype)),
        "gate_up_proj": codes(experts, 2 * intermediate_size, hidden_size),
        "gate_up_scale": scales(experts, 2 * intermediate_blocks, hidden_blocks, width=hidden_size),
        "down_proj": codes(experts, hidden_size, intermediate_size),
        "down_scale": scales(experts, hidden_blocks, intermediate_blocks, width=intermediate_size),
        "expert_ids": ids,
        "expert_weights": torch.rand(ids.shape) + 0.1,
    }
    chosen = {int(value) - first_expert for value in ids.flatten()}
    for expert in set(range(experts)) - chosen:
        inputs["gate_up_proj"][expert], inputs["down_proj"][expert] = 0x7F, -1
        inputs["gate_up_scale"][expert] = inputs["down_scale"][expert] = float("nan")
    return inputs


def problem_of(inputs: Inputs, dtype: DType) -> Problem:
    experts, hidden_size, intermediate_size = inputs["down_proj"].shape
    tokens, top_k = inputs["expert_ids"].shape
    sizes = {"experts": experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return replace(with_dims(tokens=tokens, top_k=top_k, **sizes), model_dtype=dtype)


def run(inputs: Inputs, dtype: DType, *, first_expert: int = 0, target: str = "sm_90") -> torch.Tensor:
    attributes = {"first_expert": first_expert}
    (output,) = interpret(BLOCK_SCALED_ROUTED_EXPERTS, inputs, attributes, model_dtype=dtype, target=target)
    return output


def check(inputs: Inputs, dtype: DType, *, first_expert: int = 0, target: str = "sm_90") -> torch.Tensor:
    """Compares with float64; tokens without an expert give exactly 0."""
    output = run(inputs, dtype, first_expert=first_expert, target=target)
    expected = reference.block_scaled_routed_experts(**inputs, first_expert=first_expert)
    assert output.isfinite().all()
    local = inputs["expert_ids"].long() - first_expert
    served = ((local >= 0) & (local < len(inputs["down_proj"]))).any(dim=1)
    assert (output[~served] == 0).all()
    assert (output[served] != 0).any(dim=1).all()
    if served.any():
        assert relative_error(output, expected) <= TOLERANCE[dtype]
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(150, 140), (300, 192), (72, 40)])
def test_ragged_sizes_against_float64(hidden_size: int, intermediate_size: int, dtype: DType, target: str) -> None:
    """Of 192 rows of the gate the last 64 share a row of scales, and up begins with one of its own."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    check(make_inputs(choose(21, 3, 7), dtype, **sizes), dtype, target=target)


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"),
    [(128, 64), (256, 128), (1, 1), (7, 3), (129, 65), (127, 130), (132, 260)],
)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_edges_of_tiles_blocks_and_words(hidden_size: int, intermediate_size: int, dtype: DType) -> None:
    """One column more or less than a tile has, whole tiles, and rows of bytes that are no words.

    Several choices of one column might cancel, which no error relative to the result allows for.
    """
    inputs = make_inputs(
        choose(9, 1, 4), dtype, experts=4, hidden_size=hidden_size, intermediate_size=intermediate_size
    )
    expected = reference.block_scaled_routed_experts(**inputs, first_expert=0)
    assert relative_error(run(inputs, dtype), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("tokens", "block_m"), [(1, 16), (33, 64), (250, 128)], ids=["decode", "small prefill", "prefill"]
)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_every_tile(tokens: int, block_m: int, dtype: DType) -> None:
    inputs = make_inputs(choose(tokens, 2, 3), dtype, experts=3, hidden_size=136, intermediate_size=132)
    assert PRODUCTS.choose_tiles(problem_of(inputs, dtype)).block_m == block_m
    check(inputs, dtype)


def dequantized(inputs: Inputs, dtype: DType) -> Inputs:
    """Inputs of RoutedExperts with the weights that codes and scales stand for."""
    gate, up = (
        reference.dequantize_weight(codes, scale)
        for codes, scale in zip(inputs["gate_up_proj"].chunk(2, 1), inputs["gate_up_scale"].chunk(2, 1), strict=True)
    )
    weights = {
        "gate_up_proj": torch.cat([gate, up], dim=1),
        "down_proj": reference.dequantize_weight(inputs["down_proj"], inputs["down_scale"]),
    }
    weights = {name: value.to(torch_dtype(dtype)) for name, value in weights.items()}
    return {item.name: (inputs | weights)[item.name] for item in ROUTED_EXPERTS.inputs}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(150, 140), (260, 129)])
def test_exact_sums_have_the_bits_of_routed_experts(hidden_size: int, intermediate_size: int, dtype: DType) -> None:
    """Small whole numbers times powers of two, another for each block, and a down projection that picks columns.

    Only gate and up projection add up; then every element of the result is one product.
    """
    inputs = make_inputs(
        choose(13, 1, 3), dtype, experts=3, hidden_size=hidden_size, intermediate_size=intermediate_size
    )
    inputs["hidden"] = torch.randint(-3, 4, inputs["hidden"].shape).to(torch_dtype(dtype))
    whole = torch.randint(-3, 4, inputs["gate_up_proj"].shape).float()
    inputs["gate_up_proj"] = whole.to(torch.float8_e4m3fn).view(torch.int8)
    inputs["gate_up_scale"] = 2.0 ** torch.randint(-8, -3, inputs["gate_up_scale"].shape)
    inputs["down_proj"].zero_()
    rows = torch.arange(hidden_size)
    inputs["down_proj"][:, rows, rows % intermediate_size] = ONE
    inputs["down_scale"] = 2.0 ** torch.randint(-3, 4, inputs["down_scale"].shape)
    expected = interpret(ROUTED_EXPERTS, dequantized(inputs, dtype), {"first_expert": 0}, model_dtype=dtype)
    assert torch.equal(check(inputs, dtype), expected[0])


@pytest.mark.parametrize(
    ("dtype", "gate", "up"),
    [(DType.FLOAT16, 9, 9), (DType.BFLOAT16, -90, 90), (DType.FLOAT32, -90, 90), (DType.FLOAT32, -10, -100)],
)
def test_scales_are_applied_in_fp32(dtype: DType, gate: int, up: int) -> None:
    """Weights of up to 448 * 2^9 are infinite in fp16."""
    inputs = make_inputs(choose(4, 2, 3), dtype, experts=3)
    blocks = inputs["gate_up_scale"].shape[1] // 2
    inputs["gate_up_scale"][:, :blocks] = 2.0**gate
    inputs["gate_up_scale"][:, blocks:] = 2.0**up
    if dtype is DType.FLOAT16:
        inputs["hidden"] *= 2.0**-17
    check(inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expert", [0, 6])
def test_all_tokens_choose_one_expert(expert: int, dtype: DType) -> None:
    """Far more row blocks than an even distribution has, of the smallest size."""
    check(make_inputs(torch.full((41, 2), expert), dtype), dtype)


@pytest.mark.parametrize("count", [15, 16, 17])
def test_row_block_edges(count: int) -> None:
    """One slot more or less than row blocks hold, beside an expert with one and experts with none."""
    ids = torch.full((count + 1, 1), 4)
    ids[count // 2] = 6
    check(make_inputs(ids, DType.BFLOAT16, experts=9), DType.BFLOAT16)


@pytest.mark.parametrize("first_expert", [0, 5, 2**31 - 8])
def test_ids_outside_contribute_nothing(first_expert: int) -> None:
    """Neighbours of the range, and numbers whose difference from it wraps around."""
    inside = [first_expert, first_expert + 6, first_expert + 3]
    outside = [value for value in (first_expert - 1, first_expert + 7, *WILD) if -(2**31) <= value < 2**31]
    outside = [value for value in outside if not first_expert <= value < first_expert + 7]
    ids = torch.tensor([[outside[token % len(outside)], inside[token % 3]] for token in range(12)])
    ids[4], ids[7, 0] = torch.tensor(outside[:2]), inside[0]
    inputs = make_inputs(ids, DType.FLOAT32, first_expert=first_expert)
    expected = check(inputs, DType.FLOAT32, first_expert=first_expert)
    local = ids - first_expert
    inputs["expert_weights"][(local < 0) | (local >= 7)] = float("nan")
    assert torch.equal(run(inputs, DType.FLOAT32, first_expert=first_expert), expected)


def test_no_id_inside() -> None:
    inputs = make_inputs([[-1, 7], [9, -5]], DType.BFLOAT16)
    assert (check(inputs, DType.BFLOAT16) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, dtype: DType) -> None:
    assert check(make_inputs(choose(tokens, 3, 7), dtype), dtype).shape == (tokens, 150)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_split_over_two_calls_add_up(dtype: DType) -> None:
    inputs = make_inputs(choose(19, 3, 7), dtype)
    parts = []
    for first, last in ((0, 3), (3, 7)):
        part = inputs | {name: inputs[name][first:last].contiguous() for name in WEIGHTS}
        parts.append(check(part, dtype, first_expert=first))
    expected = reference.block_scaled_routed_experts(**inputs, first_expert=0)
    assert relative_error(parts[0].double() + parts[1].double(), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_one_token_does_not_depend_on_others(dtype: DType) -> None:
    """NaN in the other tokens' rows, and their absence, change no bit."""
    inputs = make_inputs(choose(20, 3, 7), dtype)
    expected = run(inputs, dtype)[11]
    poisoned = inputs | {"hidden": inputs["hidden"].clone()}
    poisoned["hidden"][torch.arange(20) != 11] = float("nan")
    output = run(poisoned, dtype)
    assert torch.equal(output[11], expected)
    assert output.isnan().all(dim=1).sum() == 19
    if dtype is DType.BFLOAT16:
        alone = inputs | {name: inputs[name][11:12] for name in ("hidden", "expert_ids", "expert_weights")}
        assert torch.equal(run(alone, dtype)[0], expected)


@pytest.mark.parametrize("hidden_size", [300, 384])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_bands_change_no_bit(hidden_size: int, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(choose(23, 2, 7), dtype, hidden_size=hidden_size, intermediate_size=52)
    whole = check(inputs, dtype)
    for limit, bands in ((1, 3), (46 * 4 * 256, 2)):
        # The package's attribute of this name is the function.
        monkeypatch.setattr(sys.modules["trtllm_mla.ops.routed_experts.plan"], "BAND_BYTES", limit)
        assert len(BLOCK_SCALED_ROUTED_EXPERTS.plan(problem_of(inputs, dtype)).launches) == 2 + 2 * bands
        assert torch.equal(run(inputs, dtype), whole)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize(
    ("ids", "sizes"),
    [
        pytest.param([[6, 0], [-1, 6], [7, 3], [6, 2**31 - 1]], (100, 52), id="words"),
        pytest.param([[6, 0], [-1, 6], [7, 3]], (131, 65), id="bytes"),
        pytest.param([[0, 6]] * 19, (256, 128), id="whole tiles"),
        pytest.param([[-(2**31), -3], [8, 7]], (129, 65), id="no expert"),
    ],
)
def test_nothing_outside_the_tensors_is_accessed(
    ids: list[list[int]], sizes: tuple[int, int], dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address by address: reading a scale or a row too many would change no result."""
    from triton.runtime import interpreter

    tensors = make_inputs(ids, dtype, hidden_size=sizes[0], intermediate_size=sizes[1])
    expected = reference.block_scaled_routed_experts(**tensors, first_expert=0)
    plan, workspace = with_workspace_as_tensors(BLOCK_SCALED_ROUTED_EXPERTS.plan(problem_of(tensors, dtype)))
    tensors["output"] = torch.full((len(ids), sizes[0]), float("nan"), dtype=torch_dtype(dtype))
    tensors |= workspace
    memory = CheckedMemory(interpreter._interpreter, tensors.values())
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", memory)
        run_plan(plan, tensors)
    assert memory.accesses > tensors["expert_ids"].numel()
    assert relative_error(tensors["output"], expected) <= TOLERANCE[dtype] or not expected.any()


def test_nothing_around_the_output_is_written() -> None:
    inputs = make_inputs([[0, 9], [5, 5], [-1, 8], [6, 0]], DType.BFLOAT16)
    output = Guarded(torch.full((4, 150), float("nan"), dtype=torch.bfloat16))
    plan = BLOCK_SCALED_ROUTED_EXPERTS.plan(problem_of(inputs, DType.BFLOAT16))
    run_plan(plan, inputs | {"output": output.tensor})
    output.assert_margins_untouched()
    assert torch.equal(output.tensor, run(inputs, DType.BFLOAT16))


@pytest.mark.parametrize(
    ("target", "dtype", "dims"),
    [
        ("sm_80", DType.BFLOAT16, {}),
        ("sm_80", DType.FLOAT16, {}),
        ("sm_86", DType.BFLOAT16, {}),
        ("sm_89", DType.FLOAT16, {}),
        ("sm_90", DType.BFLOAT16, {}),
        ("sm_90", DType.FLOAT16, {"experts": 3, "top_k": 2, "hidden_size": 1008, "intermediate_size": 528}),
        ("sm_100", DType.BFLOAT16, {"experts": 384}),
        ("sm_120", DType.BFLOAT16, {}),
        ("sm_121", DType.FLOAT32, {}),
    ],
)
def test_compiles_ahead_of_time_within_the_budget(
    target: str, dtype: DType, dims: dict[str, int], tmp_path: Path
) -> None:
    """No spilled registers, codes copied 16 bytes at a time, the tensor cores' largest instruction for every tile."""
    problem = replace(with_dims(**dims), target=TARGETS[target], model_dtype=dtype)
    for variant in BLOCK_SCALED_ROUTED_EXPERTS.variants(problem):
        if variant.op != "BlockScaledRoutedExperts":
            continue
        constants = dict(variant.constants)
        compiled = compile_variant(variant, problem.target, tmp_path)
        assert compiled.stack_bytes == 0
        block_m, block_n, block_k = (constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        tile = Tile(block_m, block_n, block_k, variant.num_warps, variant.num_stages)
        weight_tiles = 2 if variant.kernel == "gate_up" else 1
        assert compiled.shared_memory_bytes <= shared_memory_bytes(tile, weight_tiles, dtype)
        assert "cp.async.cg" in compiled.ptx
        assert "cp.async.ca" not in compiled.ptx
        if dtype is DType.FLOAT32:
            continue
        assert {"sm_90": "wgmma", "sm_100": "tcgen05.mma"}.get(target, "mma.sync") in compiled.ptx
        # One instruction for two numbers, in the type that needs one at all.
        assert ("fma.rn.bf16x2" in compiled.ptx) == (dtype is DType.BFLOAT16)
