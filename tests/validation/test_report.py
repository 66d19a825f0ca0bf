"""Reports in print, in JSON and as a plot."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.validation import report as report_module
from trtllm_mla.validation.report import plot_errors, print_report
from trtllm_mla.validation.validate import ValidationOptions, ValidationReport, validate_executor

OPTIONS = ValidationOptions(lengths=(20, 6), greedy_tokens=4, perplexity_ids=tuple(range(40)), perplexity_window=16)


def _validate(case, corrupt=None) -> ValidationReport:
    executor = case.executor(corrupt)
    try:
        return validate_executor(executor, case.load_reference, case.spec, case.config, options=OPTIONS)
    finally:
        executor.close()


@pytest.fixture(scope="module")
def good(yarn_case):
    return _validate(yarn_case)


@pytest.fixture(scope="module")
def bad(yarn_case):
    def corrupt(model, weights):
        name = "model.layers.0.self_attn.o_proj.weight"
        weights[name] = 1.1 * weights[name]

    return _validate(yarn_case, corrupt)


def _print(report, **options):
    out = StringIO()
    print_report(report, Console(file=out, width=160), **options)
    return out.getvalue()


def test_a_report_that_passed(good):
    text = _print(good)
    assert good.passed
    assert "FAILED" not in text
    for scenario in good.scenarios:
        assert scenario.name in text
    for part in (good.executor_description, good.reference_description, "8 of 8 tokens", "perplexity over 37 tokens"):
        assert part in text
    assert "Absorption check in float32, relative L2 errors: 5 heads" in text
    assert text.rstrip().endswith("passed validation of onnxruntime in float32")


def test_a_report_that_failed_says_what_and_by_how_much(bad):
    text = _print(bad)
    assert text.rstrip().endswith("FAILED validation of onnxruntime in float32")
    assert "FAILED context: logits: cosine" in text
    assert "expected >= 1 - 1.14e-11" in text
    assert "FAILED decode: latent_1: relative_mean_error" in text
    assert "latent_0" not in text


def test_layers_are_printed_on_request(good):
    assert "cache 0" not in _print(good)
    text = _print(good, layers=True)
    assert text.count("cache 0") == text.count("cache 1") == len(good.scenarios)


def test_the_worst_layer_is_shown(bad):
    assert _print(bad).count("cache 1") == len(bad.scenarios)


def test_tables_fit_a_terminal_of_80_columns(good, bad):
    for report in (good, bad):
        out = StringIO()
        print_report(report, Console(file=out, width=80), layers=True)
        lines = out.getvalue().splitlines()
        assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
        assert sum("cache 1" in line for line in lines) == len(report.scenarios)


def test_json(good, bad):
    for report in (good, bad):
        values = json.loads(json.dumps(report.to_json(), allow_nan=False))
        assert values["passed"] is report.passed
        assert values["arithmetic"] == "float32"
        assert values["gates"]["max_abs_error"] is None
        for scenario, expected in zip(values["scenarios"], report.scenarios, strict=True):
            assert scenario["passed"] is expected.passed
            assert [output["output"] for output in scenario["outputs"]] == ["logits", "latent_0", "latent_1"]
            metrics = {metric["name"]: metric for metric in scenario["outputs"][0]["metrics"]}
            assert metrics["max_abs_error"]["value"] == expected.outputs[0].value("max_abs_error")
        assert values["perplexity"]["executor"]["tokens"] == 37
        assert values["perplexity"]["deviation"] == report.perplexity.deviation
        assert values["absorption"][0]["errors"][0]["passed"] is True
        assert values["greedy"][0]["total"] == 8


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_plot(bad, tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"errors{suffix}"
    plot_errors(bad, path)
    assert path.read_bytes().startswith(start)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_plot_of_values_that_are_not_finite(good, tmp_path):
    pytest.importorskip("matplotlib")
    first = good.scenarios[0]
    outputs = tuple(
        replace(output, metrics=tuple(replace(metric, value=None) for metric in output.metrics))
        for output in first.outputs
    )
    plot_errors(replace(good, scenarios=(replace(first, outputs=outputs),)), tmp_path / "errors.png")


def test_plot_refusals(good, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"found suffix '\.gif', expected one of \.pdf, \.png, \.svg"):
        plot_errors(good, tmp_path / "errors.gif")

    def absent(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(report_module, "import_module", absent)
    with pytest.raises(MissingDependencyError, match=r"trtllm-mla\[plots\]"):
        plot_errors(good, tmp_path / "errors.png")
