"""Comparing two polygraphy runners on scenarios, with polygraphy's comparator and gates on several metrics at once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.comparator import (
    BaseCompareFunc,
    Comparator,
    CompareResult,
    CosineSimilarityCompareFunc,
    IterationResult,
    RunResults,
    SimpleCompareFunc,
    Threshold,
)
from polygraphy.logger import G_LOGGER

from trtllm_mla.network.contract import LOGITS
from trtllm_mla.validation import metrics
from trtllm_mla.validation.gates import Gates, cache_gates
from trtllm_mla.validation.quantization import CachedPart, QuantizedCache
from trtllm_mla.validation.scenarios import Scenario

# Logits beside those of a reference whose own rows, which nobody quantised, are in its cache.
UNQUANTIZED_LOGITS = "unquantized_logits"

Metric = Callable[[Any, Any], float]
NamedFunction = tuple[str, BaseCompareFunc]


@dataclass(frozen=True)
class MetricValue:
    """A metric of one output in one scenario.

    Attributes:
        name: The metric.
        value: Its value, or None where it could not be computed or is not finite.
        gate: The condition it must meet, for example ``<= 0.0002``; None where it is reported only.
        passed: Whether it does.
    """

    name: str
    value: float | None
    gate: str | None
    passed: bool


@dataclass(frozen=True)
class OutputComparison:
    """All metrics of one output in one scenario.

    Attributes:
        output: ``logits``, or ``latent_{layer}``; with a quantised cache, also ``k_pe_{layer}`` and
            ``unquantized_logits``.
        metrics: The metrics.
    """

    output: str
    metrics: tuple[MetricValue, ...]

    @property
    def passed(self) -> bool:
        """Whether every metric meets its gate."""
        return all(metric.passed for metric in self.metrics)

    def value(self, name: str) -> float | None:
        """Value of a metric by name, None where it has none."""
        return next((metric.value for metric in self.metrics if metric.name == name), None)


class MetricGate(Threshold):  # type: ignore[misc]
    """A condition on one metric.

    Args:
        text: The condition in words, or None for a metric that is reported only.
        accepts: Tells whether a value meets it; values that are not finite never do.
    """

    def __init__(self, text: str | None, accepts: Callable[[float], bool]) -> None:
        self.text = text
        self._accepts = accepts

    def passed(self, metric_values: dict[str, float]) -> bool:
        """Whether the metric meets the condition."""
        value = metric_values["value"]
        return self.text is None or (math.isfinite(value) and self._accepts(value))


class MetricResult(CompareResult):  # type: ignore[misc]
    """The value of one metric.

    Args:
        value: The value.
        gate: Its condition.
    """

    def __init__(self, value: float, gate: MetricGate) -> None:
        super().__init__(thresholds=gate)
        self.value = value

    def metric_values(self) -> dict[str, float]:
        """The value, under the key ``value``."""
        return {"value": self.value}

    def describe(self) -> None:
        """No line for polygraphy's log; the report has its own."""


class MetricCompareFunc(BaseCompareFunc):  # type: ignore[misc]
    """Compares outputs of the same name by one metric.

    Args:
        metric: Computes the metric of an output and its reference.
        gate: Its condition.
        outputs: Tells which outputs it applies to.
    """

    def __init__(self, metric: Metric, gate: MetricGate, outputs: Callable[[str], bool] = lambda _: True) -> None:
        self._metric = metric
        self._gate = gate
        self._outputs = outputs

    def __call__(self, iter_result0: IterationResult, iter_result1: IterationResult) -> dict[str, MetricResult]:
        """Computes the metric for every output that it applies to."""
        results = OrderedDict()
        for name, actual in iter_result0.items():
            if self._outputs(name):
                reference = iter_result1[name]
                value = self._metric(actual, reference) if actual.shape == reference.shape else math.nan
                results[name] = MetricResult(value, self._gate)
        return results


