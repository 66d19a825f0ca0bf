import json

import pytest

from tests.support.hf import make_checkpoint
from trtllm_mla.cli.inspect import describe


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
