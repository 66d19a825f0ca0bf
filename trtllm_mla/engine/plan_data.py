"""Library data: operations, their launch plans and kernels in one file, for a reader without Python.

Each operation is traced for all sizes that differ from call to call, as ``Operation`` plans it: the contract's checks,
the plan, and the bounds of the workspace are one program. The reader is ``plugins/src/library.cpp``; equal operations
and kernels make equal bytes.

Format 1. Whole numbers are LEB128, signed ones in zigzag; a text is its number of bytes and these; a list is its
number of items and these::

    "TMLAPLAN", format, version of trtllm_mla
    list of contracts: name, attributes (name, type), inputs, outputs, aliased input of each output + 1
        tensor: name, element type, dimensions (name, source, offset, then input and axis, or attribute)
    list of kernels: key, operation, entry, target, warps, shared bytes, pointer alignment, parameter types,
        null pointers, cubin
    list of operations: contract, target, model type, cache type, tile_s, num_stages, integer attributes, element
        types of all tensors, fixed sizes (input, axis, size), kernels, program of the plan, program of the workspace
        program: expressions, then nodes of the tree of decisions, each behind those that lie below it
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trtllm_mla._version import __version__
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.kernel_store import Cubin
from trtllm_mla.engine.launcher import NUM_NULL_POINTERS, POINTER_ALIGNMENT
from trtllm_mla.engine.operation import Operation, OperationSettings
from trtllm_mla.ops.definition import Attribute, OpDefinition, TensorContract, split_dim
from trtllm_mla.ops.expression import Branch, Expression, Operator, Refusal, Trace, Tree
from trtllm_mla.ops.plan import KernelVariant
from trtllm_mla.ops.program import (
    Operand,
    Program,
    ProgramLaunch,
    ProgramNumber,
    ProgramPlan,
    ProgramRepetition,
    ScalarOperand,
    TensorOperand,
    WorkspaceOperand,
    trace_number,
    trace_plan,
)
from trtllm_mla.targets import Target

MAGIC = b"TMLAPLAN"
FORMAT = 1

_TYPES = {DType.FLOAT32.value: 0, DType.FLOAT16.value: 1, DType.BFLOAT16.value: 2, "int8": 3, "int32": 4}
_ELEMENTS = {"model": 0, "cache": 1, "int8": 2, "int32": 3, "float32": 4}
_DIM_NUMBER, _DIM_INPUT, _DIM_ATTRIBUTE = range(3)
_BRANCH, _REFUSAL, _PLAN, _LAUNCHES, _NUMBER = range(5)

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class PlannedOperation:
    """An operation on one target, traced.

    Attributes:
        definition: The operation.
        int_attributes: Values of its integer attributes, in the contract's order.
        settings: Types, and the tile of the target.
        target: Name of the target.
        fixed_sizes: Size of the first axis that has each dimension that is fixed, by the numbers of input and axis.
        variants: Kernels that its plans can launch.
        plan: Program of a step's plan.
        workspace: Program of the workspace that a build reserves.
    """

    definition: OpDefinition
    int_attributes: tuple[int, ...]
    settings: OperationSettings
    target: str
    fixed_sizes: Mapping[tuple[int, int], int]
    variants: tuple[KernelVariant, ...]
    plan: Program
    workspace: Program

    @property
    def types(self) -> tuple[str, ...]:
        """Element types of inputs and outputs."""
        names = {"model": self.settings.model_dtype.value, "cache": self.settings.cache_dtype.storage}
        tensors = (*self.definition.inputs, *self.definition.outputs)
        return tuple(names.get(tensor.element_type, tensor.element_type) for tensor in tensors)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a reader finds it by."""
        types = self.types[: len(self.definition.inputs)]
        return self.definition.name, self.int_attributes, types, tuple(sorted(self.fixed_sizes.items())), self.target

    @property
    def behaviour(self) -> tuple[Any, ...]:
        """What a reader does with it."""
        return self.types, self.variants, self.plan, self.workspace

    @property
    def cache(self) -> tuple[str, int, int]:
        """Type of the latent cache, tokens of a tile, and tiles in flight; empty and 0 where it has no cache."""
        (tile,) = self.settings.tiles
        if not any(tensor.element_type == "cache" for tensor in self.definition.inputs):
            return "", 0, 0
        return self.settings.cache_dtype.value, tile.tile_s, tile.num_stages


