"""How far repeated measurements lie apart, and whether two differ by more than that.

Nothing is assumed about the shape of the distribution: times on a shared machine have long tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Summary of a few repetitions.

    Attributes:
        median: Middle sample, or the mean of the middle two.
        p10: Sample number ``int(n * 0.1)`` of the n sorted ones, as ``Percentiles`` counts.
        p90: Likewise at 0.9.
        minimum: Smallest sample.
        maximum: Largest sample.
        count: Number of samples.
    """

    median: float
    p10: float
    p90: float
    minimum: float
    maximum: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarises one sample or more."""
        if not samples:
            raise ValueError("found no samples, expected at least one")
        ordered = sorted(samples)
        size = len(ordered)
        return cls(
            median=statistics.median(ordered),
            p10=ordered[int(size * 0.1)],
            p90=ordered[int(size * 0.9)],
            minimum=ordered[0],
            maximum=ordered[-1],
            count=size,
        )


@dataclass(frozen=True)
class MedianInterval:
    """The median of samples, and where the median of all such measurements may lie.

    The bounds are two of the sorted samples. Each new sample falls on either side of the true median with equal
    chance, so the binomial distribution says how often they enclose it (sign test; Conover, Practical Nonparametric
    Statistics, section 3.2).

    Attributes:
        median: Of the samples.
        low: Lower bound.
        high: Upper bound.
        confidence: How often such bounds enclose the true median: at least ``CONFIDENCE`` from 6 samples on, less with
            fewer, where the bounds are the smallest and the largest sample.
    """

    median: float
    low: float
    high: float
    confidence: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> MedianInterval:
        """The interval of one sample or more; of those with enough confidence the narrowest."""
        if not samples:
            raise ValueError("found no samples, expected at least one")
        ordered = sorted(samples)
        size = len(ordered)
        rank, tail = 0, 1 / 2**size
        # With bounds at `rank` from either end, the median is missed if at most `rank` samples lie on one side of it.
        while rank + 1 < size - rank - 1:
            larger = tail + math.comb(size, rank + 1) / 2**size
            if 1 - 2 * larger < CONFIDENCE:
                break
            rank, tail = rank + 1, larger
        return cls(statistics.median(ordered), ordered[rank], ordered[size - 1 - rank], max(0.0, 1 - 2 * tail))

    def side_of(self, value: float) -> int:
        """1 if the true median is above ``value``, -1 if it is below, 0 if the samples do not tell."""
        if self.confidence < CONFIDENCE:
            return 0
        return (self.low > value) - (self.high < value)
