"""Validation of networks with a quantised cache: right ones pass, and each mistake fails where it is."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from tests.validation.cases import MAX_SEQ_LEN, make_case
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence, read_cached_rows, run_forced
from trtllm_mla.validation.quantization import QuantizedCache
from trtllm_mla.validation.report import print_report
from trtllm_mla.validation.validate import ValidationOptions, validate, validate_executor

QUANTIZED = [CacheDType.FP8, CacheDType.NVFP4]
OPTIONS = ValidationOptions(lengths=(75, 19, 6), greedy_tokens=6, max_abs_error=2e-4, absorption_check=False)
FEW = replace(OPTIONS, lengths=(25, 9), greedy_tokens=3)
SCENARIOS = {"context", "absorbed", "chunked", "mixed", "decode"}
OUTPUTS = ["logits", "unquantized_logits", "latent_0", "k_pe_0", "latent_1", "k_pe_1"]
SCALES = (0.37, 1.7)


@pytest.fixture(scope="module", params=QUANTIZED)
def case(request, tmp_path_factory):
    """A network whose outer scales are not 1."""
    directory = tmp_path_factory.mktemp(request.param.value)
    return make_case(directory, rope="yarn", seed=11, kv_cache_dtype=request.param.value, latent_scales=SCALES)


def _validate(case, corrupt=None, *, wrap=lambda executor: executor, options=FEW, latent_scales=SCALES):
    executor = case.executor(corrupt)
    try:
        return validate_executor(
            wrap(executor),
            case.load_reference,
            case.spec,
            case.config,
            options=options,
            latent_scales=latent_scales,
        )
    finally:
        executor.close()


@pytest.fixture(scope="module")
def report(case):
    """Its validation."""
    return _validate(case, options=replace(OPTIONS, perplexity_ids=tuple(range(40)), perplexity_window=16))


def _failed(report):
    """Outputs that failed, by scenario."""
    failed = {
        scenario.name: {output.output for output in scenario.outputs if not output.passed}
        for scenario in report.scenarios
    }
    return {name: outputs for name, outputs in failed.items() if outputs}


def _failed_gates(report, scenario, output):
    (outputs,) = (item.outputs for item in report.scenarios if item.name == scenario)
    (found,) = (item for item in outputs if item.output == output)
    return {metric.name for metric in found.metrics if not metric.passed}


def test_a_right_network_passes(report):
    assert report.passed, _failed(report)
    assert report.arithmetic is DType.FLOAT32
    assert report.cache_dtype.is_quantized
    assert {scenario.name for scenario in report.scenarios} == SCENARIOS
    assert [(greedy.matching, greedy.total, greedy.required) for greedy in report.greedy] == [(18, 18, True)] * 2
    for scenario in report.scenarios:
        logits, unquantized, *rows = scenario.outputs
        assert [output.output for output in scenario.outputs] == OUTPUTS
        # Quantisation shows in the logits, a thousand times as large as what the gates let pass.
        assert unquantized.value("max_abs_error") > 0.1 > 1e-4 > logits.value("max_abs_error")
        for output in rows:
            assert output.value("same_codes") > 0.99
    typical = 0.026 if report.cache_dtype is CacheDType.FP8 else 0.087
    errors = [
        output.value("relative_rms_error")
        for scenario in report.scenarios
        for output in scenario.outputs
        if output.output.startswith("latent")
    ]
    assert errors == pytest.approx([typical] * len(errors), rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (CacheDType.FP8, {"absorption": False}),
        (CacheDType.NVFP4, {"rope_interleave": False, "kv_lora_rank": 36, "page_size": 64}),
        (CacheDType.FP8, {"model_type": "youtu", "kv_lora_rank": 200, "page_size": 128}),
        (CacheDType.NVFP4, {"absorption": False, "q_lora_rank": None, "page_size": 32}),
        (CacheDType.NVFP4, {"dtype": DType.BFLOAT16}),
        (CacheDType.FP8, {"dtype": DType.BFLOAT16, "page_size": 64}),
    ],
)
def test_right_networks_pass_from_directories(tmp_path, dtype, values):
    """A bfloat16 network runs as its float32 twin, whose cache has the same bytes."""
    case = make_case(tmp_path, seed=21, rope="yarn", kv_cache_dtype=dtype.value, latent_scales=SCALES, **values)
    report = validate(
        case.network.path,
        case.checkpoint.path,
        "onnxruntime",
        build=BuildConfig(max_seq_len=MAX_SEQ_LEN),
        options=FEW,
        num_threads=1,
    )
    assert report.passed, _failed(report)
    assert (report.arithmetic, report.cache_dtype) == (DType.FLOAT32, dtype)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["cache_dtype"] == dtype.value


def test_rows_are_the_same_however_a_text_is_cut(case):
    """But for values that the last bit of the arithmetic puts on this or that side of the middle of two codes."""
    text = np.random.default_rng(6).integers(case.spec.vocab_size, size=70).tolist()
    whole = (ForcedChunk(70, False),)
    cuts = [(ForcedChunk(70, True),), tuple(ForcedChunk(7, number % 2 == 0) for number in range(10))]
    cache = QuantizedCache(case.network.row_layout, case.network.latent_scales)
    executor = case.executor()
    for cut in cuts:
        sequences = [ForcedSequence(text, chunks) for chunks in (whole, cut)]
        results = run_forced(executor, sequences, page_seed=1)
        for layer in range(2):
            first, second = (
                cache.split(layer, read_cached_rows(executor, layer, result.pages, len(text))) for result in results
            )
            for part in cache.parts[2 * layer : 2 * layer + 2]:
                one, other = first[part.output], second[part.output]
                differs = one != other
                assert differs.mean() < 5e-3
                # Two neighbouring codes, each half a step from what was rounded.
                step = 2 * np.maximum(part.largest_errors(one, 1e-5), part.largest_errors(other, 1e-5)) + 2e-5
                assert (np.abs(one - other) <= step).all()
    executor.close()


def test_a_float16_network_has_the_gates_of_float16(tmp_path):
    case = make_case(tmp_path, seed=8, rope="yarn", kv_cache_dtype="nvfp4", dtype=DType.FLOAT16)
    report = _validate(case, options=replace(FEW, max_abs_error=None), latent_scales=None)
    assert report.passed, _failed(report)
    assert report.arithmetic is DType.FLOAT16
    assert 1e-5 < report.scenarios[0].outputs[0].value("relative_mean_error") < 1e-2


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("network", [DType.FLOAT32, DType.BFLOAT16])
def test_interpreted_kernels(tmp_path, dtype, network):
    """The plugins' kernels, with nothing of ONNX Runtime."""
    case = make_case(
        tmp_path,
        rope="yarn",
        seed=12,
        dtype=network,
        num_layers=1,
        kv_cache_dtype=dtype.value,
        latent_scales=SCALES[:1],
    )
    options = ValidationOptions(lengths=(18, 5), greedy_tokens=2, absorption_check=False)
    report = validate(case.network.path, case.checkpoint.path, "interpreter", options=options)
    assert report.passed, _failed(report)
    assert report.arithmetic is network


