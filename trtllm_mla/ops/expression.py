"""Numbers that are not known yet: expressions over symbols, and all ways a function of them can go.

A function that computes with whole numbers and reals is run on symbols instead. Arithmetic makes expressions, and
where the function decides by a comparison, both outcomes are followed, so that one function gives both its results
and, as data, what it does for all arguments.

What cannot be followed is refused with a ``TypeError``: the value of a symbol as an index, as the end of a ``range``,
or as a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeAlias, TypeVar

from trtllm_mla.errors import UserError

MAX_OUTCOMES = 1000
# What stands in a text for a number that is not known yet: the expression's index between two of these.
MARK = "\0"

_Leaf = TypeVar("_Leaf")
_Leaf_co = TypeVar("_Leaf_co", covariant=True)


class Operator(IntEnum):
    """What an expression does with its operands; the numbers are those of the library data.

    ``FLOOR_DIV`` and ``MOD`` round as Python does, downwards. Comparisons give 1 or 0. ``VARIABLE`` is the variable of
    the repetition that it is in.
    """

    INT_SYMBOL = 0
    FLOAT_SYMBOL = 1
    INT = 2
    FLOAT = 3
    ADD = 4
    SUBTRACT = 5
    MULTIPLY = 6
    FLOOR_DIV = 7
    MOD = 8
    NEGATE = 9
    MINIMUM = 10
    MAXIMUM = 11
    LESS = 12
    EQUAL = 13
    FLOAT_MULTIPLY = 14
    FLOAT_LESS = 15
    FLOAT_LESS_EQUAL = 16
    FLOAT_EQUAL = 17
    VARIABLE = 18


@dataclass(frozen=True)
class Expression:
    """An expression of a trace.

    Attributes:
        operator: What it does.
        operands: Indices of its operands, which come before it in the trace; of a symbol, its number.
        value: A constant's value.
    """

    operator: Operator
    operands: tuple[int, ...] = ()
    value: int | float | None = None


@dataclass(frozen=True)
class Branch(Generic[_Leaf_co]):
    """A decision.

    Attributes:
        condition: Index of the comparison.
        then: What follows where it holds.
        otherwise: What follows where it does not.
    """

    condition: int
    then: Tree[_Leaf_co]
    otherwise: Tree[_Leaf_co]


@dataclass(frozen=True)
class Refusal:
    """What stands for an error.

    Attributes:
        parts: Its message: pieces of text, and indices of expressions whose values stand between them.
    """

    parts: tuple[str | int, ...]


Tree: TypeAlias = Branch[_Leaf] | Refusal | _Leaf


class Trace:
    """Expressions, each once, and the decisions that are being followed.

    Attributes:
        expressions: The expressions; operands come before what they are operands of.
    """

    def __init__(self) -> None:
        self.expressions: list[Expression] = []
        self._indices: dict[tuple[Any, ...], int] = {}
        self._num_symbols = 0
        self._known: dict[int, bool] = {}
        self._asked: list[int] = []

    def int_symbol(self) -> SymbolicInt:
        """A new symbol for a whole number."""
        return SymbolicInt(self, self._symbol(Operator.INT_SYMBOL))

    def float_symbol(self) -> SymbolicFloat:
        """A new symbol for a real number."""
        return SymbolicFloat(self, self._symbol(Operator.FLOAT_SYMBOL))

    def variable(self) -> SymbolicInt:
        """The variable of the repetition that is being followed."""
        return SymbolicInt(self, self.add(Operator.VARIABLE))

    def index(self, value: Any) -> int:
        """Index of the expression for a number, which may be a plain one.

        Raises:
            TypeError: It is no number, or one of another trace.
        """
        if isinstance(value, Symbolic):
            if value.trace is not self:
                raise TypeError("found a symbol of another trace, expected one of this")
            return value.index
        if isinstance(value, float):
            return self.add(Operator.FLOAT, value=value)
        if isinstance(value, int):
            return self.add(Operator.INT, value=int(value))
        raise TypeError(f"found {value!r}, expected a number")

    def is_float(self, index: int) -> bool:
        """Whether an expression is a real number."""
        return self.expressions[index].operator in _FLOATS

    def add(self, operator: Operator, *operands: int, value: int | float | None = None) -> int:
        """Index of an expression."""
        # 0.0 and -0.0 are equal, and so are 1 and 1.0; repr tells them apart.
        key = (operator, operands, repr(value))
        if key not in self._indices:
            self._indices[key] = len(self.expressions)
            self.expressions.append(Expression(operator, operands, value))
        return self._indices[key]

    def decide(self, condition: int) -> bool:
        """The outcome of a comparison in the run that is being followed."""
        if condition not in self._known:
            self._known[condition] = True
            self._asked.append(condition)
        return self._known[condition]

    def explore(self, function: Callable[[], _Leaf]) -> Tree[_Leaf]:
        """All ways a function can go. A ``ValueError`` or ``UserError`` that it raises is one of them.

        Args:
            function: Computes with symbols of this trace. It is run once for each outcome, and may itself explore.

        Raises:
            TypeError: It does with a symbol what cannot be followed.
            RuntimeError: It has more than ``MAX_OUTCOMES`` outcomes.
        """
        known, asked = self._known, self._asked
        runs = 0

        def follow(assumed: dict[int, bool]) -> Tree[_Leaf]:
            nonlocal runs
            runs += 1
            if runs > MAX_OUTCOMES:
                raise RuntimeError(f"found more than {MAX_OUTCOMES} outcomes, expected fewer decisions")
            self._known, self._asked = dict(assumed), []
            tree: Tree[_Leaf]
            try:
                tree = function()
            except (ValueError, UserError) as error:
                tree = Refusal(_parts(str(error)))
            # The run took every decision that it was asked for as true.
            decisions = self._asked
            for number in reversed(range(len(decisions))):
                before = {**assumed, **dict.fromkeys(decisions[:number], True)}
                otherwise = follow({**before, decisions[number]: False})
                if otherwise != tree:
                    tree = Branch(decisions[number], tree, otherwise)
            return tree

        try:
            return follow(known)
        finally:
            self._known, self._asked = known, asked

    def _symbol(self, operator: Operator) -> int:
        self._num_symbols += 1
        return self.add(operator, self._num_symbols - 1)


class Symbolic:
    """A number that is not known yet.

    Args:
        trace: Its trace.
        index: Index of its expression.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace = trace
        self.index = index

    def __repr__(self) -> str:
        return f"{MARK}{self.index}{MARK}"

    def _binary(self, operator: Operator, left: Any, right: Any) -> int:
        return self.trace.add(operator, self.trace.index(left), self.trace.index(right))


