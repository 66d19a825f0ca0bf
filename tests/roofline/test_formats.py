from typing import get_args

import pytest

from trtllm_mla.config import KvCacheDType
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
        ("fp8", 336 + 16 + 2 * 24),  # 333 codes and 3 scales of 4 bytes, to 16 bytes each
        ("nvfp4", 176 + 32 + 2 * 24),  # 166 pairs and a single; 20 blocks of 16 and a part
    ],
)
def test_parts_of_a_block_or_byte_count_whole(make_spec, name, row_bytes):
    assert get_format(name).row_bytes(make_spec(kv_lora_rank=333, qk_rope_head_dim=24)) == row_bytes


def test_every_type_that_a_plugin_config_accepts_has_a_format():
    assert set(FORMATS) == set(get_args(KvCacheDType)) - {"auto"}


@pytest.mark.parametrize(("dtype", "own"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_defaults_begin_with_the_models_type(make_spec, dtype, own):
    assert [item.name for item in default_formats(make_spec(dtype=dtype))] == [own, "fp8", "nvfp4"]


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="--kv-cache-dtype: found 'int8', expected some of bf16, fp16, fp32, fp8, nvf"):
        get_format("int8")
