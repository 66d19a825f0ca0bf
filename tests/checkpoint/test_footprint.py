from dataclasses import replace

import pytest

from tests.support.hf import make_checkpoint
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.footprint import cache_footprint


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return read_model_spec(Checkpoint.open(make_checkpoint(tmp_path_factory.mktemp("hf") / "checkpoint")[0]))


def test_every_form_by_hand(spec):
    spec = replace(
        spec,
        num_hidden_layers=7,
        num_attention_heads=20,
        kv_lora_rank=96,
        qk_rope_head_dim=32,
        qk_nope_head_dim=48,
        v_head_dim=40,
    )
    footprint = cache_footprint(spec, CacheDType.BF16)
    assert footprint.latent == 7 * (96 + 32) * 2
    assert footprint.decompressed == 7 * 20 * (48 + 32 + 40) * 2
    assert footprint.multi_head == 7 * 20 * (48 + 40) * 2
    assert footprint.grouped_query == 7 * 8 * (48 + 40) * 2
    assert cache_footprint(spec, CacheDType.BF16, num_layers=1).latent == (96 + 32) * 2


def test_few_heads_have_no_smaller_groups(spec):
    footprint = cache_footprint(replace(spec, num_attention_heads=5), CacheDType.FP32)
    assert footprint.grouped_query == footprint.multi_head


@pytest.mark.parametrize(("dtype", "row"), [(CacheDType.FP8, 96 + 16 + 64), (CacheDType.NVFP4, 48 + 16 + 64)])
def test_a_quantized_latent_has_scales_and_the_other_forms_the_models_type(spec, dtype, row):
    spec = replace(spec, kv_lora_rank=96, qk_rope_head_dim=32)
    footprint, plain = cache_footprint(spec, dtype), cache_footprint(spec, CacheDType.of(spec.dtype))
    assert footprint.latent == spec.num_hidden_layers * row
    assert footprint.decompressed == plain.decompressed
