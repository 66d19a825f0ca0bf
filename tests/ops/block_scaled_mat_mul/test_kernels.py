from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.block_scaled_mat_mul.test_plan import with_dims
from tests.ops.checks import DTYPES, TOLERANCE, Guarded, interpret, relative_error, torch_dtype
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.block_scaled_mat_mul import BLOCK_SCALED_MAT_MUL
from trtllm_mla.ops.block_scaled_mat_mul.plan import Tile, choose_split, choose_tile, shared_memory_bytes
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.ops.plan import LaunchPlan, TensorArgument, WorkspaceArgument, ceil_div
from trtllm_mla.targets import TARGETS

Inputs = dict[str, torch.Tensor]
# All E4M3 numbers but NaN, as int8.
CODES = torch.tensor([code for code in range(-128, 128) if code & 0x7F != 0x7F], dtype=torch.int8)


def make_inputs(rows: int, out_features: int, in_features: int, dtype: DType) -> Inputs:
    """Random rows, codes from all numbers there are, and scales that differ by a factor of up to 100."""
    scales = ceil_div(out_features, 128), ceil_div(in_features, 128)
    return {
        "x": torch.randn(rows, in_features).to(torch_dtype(dtype)),
        "weight": CODES[torch.randint(len(CODES), (out_features, in_features))],
        "scale": 10.0 ** (2 * torch.rand(scales) - 5),
    }


def problem_of(inputs: Inputs, dtype: DType) -> Problem:
    (rows, in_features), out_features = inputs["x"].shape, len(inputs["weight"])
    return replace(with_dims(rows=rows, out_features=out_features, in_features=in_features), model_dtype=dtype)


def run(inputs: Inputs, dtype: DType, target: str = "sm_90") -> torch.Tensor:
    (output,) = interpret(BLOCK_SCALED_MAT_MUL, inputs, {}, model_dtype=dtype, target=target)
    return output


