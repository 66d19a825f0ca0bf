"""The presets in build_configs/ and the configs in the README are what the package accepts."""

import json
import re
from pathlib import Path

import pytest

from trtllm_mla.config import BuildConfig, PluginConfigFile, check_tile, load_config, parse_config
from trtllm_mla.targets import get_target

ROOT = Path(__file__).parents[1]
FULL_SIZE_PLUGIN = ROOT / "build_configs" / "flash_mla_decode.json"
PRESETS = sorted(path for path in (ROOT / "build_configs").glob("*.json") if path != FULL_SIZE_PLUGIN)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_build_config_with_a_tile_for_each_target(path):
    config = load_config(path, BuildConfig)
    assert config.targets
    if config.mla_plugin.tile_s is not None:
        for target in config.targets:
            check_tile(config.mla_plugin.tile_s, config.mla_plugin.num_stages, 1152, get_target(target))


def test_there_are_presets():
    assert len(PRESETS) >= 5


def test_the_plugin_config_of_the_readme_is_the_one_in_build_configs():
    (block,) = re.findall(r"```json\n(\{\"mla_plugin\".*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    values = json.loads(block)
    assert values == json.loads(FULL_SIZE_PLUGIN.read_text())
    parse_config(values, PluginConfigFile, source="README.md")
    check_tile(64, 3, 1152, get_target("sm_90"))