def _set_attribute(name, value, *ops):
    def corrupt(model, weights):
        nodes = [node for node in model.graph.node if node.op_type in ops]
        assert nodes
        for node in nodes:
            (attribute,) = (item for item in node.attribute if item.name == name)
            attribute.f = value

    return corrupt


@pytest.mark.parametrize(
    ("op", "scenarios"),
    [
        ("AppendLatent", SCENARIOS),
        ("LatentAttention", SCENARIOS - {"context"}),
        ("GatherLatent", SCENARIOS - {"absorbed"}),
    ],
)
def test_validation_catches_an_operation_that_ignores_the_outer_scale(case, op, scenarios):
    report = _validate(case, _set_attribute("latent_scale", 1.0, op))
    assert not report.passed
    assert _failed(report).keys() == scenarios
    for outputs in _failed(report).values():
        assert {"logits", "latent_1"} <= outputs


def test_validation_catches_rows_made_with_another_outer_scale(case):
    """All operations agree with each other, and differ from the config."""
    report = _validate(case, latent_scales=(1.0, 1.0))
    assert not report.passed
    assert all(outputs == {"latent_0", "latent_1"} for outputs in _failed(report).values())
    assert all(greedy.passed for greedy in report.greedy)


@pytest.mark.parametrize("ops", [("LatentAttention",), ("ContextAttention",)])
def test_validation_catches_a_wrong_softmax_scale(case, ops):
    """What is no matter of the cache fails as it does without quantisation."""

    def corrupt(model, weights):
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type in ops and attribute.name == "softmax_scale":
                    attribute.f *= 1.01

    report = _validate(case, corrupt)
    assert _failed(report).keys() == SCENARIOS - {"context" if ops == ("LatentAttention",) else "absorbed"}
    for outputs in _failed(report).values():
        assert outputs == {"logits", "latent_1", "k_pe_1"}


class _ChangedBytes:
    """An executor whose rows are changed behind each step, to what a wrong kernel would leave."""

    def __init__(self, executor, change, layer=0):
        self._executor = executor
        self._change = change
        self._layer = layer

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def run(self, step):
        logits = self._executor.run(step)
        pool = self._executor._pools[self._layer]
        rows = pool.reshape(-1, pool.shape[-1])
        rows[step.slot_mapping] = self._change(rows[step.slot_mapping].view(np.uint8)).view(np.int8)
        return logits


def _one_wrong_scale(layout):
    def change(rows):
        if layout.dtype is CacheDType.FP8:
            rows[:1, layout.scale_offset + 3] += 1  # the exponent's upper bits
        else:
            rows[:1, layout.scale_offset] += 16
        return rows

    return change


