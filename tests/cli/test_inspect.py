import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.models import make_network
from tests.support.configs import PUBLISHED, write_published
from tests.support.fp8 import DEEPSEEK_CONFIG
from tests.support.hf import make_checkpoint
from trtllm_mla.cli.inspect import describe
from trtllm_mla.config import BuildConfig
from trtllm_mla.roofline.gpus import GPUS

ROOT = Path(__file__).resolve().parents[2]


def test_cache_bytes_are_those_of_the_sizes(command, checkpoint):
    outcome = command("inspect", checkpoint[0], "--json")
    assert outcome.status == 0
    model = checkpoint[1].config
    cache = outcome.json["cache_bytes_per_token"]
    layers, heads = model.num_hidden_layers, model.num_attention_heads
    assert cache["latent"] == layers * (model.kv_lora_rank + model.qk_rope_head_dim) * 4
    assert cache["multi_head"] == layers * heads * (model.qk_nope_head_dim + model.v_head_dim) * 4
    assert outcome.json["parameters"] == checkpoint[1].num_parameters()
    assert outcome.json["weights"] == "checked"


def test_the_tables_name_what_would_be_built(command, checkpoint):
    outcome = command("inspect", checkpoint[0])
    assert outcome.status == 0
    assert "4 a layer, 8 in all" in outcome.out
    assert "at most 1, of max_context_kv_tokens" in outcome.out
    assert "DeepseekV3ForCausalLM" in outcome.out


def test_passes_add_two_operations_each(command, checkpoint, tmp_path):
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"mla_plugin": {"max_context_passes": 3}}))
    outcome = command("inspect", checkpoint[0], "--plugin-config", path)
    assert "8 a layer, 16 in all" in outcome.out
    assert "at most 3, of max_context_kv_tokens" in outcome.out


@pytest.mark.parametrize(("kv_cache_dtype", "row"), [("fp8", 96 + 16 + 64), ("nvfp4", 48 + 16 + 64)])
def test_a_quantised_cache_takes_codes_scales_and_a_bfloat16_rotary_key(
    command, checkpoint, tmp_path, kv_cache_dtype, row
):
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"mla_plugin": {"kv_cache_dtype": kv_cache_dtype}}))
    cache = command("inspect", checkpoint[0], "--plugin-config", path, "--json").json["cache_bytes_per_token"]
    assert (cache["dtype"], cache["latent"]) == (kv_cache_dtype, 2 * row)
    assert cache["decompressed"] == 2 * 5 * (48 + 32 + 40) * 4
    assert f"Cache in {kv_cache_dtype}" in command("inspect", checkpoint[0], "--plugin-config", path).out


def test_experts(command, tmp_path):
    path, _ = make_checkpoint(tmp_path, "deepseek_v2", dtype="bfloat16", num_layers=3)
    values = command("inspect", path, "--json").json
    assert values["num_moe_layers"] == 2
    assert values["expert_bytes"] == 2 * 2 * 12 * 3 * 36 * 80
    assert values["active_parameters"] == values["parameters"] - 2 * 9 * 3 * 36 * 80
    text = " ".join(command("inspect", path).out.replace("│", " ").split())
    assert "12 of width 36 in 2 of 3 layers" in text
    assert "softmax, group_limited_greedy: 3 experts a token from 2 of 4 groups, weights times 4" in text
    assert "one in each of 2 layers" in text


def test_weights_may_be_absent(tmp_path, checkpoint):
    (tmp_path / "config.json").write_text((checkpoint[0] / "config.json").read_text())
    assert describe(tmp_path, None)["weights"] == "absent"


def test_a_tile_is_judged_for_each_target(tmp_path, checkpoint):
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"mla_plugin": {"tile_s": 128, "num_stages": 2}}))
    tiles = describe(checkpoint[0], path)["tiles"]
    row_bytes = (96 + 32) * 4
    needed = 128 * 2 * row_bytes // 1024
    assert tiles["sm_90"] == f"fits: {needed} of 227 KiB"
    assert tiles["sm_89"].startswith(f"does not fit: {needed} of 99 KiB; tile_s 64, num_stages 2 fits")


def test_full_size_cache_against_multi_head_and_grouped_query_attention(tmp_path):
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 60,
        "first_k_dense_replace": 60,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    cache = describe(tmp_path, None)["cache_bytes_per_token"]
    tokens = 16 * 64 * 1024
    gib = 1 << 30
    assert cache["multi_head"] * tokens == 3.75 * 1024 * gib
    assert cache["grouped_query_8"] * tokens == 240 * gib
    assert cache["latent"] * tokens == 67.5 * gib


