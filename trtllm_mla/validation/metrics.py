"""How far one array is from another, in float64.

Each metric takes what was computed and a reference of the same shape. Where either holds a value that is not finite,
every metric is NaN, which fails any comparison with a bound: nothing is left out of a sum.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]


def nonfinite_count(actual: Array, reference: Array) -> int:
    """Elements that are NaN or infinite, in both arrays together."""
    actual, reference = _float64(actual, reference)
    return int(actual.size + reference.size - np.isfinite(actual).sum() - np.isfinite(reference).sum())


def cosine(actual: Array, reference: Array) -> float:
    """Cosine of the angle between two arrays, both taken as vectors; 1 for two zero vectors."""
    actual, reference = _float64(actual, reference)
    lengths = _norm(actual), _norm(reference)
    return _ratio(float((actual * reference).sum()), lengths[0] * lengths[1]) if lengths != (0.0, 0.0) else 1.0


def norm_ratio(actual: Array, reference: Array) -> float:
    """Length of ``actual`` divided by the length of ``reference``, both taken as vectors; 1 for two zero vectors."""
    actual, reference = _float64(actual, reference)
    lengths = _norm(actual), _norm(reference)
    return _ratio(*lengths) if lengths != (0.0, 0.0) else 1.0


def max_abs_error(actual: Array, reference: Array) -> float:
    """Largest absolute difference of two elements; 0 for empty arrays."""
    actual, reference = _float64(actual, reference)
    return float(_abs_error(actual, reference).max(initial=0.0))


def mean_abs_error(actual: Array, reference: Array) -> float:
    """Mean absolute difference of two elements; 0 for empty arrays."""
    actual, reference = _float64(actual, reference)
    return float(_abs_error(actual, reference).mean()) if actual.size else 0.0


def relative_max_error(actual: Array, reference: Array) -> float:
    """``max_abs_error`` divided by the root mean square of the reference."""
    return _ratio(max_abs_error(actual, reference), root_mean_square(reference))


def relative_mean_error(actual: Array, reference: Array) -> float:
    """``mean_abs_error`` divided by the root mean square of the reference."""
    return _ratio(mean_abs_error(actual, reference), root_mean_square(reference))


def relative_l2_error(actual: Array, reference: Array) -> float:
    """Length of the difference divided by the length of the reference, both taken as vectors."""
    actual, reference = _float64(actual, reference)
    return _ratio(_norm(_abs_error(actual, reference)), _norm(reference))


def root_mean_square(values: Array) -> float:
    """Root of the mean square of all elements; 0 for an empty array."""
    values = np.asarray(values, dtype=np.float64)
    return _norm(values) / math.sqrt(values.size) if values.size else 0.0


def greedy_agreement(actual: Array, reference: Array) -> float:
    """Share of rows in which both arrays have their largest element in the same place.

    Args:
        actual: Logits, [rows, vocab_size].
        reference: Logits, the same shape.

    Returns:
        From 0 to 1, or NaN where an element is not finite or there is no row.
    """
    actual, reference = _float64(actual, reference)
    if actual.ndim != 2:
        raise ValueError(f"found shape {actual.shape}, expected [rows, vocab_size]")
    if not len(actual) or nonfinite_count(actual, reference):
        return math.nan
    return float((actual.argmax(axis=1) == reference.argmax(axis=1)).mean())


def _float64(actual: Array, reference: Array) -> tuple[Float64Array, Float64Array]:
    actual, reference = np.asarray(actual), np.asarray(reference)
    if actual.shape != reference.shape:
        raise ValueError(f"found shapes {actual.shape} and {reference.shape}, expected them to be equal")
    return actual.astype(np.float64), reference.astype(np.float64)


def _abs_error(actual: Float64Array, reference: Float64Array) -> Float64Array:
    # Equal infinities would otherwise differ by NaN with a warning, and opposite ones by infinity.
    if not (np.isfinite(actual).all() and np.isfinite(reference).all()):
        return np.full(actual.shape, math.nan)
    return np.abs(actual - reference)


def _norm(values: Float64Array) -> float:
    return float(np.linalg.norm(values)) if np.isfinite(values).all() else math.nan


def _ratio(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return numerator if numerator == 0 or math.isnan(numerator) else math.inf
    return numerator / denominator
