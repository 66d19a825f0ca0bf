"""Validation as a whole: right networks pass, and each kind of broken network fails where it should."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest

from tests.validation.cases import MAX_SEQ_LEN, make_case
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.validation.validate import (
    GreedyResult,
    PerplexityResult,
    ValidationOptions,
    pages_for_validation,
    validate,
    validate_executor,
)

# The longest text goes beyond the 64 positions of the random checkpoints' YaRN.
OPTIONS = ValidationOptions(lengths=(75, 19, 6), greedy_tokens=6, max_abs_error=2e-4, absorption_check=False)
SCENARIOS = {"context", "absorbed", "chunked", "mixed", "decode"}


def _validate(case, corrupt=None, *, wrap=lambda executor: executor, options=OPTIONS):
    executor = case.executor(corrupt)
    try:
        return validate_executor(wrap(executor), case.load_reference, case.spec, case.config, options=options)
    finally:
        executor.close()


def _failed(report):
    return {scenario.name for scenario in report.scenarios if not scenario.passed}


def _failed_outputs(report, name):
    scenario = next(item for item in report.scenarios if item.name == name)
    return {output.output for output in scenario.outputs if not output.passed}


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("deepseek_v3", {"rope": "yarn", "q_lora_rank": None}),
        ("deepseek_v3", {"rope": "linear", "rope_interleave": False, "attention_bias": True}),
        ("deepseek_v3", {"absorption": False}),
        ("deepseek_v3", {"context_passes": 3, "rope": "yarn"}),
        ("deepseek_v3", {"context_passes": 4, "absorption": False}),
        ("deepseek_v3", {"num_layers": 3, "kept_layers": 2}),
        ("youtu", {"rope": "yarn", "tie": False}),
        ("youtu", {}),
        ("deepseek_v2", {"rope": "yarn"}),
        ("kimi_k2", {"rope": "yarn"}),
        ("minicpm3", {"rope": "longrope"}),
        ("minicpm3", {"num_layers": 3, "kept_layers": 2}),
        ("mistral4", {"rope": "mistral"}),
        ("axk1", {}),
        ("axk1", {"num_layers": 3, "kept_layers": 2}),
        ("longcat_flash", {"num_layers": 4, "kept_layers": 2}),
        ("mistral3", {"rope": "mistral"}),
        ("kimi_k25", {"rope": "yarn", "num_layers": 3, "kept_layers": 2}),
    ],
    ids=[
        "yarn",
        "half split",
        "no absorption",
        "passes",
        "passes alone",
        "fewer layers",
        "youtu",
        "tied head",
        "deepseek v2",
        "kimi k2",
        "minicpm3",
        "minicpm3, fewer layers",
        "mistral4",
        "axk1",
        "axk1, fewer layers",
        "longcat_flash, fewer layers",
        "mistral3",
        "kimi_k25, fewer layers",
    ],
)
def test_right_networks_pass(tmp_path, model_type, values):
    case = make_case(tmp_path, model_type, seed=21, **values)
    report = _validate(case)
    assert report.passed
    assert report.arithmetic is DType.FLOAT32
    assert {scenario.name for scenario in report.scenarios} == SCENARIOS - (
        set() if case.config.enable_matrix_absorption else {"absorbed"}
    )
    for scenario in report.scenarios:
        assert [output.output for output in scenario.outputs] == [
            "logits",
            *(f"latent_{layer}" for layer in range(case.network.num_layers)),
        ]
    assert [(greedy.matching, greedy.total) for greedy in report.greedy] == [(18, 18)] * 2


def _scale_scores(*ops):
    def corrupt(model, weights):
        nodes = [node for node in model.graph.node if node.op_type in ops]
        assert nodes
        for node in nodes:
            (attribute,) = (item for item in node.attribute if item.name == "softmax_scale")
            attribute.f *= 1.87

    return corrupt


@pytest.mark.parametrize(
    ("ops", "scenarios"),
    [
        (("LatentAttention",), SCENARIOS - {"context"}),
        (("ContextAttention",), SCENARIOS - {"absorbed"}),
        (("LatentAttention", "ContextAttention"), SCENARIOS),
    ],
)
def test_validation_catches_a_wrong_softmax_scale(yarn_case, ops, scenarios):
    report = _validate(yarn_case, _scale_scores(*ops))
    assert not report.passed
    assert _failed(report) == scenarios
    for name in scenarios:
        # The first layer's rows are written before any attention has run.
        assert _failed_outputs(report, name) == {"logits", "latent_1"}


def test_validation_catches_what_is_wrong_with_later_passes(passes_case):
    """The scenario whose histories are longer than its chunks sends some of them through all passes."""

    def mask_history(model, weights):
        nodes = [node for node in model.graph.node if node.op_type == "ContextAttention" and "/pass_" in node.name]
        assert len(nodes) == 2 * passes_case.network.num_layers
        for node in nodes:
            (attribute,) = (item for item in node.attribute if item.name == "causal")
            assert attribute.i == 0
            attribute.i = 1

    assert _failed(_validate(passes_case, mask_history)) == {"chunked"}


def test_a_single_position_hides_a_wrong_softmax_scale(yarn_case):
    """Why scenarios have texts of several tokens: over one key, the softmax is 1 whatever the scale."""
    corrupt = _scale_scores("LatentAttention", "ContextAttention")
    report = _validate(yarn_case, corrupt, options=replace(OPTIONS, lengths=(1, 1, 1)))
    assert not _failed(report)


def test_validation_catches_swapped_rope_pairs(yarn_case):
    def corrupt(model, weights):
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "rope_interleave":
                    attribute.i = 1 - attribute.i

    report = _validate(yarn_case, corrupt)
    assert _failed(report) == SCENARIOS
    assert _failed_outputs(report, "context") == {"logits", "latent_0", "latent_1"}


def test_validation_catches_one_perturbed_weight(yarn_case):
    def corrupt(model, weights):
        name = "model.layers.1.self_attn.k_up"
        weights[name] = weights[name].copy()
        weights[name][2, 7] *= 1.1

    report = _validate(yarn_case, corrupt)
    assert _failed(report) == SCENARIOS
    # Only what comes behind the second layer's attention is off.
    assert _failed_outputs(report, "absorbed") == {"logits"}


@pytest.mark.parametrize(
    ("op", "scenarios"),
    [("ContextAttention", SCENARIOS - {"absorbed"}), ("LatentAttention", SCENARIOS - {"context"})],
)
def test_validation_catches_a_causal_mask_that_is_off_by_one(yarn_case, op, scenarios):
    def corrupt(model, weights):
        (function,) = (item for item in model.functions if item.name == op)
        (less,) = (node for node in function.node if node.op_type == "Less")
        less.op_type = "LessOrEqual"

    report = _validate(yarn_case, corrupt)
    assert _failed(report) == scenarios


def test_validation_catches_a_value_that_is_not_finite(yarn_case):
    def corrupt(model, weights):
        name = "model.layers.1.self_attn.v_up"
        weights[name] = weights[name].copy()
        weights[name][0, 0, 0] = np.nan

    report = _validate(yarn_case, corrupt)
    assert _failed(report) == SCENARIOS
    logits = report.scenarios[0].outputs[0]
    assert logits.value("nonfinite") > 0
    assert logits.value("cosine") is None
    json.dumps(report.to_json(), allow_nan=False)


class _ChangedSteps:
    """An executor whose steps are changed on their way in, as a runtime with a mistake would."""

    def __init__(self, executor, change):
        self._executor = executor
        self._change = change

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def run(self, step):
        return self._executor.run(self._change(step))


def _writes_to_other_slots(step):
    return replace(step, slot_mapping=np.roll(step.slot_mapping, 1))


def _forgets_the_newest_key(step):
    return replace(step, generation_sequence_length=np.maximum(step.generation_sequence_length - 1, 1))


def _positions_start_over(step):
    if len(step.generation_position_ids) != 3:
        return step
    return replace(step, generation_position_ids=np.zeros_like(step.generation_position_ids))


@pytest.mark.parametrize(
    ("change", "scenarios"),
    [
        (_writes_to_other_slots, SCENARIOS),
        (_forgets_the_newest_key, SCENARIOS - {"context"}),
        (_positions_start_over, {"decode"}),
    ],
)
def test_validation_catches_a_runtime_that_is_wrong(yarn_case, change, scenarios):
    report = _validate(yarn_case, wrap=lambda executor: _ChangedSteps(executor, change))
    assert _failed(report) >= scenarios
    assert "context" in scenarios or "context" not in _failed(report)


def test_validation_catches_a_free_running_decode_that_drifts(yarn_case):
    """Teacher forcing sees nothing of a scheduler that feeds other tokens back than it chose."""

    def change(step):
        # Scenarios have all rows' logits, decode steps of the scheduler one a request.
        if len(step.last_token_ids) == len(step.input_ids) == 3 and step.generation_position_ids.min() >= 12:
            return replace(step, input_ids=(step.input_ids + 1) % 131)
        return step

    options = replace(OPTIONS, lengths=(12, 12, 12))
    report = _validate(yarn_case, wrap=lambda executor: _ChangedSteps(executor, change), options=options)
    assert not _failed(report)
    assert not report.passed
    assert all(0 < greedy.matching < greedy.total for greedy in report.greedy)


def test_gates_follow_the_coarsest_type(tmp_path):
    case = make_case(tmp_path, rope="yarn", seed=8, dtype=DType.FLOAT16)
    report = _validate(case, options=replace(OPTIONS, max_abs_error=None))
    assert report.arithmetic is DType.FLOAT16
    assert report.passed
    assert not any(greedy.required for greedy in report.greedy)
    error = report.scenarios[0].outputs[0].value("relative_mean_error")
    assert 1e-5 < error < 1e-2


@pytest.mark.parametrize("ops", [("LatentAttention",), ("ContextAttention",)])
def test_float16_gates_catch_a_wrong_softmax_scale(tmp_path, ops):
    case = make_case(tmp_path, rope="yarn", seed=8, dtype=DType.FLOAT16)
    assert not _validate(case, _scale_scores(*ops), options=replace(OPTIONS, max_abs_error=None)).passed


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_validate_from_directories(tmp_path, dtype):
    """A bfloat16 network runs as its float32 twin and has to meet float32's gates."""
    case = make_case(tmp_path, rope="yarn", seed=9, dtype=dtype)
    lines = []
    options = replace(OPTIONS, absorption_check=True)
    report = validate(
        case.network.path,
        case.checkpoint.path,
        "onnxruntime",
        build=BuildConfig(max_seq_len=MAX_SEQ_LEN, mla_plugin=MlaPluginConfig(page_size=32)),
        options=options,
        num_threads=1,
        on_progress=lines.append,
    )
    assert report.passed
    assert report.arithmetic is DType.FLOAT32
    assert [result.dtype for result in report.absorption] == [DType.FLOAT32]
    assert report.absorption[0].sizes.num_attention_heads == 5
    assert report.absorption[0].passed
    assert any("twin" in line for line in [report.executor_description]) == (dtype is DType.BFLOAT16)
    assert [line for line in lines if line.startswith("scenario")]
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["passed"] is True


