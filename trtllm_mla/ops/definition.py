"""What an MLA operation is: its contract, its ONNX function body, and its launch plan.

Everything that carries an operation (the ONNX graph, the TensorRT plugin, the interpreter) is derived from its
``OpDefinition``; none of them knows an operation by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.expression import maximum
from trtllm_mla.ops.plan import KernelVariant, LaunchPlan
from trtllm_mla.targets import Target

if TYPE_CHECKING:
    import onnx_ir

DOMAIN = "trtllm_mla"
VERSION = "1"

ElementType = Literal["model", "cache", "int8", "int32", "float32"]
Attribute = int | float


@dataclass(frozen=True)
class TensorContract:
    """An input or output of an operation.

    Attributes:
        name: Name, as in the function body and in kernel arguments.
        element_type: ``model`` is the network's type, ``cache`` the latent cache's.
        dims: Names of the dimensions, or whole numbers. Equal names mean equal sizes; a name plus a number, such as
            ``requests+1``, is that much more. An output's name may also be that of an attribute.
    """

    name: str
    element_type: ElementType
    dims: tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One concrete use of an operation: what its launch plan is computed from.

    Attributes:
        dims: Size of every named dimension.
        attributes: The node's attributes.
        model_dtype: The network's type.
        cache_dtype: The latent cache's type.
        target: The GPU generation; its number of multiprocessors sets split counts.
        tile_s: Cached tokens a kernel works on at once.
        num_stages: Tiles in flight.
    """

    dims: Mapping[str, int]
    attributes: Mapping[str, Attribute]
    model_dtype: DType
    cache_dtype: CacheDType
    target: Target
    tile_s: int
    num_stages: int


@dataclass(frozen=True)
class BodyTypes:
    """Types an ONNX function body is written for.

    Attributes:
        model_dtype: The network's type.
        layout: A row of the latent cache.
    """

    model_dtype: DType
    layout: RowLayout

    @property
    def cache_dtype(self) -> CacheDType:
        """The latent cache's type."""
        return self.layout.dtype


@dataclass(frozen=True)
class OpDefinition:
    """An MLA operation.

    Attributes:
        name: ONNX ``op_type`` and plugin name, in domain and plugin namespace ``trtllm_mla``.
        inputs: Inputs, in order.
        outputs: Outputs, in order.
        attributes: Type of each attribute. All are required.
        aliases: For an output that is an input updated in place: output index to input index.
        max_workspace_bytes: Bounds the workspace of ``plan`` for all dynamic dimensions up to the problem's.
        build_body: Makes the ONNX function that defines the operation.
        plan: Computes the launches for a problem from host-known integers alone.
        variants: Every kernel variant that ``plan`` can ask for, whatever the values in ``dynamic_dims`` are.
        dynamic_dims: Dimensions that differ from step to step; the others are fixed when an engine is built.
    """

    name: str
    inputs: tuple[TensorContract, ...]
    outputs: tuple[TensorContract, ...]
    attributes: Mapping[str, type[int] | type[float]]
    build_body: Callable[[BodyTypes, Mapping[str, Attribute]], onnx_ir.Function]
    plan: Callable[[Problem], LaunchPlan]
    variants: Callable[[Problem], tuple[KernelVariant, ...]]
    dynamic_dims: frozenset[str]
    aliases: Mapping[int, int] = field(default_factory=dict)
    max_workspace_bytes: Callable[[Problem], int] = lambda problem: 0

    def resolve_dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Finds the size of every named dimension from concrete input shapes.

        Args:
            shapes: Shape of each input, by name.

        Raises:
            ValueError: A rank or a size contradicts the contract.
        """
        dims: dict[str, int] = {}
        for tensor in self.inputs:
            shape = shapes[tensor.name]
            if len(shape) != len(tensor.dims):
                raise ValueError(
                    f"{self.name}: input '{tensor.name}': found shape {shape}, expected dimensions {tensor.dims}"
                )
            for axis, (dim, size) in enumerate(zip(tensor.dims, shape, strict=True)):
                name, offset = split_dim(dim)
                expected = offset if name is None else dims.setdefault(name, maximum(size - offset, 0)) + offset
                if size != expected:
                    raise ValueError(
                        f"{self.name}: input '{tensor.name}': found {size} on axis {axis}, expected {dim} = {expected}"
                    )
        return dims

    def output_shape(
        self, index: int, dims: Mapping[str, int], attributes: Mapping[str, Attribute]
    ) -> tuple[int, ...]:
        """Shape of an output, from the dimensions of the inputs and the attributes."""
        known = {**attributes, **dims}
        shape = []
        for dim in self.outputs[index].dims:
            name, offset = split_dim(dim)
            shape.append(offset if name is None else int(known[name]) + offset)
        return tuple(shape)


def row_layout(op: str, problem: Problem, kv_lora_rank: int, rope_dim: int) -> RowLayout:
    """A row of the problem's latent cache.

    Args:
        op: Name of the operation, for messages.
        problem: The problem; it has the dimension ``width`` and the attribute ``latent_scale``.
        kv_lora_rank: Elements of the latent.
        rope_dim: Elements of the rotary key.

    Raises:
        ValueError: The pool's rows have another width, or a cache that is not quantised is scaled.
    """
    layout = problem.cache_dtype.layout(kv_lora_rank, rope_dim)
    width, scale = problem.dims["width"], problem.attributes["latent_scale"]
    if width != layout.width:
        raise ValueError(
            f"{op}: found rows of width {width}, expected {layout.width}: kv_lora_rank {kv_lora_rank} and rope_dim "
            f"{rope_dim} in {problem.cache_dtype}"
        )
    if not (0 < scale < math.inf if problem.cache_dtype.is_quantized else scale == 1):
        expected = "a positive number" if problem.cache_dtype.is_quantized else "1"
        raise ValueError(f"{op}: found latent_scale {scale} with a {problem.cache_dtype} cache, expected {expected}")
    return layout


def split_dim(dim: str | int) -> tuple[str | None, int]:
    """Splits ``requests+1`` into its name and its number; a whole number has no name."""
    if isinstance(dim, int):
        return None, dim
    name, _, offset = dim.partition("+")
    return name, int(offset or 0)
