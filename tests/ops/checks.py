"""What several tests of operations need: tolerances, plan checks, tensors with guards."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import Attribute, OpDefinition, Problem
from trtllm_mla.ops.interpreter import run_op
from trtllm_mla.ops.kernels import jit_kernel
from trtllm_mla.ops.plan import Argument, KernelVariant, LaunchPlan, ScalarArgument, TensorArgument
from trtllm_mla.targets import TARGETS

DTYPES = tuple(DType)
# Norm of the difference from float64 over the norm of the float64 result.
TOLERANCE = {DType.FLOAT32: 5e-7, DType.FLOAT16: 6e-4, DType.BFLOAT16: 4e-3}
LOG_SUM_EXP_TOLERANCE = 1e-5


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; NaN where ``found`` holds one."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def as_cache_dtype(dtype: DType | CacheDType) -> CacheDType:
    """The cache type whose rows hold elements of ``dtype``; a cache type is itself."""
    return CacheDType.of(dtype) if isinstance(dtype, DType) else dtype


def interpret(
    op: OpDefinition,
    inputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Attribute],
    *,
    model_dtype: DType,
    cache_dtype: DType | CacheDType | None = None,
    target: str = "sm_90",
) -> tuple[torch.Tensor, ...]:
    """Runs an operation on inputs given by name."""
    return run_op(
        op,
        [inputs[tensor.name] for tensor in op.inputs],
        {name: {"latent_scale": 1.0, **attributes}[name] for name in op.attributes},
        model_dtype=model_dtype,
        cache_dtype=as_cache_dtype(cache_dtype or model_dtype),
        target=TARGETS[target],
        tile_s=64,
        num_stages=2,
    )


class Guarded:
    """A contiguous tensor inside a larger allocation whose margins are filled with NaN."""

    def __init__(self, tensor: torch.Tensor, margin: int = 4096) -> None:
        self._margin = margin
        self._memory = torch.full((tensor.numel() + 2 * margin,), float("nan"), dtype=tensor.dtype)
        self.tensor = self._memory[margin : margin + tensor.numel()].view(tensor.shape)
        self.tensor.copy_(tensor)

    def assert_margins_untouched(self) -> None:
        assert self._memory[: self._margin].isnan().all()
        assert self._memory[len(self._memory) - self._margin :].isnan().all()


def check_plan(op: OpDefinition, problem: Problem) -> LaunchPlan:
    """Asserts what every plan must fulfil, and returns it."""
    plan, variants = op.plan(problem), op.variants(problem)
    for launch in plan.launches:
        assert launch.variant in variants
        assert all(blocks >= 1 for blocks in launch.grid)
        assert launch.grid[0] <= 2**31 - 1
        assert launch.grid[1] <= 65535
        assert launch.grid[2] <= 65535
        assert len(launch.arguments) == len(launch.variant.signature)
        for (name, parameter_type), argument in zip(launch.variant.signature, launch.arguments, strict=True):
            _check_argument(op, problem, plan, name, parameter_type, argument)
    for variant in variants:
        _check_signature(variant)
    return plan


def _check_argument(
    op: OpDefinition, problem: Problem, plan: LaunchPlan, name: str, parameter_type: str, argument: Argument
) -> None:
    if isinstance(argument, ScalarArgument):
        assert parameter_type in ("i32", "fp32"), name
        if parameter_type == "i32":
            assert isinstance(argument.value, int), name
            assert -(2**31) <= argument.value < 2**31, name
    elif isinstance(argument, TensorArgument):
        tensor = next(item for item in (*op.inputs, *op.outputs) if item.name == argument.name)
        element_types = {
            "model": problem.model_dtype.triton,
            "cache": problem.cache_dtype.triton,
            "int8": "i8",
            "int32": "i32",
            "float32": "fp32",
        }
        assert parameter_type == f"*{element_types[tensor.element_type]}", name
    else:
        assert parameter_type == f"*{argument.dtype}", name
        size = argument.elements * {"fp32": 4, "i32": 4, "fp16": 2, "bf16": 2}[argument.dtype]
        assert argument.offset >= 0, name
        assert argument.offset + size <= plan.workspace_bytes, name


def _check_signature(variant: KernelVariant) -> None:
    """Names in a variant are the kernel's parameters, in order; ``INTERPRET`` is the last."""
    parameters = inspect.signature(jit_kernel(variant.op, variant.kernel).fn).parameters.values()
    compile_time = [parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)]
    run_time = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    assert [name for name, _ in variant.signature] == run_time
    assert [name for name, _ in variant.constants] + ["INTERPRET"] == compile_time