def test_interpreted_kernels_in_bfloat16(tmp_path):
    """The plugins' kernels, with nothing of ONNX Runtime, against bfloat16's gates."""
    case = make_case(tmp_path, rope="yarn", seed=12, dtype=DType.BFLOAT16, num_layers=1)
    options = ValidationOptions(lengths=(18, 5), greedy_tokens=2, absorption_check=False)
    report = validate(case.network.path, case.checkpoint.path, "interpreter", options=options)
    assert report.passed
    assert report.arithmetic is DType.BFLOAT16
    assert report.scenarios[0].outputs[0].value("relative_mean_error") > 1e-3


def test_validate_needs_weights(yarn_case, tmp_path):
    shutil.copy(yarn_case.checkpoint.path / "config.json", tmp_path)
    with pytest.raises(UserError, match="no weights"):
        validate(yarn_case.network.path, tmp_path, "onnxruntime")


def test_lengths_beyond_the_limits_are_refused(yarn_case):
    for lengths in ((3000,), (0, 3), (1,) * 17):
        with pytest.raises(UserError, match=r"lengths: found"):
            _validate(yarn_case, options=replace(OPTIONS, lengths=lengths))


def test_pool_is_large_enough_for_everything(yarn_case):
    config = yarn_case.config
    assert pages_for_validation(config, OPTIONS) == 6 + 2 + 1
    perplexity = replace(OPTIONS, perplexity_ids=(1, 2, 3), perplexity_window=256)
    assert pages_for_validation(config, perplexity) == 16
    assert pages_for_validation(replace(config, max_seq_len=40), replace(perplexity, lengths=(3,))) == 3