def test_kinds_add_up_to_the_whole(command, tmp_path):
    path, model = make_checkpoint(tmp_path, "deepseek_v2", dtype="bfloat16", num_layers=3)
    report = command("inspect", path, "--json").json
    kinds = {group["kind"]: group for group in report["weights_by_kind"]}
    assert sum(group["parameters"] for group in kinds.values()) == report["parameters"] == model.num_parameters()
    assert sum(group["num_bytes"] for group in kinds.values()) == report["weight_bytes"]
    assert sum(group["share"] for group in kinds.values()) == pytest.approx(1)
    assert kinds["routed_experts"]["num_bytes"] == report["expert_bytes"]
    rows = [line.replace("│", " ").split() for line in command("inspect", path).out.splitlines()]
    for label, kind in (("embedding", "embedding"), ("routers", "router"), ("norms", "norm"), ("head", "head")):
        group = kinds[kind]
        dtype = "fp32" if kind == "router" else "bf16"
        share = f"{group['share']:.1%}"
        assert [label, f"{group['parameters']:,}", f"{group['num_bytes']:,}", share, dtype] in rows
    assert ["total", f"{report['parameters']:,}", f"{report['weight_bytes']:,}", "100.0%"] in rows


def test_what_is_skipped_stands_below_with_its_reason(command, tmp_path):
    """A checkpoint that ends with a layer for multi-token prediction, as DeepSeek-V3 is released."""
    path, model = make_checkpoint(tmp_path, "deepseek_v3", dtype="bfloat16", num_layers=3)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    (path / "config.json").write_text(json.dumps(config))
    rename_one(path, "model.layers.2.self_attn.o_proj.weight", "model.layers.2.eh_proj.weight")
    report = command("inspect", path, "--json").json
    (group,) = report["skipped_by_reason"]
    sizes = [tensor.numel() for name, tensor in model.state_dict().items() if ".layers.2." in name]
    assert group == {
        "reason": "multi-token prediction layer",
        "num_tensors": len(sizes),
        "elements": sum(sizes),
        "num_bytes": 2 * sum(sizes),
    }
    assert len(report["skipped_tensors"]) == len(sizes)
    assert report["parameters"] == model.num_parameters() - sum(sizes)
    text = " ".join(command("inspect", path).out.replace("│", " ").split())
    assert f"skipped, {len(sizes)} tensors {sum(sizes):,} {2 * sum(sizes):,} multi-token prediction layer" in text


def rename_one(path, old, new):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors[new] = tensors.pop(old)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_cache_workspace_and_gpus(command, checkpoint):
    options = ("--context", 1000, "--batch-size", 3, "--gpu", "RTX4090,a100")
    report = command("inspect", checkpoint[0], *options, "--json").json
    assert report["limits"]["max_seq_len"] == 1000
    assert report["limits"]["max_batch_size"] == 3
    formats = {item["dtype"]: item for item in report["cache"]["formats"]}
    assert formats.keys() == {"fp32", "bf16", "fp8", "nvfp4"}
    assert formats["bf16"]["num_bytes"] == 3 * 1024 * 2 * (96 + 32) * 2
    assert report["workspace"]["rotary_bytes"] == 1000 * 32 * 4
    assert [fit["gpu"] for fit in report["gpus"]] == ["rtx4090", "a100"]
    for fit in report["gpus"]:
        assert fit["num_gpus"] == 1
        assert fit["weight_bytes"] == 4 * checkpoint[1].num_parameters()
        assert fit["cache_bytes"] == formats["fp32"]["num_bytes"]
    half = command("inspect", checkpoint[0], *options, "--kv-cache-free-gpu-mem-fraction", 0.45, "--json").json
    for fit, less in zip(report["gpus"], half["gpus"], strict=True):
        assert less["max_tokens"] == pytest.approx(fit["max_tokens"] / 2, abs=64)
    out = " ".join(command("inspect", checkpoint[0], *options).out.split())
    assert "Cache of 3 requests of 1,000 tokens, in pages of 64" in out
    assert "Engines of this package run on one GPU" in out
    assert "estimate from above" in out