def compare_runners(
    actual: BaseRunner,
    reference: BaseRunner,
    scenarios: Sequence[Scenario],
    gates: Gates,
    *,
    quantized: QuantizedCache | None = None,
    on_scenario: Callable[[Scenario], None] | None = None,
) -> list[list[OutputComparison]]:
    """Runs scenarios on two runners and compares all outputs.

    Only one scenario's outputs are held at a time. Arrays are compared in float64.

    Args:
        actual: The runner that is checked.
        reference: The runner it is compared with.
        scenarios: What to run.
        gates: Conditions that the metrics must meet.
        quantized: The cache whose rows are compared, where it is quantised. Gates for rounded rows apply to them then,
            and ``unquantized_logits`` have none.
        on_scenario: Called when a scenario begins.

    Returns:
        For each scenario, its outputs in the order of the reference's.
    """

    def inputs() -> Iterator[dict[str, Any]]:
        for scenario in scenarios:
            if on_scenario is not None:
                on_scenario(scenario)
            yield scenario.to_arrays()

    outputs: list[list[str]] = []

    def checked(stream: Iterable[RunResults]) -> Iterator[RunResults]:
        for run in stream:
            outputs.append(_check_outputs(run, actual, reference))
            yield run

    functions = _compare_functions(gates, lambda output: quantized is None or output == LOGITS)
    if quantized is not None:
        functions += [*_unquantized_functions(), *_cache_functions(quantized, gates)]
    # The comparator logs every output of every scenario, failures as errors; the report says the same in a table.
    # Its arithmetic on values that are not finite warns; they fail the metrics.
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(invalid="ignore", over="ignore"):
        stream = Comparator.run([actual, reference], data_loader=inputs(), streaming=True)
        stream = Comparator.postprocess(checked(stream), _to_float64)
        results = Comparator.compare_accuracy(stream, compare_func=[function for _, function in functions])
    pair = (actual.name, reference.name)
    comparisons = [
        [
            OutputComparison(
                output,
                tuple(
                    value
                    for (name, _), result in zip(functions, results, strict=True)
                    if output in result[pair][index]
                    for value in _metric_values(name, result[pair][index][output])
                ),
            )
            for output in names
        ]
        for index, names in enumerate(outputs)
    ]
    if bool(results) != all(output.passed for scenario in comparisons for output in scenario):
        raise AssertionError("polygraphy's verdict and the report's differ")
    return comparisons


def _check_outputs(run: RunResults, actual: BaseRunner, reference: BaseRunner) -> list[str]:
    # The comparator skips an output that the other side lacks.
    names = [list(iterations[0].keys()) for _, iterations in run.items()]
    if sorted(names[0]) != sorted(names[1]):
        raise ValueError(
            f"{actual.name} has outputs {names[0]}, {reference.name} has {names[1]}; expected the same ones"
        )
    return names[1]


def _compare_functions(gates: Gates, outputs: Callable[[str], bool] = lambda _: True) -> list[NamedFunction]:
    """Name and comparison function of each metric that arithmetic is judged by, in the order of the report."""

    def same_name(output: str, _index: int, _result: IterationResult) -> list[str]:
        return [output] if outputs(output) else []

    def on_outputs(metric: Metric, gate: MetricGate) -> MetricCompareFunc:
        return MetricCompareFunc(metric, gate, outputs)

    greedy = gates.min_greedy_agreement
    return [
        ("cosine", CosineSimilarityCompareFunc(gates.min_cosine, find_output_func=same_name)),
        ("norm_ratio", on_outputs(metrics.norm_ratio, _near_one(gates.max_norm_deviation))),
        ("relative_max_error", on_outputs(metrics.relative_max_error, _at_most(gates.max_relative_max_error))),
        ("relative_mean_error", on_outputs(metrics.relative_mean_error, _at_most(gates.max_relative_mean_error))),
        (
            "abs_error",
            SimpleCompareFunc(
                atol=math.inf if gates.max_abs_error is None else gates.max_abs_error,
                rtol=0.0,
                check_error_stat="max",
                find_output_func=same_name,
            ),
        ),
        (
            "greedy_agreement",
            MetricCompareFunc(
                metrics.greedy_agreement,
                MetricGate(None if greedy is None else f">= {greedy:g}", lambda value: value >= (greedy or 0.0)),
                lambda output: output == LOGITS,
            ),
        ),
        ("nonfinite", MetricCompareFunc(metrics.nonfinite_count, _at_most(0))),
    ]


