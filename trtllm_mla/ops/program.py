"""Plan programs: a launch plan for all sizes at once, as data.

A program is what ``Trace`` finds when it follows the function that makes a plan: a tree of decisions whose leaves are
launches, or the message of an error. Nothing in it knows an operation. The plugin library, which has no Python,
evaluates programs; whatever a plan in Python computes, it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_mla.ops.expression import Branch, Expression, Trace, Tree
from trtllm_mla.ops.plan import (
    Argument,
    KernelVariant,
    Launch,
    LaunchPlan,
    Repetition,
    ScalarArgument,
    TensorArgument,
    WorkspaceArgument,
)


@dataclass(frozen=True)
class TensorOperand:
    """Address of an input or output.

    Attributes:
        name: Its name in the contract.
    """

    name: str


@dataclass(frozen=True)
class WorkspaceOperand:
    """Address inside the workspace.

    Attributes:
        offset: Index of the expression for the bytes from its start.
    """

    offset: int


@dataclass(frozen=True)
class ScalarOperand:
    """A number.

    Attributes:
        value: Index of its expression, a whole number or a real one as the kernel's parameter is.
    """

    value: int


Operand = TensorOperand | WorkspaceOperand | ScalarOperand


@dataclass(frozen=True)
class ProgramLaunch:
    """A kernel launch.

    Attributes:
        variant: What to launch.
        grid: Index of the expression for the blocks along x, y and z. They are within CUDA's limits.
        operands: One for each run-time parameter of the variant's signature, in order.
    """

    variant: KernelVariant
    grid: tuple[int, int, int]
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class ProgramRepetition:
    """Launches that are repeated for each value of a variable from 0 to below ``stop``, ``step`` apart.

    Attributes:
        stop: Index of the expression for the end.
        step: Index of the expression for the distance, which is at least 1.
        body: The launches for one value, in which the variable is ``Operator.VARIABLE``.
    """

    stop: int
    step: int
    body: Tree[tuple[ProgramLaunch, ...]]


@dataclass(frozen=True)
class ProgramPlan:
    """Launches to run one after the other.

    Attributes:
        launches: The launches.
        workspace_bytes: Index of the expression for the bytes of scratch memory.
    """

    launches: tuple[ProgramLaunch | ProgramRepetition, ...]
    workspace_bytes: int


@dataclass(frozen=True)
class ProgramNumber:
    """A whole number as a result.

    Attributes:
        value: Index of its expression.
    """

    value: int


@dataclass(frozen=True)
class Program:
    """What a function of some numbers computes for all of them.

    Attributes:
        expressions: Expressions; operands come before what they are operands of. Symbols are numbered in the order in
            which the function's arguments were made.
        tree: What the function does.
    """

    expressions: tuple[Expression, ...]
    tree: Tree[ProgramPlan | ProgramNumber]

    @property
    def variants(self) -> tuple[KernelVariant, ...]:
        """Kernels that the launches name, each once."""
        found: dict[KernelVariant, None] = {}

        def visit(tree: Tree[ProgramPlan | ProgramNumber] | Tree[tuple[ProgramLaunch, ...]]) -> None:
            if isinstance(tree, Branch):
                visit(tree.then)
                visit(tree.otherwise)
            elif isinstance(tree, (ProgramPlan, tuple)):
                for item in tree.launches if isinstance(tree, ProgramPlan) else tree:
                    if isinstance(item, ProgramRepetition):
                        visit(item.body)
                    else:
                        found[item.variant] = None

        visit(self.tree)
        return tuple(found)


def trace_plan(trace: Trace, function: Callable[[], LaunchPlan]) -> Program:
    """The program of a function that makes a plan.

    Args:
        trace: Where its arguments are symbols of.
        function: Makes the plan from symbols of the trace.

    Raises:
        TypeError: The function does with a symbol what cannot be followed, or an argument is no number of its
            parameter's type.
        RuntimeError: The function has too many outcomes.
    """
    tree = trace.explore(lambda: _plan(trace, function()))
    return Program(tuple(trace.expressions), tree)


def trace_number(trace: Trace, function: Callable[[], int]) -> Program:
    """The program of a function that computes a whole number; see ``trace_plan``."""
    tree = trace.explore(lambda: ProgramNumber(trace.index(function())))
    return Program(tuple(trace.expressions), tree)


def _plan(trace: Trace, plan: LaunchPlan) -> ProgramPlan:
    items = tuple(
        _repetition(trace, item) if isinstance(item, Repetition) else _launch(trace, item) for item in plan.launches
    )
    return ProgramPlan(items, trace.index(plan.workspace_bytes))


def _repetition(trace: Trace, repetition: Repetition) -> ProgramRepetition:
    variable: Any = trace.variable()
    body = trace.explore(lambda: tuple(_launch(trace, item) for item in repetition.launches(variable)))
    return ProgramRepetition(trace.index(repetition.stop), trace.index(repetition.step), body)


def _launch(trace: Trace, launch: Launch) -> ProgramLaunch:
    if not isinstance(launch, Launch):
        raise TypeError(f"found a {type(launch).__name__} in a repetition, expected launches alone")
    x, y, z = (trace.index(blocks) for blocks in launch.grid)
    operands = tuple(
        _operand(trace, name, parameter_type, argument)
        for (name, parameter_type), argument in zip(launch.variant.signature, launch.arguments, strict=True)
    )
    return ProgramLaunch(launch.variant, (x, y, z), operands)


def _operand(trace: Trace, name: str, parameter_type: str, argument: Argument) -> Operand:
    if isinstance(argument, ScalarArgument) != (parameter_type in ("i32", "fp32")):
        raise TypeError(f"parameter '{name}' is a {parameter_type}, found {argument}")
    if isinstance(argument, TensorArgument):
        return TensorOperand(argument.name)
    if isinstance(argument, WorkspaceArgument):
        return WorkspaceOperand(trace.index(argument.offset))
    value = float(argument.value) if parameter_type == "fp32" and isinstance(argument.value, int) else argument.value
    index = trace.index(value)
    if trace.is_float(index) != (parameter_type == "fp32"):
        raise TypeError(f"parameter '{name}' is a {parameter_type}, found {value!r}")
    return ScalarOperand(index)
