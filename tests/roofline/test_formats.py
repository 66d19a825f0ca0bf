import pytest
from pydantic import ValidationError

from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.roofline.formats import FORMATS, default_formats, get_format


@pytest.mark.parametrize(
    ("name", "row_bytes"), [("bf16", 1152), ("fp16", 1152), ("fp32", 2304), ("fp8", 656), ("nvfp4", 416)]
)
def test_rows_of_512_and_64(make_spec, name, row_bytes):
    assert get_format(name).row_bytes(make_spec()) == row_bytes


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("bf16", 2 * (333 + 24)),
        ("fp8", 333 + 4 * 3 + 2 * 24),  # 333 elements are 2 blocks of 128 and a part of a third
        ("nvfp4", 167 + 21 + 2 * 24),  # 166 pairs and a single; 20 blocks of 16 and a part
    ],
)
def test_parts_of_a_block_or_byte_count_whole(make_spec, name, row_bytes):
    assert get_format(name).row_bytes(make_spec(kv_lora_rank=333, qk_rope_head_dim=24)) == row_bytes


@pytest.mark.parametrize("item", FORMATS.values(), ids=lambda item: item.name)
def test_planned_is_what_a_plugin_config_refuses(item):
    if item.planned:
        with pytest.raises(ValidationError, match="kv_cache_dtype"):
            MlaPluginConfig(kv_cache_dtype=item.name)
    else:
        assert MlaPluginConfig(kv_cache_dtype=item.name).kv_cache_dtype == item.name


@pytest.mark.parametrize(("dtype", "own"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_defaults_begin_with_the_models_type(make_spec, dtype, own):
    assert [item.name for item in default_formats(make_spec(dtype=dtype))] == [own, "fp8", "nvfp4"]


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="--kv-cache-dtype: found 'int8', expected some of bf16, fp16, fp32, fp8, nvf"):
        get_format("int8")
