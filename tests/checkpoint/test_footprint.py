from dataclasses import replace

import numpy as np
import pytest

from tests.support.configs import published_spec
from tests.support.hf import make_checkpoint
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.footprint import cache_footprint, weight_footprint


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


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    # As their authors give them; DeepSeek-V2-Lite's active ones without the embedding.
    [
        ("deepseek_v2_lite", 15.7, 2.4),
        ("deepseek_v2", 236, 21),
        ("deepseek_v3", 671, 37),
        ("kimi_k2", 1026, 32),
    ],
)
def test_parameters_of_released_models(name, billions, active_billions):
    weights = weight_footprint(published_spec(name))
    assert weights.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert weights.multiplied / 1e9 == pytest.approx(active_billions, rel=0.025)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [("deepseek_v2", {}), ("deepseek_v3", {"first_k_dense_replace": 1, "tie": True}), ("youtu", {}), ("kimi_k2", {})],
)
def test_weights_are_those_of_the_transformers_model(tmp_path, model_type, values):
    path, model = make_checkpoint(tmp_path, model_type, dtype="bfloat16", num_layers=3, **values)
    weights = weight_footprint(read_model_spec(Checkpoint.open(path)))
    state = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    total = sum(state.values())
    experts = sum(size for name, size in state.items() if ".experts." in name)
    router = sum(size for name, size in state.items() if ".gate." in name)
    embedding = 0 if model.config.tie_word_embeddings else 131 * 80
    assert weights.parameters == total
    assert weights.active_parameters == total - experts * 9 // 12
    assert weights.multiplied == weights.active_parameters - embedding
    assert weights.weight_bytes == 2 * total + 2 * router
    assert weights.expert_bytes == 2 * experts
    assert weights.dense_bytes == weights.weight_bytes - weights.expert_bytes - 2 * embedding
    assert weights.read_bytes(1) == pytest.approx(weights.dense_bytes + weights.expert_bytes * 3 / 12)


def test_bytes_that_a_step_reads_against_random_routers():
    """Of 256 experts, each token chooses 8 that do not depend on the others'."""
    weights = weight_footprint(published_spec("deepseek_v3"))
    generator = np.random.default_rng(0)
    for tokens in (1, 7, 64):
        hit = [len(np.unique(generator.random((tokens, 256)).argsort(axis=1)[:, :8])) for _ in range(300)]
        expected = weights.dense_bytes + weights.expert_bytes * np.mean(hit) / 256
        assert weights.read_bytes(tokens) == pytest.approx(expected, rel=0.01)
    assert weights.read_bytes(10_000) == pytest.approx(weights.dense_bytes + weights.expert_bytes)
