from dataclasses import replace

import pytest

from tests.support.hf import make_checkpoint
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
    footprint = cache_footprint(spec, itemsize=2)
    assert footprint.latent == 7 * (96 + 32) * 2
    assert footprint.decompressed == 7 * 20 * (48 + 32 + 40) * 2
    assert footprint.multi_head == 7 * 20 * (48 + 40) * 2
    assert footprint.grouped_query == 7 * 8 * (48 + 40) * 2
    assert cache_footprint(spec, itemsize=2, num_layers=1).latent == (96 + 32) * 2


def test_few_heads_have_no_smaller_groups(spec):
    footprint = cache_footprint(replace(spec, num_attention_heads=5), itemsize=4)
    assert footprint.grouped_query == footprint.multi_head
