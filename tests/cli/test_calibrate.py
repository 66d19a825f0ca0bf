import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.directory import NetworkDirectory, convert


@pytest.fixture(scope="module")
def readable(checkpoint, tmp_path_factory):
    """The checkpoint with a tokenizer of single characters."""
    path = tmp_path_factory.mktemp("calibrate") / "checkpoint"
    shutil.copytree(checkpoint[0], path)
    tokenizer = Tokenizer(models.WordLevel({chr(97 + index): index for index in range(26)}, unk_token="a"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def quantized(readable, tmp_path):
    path = tmp_path / "network"
    convert(readable, path, plugin=MlaPluginConfig(page_size=16, kv_cache_dtype="nvfp4"), dtype=DType.FLOAT32)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("thequickbrownfoxjumpsoverthelazydog" * 3)
    return path


def test_calibrate_reports_each_layer_and_stores_the_scales(command, readable, quantized, text, tmp_path):
    out = tmp_path / "calibrated"
    options = ("--checkpoint", readable, "--text", text, "--window", 32, "--threads", 1)
    outcome = command("calibrate", quantized, *options, "--output", out, "--max-tokens", 80, "--json")
    assert outcome.status == 0
    report = outcome.json
    assert (report["kv_cache_dtype"], report["tokens"], report["window"]) == ("nvfp4", 80, 32)
    assert (report["network_dir"], report["output_dir"]) == (str(quantized), str(out))
    layers = report["layers"]
    assert len(layers) == 2
    for layer in layers:
        assert 0 < layer["error_after"] <= layer["error_before"] < 0.2
        assert 0 < layer["amax"] < 100
    assert list(NetworkDirectory.load(out).latent_scales) == [layer["latent_scale"] for layer in layers]
    assert json.loads((quantized / "config.json").read_text())["latent_scales"] == [1, 1]

    outcome = command("calibrate", quantized, *options)
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert "float32 network" in lines[0]
    assert lines[1].startswith("nvfp4 latents of 105 tokens")
    assert [line.split()[0] for line in lines[4:6]] == ["0", "1"]
    assert lines[-1].startswith(f"{quantized}: stored the outer scales of 2 layers")


def test_a_plain_cache_is_refused_with_the_reason(command, readable, network, text):
    outcome = command("calibrate", network, "--checkpoint", readable, "--text", text)
    assert outcome.status == 2
    assert "found a network with a fp32 cache, whose rows have no scales" in outcome.err
    assert outcome.err.count("\n") == 1


def test_an_engine_is_refused(command, readable, quantized, text):
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"build_config": {}}))
    outcome = command("calibrate", quantized, "--checkpoint", readable, "--text", text)
    assert outcome.status == 2
    assert "found an engine directory" in outcome.err
    assert "build again" in outcome.err


def test_an_output_with_content_needs_overwrite(command, readable, quantized, text, tmp_path):
    out = tmp_path / "out"
    options = ("--checkpoint", readable, "--text", text, "--window", 32, "--output", out)
    assert command("calibrate", quantized, *options).status == 0
    outcome = command("calibrate", quantized, *options)
    assert outcome.status == 2
    assert "pass --overwrite" in outcome.err
    assert command("calibrate", quantized, *options, "--overwrite").status == 0


def test_help_has_an_example(command):
    outcome = command("calibrate", "--help")
    assert outcome.status == 0
    assert "Example: trtllm-mla calibrate network --checkpoint examples/tiny-mla --text" in " ".join(
        outcome.out.split()
    )