def _unquantized_functions() -> list[NamedFunction]:
    """What is reported of the distance to the reference without quantisation."""
    reported: dict[str, Metric] = {
        "cosine": metrics.cosine,
        "norm_ratio": metrics.norm_ratio,
        "relative_mean_error": metrics.relative_mean_error,
        "max_abs_error": metrics.max_abs_error,
        "mean_abs_error": metrics.mean_abs_error,
        "greedy_agreement": metrics.greedy_agreement,
    }
    return [
        (name, MetricCompareFunc(metric, _REPORTED, lambda output: output == UNQUANTIZED_LOGITS))
        for name, metric in reported.items()
    ]


def _cache_functions(cache: QuantizedCache, gates: Gates) -> list[NamedFunction]:
    """Metrics of each layer's rounded latents and rotary keys."""
    return [
        (name, MetricCompareFunc(metric, gate, part.output.__eq__))
        for part in cache.parts
        for name, (metric, gate) in _part_metrics(part, gates).items()
    ]


def _part_metrics(part: CachedPart, gates: Gates) -> dict[str, tuple[Metric, MetricGate]]:
    bounds = cache_gates(gates)

    def conversion_error(actual: Any, reference: Any) -> float:
        return metrics.relative_l2_error(part.round(reference), reference)

    def rms_ratio(actual: Any, reference: Any) -> float:
        allowed = math.hypot(conversion_error(actual, reference), bounds.arithmetic_rms)
        return metrics.relative_l2_error(actual, reference) / allowed

    def norm_ratio(actual: Any, reference: Any) -> float:
        return metrics.norm_ratio(actual, part.round(reference))

    def rounding(actual: Any, reference: Any) -> float:
        return part.rounding(actual, reference, bounds.arithmetic_max * metrics.root_mean_square(reference))

    return {
        "relative_mean_error": (metrics.relative_mean_error, _REPORTED),
        "relative_rms_error": (
            metrics.relative_l2_error,
            _at_most(math.hypot(part.roundoff, bounds.arithmetic_rms)),
        ),
        "conversion_rms_error": (conversion_error, _REPORTED),
        "rms_ratio": (rms_ratio, _at_most(bounds.max_rms_ratio)),
        "norm_ratio": (norm_ratio, _near_one(bounds.max_norm_deviation)),
        "rounding": (rounding, _at_most(bounds.max_rounding)),
        "same_codes": (part.same_codes, _REPORTED),
    }


_REPORTED = MetricGate(None, lambda _: True)


def _at_most(bound: float) -> MetricGate:
    return MetricGate(f"<= {bound:g}", lambda value: value <= bound)


def _near_one(deviation: float) -> MetricGate:
    return MetricGate(f"within 1 +- {deviation:g}", lambda value: abs(value - 1) <= deviation)


def _metric_values(name: str, result: Any) -> list[MetricValue]:
    """What a comparison function found out about an output; a bare bool says that shapes differ."""
    if isinstance(result, bool):
        return [MetricValue(name, None, "same shape", result)]
    if isinstance(result, MetricResult):
        return [MetricValue(name, _finite(result.value), result.thresholds.text, bool(result))]
    if name == "cosine":
        gate = f">= 1 - {1 - result.thresholds.threshold:.3g}"
        return [MetricValue(name, _finite(result.cosine_similarity), gate, bool(result))]
    gated = math.isfinite(result.thresholds.atol)
    return [
        MetricValue(
            "max_abs_error",
            _finite(result.max_absdiff),
            f"<= {result.thresholds.atol:g}" if gated else None,
            bool(result),
        ),
        MetricValue("mean_abs_error", _finite(result.mean_absdiff), None, math.isfinite(result.mean_absdiff)),
    ]


def _to_float64(result: IterationResult) -> IterationResult:
    return IterationResult(
        {name: np.asarray(value, dtype=np.float64) for name, value in result.items()},
        runtime=result.runtime,
        runner_name=result.runner_name,
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