class Condition(Symbolic):
    """A comparison. Its truth is a decision.

    Args:
        trace: Its trace.
        index: Index of its expression.
        holds: Whether it is the comparison, or its opposite.
    """

    def __init__(self, trace: Trace, index: int, *, holds: bool = True) -> None:
        super().__init__(trace, index)
        self._holds = holds

    def __bool__(self) -> bool:
        return self.trace.decide(self.index) == self._holds


class SymbolicInt(Symbolic):
    """A whole number that is not known yet."""

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __add__(self, other: Any) -> SymbolicInt:
        return self if _is(other, 0) else self._int(Operator.ADD, self, other)

    def __radd__(self, other: Any) -> SymbolicInt:
        return self if _is(other, 0) else self._int(Operator.ADD, other, self)

    def __sub__(self, other: Any) -> SymbolicInt:
        return self if _is(other, 0) else self._int(Operator.SUBTRACT, self, other)

    def __rsub__(self, other: Any) -> SymbolicInt:
        return self._int(Operator.SUBTRACT, other, self)

    def __mul__(self, other: Any) -> SymbolicInt:
        return self if _is(other, 1) else self._int(Operator.MULTIPLY, self, other)

    def __rmul__(self, other: Any) -> SymbolicInt:
        return self if _is(other, 1) else self._int(Operator.MULTIPLY, other, self)

    def __floordiv__(self, other: Any) -> SymbolicInt:
        return self if _is(other, 1) else self._int(Operator.FLOOR_DIV, self, other)

    def __rfloordiv__(self, other: Any) -> SymbolicInt:
        return self._int(Operator.FLOOR_DIV, other, self)

    def __mod__(self, other: Any) -> SymbolicInt:
        return self._int(Operator.MOD, self, other)

    def __rmod__(self, other: Any) -> SymbolicInt:
        return self._int(Operator.MOD, other, self)

    def __neg__(self) -> SymbolicInt:
        return SymbolicInt(self.trace, self.trace.add(Operator.NEGATE, self.index))

    def __lt__(self, other: Any) -> Condition:
        return self._condition(Operator.LESS, self, other)

    def __gt__(self, other: Any) -> Condition:
        return self._condition(Operator.LESS, other, self)

    def __le__(self, other: Any) -> Condition:
        return self._condition(Operator.LESS, other, self, holds=False)

    def __ge__(self, other: Any) -> Condition:
        return self._condition(Operator.LESS, self, other, holds=False)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return self._condition(Operator.EQUAL, self, other)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return self._condition(Operator.EQUAL, self, other, holds=False)

    def extremum(self, operator: Operator, other: Any) -> SymbolicInt:
        """The ``MINIMUM`` or ``MAXIMUM`` of two whole numbers."""
        return self._int(operator, self, other)

    def _int(self, operator: Operator, left: Any, right: Any) -> SymbolicInt:
        return SymbolicInt(self.trace, self._binary(operator, *self._ints(left, right)))

    def _condition(self, operator: Operator, left: Any, right: Any, *, holds: bool = True) -> Condition:
        return Condition(self.trace, self._binary(operator, *self._ints(left, right)), holds=holds)

    def _ints(self, *values: Any) -> tuple[Any, ...]:
        for value in values:
            if not isinstance(value, (int, SymbolicInt)):
                raise TypeError(f"found {value!r} with a whole number that is not known yet, expected another one")
        return values


