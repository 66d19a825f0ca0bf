"""``convert --layout trtllm`` and ``convert --from-trtllm`` on the command line."""

from __future__ import annotations

import json

import pytest

from tests.support.hf import make_checkpoint
from trtllm_mla.checkpoint.files import Checkpoint


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("trtllm") / "checkpoint"
    sizes = {"num_attention_heads": 4, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
    return make_checkpoint(path, "deepseek_v2", dtype="bfloat16", rope="yarn", **sizes).path


def test_there_and_back(command, deepseek, tmp_path):
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    outcome = command("convert", deepseek, ranks, "--layout", "trtllm", "--tp", 4, "--moe-ep", 2)
    assert outcome.status == 0, outcome.err
    assert "2 layers of DeepseekV2ForCausalLM in bfloat16, split over 4 ranks" in outcome.out
    assert json.loads((ranks / "config.json").read_text())["mapping"]["moe_ep_size"] == 2
    assert command("convert", ranks, back, "--from-trtllm").status == 0
    original, restored = Checkpoint.open(deepseek), Checkpoint.open(back)
    assert original.config == restored.config
    assert original.tensors.keys() == restored.tensors.keys()
    for name in original.tensors:
        assert original.read(name).tobytes() == restored.read(name).tobytes()


def test_json(command, deepseek, tmp_path):
    report = command("convert", deepseek, tmp_path / "ranks", "--layout", "trtllm", "--tp", 2, "--json").json
    assert report["files"] == report["tp_size"] == 2
    assert report["nbytes"] == sum(file.stat().st_size for file in (tmp_path / "ranks").glob("*.safetensors"))
    assert report["rounded"] == []
    report = command("convert", tmp_path / "ranks", tmp_path / "back", "--from-trtllm", "--json").json
    assert report["tensors"] == len(Checkpoint.open(deepseek).tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2"], "--tp: it has no effect with --layout network"),
        (
            ["--layout", "trtllm", "--plugin-config", "x.json"],
            "--plugin-config: it has no effect with --layout trtllm",
        ),
        (["--from-trtllm", "--tp", "2"], "--tp: it has no effect with --from-trtllm"),
        (["--from-trtllm", "--layout", "trtllm"], "--layout: it has no effect with --from-trtllm"),
        (["--from-trtllm"], "found no key hf_config"),
        (["--layout", "trtllm", "--tp", "8"], "num_attention_heads 4, which 8 ranks cannot share"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(command, deepseek, tmp_path, options, message):
    outcome = command("convert", deepseek, tmp_path / "out", *options)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
