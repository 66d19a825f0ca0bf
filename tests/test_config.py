import json
from pathlib import Path

import pytest

from trtllm_mla.cache_rows import CacheDType, tile_bytes
from trtllm_mla.config import (
    BuildConfig,
    MlaPluginConfig,
    PluginConfigFile,
    check_tile,
    largest_fitting_tile,
    load_config,
    merge_plugin_configs,
    parse_config,
)
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.targets import KIB, TARGETS, get_target

FULL_SIZE = {
    "mla_plugin": {
        "name": "flash_mla_decode",
        "num_heads": 128,
        "head_dim_content": 128,
        "latent_kv_dim": 512,
        "rope_dim": 64,
        "tile_s": 64,
        "num_stages": 3,
        "page_size": 64,
        "enable_matrix_absorption": True,
        "max_context_passes": 4,
        "prefill_absorption_threshold": 256,
        "rope_compute_dtype": "fp32",
        "kv_cache_dtype": "bf16",
    }
}
ROW_BYTES = (512 + 64) * 2


def to_toml(values: dict) -> str:
    lines = []
    for table, keys in values.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines)


@pytest.mark.parametrize(("suffix", "dump"), [("json", json.dumps), ("toml", to_toml)])
def test_the_same_keys_are_read_from_json_and_toml(tmp_path: Path, suffix: str, dump) -> None:
    path = tmp_path / f"plugin.{suffix}"
    path.write_text(dump(FULL_SIZE))
    plugin = load_config(path, PluginConfigFile).mla_plugin
    assert plugin.model_dump() == FULL_SIZE["mla_plugin"]
    assert plugin.cache_dtype(DType.FLOAT32) is CacheDType.BF16


def test_a_cache_follows_the_network_unless_told() -> None:
    assert MlaPluginConfig().cache_dtype(DType.FLOAT16) is CacheDType.FP16


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"page_size": 48}, "mla_plugin.page_size: found 48, expected: 16, 32, 64 or 128"),
        ({"prefill_absorption_threshold": -1}, "found -1, expected: greater than or equal to 0"),
        ({"tile": 3}, "mla_plugin.tile: unknown key; the keys here are name, num_heads"),
        ({"rope_compute_dtype": "bf16"}, "found 'bf16', expected 'fp32'"),
        ({"num_heads": "many"}, "mla_plugin.num_heads: found 'many'"),
        ({"num_heads": True}, "mla_plugin.num_heads: found True"),
        ({"tile_s": 64}, "tile_s and num_stages: found one of them"),
        ({"kv_cache_dtype": "int3"}, "mla_plugin.kv_cache_dtype: found 'int3'"),
    ],
)
def test_wrong_values_are_named(values: dict, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_config({"mla_plugin": values}, BuildConfig, source="build.json")
    assert str(raised.value).startswith("build.json: ")
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_batch_size": 0}, "max_batch_size: found 0"),
        ({"max_batch_size": 64, "max_num_tokens": 32}, "found 64, expected at most max_num_tokens = 32"),
        ({"max_seq_len": 100, "max_input_len": 100}, "found 100, expected at most max_seq_len - 1 = 99"),
        ({"targets": ["sm_33"]}, "Unknown target 'sm_33'"),
        ({"max_batches": 1}, "max_batches: unknown key; the keys here are max_batch_size"),
        ({"mla_plugin": 3}, "mla_plugin: found 3"),
    ],
)
def test_wrong_build_configs_are_named(values: dict, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_config(values, BuildConfig, source="build.json")
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[1]", "found a list at the top level"),
        ("a.json", b"\xff\xfe", "not valid JSON"),
        ("a.toml", b"a = ", "not valid TOML"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.json", b" " * (1 << 21), "expected at most 1048576"),
        ("a.json", b'{"max_seq_len": 16, "max_seq_len": 64}', "the key 'max_seq_len' appears twice"),
        ("a.json", b'{"mla_plugin": {"rope_compute_dtype": "\\ud800"}}', "expected valid Unicode"),
        ("a.json", b'{"mla_plugin": {"enable_matrix_absorption": "no"}}', "enable_matrix_absorption: found 'no'"),
        ("a.toml", b"max_seq_len = 0x" + b"f" * 10_000, "max_seq_len: found a int with a number of thousands of"),
        ("a.json", b'{"max_context_kv_tokens": 3000000000}', "max_context_kv_tokens: found 3000000000"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=expected):
        load_config(path, BuildConfig)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "none.json", BuildConfig)


def test_the_full_size_tile_fits_hopper_and_a_larger_one_does_not() -> None:
    hopper = get_target("sm_90")
    assert tile_bytes(64, 3, ROW_BYTES) == 216 * KIB
    check_tile(64, 3, ROW_BYTES, hopper)
    with pytest.raises(UserError) as raised:
        check_tile(128, 3, ROW_BYTES, hopper)
    message = str(raised.value)
    assert str(128 * 3 * ROW_BYTES) in message
    assert "Use tile_s 64 with num_stages 3" in message


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("row_bytes", [128, 1152, 2304])
def test_the_advised_tile_fits_and_no_deeper_one_does(target, row_bytes: int) -> None:
    tile = largest_fitting_tile(row_bytes, target)
    assert tile is not None
    check_tile(*tile, row_bytes, target)
    if tile != (128, 8):
        assert tile_bytes(tile[0], tile[1] + 1, row_bytes) > target.shared_memory_bytes or tile[1] == 8


def test_rows_too_wide_for_any_tile_are_refused() -> None:
    with pytest.raises(UserError, match="No tile of such rows fits"):
        check_tile(16, 1, 1 << 20, get_target("sm_89"))


def test_a_build_config_overrides_what_the_graph_does_not_depend_on() -> None:
    network = MlaPluginConfig(num_heads=8, page_size=64, tile_s=16, num_stages=2)
    merged = merge_plugin_configs(network, MlaPluginConfig(page_size=16, prefill_absorption_threshold=7))
    assert (merged.page_size, merged.prefill_absorption_threshold) == (16, 7)
    assert (merged.num_heads, merged.tile_s, merged.num_stages) == (8, 16, 2)


def test_an_automatic_cache_type_in_a_build_config_is_the_networks() -> None:
    network = MlaPluginConfig(kv_cache_dtype="bf16")
    assert merge_plugin_configs(network, MlaPluginConfig(kv_cache_dtype="auto")) == network


def test_a_build_config_cannot_change_the_graph() -> None:
    with pytest.raises(UserError, match="enable_matrix_absorption: the build config says False"):
        merge_plugin_configs(MlaPluginConfig(), MlaPluginConfig(enable_matrix_absorption=False))
    with pytest.raises(UserError, match="max_context_passes: the build config says 4, the network was"):
        merge_plugin_configs(MlaPluginConfig(), MlaPluginConfig(max_context_passes=4))


@pytest.mark.parametrize("passes", [0, 65, 2.0, True])
def test_passes_are_one_to_sixty_four(passes: object) -> None:
    with pytest.raises(UserError, match=r"mla_plugin\.max_context_passes: found"):
        parse_config({"mla_plugin": {"max_context_passes": passes}}, PluginConfigFile, source="test")
