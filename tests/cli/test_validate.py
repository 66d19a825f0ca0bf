import json
import shutil
from pathlib import Path

import onnx
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"


def test_a_network_passes(command, network, checkpoint, tmp_path):
    outcome = command("validate", network, "-c", checkpoint[0], "--json", tmp_path / "report.json")
    assert outcome.status == 0, outcome.out
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is True
    assert "FAILED" not in outcome.out


def test_a_wrong_softmax_scale_fails_with_status_1(command, network, checkpoint, tmp_path):
    broken = tmp_path / "network"
    shutil.copytree(network, broken)
    model = onnx.load(broken / "network.onnx")
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "softmax_scale":
                attribute.f /= 1.2
    onnx.save(model, broken / "network.onnx")
    outcome = command("validate", broken, "-c", checkpoint[0], "--json", tmp_path / "report.json")
    assert outcome.status == 1
    assert "FAILED" in outcome.out
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is False


def test_the_interpreter_passes_a_quick_validation(command, network, checkpoint):
    outcome = command("validate", network, "-c", checkpoint[0], "--executor", "interpreter", "--quick")
    assert outcome.status == 0, outcome.out
    assert "Triton's interpreter" in outcome.out


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_a_quantised_cache_passes_with_every_page_size(command, quantized, checkpoint, tmp_path, page_size):
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"mla_plugin": {"page_size": page_size}}))
    outcome = command(
        *("validate", quantized.path, "-c", checkpoint[0], "--config", path, "--json", tmp_path / "report.json"),
        *("--quick", "--threads", 1),
    )
    assert outcome.status == 0, outcome.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert report["cache_dtype"] == quantized.row_layout.dtype.value
    assert report["greedy"][0]["unquantized_ids"] is not None


@pytest.mark.parametrize("absorption", [True, False])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "nvfp4"])
def test_a_bfloat16_network_with_a_quantised_cache_passes(command, checkpoint, tmp_path, kv_cache_dtype, absorption):
    plugin = {"page_size": 64, "kv_cache_dtype": kv_cache_dtype, "enable_matrix_absorption": absorption}
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"mla_plugin": plugin}))
    network = tmp_path / "network"
    assert command("convert", checkpoint[0], network, "--plugin-config", path, "--dtype", "bfloat16").status == 0
    outcome = command("validate", network, "-c", checkpoint[0], "--quick", "--threads", 1)
    assert outcome.status == 0, outcome.out
    assert f"{kv_cache_dtype} cache" in outcome.out


def test_the_perplexity_of_a_trained_model_is_gated(command, tmp_path):
    plugin = tmp_path / "plugin.json"
    plugin.write_text(json.dumps({"mla_plugin": {"kv_cache_dtype": "nvfp4"}}))
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLE / "held_out.txt").read_text(encoding="utf-8")[:800], encoding="utf-8")
    assert command("convert", EXAMPLE, tmp_path / "network", "--plugin-config", plugin).status == 0
    outcome = command(
        *("validate", tmp_path / "network", "-c", EXAMPLE, "--quick", "--text", text),
        *("--json", tmp_path / "report.json", "--plot", tmp_path / "plot.svg"),
    )
    assert outcome.status == 0, outcome.out
    perplexity = json.loads((tmp_path / "report.json").read_text())["perplexity"]
    assert perplexity["required"] is True
    assert perplexity["max_deviation"] == pytest.approx(0.0301)
    assert 1e-5 < perplexity["deviation"] < 0.03
    assert (tmp_path / "plot.svg").stat().st_size


@pytest.mark.parametrize("options", [[], ["--quick"]])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_seq_len": 8, "max_batch_size": 1},
        {"max_seq_len": 8, "max_input_len": 3, "max_num_tokens": 16},
        {"max_batch_size": 1, "max_num_tokens": 1},
        {"max_context_kv_tokens": 1},
    ],
)
def test_prompts_are_cut_to_small_limits(command, network, checkpoint, tmp_path, limits, options):
    path = tmp_path / "build.json"
    path.write_text(json.dumps(limits))
    outcome = command("validate", network, "-c", checkpoint[0], "--config", path, *options)
    assert outcome.status == 0, outcome.out + outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "tensorrt"], "rank0.engine"),
        (["--text", "none.txt"], "none.txt: no such file"),
        (["--json", "."], "found a directory, expected a file to write"),
        (["--plot", "plot.bmp"], "plot.bmp: found suffix '.bmp'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, network, checkpoint, options, message):
    outcome = command("validate", network, "-c", checkpoint[0], *options)
    assert outcome.status == 2
    assert outcome.out == ""
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