def trace_operation(
    definition: OpDefinition,
    attributes: Mapping[str, Attribute],
    settings: OperationSettings,
    fixed_dims: Mapping[str, int],
    target: Target,
) -> PlannedOperation:
    """Traces an operation for all sizes of its dynamic dimensions, numbers of multiprocessors, and real attributes.

    Args:
        definition: The operation.
        attributes: The node's attributes.
        settings: Types and tiles.
        fixed_dims: Sizes of the dimensions that are the same in every step.
        target: The GPU generation.

    Raises:
        UserError: No kernel fits the target.
    """
    settings = dataclasses.replace(settings, tiles=(settings.tile(target),))
    # What the kernels are compiled for does not depend on real attributes, but their values are checked here.
    variants = Operation(definition, attributes, settings).variants(fixed_dims, target)
    fixed_sizes = _fixed_sizes(definition, fixed_dims)

    def program(follow: Callable[[Trace, _Arguments], Program]) -> Program:
        trace = Trace()
        return follow(trace, _Arguments.of(trace, definition, attributes, settings, fixed_sizes, target))

    plan = program(
        lambda trace, arguments: trace_plan(
            trace,
            lambda: arguments.operation.compute_plan(arguments.shapes, arguments.target, arguments.workspace_bytes),
        )
    )
    workspace = program(
        lambda trace, arguments: trace_number(
            trace, lambda: arguments.operation.compute_workspace_bytes(arguments.shapes)
        )
    )
    unlisted = [variant.key for variant in plan.variants if variant not in variants]
    if unlisted:
        raise ValueError(f"{definition.name}: plans launch {unlisted}, expected kernels that are listed as variants")
    int_attributes = tuple(int(attributes[name]) for name, kind in definition.attributes.items() if kind is int)
    return PlannedOperation(definition, int_attributes, settings, target.name, fixed_sizes, variants, plan, workspace)


@dataclass(frozen=True)
class _Arguments:
    """What a step is planned from, as symbols; a reader has their values in the order in which they are made here."""

    operation: Operation
    shapes: tuple[tuple[int, ...], ...]
    target: Target
    workspace_bytes: int

    @classmethod
    def of(
        cls,
        trace: Trace,
        definition: OpDefinition,
        attributes: Mapping[str, Attribute],
        settings: OperationSettings,
        fixed_sizes: Mapping[tuple[int, int], int],
        target: Target,
    ) -> _Arguments:
        # Symbols stand for numbers in functions that were written for numbers.
        sizes: list[list[Any]] = [[trace.int_symbol() for _ in tensor.dims] for tensor in definition.inputs]
        for (index, axis), size in fixed_sizes.items():
            sizes[index][axis] = size
        multiprocessors: Any = trace.int_symbol()
        workspace_bytes: Any = trace.int_symbol()
        values: dict[str, Any] = {
            name: trace.float_symbol() if kind is float else attributes[name]
            for name, kind in definition.attributes.items()
        }
        return cls(
            Operation(definition, values, settings),
            tuple(tuple(shape) for shape in sizes),
            dataclasses.replace(target, multiprocessors=multiprocessors),
            workspace_bytes,
        )


def _fixed_sizes(definition: OpDefinition, fixed_dims: Mapping[str, int]) -> dict[tuple[int, int], int]:
    return {
        place: fixed_dims[name] + offset
        for name, (place, offset) in _first_places(definition).items()
        if name not in definition.dynamic_dims
    }


def _first_places(definition: OpDefinition) -> dict[str, tuple[tuple[int, int], int]]:
    """Numbers of the first input and axis that has each named dimension, and how much more its size is."""
    places: dict[str, tuple[tuple[int, int], int]] = {}
    for index, tensor in enumerate(definition.inputs):
        for axis, dim in enumerate(tensor.dims):
            name, offset = split_dim(dim)
            if name is not None:
                places.setdefault(name, ((index, axis), offset))
    return places


