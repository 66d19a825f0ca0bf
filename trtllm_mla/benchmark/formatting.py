"""Numbers for readers."""

from __future__ import annotations

import math


def show_number(value: float, digits: int = 4) -> str:
    """A number with so many digits that count, whole where it is or where more digits stand before the point."""
    if value == int(value):
        return f"{int(value):,}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), 9)}f}"


def show_range(low: float, high: float) -> str:
    """Bounds, in parentheses and with fewer digits than what they bound."""
    return f"({show_number(low, 3)} to {show_number(high, 3)})"