class SymbolicFloat(Symbolic):
    """A real number that is not known yet, in double precision."""

    def __mul__(self, other: Any) -> SymbolicFloat:
        return SymbolicFloat(self.trace, self._binary(Operator.FLOAT_MULTIPLY, self, self._float(other)))

    def __rmul__(self, other: Any) -> SymbolicFloat:
        return SymbolicFloat(self.trace, self._binary(Operator.FLOAT_MULTIPLY, self._float(other), self))

    def __lt__(self, other: Any) -> Condition:
        return self._condition(Operator.FLOAT_LESS, self, self._float(other))

    def __gt__(self, other: Any) -> Condition:
        return self._condition(Operator.FLOAT_LESS, self._float(other), self)

    def __le__(self, other: Any) -> Condition:
        return self._condition(Operator.FLOAT_LESS_EQUAL, self, self._float(other))

    def __ge__(self, other: Any) -> Condition:
        return self._condition(Operator.FLOAT_LESS_EQUAL, self._float(other), self)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return self._condition(Operator.FLOAT_EQUAL, self, self._float(other))

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return self._condition(Operator.FLOAT_EQUAL, self, self._float(other), holds=False)

    def _condition(self, operator: Operator, left: Any, right: Any, *, holds: bool = True) -> Condition:
        return Condition(self.trace, self._binary(operator, left, right), holds=holds)

    def _float(self, value: Any) -> Any:
        if isinstance(value, SymbolicInt):
            raise TypeError("found a whole number that is not known yet, expected a real one")
        return value if isinstance(value, SymbolicFloat) else float(value)


def is_known(value: object) -> bool:
    """Whether a number is a plain one."""
    return not isinstance(value, Symbolic)


def minimum(first: int, *others: int) -> int:
    """The least of some whole numbers, of which some may not be known yet; no decision."""
    return _extremum(Operator.MINIMUM, min, first, *others)


def maximum(first: int, *others: int) -> int:
    """The greatest of some whole numbers, of which some may not be known yet; no decision."""
    return _extremum(Operator.MAXIMUM, max, first, *others)


def _extremum(operator: Operator, known: Callable[[int, int], int], first: int, *others: int) -> int:
    result: Any = first
    values: tuple[Any, ...] = others
    for other in values:
        symbolic = next((value for value in (result, other) if isinstance(value, SymbolicInt)), None)
        if symbolic is None:
            result = known(result, other)
        else:
            result = symbolic.extremum(operator, other if symbolic is result else result)
    number: int = result
    return number


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def _parts(message: str) -> tuple[str | int, ...]:
    pieces = message.split(MARK)
    return tuple(int(piece) if number % 2 else piece for number, piece in enumerate(pieces) if piece)


_FLOATS = frozenset({Operator.FLOAT_SYMBOL, Operator.FLOAT, Operator.FLOAT_MULTIPLY})
