"""Summaries of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Percentiles:
    """Summary of samples, with the keys of trtllm-bench's reports and the median beside them.

    Attributes:
        p50: Sample number ``int(n * 0.5)`` of the n sorted ones, as trtllm-bench counts percentiles.
        p90: Likewise at 0.9.
        p95: Likewise at 0.95.
        p99: Likewise at 0.99.
        minimum: Smallest sample.
        maximum: Largest sample.
        average: Mean.
        median: Middle sample, or the mean of the middle two.
    """

    p50: float
    p90: float
    p95: float
    p99: float
    minimum: float
    maximum: float
    average: float
    median: float

    def trtllm_bench(self) -> dict[str, float]:
        """Values by the keys of trtllm-bench's reports, which have no median."""
        return {name: value for name, value in asdict(self).items() if name != "median"}

    @classmethod
    def of(cls, samples: Sequence[float]) -> Percentiles:
        """Summarises one sample or more."""
        if not samples:
            raise ValueError("found no samples, expected at least one")
        ordered = sorted(samples)

        def at(share: float) -> float:
            return ordered[int(len(ordered) * share)]

        return cls(
            p50=at(0.5),
            p90=at(0.9),
            p95=at(0.95),
            p99=at(0.99),
            minimum=ordered[0],
            maximum=ordered[-1],
            average=statistics.fmean(ordered),
            median=statistics.median(ordered),
        )