def _other_order_of_codes(layout):
    def change(rows):
        codes = rows[:, : layout.code_bytes]
        if layout.dtype is CacheDType.NVFP4:
            codes[:] = codes << 4 | codes >> 4
        else:
            codes[:] = codes.reshape(len(rows), -1, 2)[..., ::-1].reshape(codes.shape)
        return rows

    return change


def _lower_rotary_keys(layout):
    def change(rows):
        keys = rows[:, layout.rope_offset :][:, : 2 * layout.rope_dim].view(np.uint16)
        keys[:] -= (keys & 0x7FFF) > 0  # a step toward zero, half of which truncation takes on average
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "output", "gates"),
    [
        (_one_wrong_scale, "latent_0", {"rounding"}),
        (_other_order_of_codes, "latent_0", {"rounding", "rms_ratio", "relative_rms_error"}),
        (_lower_rotary_keys, "k_pe_0", {"rounding", "rms_ratio", "norm_ratio"}),
    ],
)
def test_validation_catches_wrong_bytes(case, change, output, gates):
    change = change(case.network.row_layout)
    report = _validate(case, wrap=lambda executor: _ChangedBytes(executor, change))
    assert not report.passed
    assert _failed(report).keys() == SCENARIOS
    for name in SCENARIOS:
        assert _failed_gates(report, name, output) >= gates
        other = "k_pe_0" if output == "latent_0" else "latent_0"
        assert not _failed_gates(report, name, other)


def test_validation_catches_a_row_that_is_not_a_number(case):
    layout = case.network.row_layout

    def change(rows):
        rows[-1:, layout.scale_offset :][:, :16] = 0xFF
        return rows

    report = _validate(case, wrap=lambda executor: _ChangedBytes(executor, change))
    assert not report.passed
    assert _failed(report).keys() == SCENARIOS
    assert "nonfinite" in _failed_gates(report, "context", "latent_0")
    assert report.greedy == ()
    json.dumps(report.to_json(), allow_nan=False)


def test_validation_catches_a_free_running_decode_that_drifts(case):
    class Drifting(_ChangedBytes):
        def run(self, step):
            # Scenarios have all rows' logits, decode steps of the scheduler one a request.
            if len(step.last_token_ids) == len(step.input_ids) == 3 and step.generation_position_ids.min() >= 12:
                step = replace(step, input_ids=(step.input_ids + 1) % 131)
            return self._executor.run(step)

    options = replace(OPTIONS, lengths=(12, 12, 12))
    report = _validate(case, wrap=lambda executor: Drifting(executor, None), options=options)
    assert not _failed(report)
    assert not report.passed
    assert all(0 < greedy.matching < greedy.total for greedy in report.greedy)


def test_the_perplexity_of_random_weights_is_not_gated(case, report):
    assert not report.perplexity.required
    assert report.perplexity.reference.perplexity > case.spec.vocab_size / 2
    assert report.gates.max_perplexity_deviation == pytest.approx(
        (0.005 if report.cache_dtype is CacheDType.FP8 else 0.03) + 1e-4
    )
    assert "not required: the reference itself hardly predicts this text" in _words(report)


def _print(report, **options):
    out = StringIO()
    print_report(report, Console(file=out, width=options.pop("width", 160)), **options)
    return out.getvalue()


def _words(report):
    return " ".join(_print(report).split())


def test_the_report_says_what_was_compared(report):
    text = _words(report)
    name = report.cache_dtype.value
    assert f"float32 gates, {name} cache" in text
    assert "the reference reads the same cache" in text
    assert f"Rows of the {name} cache beside those that the reference would have cached" in text
    assert text.count("unquantised ") >= len(report.scenarios)
    assert "18 of 18 tokens as the reference reading the same cache" in text
    assert "as transformers' generate, whose cache is not quantised" in text
    assert text.endswith("passed validation of onnxruntime in float32")
    assert _print(report, layers=True).count("latent 0") == len(report.scenarios)


def test_tables_fit_a_terminal_of_80_columns(case, report):
    for item in (report, _validate(case, _set_attribute("latent_scale", 50.0, "LatentAttention"))):
        lines = _print(item, width=80, layers=True).splitlines()
        assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
        assert sum("latent 1" in line and ("passed" in line or "FAILED" in line) for line in lines) == 5


def test_a_plain_cache_is_compared_as_before(tmp_path):
    case = make_case(tmp_path, rope="yarn", seed=11, kv_cache_dtype="fp32")
    report = _validate(case, latent_scales=None)
    assert report.passed
    assert [output.output for output in report.scenarios[0].outputs] == ["logits", "latent_0", "latent_1"]
    assert "unquantised" not in _print(report)


def test_settings_of_the_plugin_reach_the_pool(tmp_path):
    case = make_case(tmp_path, rope="yarn", seed=4, kv_cache_dtype="nvfp4")
    build = BuildConfig(max_seq_len=MAX_SEQ_LEN, mla_plugin=MlaPluginConfig(page_size=128))
    report = validate(case.network.path, case.checkpoint.path, "onnxruntime", build=build, options=FEW)
    assert report.passed, _failed(report)