def library_data(
    definitions: Sequence[OpDefinition], operations: Sequence[PlannedOperation], cubins: Sequence[Cubin]
) -> bytes:
    """The bytes of a library.

    Args:
        definitions: All operations that there are.
        operations: Those with kernels; each has another ``key``.
        cubins: The kernels of all operations' variants and targets.
    """
    numbers = {(cubin.key, cubin.target): number for number, cubin in enumerate(cubins)}
    contracts = {definition.name: number for number, definition in enumerate(definitions)}
    out = _Writer()
    out.raw(MAGIC)
    out.unsigned(FORMAT)
    out.text(__version__)
    out.items(definitions, lambda definition: _write_contract(out, definition))
    out.items(cubins, lambda cubin: _write_kernel(out, cubin))
    out.items(operations, lambda operation: _write_operation(out, operation, contracts, numbers))
    return bytes(out.data)


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()

    def raw(self, data: bytes) -> None:
        self.data += data

    def unsigned(self, value: int) -> None:
        if not 0 <= value < 1 << 64:
            raise ValueError(f"found {value}, expected a number of 64 bits")
        while value >= 0x80:
            self.data.append(value & 0x7F | 0x80)
            value >>= 7
        self.data.append(value)

    def signed(self, value: int) -> None:
        self.unsigned(2 * value if value >= 0 else -2 * value - 1)

    def real(self, value: float) -> None:
        self.data += struct.pack("<d", value)

    def text(self, value: str) -> None:
        encoded = value.encode()
        self.unsigned(len(encoded))
        self.data += encoded

    def items(self, items: Iterable[_Item], write: Callable[[_Item], None]) -> None:
        listed = list(items)
        self.unsigned(len(listed))
        for item in listed:
            write(item)


def _write_contract(out: _Writer, definition: OpDefinition) -> None:
    out.text(definition.name)

    def write_attribute(item: tuple[str, type[int] | type[float]]) -> None:
        out.text(item[0])
        out.unsigned(int(item[1] is float))

    out.items(definition.attributes.items(), write_attribute)
    for tensors in (definition.inputs, definition.outputs):
        out.items(tensors, lambda tensor: _write_tensor(out, tensor, definition))
    for output in range(len(definition.outputs)):
        out.unsigned(definition.aliases.get(output, -1) + 1)


def _write_tensor(out: _Writer, tensor: TensorContract, definition: OpDefinition) -> None:
    places = _first_places(definition)

    def write_dim(dim: str | int) -> None:
        name, offset = split_dim(dim)
        out.text(str(dim))
        if name is None:
            out.unsigned(_DIM_NUMBER)
            out.signed(offset)
        elif name in places:
            (index, axis), first_offset = places[name]
            out.unsigned(_DIM_INPUT)
            out.signed(offset - first_offset)
            out.unsigned(index)
            out.unsigned(axis)
        else:
            out.unsigned(_DIM_ATTRIBUTE)
            out.signed(offset)
            out.unsigned(list(definition.attributes).index(name))

    out.text(tensor.name)
    out.unsigned(_ELEMENTS[tensor.element_type])
    out.items(tensor.dims, write_dim)


def _write_kernel(out: _Writer, cubin: Cubin) -> None:
    variant = cubin.variant
    out.text(cubin.key)
    out.text(variant.op)
    out.text(cubin.entry)
    out.unsigned(_capability(cubin.target))
    out.unsigned(variant.num_warps)
    out.unsigned(cubin.shared_bytes)
    out.unsigned(POINTER_ALIGNMENT)
    parameters = {"i32": 1, "fp32": 2}
    out.items(variant.signature, lambda parameter: out.unsigned(parameters.get(parameter[1], 0)))
    out.unsigned(NUM_NULL_POINTERS)
    code = cubin.read()
    out.unsigned(len(code))
    out.raw(code)


def _write_operation(
    out: _Writer,
    operation: PlannedOperation,
    contracts: Mapping[str, int],
    kernels: Mapping[tuple[str, str], int],
) -> None:
    out.unsigned(contracts[operation.definition.name])
    out.unsigned(_capability(operation.target))
    out.text(operation.settings.model_dtype)
    cache_dtype, tile_s, num_stages = operation.cache
    out.text(cache_dtype)
    out.unsigned(tile_s)
    out.unsigned(num_stages)
    for value in operation.int_attributes:
        out.signed(value)
    for element_type in operation.types:
        out.unsigned(_TYPES[element_type])

    def write_fixed(item: tuple[tuple[int, int], int]) -> None:
        (index, axis), size = item
        out.unsigned(index)
        out.unsigned(axis)
        out.signed(size)

    out.items(sorted(operation.fixed_sizes.items()), write_fixed)
    out.items(operation.variants, lambda variant: out.unsigned(kernels[variant.key, operation.target]))
    variants = {variant: number for number, variant in enumerate(operation.variants)}
    tensors = [tensor.name for tensor in (*operation.definition.inputs, *operation.definition.outputs)]
    for program in (operation.plan, operation.workspace):
        _ProgramWriter(out, program, variants, tensors).write()


