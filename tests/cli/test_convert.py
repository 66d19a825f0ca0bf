import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.network import directory

FULL_SIZE_PLUGIN = "build_configs/flash_mla_decode.json"


def test_convert_reports_what_it_wrote(command, checkpoint, tmp_path):
    outcome = command(
        "convert", checkpoint[0], tmp_path / "network", "--dtype", "float16", "--num-layers", 1, "--json"
    )
    assert outcome.status == 0
    assert outcome.json["num_layers"] == 1
    assert outcome.json["kv_cache_dtype"] == "fp16"
    assert {path.name for path in (tmp_path / "network").iterdir()} == {"config.json", "network.onnx", "weights.json"}


def test_only_the_config_is_needed(command, checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint[0] / "config.json").read_text())
    assert command("convert", tmp_path, tmp_path / "network").status == 0


def break_truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_header(path):
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[:8] = (len(content) * 2).to_bytes(8, "little")
    file.write_bytes(content)


def edit_tensors(change):
    def apply(path):
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def remove_one(tensors):
    del tensors["model.norm.weight"]


def add_one(tensors):
    tensors["model.layers.0.extra.weight"] = tensors["model.norm.weight"].clone()


def cut_one(tensors):
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name][:-1].clone()


def edit_config(**values):
    def apply(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | values))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "no such directory"),
        (break_truncated, "model.safetensors"),
        (break_header, "model.safetensors"),
        (edit_tensors(remove_one), "model.norm.weight"),
        (edit_tensors(add_one), "model.layers.0.extra.weight"),
        (edit_tensors(cut_one), "model.layers.1.self_attn.o_proj.weight"),
        (edit_config(model_type="llama"), "deepseek_v2, deepseek_v3"),
        (edit_config(first_k_dense_replace=0), "model.layers.0.mlp.gate.weight"),
        (edit_config(kv_lora_rank=-1), "kv_lora_rank"),
    ],
)
def test_a_damaged_checkpoint_is_one_line_and_nothing_is_written(command, checkpoint, tmp_path, damage, message):
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint[0], path)
    damage(path)
    outcome = command("convert", path, tmp_path / "network")
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.startswith("Error: ")
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "network").exists()


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"page_size": 48}, "page_size: found 48"),
        ({"prefill_absorption_threshold": -1}, "prefill_absorption_threshold: found -1"),
        ({"pages": 48}, "pages: unknown key"),
        ({"num_heads": 128}, "num_heads: found 128, the checkpoint's num_attention_heads is 5"),
        ({"rope_compute_dtype": "bf16"}, "rope_compute_dtype: found 'bf16'"),
    ],
)
def test_a_wrong_plugin_config_is_one_line_and_nothing_is_written(command, checkpoint, tmp_path, plugin, message):
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"mla_plugin": plugin}))
    outcome = command("convert", checkpoint[0], tmp_path / "network", "--plugin-config", path)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "network").exists()


def test_the_plugin_config_of_a_full_size_model_is_accepted(command, tmp_path):
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 61}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--plugin-config", FULL_SIZE_PLUGIN, "--num-layers", 1)
    assert command("convert", tmp_path, tmp_path / "network", *options).status == 0
    written = json.loads((tmp_path / "network" / "config.json").read_text())
    given = json.loads(Path(FULL_SIZE_PLUGIN).read_text())["mla_plugin"]
    assert written["mla_plugin"] == {**MlaPluginConfig().model_dump(), **given}


def test_a_network_is_replaced_only_if_told_and_other_content_never(command, checkpoint, tmp_path):
    network = tmp_path / "network"
    assert command("convert", checkpoint[0], network).status == 0
    assert command("convert", checkpoint[0], network).status == 2
    assert command("convert", checkpoint[0], network, "--overwrite").status == 0
    outcome = command("convert", checkpoint[0], tmp_path, "--overwrite")
    assert outcome.status == 2
    assert "never replaced" in outcome.err


def test_progress_tells_the_files_opened_then_the_stages(checkpoint, tmp_path):
    shards = tmp_path / "sharded"
    checkpoint[1].save_pretrained(shards, max_shard_size="60KB")
    count = len(list(shards.glob("*.safetensors")))
    assert count > 2
    told = []
    directory.convert(shards, tmp_path / "network", plugin=MlaPluginConfig(), progress=lambda *now: told.append(now))
    assert told[:count] == [("Reading headers", number, count) for number in range(1, count + 1)]
    assert told[count:] == [
        ("Checking tensors", 0, 2),
        ("Writing the network", 1, 2),
        ("Writing the network", 2, 2),
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_drawn_on_a_terminal_only_and_on_standard_error(
    command, checkpoint, tmp_path, monkeypatch, capsys, terminal
):
    shards = tmp_path / "sharded"
    checkpoint[1].save_pretrained(shards, max_shard_size="60KB")
    monkeypatch.setattr("trtllm_mla.cli.console.ERR", Console(stderr=True, force_terminal=terminal, width=100))
    capsys.readouterr()
    outcome = command("convert", shards, tmp_path / "network")
    assert outcome.status == 0
    assert outcome.out.startswith(str(tmp_path / "network"))
    if terminal:
        assert "Writing the network" in outcome.err
    else:
        assert outcome.err == ""
