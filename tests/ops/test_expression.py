from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_mla.errors import UserError
from trtllm_mla.ops.expression import (
    Branch,
    Operator,
    Refusal,
    Trace,
    is_known,
    maximum,
    minimum,
)

VALUES = st.integers(-50, 50)


def evaluate(trace: Trace, index: int, values: list[Any]) -> Any:
    """What an expression is where symbols have values."""
    expression = trace.expressions[index]
    if expression.operator in (Operator.INT, Operator.FLOAT):
        return expression.value
    if expression.operator in (Operator.INT_SYMBOL, Operator.FLOAT_SYMBOL):
        return values[expression.operands[0]]
    functions: dict[Operator, Any] = {
        Operator.ADD: lambda a, b: a + b,
        Operator.SUBTRACT: lambda a, b: a - b,
        Operator.MULTIPLY: lambda a, b: a * b,
        Operator.FLOOR_DIV: lambda a, b: a // b,
        Operator.MOD: lambda a, b: a % b,
        Operator.NEGATE: lambda a: -a,
        Operator.MINIMUM: min,
        Operator.MAXIMUM: max,
        Operator.LESS: lambda a, b: a < b,
        Operator.EQUAL: lambda a, b: a == b,
        Operator.FLOAT_MULTIPLY: lambda a, b: a * b,
        Operator.FLOAT_LESS: lambda a, b: a < b,
        Operator.FLOAT_LESS_EQUAL: lambda a, b: a <= b,
        Operator.FLOAT_EQUAL: lambda a, b: a == b,
    }
    return functions[expression.operator](*(evaluate(trace, item, values) for item in expression.operands))


def outcome(trace: Trace, tree: Any, values: list[Any]) -> Any:
    """What a tree says that a function does: its result, or the text of its error."""
    while isinstance(tree, Branch):
        tree = tree.then if evaluate(trace, tree.condition, values) else tree.otherwise
    if isinstance(tree, Refusal):
        return "".join(str(evaluate(trace, part, values)) if isinstance(part, int) else part for part in tree.parts)
    return evaluate(trace, tree, values)


@settings(max_examples=300)
@given(VALUES, VALUES)
def test_all_ways_of_a_function_of_whole_numbers(a: int, b: int) -> None:
    def function(x: int, y: int) -> int:
        if x > y or x == 3:
            return minimum(x, y, 7) + 2 * y - x
        if not x <= -20 and y != x:
            return maximum(x, 1 - y) * (-x // 3) + y % 7
        if x < -30:
            raise ValueError(f"found {x} and {(x, y + 1)}, expected more")
        return -(-y // 4) + 9 // maximum(x, 1) - 100 % maximum(1, y)

    trace = Trace()
    symbols: list[Any] = [trace.int_symbol(), trace.int_symbol()]
    tree = trace.explore(lambda: trace.index(function(*symbols)))
    try:
        expected: Any = function(a, b)
    except ValueError as error:
        expected = str(error)
    assert outcome(trace, tree, [a, b]) == expected


@given(st.floats(allow_nan=True))
def test_all_ways_of_a_function_of_real_numbers(a: float) -> None:
    def function(x: float) -> float:
        if not 0 < x < math.inf:
            raise UserError(f"found {x}, expected a positive number")
        if x == 1 or x >= 1e9:
            return x
        return (2 if x != 2.5 and x <= 100 else 3) * x * 0.1

    trace = Trace()
    symbol: Any = trace.float_symbol()
    tree = trace.explore(lambda: trace.index(function(symbol)))
    try:
        expected: Any = function(a)
    except UserError as error:
        expected = str(error)
    assert outcome(trace, tree, [a]) == expected


def test_a_decision_is_asked_for_once() -> None:
    trace = Trace()
    size: Any = trace.int_symbol()
    runs = []

    def function() -> int:
        runs.append(None)
        return sum(10**place for place in range(5) if size < 8)

    tree = trace.explore(lambda: trace.index(function()))
    assert len(runs) == 2
    assert [outcome(trace, tree, [value]) for value in (7, 8)] == [11111, 0]


def test_symbols_of_another_trace_are_refused() -> None:
    with pytest.raises(TypeError, match="found a symbol of another trace"):
        Trace().index(Trace().int_symbol())


def test_equal_outcomes_are_no_decision() -> None:
    trace = Trace()
    size: Any = trace.int_symbol()
    assert trace.explore(lambda: trace.index(max(5, 3 if size < 8 else 4))) == trace.index(5)


def test_equal_expressions_are_one() -> None:
    trace = Trace()
    size: Any = trace.int_symbol()
    assert trace.index(size * 3 + 1) == trace.index(size * 3 + 1)
    # Equal as Python compares them.
    assert trace.index(0.0) != trace.index(-0.0)
    assert trace.index(1) != trace.index(1.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda size, real: range(size),
        lambda size, real: [1, 2, 3][size],
        lambda size, real: {size: 1},
        lambda size, real: 1 << size,
        lambda size, real: size + 0.5,
        lambda size, real: size / 2,
        lambda size, real: size * real,
        lambda size, real: real < size,
        lambda size, real: float(real),
        lambda size, real: real + 1,
        lambda size, real: minimum(size, real),
    ],
)
def test_what_cannot_be_followed_is_refused(function: Any) -> None:
    trace = Trace()
    with pytest.raises(TypeError):
        trace.explore(lambda: function(trace.int_symbol(), trace.float_symbol()))


def test_too_many_outcomes_are_refused() -> None:
    trace = Trace()
    size: Any = trace.int_symbol()
    with pytest.raises(RuntimeError, match="found more than 1000 outcomes"):
        trace.explore(lambda: trace.index(sum(number for number in range(1100) if size == number)))


def test_minimum_and_maximum_of_plain_numbers() -> None:
    assert (minimum(3, 1, 2), maximum(3, 1, 5), minimum(4)) == (1, 5, 4)
    assert is_known(minimum(3, 1))
    assert not is_known(minimum(3, Trace().int_symbol()))  # type: ignore[arg-type]
