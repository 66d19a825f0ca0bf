"""Runs launch plans on CPU tensors, with the real kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import MissingDependencyError
from trtllm_mla.ops.definition import Attribute, OpDefinition, Problem
from trtllm_mla.ops.kernels import interpreted_kernel
from trtllm_mla.ops.plan import ITEMSIZES, Argument, LaunchPlan, ScalarArgument, TensorArgument
from trtllm_mla.targets import Target

if TYPE_CHECKING:
    import torch


def check_installed() -> None:
    """Checks that what ``run_op`` needs can be imported.

    Raises:
        MissingDependencyError: PyTorch or Triton is not installed.
    """
    for package in ("torch", "triton"):
        _import(package)


def run_op(
    op: OpDefinition,
    inputs: Sequence[torch.Tensor],
    attributes: Mapping[str, Attribute],
    *,
    model_dtype: DType,
    cache_dtype: CacheDType,
    target: Target,
    tile_s: int,
    num_stages: int,
) -> tuple[torch.Tensor, ...]:
    """Plans and runs an operation.

    Args:
        op: The operation.
        inputs: Contiguous tensors as its contract lists them, of the types that ``model_dtype`` and ``cache_dtype``
            say. Those that an output aliases are updated in place.
        attributes: The node's attributes.
        model_dtype: Type of the tensors marked ``model``.
        cache_dtype: Type of the tensors marked ``cache``.
        target: GPU generation whose plan is run.
        tile_s: Cached tokens a kernel works on at once.
        num_stages: Tiles in flight; without effect in the interpreter.

    Returns:
        The outputs. Memory that no kernel writes holds NaN.

    Raises:
        ValueError: An input contradicts the contract.
    """
    torch = _torch()
    named = {tensor.name: value for tensor, value in zip(op.inputs, inputs, strict=True)}
    dims = op.resolve_dims({name: tuple(value.shape) for name, value in named.items()})
    problem = Problem(dims, attributes, model_dtype, cache_dtype, target, tile_s, num_stages)
    element_types = {
        "model": getattr(torch, model_dtype),
        "cache": getattr(torch, cache_dtype.storage),
        "float32": torch.float32,
        "int32": torch.int32,
        "int8": torch.int8,
    }
    for tensor in op.inputs:
        found, expected = named[tensor.name].dtype, element_types[tensor.element_type]
        if found != expected:
            raise ValueError(f"{op.name}: input '{tensor.name}': found {found}, expected {expected}")
    outputs = []
    for index, output in enumerate(op.outputs):
        if index in op.aliases:
            value = inputs[op.aliases[index]]
        else:
            shape = op.output_shape(index, dims, attributes)
            value = torch.full(shape, float("nan"), dtype=element_types[output.element_type])
        named[output.name] = value
        outputs.append(value)
    run_plan(op.plan(problem), named)
    return tuple(outputs)


def run_plan(plan: LaunchPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Runs the launches of a plan in order.

    Args:
        plan: The plan.
        tensors: The operation's inputs and outputs by name, contiguous.
    """
    torch = _torch()
    # Every byte 0xFF is NaN in each floating-point type: reading scratch memory before writing it shows.
    workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8)
    for launch in plan.launches:
        kernel = interpreted_kernel(launch.variant.op, launch.variant.kernel)
        names = [name for name, _ in launch.variant.signature]
        values = [_value(argument, tensors, workspace) for argument in launch.arguments]
        kernel[launch.grid](**dict(zip(names, values, strict=True)), **dict(launch.variant.constants), INTERPRET=True)


def _value(
    argument: Argument, tensors: Mapping[str, torch.Tensor], workspace: torch.Tensor
) -> torch.Tensor | int | float:
    torch = _torch()
    if isinstance(argument, ScalarArgument):
        return argument.value
    if isinstance(argument, TensorArgument):
        tensor = tensors[argument.name]
        if not tensor.is_contiguous():
            raise ValueError(f"'{argument.name}': found strides {tensor.stride()}, expected a contiguous tensor")
        return tensor
    dtype = {"fp32": torch.float32, "i32": torch.int32, "bf16": torch.bfloat16, "fp16": torch.float16}[argument.dtype]
    size = argument.elements * ITEMSIZES[argument.dtype]
    return workspace[argument.offset : argument.offset + size].view(dtype)


def _torch() -> ModuleType:
    return _import("torch")


def _import(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(package, "run kernels in Triton's interpreter", "reference") from error