def check(inputs: Inputs, dtype: DType, target: str = "sm_90") -> torch.Tensor:
    output = run(inputs, dtype, target)
    expected = reference.block_scaled_mat_mul(**inputs)
    assert output.shape == expected.shape
    # Half a unit of fp16's subnormal numbers, which small products are rounded to.
    subnormal = 2.0**-25 * expected.numel() ** 0.5 if dtype is DType.FLOAT16 else 0.0
    error = float((output.double() - expected).norm())
    assert error <= TOLERANCE[dtype] * float(expected.norm()) + subnormal
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 70])
def test_ragged_sizes_against_float64(rows: int, dtype: DType) -> None:
    """576 rows of the weight have 5 rows of scales, of which the last serves 64."""
    check(make_inputs(rows, 576, 300, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [1, 3, 50, 127, 128, 129, 130, 132, 256])
@pytest.mark.parametrize("out_features", [1, 65, 128, 129])
def test_edges_of_tiles_blocks_and_words(out_features: int, in_features: int, dtype: DType) -> None:
    check(make_inputs(3, out_features, in_features, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile(dtype: DType) -> None:
    for rows, block_m in ((16, 16), (50, 64), (150, 128)):
        inputs = make_inputs(rows, 136, 144, dtype)
        if dtype is not DType.FLOAT32:
            assert choose_tile(problem_of(inputs, dtype)).block_m == block_m
        check(inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_decoded_exactly(dtype: DType) -> None:
    """Rows of the identity matrix read the weight itself; subnormal numbers and both zeros included."""
    weight = CODES.repeat(3)[: 2 * 128].reshape(2, 128).contiguous()
    weight[1] = CODES[-128:]
    inputs = {"x": torch.eye(128).to(torch_dtype(dtype)), "weight": weight, "scale": torch.ones(1, 1)}
    expected = weight.view(torch.float8_e4m3fn).float().T
    assert torch.equal(run(inputs, dtype).float(), expected)
    assert {float(value) for value in expected.flatten()} == {
        float(value) for value in CODES.view(torch.float8_e4m3fn).float()
    }


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [
        (DType.FLOAT16, -10),
        (DType.FLOAT16, 9),
        (DType.BFLOAT16, -100),
        (DType.BFLOAT16, 100),
        (DType.FLOAT32, -100),
        (DType.FLOAT32, 100),
    ],
)
def test_scales_are_applied_in_fp32(dtype: DType, exponent: int) -> None:
    """A kernel that held dequantised weights of 448 * 2^9 in fp16 would give infinity."""
    inputs = make_inputs(4, 40, 256, dtype)
    inputs["scale"] = torch.tensor([[2.0**exponent, 2.0 ** (exponent - 1)]])
    if dtype is DType.FLOAT16 and exponent > 0:
        inputs["x"] *= 2.0**-10
    check(inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("in_features", [1024, 1100, 2051])
def test_products_split_among_programs(in_features: int, target: str, dtype: DType) -> None:
    inputs = make_inputs(3, 65, in_features, dtype)
    problem = problem_of(inputs, dtype)
    assert choose_split(problem, choose_tile(problem)).parts == in_features // 512
    check(inputs, dtype, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_rows(dtype: DType) -> None:
    assert run(make_inputs(0, 40, 50, dtype), dtype).shape == (0, 40)


@pytest.mark.parametrize("in_features", [130, 1100])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_one_row_does_not_depend_on_others(dtype: DType, in_features: int) -> None:
    """NaN in the other rows changes no bit, nor does their absence while tile and split are the same."""
    inputs = make_inputs(11, 70, in_features, dtype)
    expected = check(inputs, dtype)[4]
    poisoned = inputs | {"x": inputs["x"].clone()}
    poisoned["x"][torch.arange(11) != 4] = float("nan")
    output = run(poisoned, dtype)
    assert torch.equal(output[4], expected)
    assert output.isnan().all(dim=1).sum() == 10
    assert torch.equal(run(inputs | {"x": inputs["x"][4:5]}, dtype)[0], expected)


class CheckedMemory:
    """Stands in for the interpreter's loads and stores: each must lie in one of the tensors."""

    def __init__(self, real: Any, tensors: list[torch.Tensor]) -> None:
        self._real = real
        self._ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
        self.accesses = 0

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(addresses[mask], np.dtype(dtype).itemsize)
        return self._real.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._check(addresses[mask], values.dtype.itemsize)
        return self._real.store(addresses, values, mask)

    def _check(self, addresses: Any, itemsize: int) -> None:
        inside = np.zeros(addresses.shape, dtype=bool)
        for begin, end in self._ranges:
            inside |= (addresses >= begin) & (addresses + itemsize <= end)
        assert inside.all()
        self.accesses += addresses.size


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [
        pytest.param(3, 65, 52, id="words"),
        pytest.param(19, 70, 131, id="bytes"),
        pytest.param(16, 128, 128, id="whole tiles"),
        pytest.param(2, 33, 1099, id="split"),
    ],
)
def test_nothing_outside_the_tensors_is_accessed(
    rows: int, out_features: int, in_features: int, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address by address: reading a row too many would change no result."""
    from triton.runtime import interpreter

    inputs = make_inputs(rows, out_features, in_features, dtype)
    plan = BLOCK_SCALED_MAT_MUL.plan(problem_of(inputs, dtype))
    tensors = inputs | {"output": torch.full((rows, out_features), float("nan"), dtype=torch_dtype(dtype))}
    plan, workspace = with_workspace_as_tensor(plan)
    tensors |= workspace
    memory = CheckedMemory(interpreter._interpreter, list(tensors.values()))
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", memory)
        run_plan(plan, tensors)
    assert memory.accesses > inputs["x"].numel()
    expected = reference.block_scaled_mat_mul(**inputs)
    assert relative_error(tensors["output"], expected) <= TOLERANCE[dtype]


def with_workspace_as_tensor(plan: LaunchPlan) -> tuple[LaunchPlan, Inputs]:
    """The plan with a tensor full of NaN in place of the partial products, if it has any."""
    partial = [
        argument
        for launch in plan.launches
        for argument in launch.arguments
        if isinstance(argument, WorkspaceArgument)
    ]
    if not partial:
        return plan, {}
    launches = tuple(
        replace(
            launch,
            arguments=tuple(
                TensorArgument("partial") if isinstance(argument, WorkspaceArgument) else argument
                for argument in launch.arguments
            ),
        )
        for launch in plan.launches
    )
    return LaunchPlan(launches), {"partial": torch.full((partial[0].elements,), float("nan"))}


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_around_the_output_is_written(dtype: DType) -> None:
    inputs = make_inputs(18, 67, 60, dtype)
    output = Guarded(torch.full((18, 67), float("nan"), dtype=torch_dtype(dtype)))
    run_plan(BLOCK_SCALED_MAT_MUL.plan(problem_of(inputs, dtype)), inputs | {"output": output.tensor})
    output.assert_margins_untouched()
    assert torch.equal(output.tensor, run(inputs, dtype))


@pytest.mark.parametrize(
    ("target", "dtype", "out_features", "in_features"),
    [
        ("sm_80", DType.FLOAT16, 7168, 2048),
        ("sm_86", DType.BFLOAT16, 576, 7168),
        ("sm_89", DType.FLOAT16, 576, 7168),
        ("sm_90", DType.BFLOAT16, 7168, 2048),
        ("sm_90", DType.FLOAT16, 1000, 1040),
        ("sm_100", DType.BFLOAT16, 7168, 2048),
        ("sm_120", DType.BFLOAT16, 7168, 2048),
        ("sm_121", DType.FLOAT32, 7168, 2048),
    ],
)
def test_compiles_ahead_of_time_within_the_budget(
    target: str, dtype: DType, out_features: int, in_features: int, tmp_path: Path
) -> None:
    """No spilled registers, copies of 16 bytes only, and the tensor cores' largest instruction for every tile."""
    problem = with_dims(out_features=out_features, in_features=in_features)
    problem = replace(problem, target=TARGETS[target], model_dtype=dtype)
    for variant in BLOCK_SCALED_MAT_MUL.variants(problem):
        constants = dict(variant.constants)
        compiled = compile_variant(variant, problem.target, tmp_path)
        assert compiled.stack_bytes == 0
        assert compiled.wide_accesses > 0
        if variant.kernel != "multiply":
            continue
        block_m, block_n, block_k = (constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        tile = Tile(block_m, block_n, block_k, variant.num_warps, variant.num_stages)
        assert compiled.shared_memory_bytes <= shared_memory_bytes(tile, dtype)
        assert "cp.async.cg" in compiled.ptx
        assert "cp.async.ca" not in compiled.ptx
        if dtype is not DType.FLOAT32:
            assert {"sm_90": "wgmma", "sm_100": "tcgen05.mma"}.get(target, "mma.sync") in compiled.ptx
        # One instruction for two numbers, in the types that need one at all.
        assert ("fma.rn.bf16x2" in compiled.ptx) == (dtype is DType.BFLOAT16)
