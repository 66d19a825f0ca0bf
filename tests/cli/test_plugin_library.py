import json

import pytest


@pytest.fixture
def build_config(tmp_path):
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"targets": ["sm_89"]}))
    return path


def test_the_data_of_a_library(command, network, build_config, tmp_path):
    output = tmp_path / "library"
    arguments = ("plugin-library", output, "--network", network, "--config", build_config, "--no-compile")
    made = command(*arguments, "--json")
    assert made.status == 0, made.err
    assert made.json["targets"] == ["sm_89"]
    assert made.json["operations"] == 4
    assert made.json["kernels"] >= 5
    assert made.json["data_bytes"] == (output / "library.bin").stat().st_size
    assert made.json["compiled"] is False
    refused = command(*arguments)
    assert refused.status == 2
    assert "not empty" in refused.err
    again = command(*arguments, "--overwrite")
    assert again.status == 0, again.err
    assert "the data of a library for sm_89: 4 operations" in again.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "found no folder with TensorRT's headers"),
        (["--tensorrt-include", "."], "found no NvInferRuntime.h"),
        (["--no-compile", "--targets", "sm_1"], "Unknown target 'sm_1'"),
        (["--no-compile", "--network", "nowhere"], "nowhere: no such directory"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(command, network, tmp_path, monkeypatch, options, message):
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR", raising=False)
    outcome = command("plugin-library", tmp_path / "library", "--network", network, *options)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "library").exists()
