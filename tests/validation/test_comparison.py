"""The comparison through polygraphy: each gate fails on what it is there for, and nothing slips through."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.validation.stub_runner import SCENARIOS, StubRunner
from trtllm_mla.dtypes import DType
from trtllm_mla.validation.comparison import compare_runners
from trtllm_mla.validation.gates import gates_for


def _reference(seed=0):
    generator = np.random.default_rng(seed)
    return {
        "logits": generator.standard_normal((40, 211)).astype(np.float32),
        "latent_0": generator.standard_normal((40, 24)).astype(np.float32),
    }


def _compare(change, dtype=DType.FLOAT32, **gates):
    """Compares two scenarios, of which ``change`` spoils the second; returns the second's outputs by name."""
    references = [_reference(0), _reference(1)]
    actuals = [_reference(0), change(_reference(1))]
    first, second = compare_runners(
        StubRunner("actual", actuals),
        StubRunner("reference", references),
        SCENARIOS,
        replace(gates_for(dtype, 2), **gates),
    )
    assert all(output.passed for output in first)
    return {output.output: output for output in second}


def _failed(output):
    return {metric.name for metric in output.metrics if not metric.passed}


def test_equal_outputs_pass():
    outputs = _compare(lambda table: table)
    assert list(outputs) == ["logits", "latent_0"]
    assert all(output.passed for output in outputs.values())
    assert outputs["logits"].value("cosine") == pytest.approx(1.0, abs=1e-15)
    assert outputs["logits"].value("max_abs_error") == 0
    assert outputs["logits"].value("greedy_agreement") == 1
    assert outputs["latent_0"].value("greedy_agreement") is None


def test_metrics_are_computed_in_float64():
    def change(table):
        return {**table, "latent_0": table["latent_0"] * np.float32(1 + 1e-6)}

    output = _compare(change)["latent_0"]
    assert output.passed
    assert output.value("norm_ratio") == pytest.approx(1 + 1e-6, abs=5e-8)


def test_a_wrong_scale_passes_the_cosine_and_fails_the_norm_ratio():
    outputs = _compare(lambda table: {**table, "latent_0": table["latent_0"] * 1.055}, DType.BFLOAT16)
    assert outputs["logits"].passed
    assert _failed(outputs["latent_0"]) == {"norm_ratio"}
    assert outputs["latent_0"].value("cosine") == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("both", [False, True])
def test_a_value_that_is_not_finite_fails_by_name(dtype, poison, both):
    references, actuals = [_reference(0), _reference(1)], [_reference(0), _reference(1)]
    actuals[1]["latent_0"][3, 4] = poison
    if both:
        references[1]["latent_0"][3, 4] = poison
    _, second = compare_runners(
        StubRunner("actual", actuals), StubRunner("reference", references), SCENARIOS, gates_for(dtype, 2)
    )
    logits, latent = second
    assert logits.passed
    assert not latent.passed
    assert "nonfinite" in _failed(latent)
    assert latent.value("nonfinite") == (2 if both else 1)
    assert latent.value("cosine") is None


def test_one_wrong_element_fails_the_largest_error():
    def change(table):
        table["logits"][7, 9] += 3e-4
        return table

    output = _compare(change)["logits"]
    assert _failed(output) == {"relative_max_error"}
    assert output.value("max_abs_error") == pytest.approx(3e-4, rel=1e-3)


def test_an_absolute_gate_is_kept_where_it_is_asked_for():
    def change(table):
        table["logits"][7, 9] += 3e-4
        return table

    assert _failed(_compare(change, DType.BFLOAT16, max_abs_error=2e-4)["logits"]) == {"max_abs_error"}
    assert not _failed(_compare(change, DType.BFLOAT16, max_abs_error=4e-4)["logits"])


def test_small_errors_everywhere_fail_the_mean_error():
    noise = np.random.default_rng(2).choice([-3e-6, 3e-6], size=(40, 24)).astype(np.float32)
    output = _compare(lambda table: {**table, "latent_0": table["latent_0"] + noise})["latent_0"]
    assert _failed(output) == {"relative_mean_error"}


def test_one_greedy_token_that_differs_fails_in_float32_and_is_reported_in_16_bits():
    def change(table):
        first, second = np.argsort(table["logits"][5])[-2:]
        table["logits"][5, [first, second]] = table["logits"][5, [second, first]]
        return table

    assert "greedy_agreement" in _failed(_compare(change)["logits"])
    output = _compare(change, DType.FLOAT16)["logits"]
    assert output.value("greedy_agreement") == pytest.approx(39 / 40)
    assert "greedy_agreement" not in _failed(output)


def test_a_wrong_shape_fails():
    outputs = _compare(lambda table: {**table, "logits": table["logits"][:-1]})
    assert outputs["latent_0"].passed
    assert not outputs["logits"].passed


@pytest.mark.parametrize("side", [0, 1])
def test_an_output_that_one_side_lacks_is_an_error(side):
    tables = [[_reference(0)], [_reference(0)]]
    del tables[side][0]["latent_0"]
    with pytest.raises(ValueError, match="expected the same ones"):
        compare_runners(
            StubRunner("actual", tables[0]),
            StubRunner("reference", tables[1]),
            SCENARIOS[:1],
            gates_for(DType.FLOAT32, 2),
        )


def test_progress_and_silence(capfd):
    seen = []
    tables = [[_reference(0), _reference(1)], [_reference(0), _reference(2)]]
    compare_runners(
        StubRunner("actual", tables[0]),
        StubRunner("reference", tables[1]),
        SCENARIOS,
        gates_for(DType.FLOAT32, 2),
        on_scenario=lambda scenario: seen.append(scenario.name),
    )
    assert seen == ["first", "second"]
    assert capfd.readouterr() == ("", "")
