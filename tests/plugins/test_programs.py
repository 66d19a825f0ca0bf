"""Programs that no plan has, or that no plan may have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.evaluator import Evaluator, PlanError
from tests.plugins.test_plans import make_form, make_shapes, opened
from trtllm_mla.ops.expression import Trace, maximum, minimum
from trtllm_mla.ops.plan import (
    KernelVariant,
    Launch,
    LaunchPlan,
    ScalarArgument,
    TensorArgument,
    WorkspaceArgument,
    repeat,
)
from trtllm_mla.ops.program import Program, ProgramLaunch, ProgramPlan, trace_plan

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
VARIANT = KernelVariant("GatherLatent", "gather_latent", (("latent", "*bf16"), ("keys", "i32")), (), 4, 1)


class Calls:
    """Calls of GatherLatent with another plan: a function of its number of keys.

    Args:
        evaluator: The evaluator.
        directory: For files.
        program: The plan, or what makes it.
    """

    def __init__(self, evaluator: Evaluator, directory: Path, program: Program | Callable[[Any], LaunchPlan]) -> None:
        self._evaluator, self._directory = evaluator, directory
        self._form = make_form("GatherLatent", "sm_89")
        if not isinstance(program, Program):
            trace = Trace()
            keys: Any = [trace.int_symbol() for _ in range(4)][3]
            program = trace_plan(trace, lambda: program(keys))
        self._planned = dataclasses.replace(self._form.planned, variants=(VARIANT,), plan=program)

    def plan(self, keys: int) -> Any:
        form, shapes = self._form, make_shapes(self._form, pages=1, keys=keys)
        with opened(self._evaluator, [self._planned], self._directory) as library:
            operation = library.find(form.definition, form.attributes, form.input_types, shapes, "sm_89")
            return library.plan(operation, form.definition, form.attributes, shapes, 128, MAX_INT64)


def launch(grid: int = 1, argument: Any = None, keys: int = 1) -> Launch:
    return Launch(VARIANT, (grid, 1, 1), (argument or TensorArgument("latent"), ScalarArgument(keys)))


@pytest.mark.parametrize("divisor", [-7, -3, -1, 1, 2, 5])
@pytest.mark.parametrize("keys", [-20, -7, -1, 0, 1, 6, 7, 20])
def test_divisions_round_as_in_python(evaluator: Evaluator, tmp_path: Path, keys: int, divisor: int) -> None:
    def size(keys: int) -> int:
        return 1000 + 100 * (keys // divisor) + keys % divisor + minimum(keys, divisor) + maximum(-keys, 3)

    calls = Calls(evaluator, tmp_path, lambda keys: LaunchPlan((), size(keys)))
    if size(keys) >= 0:
        assert calls.plan(keys).workspace_bytes == size(keys)
    else:
        with pytest.raises(PlanError, match="expected at most"):
            calls.plan(keys)


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (lambda keys: keys + 1, MAX_INT64),
        (lambda keys: keys - 1, MIN_INT64),
        (lambda keys: keys * 2, 2**62),
        (lambda keys: -keys, MIN_INT64),
        (lambda keys: keys // -1, MIN_INT64),
    ],
)
def test_numbers_beyond_64_bits_are_refused(
    evaluator: Evaluator, tmp_path: Path, function: Callable[[int], int], keys: int
) -> None:
    calls = Calls(evaluator, tmp_path, lambda keys: LaunchPlan((), maximum(0, function(keys)) * 0))
    assert calls.plan(1).workspace_bytes == 0
    with pytest.raises(PlanError, match=r"^GatherLatent: .* more than 64 bits"):
        calls.plan(keys)


def test_the_least_number_leaves_nothing_of_a_division_by_minus_one(evaluator: Evaluator, tmp_path: Path) -> None:
    calls = Calls(evaluator, tmp_path, lambda keys: LaunchPlan((), keys % -1))
    assert calls.plan(MIN_INT64).workspace_bytes == 0


def test_a_division_by_zero_is_refused(evaluator: Evaluator, tmp_path: Path) -> None:
    calls = Calls(evaluator, tmp_path, lambda keys: LaunchPlan((), 512 // keys))
    assert calls.plan(3).workspace_bytes == 170
    with pytest.raises(PlanError, match="GatherLatent: found a division by 0, expected sizes above 0"):
        calls.plan(0)


def test_repetitions(evaluator: Evaluator, tmp_path: Path) -> None:
    def plan(keys: int) -> LaunchPlan:
        def body(first: int) -> tuple[Launch, ...]:
            if first >= 4:  # a decision that differs from one repetition to the next
                return (launch(keys=first * 10), launch(keys=minimum(first, keys)))
            if keys == 3:
                raise ValueError(f"found {keys} keys at {first}, expected others")
            return (launch(grid=first + 1, keys=first),)

        return LaunchPlan((launch(), *repeat(keys, 2, body), *repeat(6, keys, body), launch()))

    calls = Calls(evaluator, tmp_path, plan)
    for keys in (1, 2, 7, 8, 11):
        found = [(item.grid[0], item.arguments[1][1]) for item in calls.plan(keys).launches]
        values = [item.arguments[1] for item in plan(keys).launches]
        numbers = [item.value for item in values if isinstance(item, ScalarArgument)]
        assert found == [(item.grid[0], number) for item, number in zip(plan(keys).launches, numbers, strict=True)]
    with pytest.raises(PlanError, match="found 3 keys at 0, expected others"):
        calls.plan(3)
    with pytest.raises(PlanError, match="GatherLatent: found launches 0 apart, expected a positive number"):
        calls.plan(0)


@pytest.mark.parametrize("keys", [65537, MAX_INT64])
@pytest.mark.parametrize("launches", [(launch(),), ()])
def test_endless_repetitions_are_refused(
    evaluator: Evaluator, tmp_path: Path, keys: int, launches: tuple[Launch, ...]
) -> None:
    calls = Calls(evaluator, tmp_path, lambda keys: LaunchPlan(repeat(keys, 1, lambda first: launches)))
    with pytest.raises(PlanError, match="GatherLatent: found more than 65536 launches"):
        calls.plan(keys)


def test_addresses_stay_in_the_workspace(evaluator: Evaluator, tmp_path: Path) -> None:
    calls = Calls(
        evaluator,
        tmp_path,
        lambda keys: LaunchPlan((launch(argument=WorkspaceArgument(keys * 256, "fp32", 1)),), 1024),
    )
    assert calls.plan(3).launches[0].arguments[0] == (1, 768)
    for keys in (-1, 5):
        with pytest.raises(PlanError, match=r"GatherLatent: found byte -?\d+ of the workspace, expected 0 to 1024"):
            calls.plan(keys)


@pytest.mark.parametrize(("keys", "axis"), [(0, 0), (2**31, 0), (65536, 1), (65536, 2)])
def test_grids_stay_within_the_limits(evaluator: Evaluator, tmp_path: Path, keys: int, axis: int) -> None:
    """Also where the data says otherwise than a plan would."""
    trace = Trace()
    symbols = [trace.int_symbol() for _ in range(4)]
    grid = [trace.index(1)] * 3
    grid[axis] = symbols[3].index
    traced = trace_plan(trace, lambda: LaunchPlan((launch(),)))
    assert isinstance(traced.tree, ProgramPlan)
    first = traced.tree.launches[0]
    assert isinstance(first, ProgramLaunch)
    changed = dataclasses.replace(first, grid=tuple(grid))
    calls = Calls(evaluator, tmp_path, dataclasses.replace(traced, tree=ProgramPlan((changed,), trace.index(0))))
    assert calls.plan(7).launches[0].grid[axis] == 7
    with pytest.raises(PlanError, match=f"GatherLatent: found {keys} blocks on axis {axis} of a grid, expected 1 to"):
        calls.plan(keys)


def test_deep_expressions_are_refused(evaluator: Evaluator, tmp_path: Path) -> None:
    def plan(depth: int) -> Callable[[int], LaunchPlan]:
        def size(keys: int) -> int:
            for _ in range(depth):
                keys = 1 - keys
            return keys * 0

        return lambda keys: LaunchPlan((), size(keys))

    assert Calls(evaluator, tmp_path, plan(500)).plan(5).workspace_bytes == 0
    with pytest.raises(PlanError, match="library data: found expressions that are nested too deeply"):
        Calls(evaluator, tmp_path, plan(600)).plan(5)


def test_a_plan_that_needs_a_number_of_another_type_is_no_program() -> None:
    trace = Trace()
    real: Any = trace.float_symbol()
    for plan in (LaunchPlan((launch(keys=real),)), LaunchPlan((launch(keys=2.5),))):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="parameter 'keys' is a i32"):
            trace_plan(trace, lambda plan=plan: plan)  # type: ignore[misc]


def test_repetitions_do_not_nest() -> None:
    trace = Trace()
    size: Any = trace.int_symbol()
    inner = repeat(size, 1, lambda first: (launch(),))
    with pytest.raises(TypeError, match="found a Repetition in a repetition"):
        trace_plan(trace, lambda: LaunchPlan(repeat(size, 1, lambda first: inner)))
