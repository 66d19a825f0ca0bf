import json
import shutil

import onnx
import pytest


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
