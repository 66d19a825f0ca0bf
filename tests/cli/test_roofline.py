import json
from pathlib import Path

import pytest

from tests.support.configs import PUBLISHED, write_published
from tests.support.fp8 import DEEPSEEK_CONFIG
from trtllm_mla.roofline.gpus import GPUS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture
def v3(tmp_path):
    """The config alone of a dense model with DeepSeek-V3's sizes."""
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 61}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return tmp_path


def test_tables(command, v3):
    outcome = command("roofline", "--gpu", "h200", v3)
    assert outcome.status == 0
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["128", "bf16", "1152", "278,528", "241.8", "240.0", "281.5", "MMA"] in lines
    assert ["16", "(TP8)", "nvfp4", "416", "34,816", "83.7", "86.7", "35.2", "62.1", "memory"] in lines
    assert ["nvfp4", "416", "39.4", "heads", "20.9", "cycles", "15.0", "cycles"] in lines
    # 61 layers, 16 requests of 65,536 tokens, 240 ps.
    assert ["16", "(TP8)", "bf16", "65,536", "0.252", "15.4"] in [line[:6] for line in lines]
    assert "up to 170.7 query tokens that share the cached ones (default threshold: 256)" in outcome.out
    assert ["MHA", "bf16", "244.0", "GiB", "3.81", "TiB"] in lines


def published(name, directory):
    """A model's config.json as released, the weights in FP8."""
    path = write_published(name, directory)
    (path / "config.json").write_text(json.dumps(PUBLISHED[name] | {"quantization_config": DEEPSEEK_CONFIG}))
    return path


@pytest.mark.parametrize("cache", ["bf16", "nvfp4"])
@pytest.mark.parametrize("model", ["deepseek_v3", "tiny-mla"])
def test_inspect_gives_the_same_sizes_and_tokens(command, tmp_path, model, cache):
    path = ROOT / "examples" / model if model == "tiny-mla" else published(model, tmp_path / "model")
    plugin = tmp_path / "plugin.json"
    plugin.write_text(json.dumps({"mla_plugin": {"kv_cache_dtype": cache}}))
    requests = ("--context", 30_001, "--batch-size", 13, "--kv-cache-free-gpu-mem-fraction", 0.83)
    compared = 0
    for fit in command("inspect", path, "--plugin-config", plugin, *requests, "--json").json["gpus"]:
        options = ("--gpu", fit["gpu"], "--kv-cache-dtype", cache, *requests)
        report = command("roofline", path, *options, "--json").json
        fits = [step["tensor_parallel"] for step in report["steps"] if step["fits"]]
        if fit["num_gpus"] not in (1, 2, 4, 8):
            assert fits == []
            continue
        assert fits[0] == fit["num_gpus"]
        (room,) = (item for item in report["capacities"] if item["tensor_parallel"] == fit["num_gpus"])
        assert (room["weight_bytes"], room["workspace_bytes"]) == (fit["weight_bytes"], fit["workspace_bytes"])
        assert room["tokens"] == fit["max_tokens"] > 13 * 30_001
        assert f"  {fit['max_tokens']:,} " in command("roofline", path, *options).out
        compared += 1
    # Of DeepSeek-V3 only H200 and B200 hold enough.
    assert compared == (2 if model == "deepseek_v3" else len(GPUS))


def test_kernels_that_do_not_fit_are_named_once(command, v3):
    config = json.loads((v3 / "config.json").read_text())
    config |= {"dtype": "float32", "kv_lora_rank": 1024, "num_hidden_layers": 1}
    (v3 / "config.json").write_text(json.dumps(config))
    outcome = command("roofline", v3, "--gpu", "rtx3090", "--kv-cache-dtype", "fp32")
    assert outcome.status == 0
    assert outcome.out.count("fp32: ") == outcome.out.count("shared memory") == 1


def test_nothing_is_cut_off_at_80_columns(command, v3, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = command("roofline", "--gpu", "h200", v3)
    assert "…" not in outcome.out
    assert "dequantisation" in outcome.out


def test_json(command, v3):
    report = command(
        *("roofline", v3, "--gpu", "B200", "--context", "512,131072", "--batch-size", "7"),
        *("--kv-cache-dtype", "nvfp4,bf16", "--json"),
    ).json
    assert report["gpu"]["name"] == "b200"
    assert report["gpu"]["source"]
    assert report["batch_size"] == 7
    assert [item["name"] for item in report["formats"]] == ["nvfp4", "bf16"]
    assert len(report["rows"]) == len(report["capacities"]) == 4 * 2
    assert [step["context"] for step in report["steps"]] == [512, 131072] * 8
    assert report["steps"][-1]["attention_tokens_per_second"] == pytest.approx(1 / (61 * 131072 * 1152 / 8e12))
    assert report["spec"]["kv_lora_rank"] == 512


def test_a_random_checkpoint_in_float32(command, checkpoint):
    report = command("roofline", checkpoint[0], "--gpu", "a100", "--json").json
    model = checkpoint[1].config
    assert report["rows"][0]["cache"] == "fp32"
    assert report["rows"][0]["row_bytes"] == 4 * (model.kv_lora_rank + model.qk_rope_head_dim)
    assert report["capacities"][0]["weight_bytes"] == 4 * checkpoint[1].num_parameters()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "--gpu: found 'tpu', expected one of a100"),
        (["--gpu", "h100", "--context", "4k"], "--context: found '4k', expected numbers separated by commas"),
        (["--gpu", "h100", "--context", "0"], "--context: found 0, expected a number from 1"),
        (["--gpu", "h100", "--context", "9" * 5000], "--context: found 99999999999999999999, expected"),
        (["--gpu", "h100", "--context", "200000000"], "max_batch_size 16 and max_seq_len 200000000 make a cache of"),
        (["--gpu", "h100", "--batch-size", "0"], "--batch-size: found 0, expected a number from 1"),
        (["--gpu", "h100", "--kv-cache-dtype", "fp8,"], "--kv-cache-dtype: found '', expected some of bf16"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, v3, arguments, message):
    outcome = command("roofline", v3, *arguments)
    assert outcome.status == 2
    assert outcome.err.startswith(f"Error: {message}")
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_the_help_names_every_gpu(command):
    text = " ".join(command("roofline", "--help").out.split())
    assert all(name in text for name in GPUS)


def test_the_readme_shows_what_is_printed(command, v3):
    section = README.read_text().split("## Roofline\n")[1].split("\n## ")[0]
    commands, shown = section.split("```\n")[1::2]
    config = commands[commands.index("{") : commands.index("}") + 1]
    (v3 / "config.json").write_text(config)
    arguments = commands.splitlines()[-1].split()[1:-1]
    printed = [line.split() for line in command(*arguments, v3).out.splitlines()]
    lines = [line.split() for line in shown.splitlines() if line and "──" not in line]
    assert len(lines) > 20
    assert [line for line in lines if line not in printed] == []