class _ProgramWriter:
    """Writes a program without the expressions that nothing refers to."""

    def __init__(
        self, out: _Writer, program: Program, variants: Mapping[KernelVariant, int], tensors: Sequence[str]
    ) -> None:
        self._out, self._program, self._variants, self._tensors = out, program, variants, tensors
        used = sorted(self._with_operands(_roots(program.tree)))
        self._indices = {index: number for number, index in enumerate(used)}
        self._nodes: dict[Any, int] = {}
        self._order: list[Any] = []

    def write(self) -> None:
        self._out.items(self._indices, lambda index: self._write_expression(self._program.expressions[index]))
        self._number(self._program.tree)
        self._out.items(self._order, self._write_node)

    def _with_operands(self, roots: Iterable[int]) -> set[int]:
        used: set[int] = set()
        waiting = list(roots)
        while waiting:
            index = waiting.pop()
            if index not in used:
                used.add(index)
                expression = self._program.expressions[index]
                if expression.operator not in (Operator.INT_SYMBOL, Operator.FLOAT_SYMBOL):
                    waiting += expression.operands
        return used

    def _write_expression(self, expression: Expression) -> None:
        self._out.unsigned(expression.operator)
        if expression.operator is Operator.INT:
            self._out.signed(int(expression.value or 0))
        elif expression.operator is Operator.FLOAT:
            self._out.real(float(expression.value or 0))
        elif expression.operator in (Operator.INT_SYMBOL, Operator.FLOAT_SYMBOL):
            self._out.unsigned(expression.operands[0])
        else:
            for operand in expression.operands:
                self._reference(operand)

    def _reference(self, index: int) -> None:
        self._out.unsigned(self._indices[index])

    def _number(self, tree: Any) -> None:
        """Lists the nodes of a tree, equal ones once, each behind those below it."""
        if tree in self._nodes:
            return
        if isinstance(tree, Branch):
            self._number(tree.then)
            self._number(tree.otherwise)
        elif isinstance(tree, ProgramPlan):
            for item in tree.launches:
                if isinstance(item, ProgramRepetition):
                    self._number(item.body)
        self._nodes[tree] = len(self._order)
        self._order.append(tree)

    def _write_node(self, node: Any) -> None:
        out = self._out
        match node:
            case Branch():
                out.unsigned(_BRANCH)
                self._reference(node.condition)
                out.unsigned(self._nodes[node.then])
                out.unsigned(self._nodes[node.otherwise])
            case Refusal():
                out.unsigned(_REFUSAL)
                out.items(node.parts, self._write_part)
            case ProgramPlan():
                out.unsigned(_PLAN)
                self._reference(node.workspace_bytes)
                out.items(node.launches, self._write_item)
            case ProgramNumber():
                out.unsigned(_NUMBER)
                self._reference(node.value)
            case _:
                out.unsigned(_LAUNCHES)
                out.items(node, self._write_item)

    def _write_part(self, part: str | int) -> None:
        self._out.unsigned(int(isinstance(part, int)))
        if isinstance(part, int):
            self._reference(part)
        else:
            self._out.text(part)

    def _write_item(self, item: ProgramLaunch | ProgramRepetition) -> None:
        self._out.unsigned(int(isinstance(item, ProgramRepetition)))
        if isinstance(item, ProgramRepetition):
            self._reference(item.stop)
            self._reference(item.step)
            self._out.unsigned(self._nodes[item.body])
            return
        self._out.unsigned(self._variants[item.variant])
        for index in item.grid:
            self._reference(index)
        for operand in item.operands:
            self._write_operand(operand)

    def _write_operand(self, operand: Operand) -> None:
        match operand:
            case TensorOperand():
                self._out.unsigned(0)
                self._out.unsigned(self._tensors.index(operand.name))
            case WorkspaceOperand():
                self._out.unsigned(1)
                self._reference(operand.offset)
            case ScalarOperand():
                self._reference(operand.value)


def _roots(tree: Tree[Any]) -> Iterator[int]:
    """Expressions that a tree refers to."""
    if isinstance(tree, Branch):
        yield tree.condition
        yield from _roots(tree.then)
        yield from _roots(tree.otherwise)
    elif isinstance(tree, Refusal):
        yield from (part for part in tree.parts if isinstance(part, int))
    elif isinstance(tree, ProgramNumber):
        yield tree.value
    else:
        if isinstance(tree, ProgramPlan):
            yield tree.workspace_bytes
        for item in tree.launches if isinstance(tree, ProgramPlan) else tree:
            if isinstance(item, ProgramRepetition):
                yield from (item.stop, item.step)
                yield from _roots(item.body)
                continue
            yield from item.grid
            for operand in item.operands:
                if isinstance(operand, WorkspaceOperand):
                    yield operand.offset
                elif isinstance(operand, ScalarOperand):
                    yield operand.value


def _capability(target: str) -> int:
    return int(target.removeprefix("sm_"))
