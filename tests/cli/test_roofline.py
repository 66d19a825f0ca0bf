import json
from pathlib import Path

import pytest

from trtllm_mla.roofline.gpus import GPUS

README = Path(__file__).resolve().parents[2] / "README.md"


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