def test_greedy_result():
    result = GreedyResult("x", (3, 3), ((1, 2, 3), (4, 5, 6)), ((1, 9, 3), (4, 5, 6)), required=True)
    assert (result.matching, result.total, result.passed) == (4, 6, False)
    assert replace(result, required=False).passed
    assert result.matching_unquantized is None
    assert replace(result, unquantized_ids=((1, 2, 9), (0, 5, 6))).matching_unquantized == 2


def test_perplexities_that_differ_fail():
    from trtllm_mla.validation.perplexity import Perplexity

    reference = Perplexity(10, 1, 11, 2.0)
    assert PerplexityResult(replace(reference, mean_nll=2.00001), reference, 1e-4).passed
    assert not PerplexityResult(replace(reference, mean_nll=2.001), reference, 1e-4).passed
    assert not PerplexityResult(replace(reference, mean_nll=float("nan")), reference, 1e-4).passed
    random = PerplexityResult(replace(reference, mean_nll=2.5), reference, 1e-4, required=False)
    assert random.passed
    assert not replace(random, executor=replace(reference, mean_nll=float("nan"))).passed


def test_corruptions_change_the_graph(yarn_case):
    """The tests above corrupt what is there: the attributes and nodes they name."""
    model = yarn_case.network.model()
    before = model.SerializeToString()
    _scale_scores("LatentAttention")(model, {})
    assert model.SerializeToString() != before
    assert isinstance(model, onnx.ModelProto)