def test_a_build_configs_limits_apply(command, checkpoint, tmp_path):
    path = tmp_path / "build.json"
    limits = {"max_batch_size": 5, "max_num_tokens": 300, "max_seq_len": 700, "max_context_kv_tokens": 900}
    path.write_text(json.dumps(limits | {"mla_plugin": {"page_size": 16}}))
    report = command("inspect", checkpoint[0], "--config", path, "--json").json
    assert report["limits"] == limits
    assert (report["cache"]["context"], report["cache"]["batch_size"], report["cache"]["page_size"]) == (700, 5, 16)
    assert report["workspace"]["decompressed_bytes"] == 900 * 5 * (48 + 40) * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "tpu"), "--gpu: found 'tpu', expected one of a100"),
        (("--config", "{config}", "--context", "701"), "--context: found 701, expected at most max_seq_len = 700"),
        (("--config", "{config}", "--batch-size", "6"), "--batch-size: found 6, expected at most max_batch_size = 5"),
        (("--context", "2000000000", "--batch-size", "9"), "max_batch_size 9 and max_seq_len 2000000000"),
        (("--context", "99999999999"), "--batch-size, --context: max_seq_len: found 99999999999"),
        (("--engine", "{config}"), "no such directory"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, checkpoint, tmp_path, options, message):
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"max_batch_size": 5, "max_num_tokens": 300, "max_seq_len": 700}))
    outcome = command("inspect", checkpoint[0], *(item.format(config=path) for item in options))
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_an_engine_brings_its_limits_and_tensorrts_plan(command, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    from trtllm_mla.engine.builder import build

    network = make_network(tmp_path)
    limits = BuildConfig(max_batch_size=3, max_num_tokens=96, max_seq_len=448, max_context_kv_tokens=320)
    info = build(network.path, tmp_path / "engine", config=limits, targets=("sm_89",), native=True).directory.info
    options = (tmp_path / "checkpoint", "--engine", tmp_path / "engine")
    report = command("inspect", *options, "--json").json
    assert report["workspace"]["activations_planned"]
    assert report["workspace"]["activation_bytes"] == info.activation_bytes > 0
    assert report["cache"]["context"] == 448
    assert {fit["gpu"] for fit in report["gpus"]} == {"rtx4090", "l40s"}
    assert "as TensorRT planned" in command("inspect", *options).out
    outcome = command("inspect", *options, "--gpu", "h100")
    assert outcome.status == 2
    assert "found an engine for sm_89" in outcome.err
    plugin = ROOT / "build_configs" / "flash_mla_decode.json"
    assert "has no effect with --engine" in command("inspect", *options, "--plugin-config", plugin).err


@pytest.mark.parametrize(
    ("name", "quantized", "parameters", "gigabytes"),
    # As their authors give them. Released in FP8, the 671 billion have a byte each but for embedding, head, routers
    # and what is dequantised, and scales of four bytes for 16,384.
    [("deepseek_v3", True, 671.0e9, 674.4), ("deepseek_v3", False, 671.0e9, 1342), ("kimi_k2", True, 1026e9, 1031)],
)
def test_full_size_models_from_their_config_alone(tmp_path, name, quantized, parameters, gigabytes):
    """In seconds, and in a tenth of a gigabyte of memory."""
    path = write_published(name, tmp_path)
    if quantized:
        (path / "config.json").write_text(json.dumps(PUBLISHED[name] | {"quantization_config": DEEPSEEK_CONFIG}))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = (
        "import json, sys; from pathlib import Path; from trtllm_mla.cli.inspect import describe; "
        "report = describe(Path(sys.argv[1]), None); "
        # getrusage would count what the process that started this one had.
        "lines = Path('/proc/self/status').read_text().splitlines(); "
        "print(json.dumps([report, next(int(line.split()[1]) * 1024 for line in lines if 'VmHWM' in line)]))"
    )
    result = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report, memory = json.loads(result.stdout)
    assert report["parameters"] == pytest.approx(parameters, rel=0.001)
    assert report["weight_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.001)
    assert {fit["gpu"] for fit in report["gpus"]} == GPUS.keys()
    assert memory < 1e9
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30


def test_nothing_is_cut_off_at_80_columns(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = command("inspect", write_published("kimi_k2", tmp_path)).out
    assert "…" not in out
    assert "1,026,408,232,448" in out


def test_the_help_names_every_gpu(command):
    text = " ".join(command("inspect", "--help").out.split())
    assert all(name in text for name in GPUS)


def test_the_readme_shows_what_is_printed(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    (shown,) = re.findall(
        r"```\n\$ trtllm-mla inspect examples/tiny-mla\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    printed = [line.rstrip() for line in command("inspect", "examples/tiny-mla").out.splitlines()]
    lines = [line.rstrip() for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) > 40
    assert [line for line in lines if line not in printed] == []
