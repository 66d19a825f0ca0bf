"""The evaluator of launch plans, by its C interface."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_mla.ops.definition import Attribute, OpDefinition
from trtllm_mla.ops.plan import LaunchPlan, ScalarArgument, TensorArgument

TYPES = ("float32", "float16", "bfloat16", "int8", "int32")
TENSOR, WORKSPACE, INT32, FLOAT32 = range(4)

Shape = tuple[int, ...]
# Kind and value of an argument; a real one as its bits.
Argument = tuple[int, int | bytes]


@dataclass(frozen=True)
class EvaluatedLaunch:
    key: str
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class EvaluatedPlan:
    launches: tuple[EvaluatedLaunch, ...]
    workspace_bytes: int


class PlanError(Exception):
    """An error of the evaluator; its text is the message."""


class Message(Structure):
    _fields_ = (("text", c_char * 2048),)


class AttributeStruct(Structure):
    _fields_ = (("name", c_char_p), ("type", c_int32))


class Value(Structure):
    _fields_ = (("integer", c_int64), ("real", c_double))


class Dim(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("source", c_int32),
        ("input", c_int32),
        ("axis", c_int32),
        ("attribute", c_int32),
        ("offset", c_int64),
    )


class Tensor(Structure):
    _fields_ = (("name", c_char_p), ("element", c_int32), ("num_dims", c_int32), ("dims", POINTER(Dim)))


class Op(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("num_attributes", c_int32),
        ("num_inputs", c_int32),
        ("num_outputs", c_int32),
        ("attributes", POINTER(AttributeStruct)),
        ("inputs", POINTER(Tensor)),
        ("outputs", POINTER(Tensor)),
        ("aliases", POINTER(c_int32)),
    )


class Kernel(Structure):
    _fields_ = (
        ("key", c_char_p),
        ("op", c_char_p),
        ("entry", c_char_p),
        ("compute_capability", c_int32),
        ("block_threads", c_int32),
        ("shared_bytes", c_int64),
        ("pointer_alignment", c_int32),
        ("num_parameters", c_int32),
        ("parameters", POINTER(c_int32)),
        ("num_null_pointers", c_int32),
        ("cubin", c_void_p),
        ("cubin_size", c_uint64),
    )


class FixedSize(Structure):
    _fields_ = (("input", c_int32), ("axis", c_int32), ("size", c_int64))


class Operation(Structure):
    _fields_ = (
        ("op", POINTER(Op)),
        ("compute_capability", c_int32),
        ("model_dtype", c_char_p),
        ("cache_dtype", c_char_p),
        ("tile_s", c_int32),
        ("num_stages", c_int32),
        ("attributes", POINTER(Value)),
        ("types", POINTER(c_int32)),
        ("num_fixed_sizes", c_int32),
        ("fixed_sizes", POINTER(FixedSize)),
        ("num_kernels", c_int32),
        ("kernels", POINTER(POINTER(Kernel))),
    )


class ShapeStruct(Structure):
    _fields_ = (("rank", c_int32), ("sizes", POINTER(c_int64)))


class ArgumentStruct(Structure):
    _fields_ = (("kind", c_int32), ("index", c_int32), ("integer", c_int64), ("real", c_double))


class Launch(Structure):
    _fields_ = (("kernel", POINTER(Kernel)), ("grid", c_uint32 * 3), ("arguments", POINTER(ArgumentStruct)))


class Plan(Structure):
    _fields_ = (("workspace_bytes", c_int64), ("num_launches", c_int32), ("launches", POINTER(Launch)))


class Evaluator:
    """The shared library.

    Args:
        path: Its file.
    """

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.tmla_library_version.restype = c_char_p
        self.c.tmla_library_op.restype = POINTER(Op)
        self.c.tmla_library_find_op.restype = POINTER(Op)
        self.c.tmla_library_operation.restype = POINTER(Operation)
        self.c.tmla_library_kernel.restype = POINTER(Kernel)
        self.c.tmla_library_close.argtypes = [c_void_p]
        self.c.tmla_plan_free.argtypes = [POINTER(Plan)]

    def check(self, status: int, message: Message) -> None:
        if status:
            raise PlanError(message.text.decode())


class Library:
    """Opened library data. Everything is asked for by definitions and Python values."""

    def __init__(self, evaluator: Evaluator, data: bytes) -> None:
        self._evaluator = evaluator
        self.c = evaluator.c
        # A copy whose end is the end of its memory.
        self._data = ctypes.create_string_buffer(data, len(data)) if data else None
        self.handle = c_void_p()
        message = Message()
        evaluator.check(
            self.c.tmla_library_open(self._data, c_uint64(len(data)), byref(self.handle), byref(message)), message
        )

    def close(self) -> None:
        self.c.tmla_library_close(self.handle)
        self.handle = c_void_p()

    def op(self, name: str) -> Any:
        """The contract of an operation, as a pointer; its truth is whether there is one."""
        return self.c.tmla_library_find_op(self.handle, name.encode())

    def kernels(self) -> list[Kernel]:
        count = self.c.tmla_library_num_kernels(self.handle)
        return [self.c.tmla_library_kernel(self.handle, index).contents for index in range(count)]

    def operations(self) -> list[Operation]:
        count = self.c.tmla_library_num_operations(self.handle)
        return [self.c.tmla_library_operation(self.handle, index).contents for index in range(count)]

    def targets(self) -> list[int]:
        count = self.c.tmla_library_num_targets(self.handle)
        return [self.c.tmla_library_target(self.handle, index) for index in range(count)]

    def check_types(self, definition: OpDefinition, attributes: Mapping[str, Attribute], types: Sequence[str]) -> None:
        message = Message()
        status = self.c.tmla_check_types(
            self.handle,
            self.op(definition.name),
            _values(definition, attributes),
            _types(types),
            c_int32(len(types)),
            byref(message),
        )
        self._evaluator.check(status, message)

    def output_types(
        self, definition: OpDefinition, attributes: Mapping[str, Attribute], types: Sequence[str]
    ) -> tuple[str, ...]:
        message, found = Message(), (c_int32 * len(definition.outputs))()
        status = self.c.tmla_output_types(
            self.handle,
            self.op(definition.name),
            _values(definition, attributes),
            _types(types),
            found,
            byref(message),
        )
        self._evaluator.check(status, message)
        return tuple(TYPES[item] for item in found)

    def workspace_bytes(
        self,
        definition: OpDefinition,
        attributes: Mapping[str, Attribute],
        types: Sequence[str],
        shapes: Sequence[Shape],
    ) -> int:
        message, found = Message(), c_int64()
        status = self.c.tmla_workspace_bytes(
            self.handle,
            self.op(definition.name),
            _values(definition, attributes),
            _types(types),
            _shapes(shapes),
            byref(found),
            byref(message),
        )
        self._evaluator.check(status, message)
        return found.value

    def find(
        self,
        definition: OpDefinition,
        attributes: Mapping[str, Attribute],
        types: Sequence[str],
        shapes: Sequence[Shape],
        target: str,
    ) -> Any:
        """The operation of a call, as a pointer."""
        message, found = Message(), POINTER(Operation)()
        status = self.c.tmla_find_operation(
            self.handle,
            self.op(definition.name),
            _values(definition, attributes),
            _types(types),
            _shapes(shapes),
            c_int32(int(target.removeprefix("sm_"))),
            byref(found),
            byref(message),
        )
        self._evaluator.check(status, message)
        return found

    def plan(
        self,
        operation: Any,
        definition: OpDefinition,
        attributes: Mapping[str, Attribute],
        shapes: Sequence[Shape],
        multiprocessors: int,
        workspace_bytes: int,
    ) -> EvaluatedPlan:
        message, plan = Message(), POINTER(Plan)()
        status = self.c.tmla_plan_create(
            operation,
            _values(definition, attributes),
            _shapes(shapes),
            c_int32(multiprocessors),
            c_int64(workspace_bytes),
            byref(plan),
            byref(message),
        )
        self._evaluator.check(status, message)
        try:
            contents = plan.contents
            launches = tuple(_launch(contents.launches[index]) for index in range(contents.num_launches))
            return EvaluatedPlan(launches, contents.workspace_bytes)
        finally:
            self.c.tmla_plan_free(plan)


def evaluated(definition: OpDefinition, plan: LaunchPlan) -> EvaluatedPlan:
    """A plan made in Python, as the evaluator gives it."""
    tensors = [tensor.name for tensor in (*definition.inputs, *definition.outputs)]
    launches = []
    for launch in plan.launches:
        arguments: list[Argument] = []
        for (_, parameter_type), argument in zip(launch.variant.signature, launch.arguments, strict=True):
            if isinstance(argument, TensorArgument):
                arguments.append((TENSOR, tensors.index(argument.name)))
            elif not isinstance(argument, ScalarArgument):
                arguments.append((WORKSPACE, argument.offset))
            elif parameter_type == "i32":
                assert isinstance(argument.value, int)
                arguments.append((INT32, argument.value))
            else:
                arguments.append((FLOAT32, struct.pack("<d", argument.value)))
        launches.append(EvaluatedLaunch(launch.variant.key, launch.grid, tuple(arguments)))
    return EvaluatedPlan(tuple(launches), plan.workspace_bytes)


def _launch(launch: Launch) -> EvaluatedLaunch:
    kernel = launch.kernel.contents
    arguments: list[Argument] = []
    for index in range(kernel.num_parameters):
        item = launch.arguments[index]
        value = {TENSOR: item.index, FLOAT32: struct.pack("<d", item.real)}.get(item.kind, item.integer)
        arguments.append((item.kind, value))
    x, y, z = launch.grid
    return EvaluatedLaunch(kernel.key.decode(), (x, y, z), tuple(arguments))


def _values(definition: OpDefinition, attributes: Mapping[str, Attribute]) -> Any:
    values = (Value * max(len(definition.attributes), 1))()
    for index, (name, kind) in enumerate(definition.attributes.items()):
        if kind is float:
            values[index].real = attributes[name]
        else:
            values[index].integer = int(attributes[name])
    return values


def _types(types: Sequence[str]) -> Any:
    return (c_int32 * max(len(types), 1))(*(TYPES.index(item) for item in types))


def _shapes(shapes: Sequence[Shape]) -> Any:
    return (ShapeStruct * len(shapes))(
        *(ShapeStruct(len(shape), (c_int64 * max(len(shape), 1))(*shape)) for shape in shapes)
    )
