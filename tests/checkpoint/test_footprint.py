from dataclasses import replace
from typing import ClassVar, get_args

import numpy as np
import pytest

from tests.support.configs import published_spec
from tests.support.fp8 import quantize_checkpoint
from tests.support.hf import ModelType, make_checkpoint
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.footprint import (
    WeightKind,
    cache_footprint,
    rank_weight_bytes,
    skipped_groups,
    weight_footprint,
    weight_groups,
)
from trtllm_mla.checkpoint.spec import Fp8Spec
from trtllm_mla.checkpoint.trtllm_layout import RankGrid, rank_types
from trtllm_mla.checkpoint.weights import TensorSource, WeightMap, bind, build_weight_map, check_checkpoint
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.directory import convert


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


def transformers_kind(module, name):
    """What a parameter of a transformers model is, by its module's class and path."""
    if type(module).__name__.endswith("RMSNorm"):
        return WeightKind.NORM
    for part, kind in (
        ("embed_tokens", WeightKind.EMBEDDING),
        ("lm_head", WeightKind.HEAD),
        ("kv_b_proj", WeightKind.UP_PROJECTION),
        ("self_attn", WeightKind.ATTENTION),
        (".experts.", WeightKind.ROUTED_EXPERTS),
        ("shared_experts", WeightKind.SHARED_EXPERTS),
        ("router", WeightKind.ROUTER),
        (".gate.", WeightKind.ROUTER),
        ("mlp", WeightKind.DENSE_MLP),
    ):
        if part in name:
            return kind
    raise AssertionError(name)


def transformers_parameters(model):
    """Elements of each kind in the language model, the routers' biases included, which are buffers."""
    config = model.config.get_text_config()
    stored = set(model.state_dict())
    if config.tie_word_embeddings:
        stored.discard("lm_head.weight")
    if config.model_type == "axk1":
        stored = {name for name in stored if not name.endswith("e_score_correction_bias")}
    counts = {}
    for path, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if f"{path}.{name}" not in stored or "vision" in path or "projector" in path:
                continue
            kind = transformers_kind(module, f"{path}.{name}")
            if kind is WeightKind.ROUTED_EXPERTS:
                # LongCat's experts that give back their input have weights in transformers, which nothing reads.
                tensor = tensor[: config.n_routed_experts]
            counts[kind] = counts.get(kind, 0) + tensor.numel()
    return counts


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("model_type", get_args(ModelType))
def test_groups_are_what_a_network_of_the_architecture_binds(tmp_path, model_type, dtype):
    rope = "mistral" if model_type == "mistral4" else "default"
    path, model = make_checkpoint(tmp_path / "hf", model_type, dtype="bfloat16", num_layers=4, rope=rope)
    network = convert(path, tmp_path / "network", plugin=MlaPluginConfig(), dtype=dtype)
    groups = weight_groups(network.weights, network.dtype)
    bound = bind(network.weights, Checkpoint.open(path), dtype)
    assert sum(group.num_bytes for group in groups) == sum(array.nbytes for array in bound.values())
    assert sum(group.num_inputs for group in groups) == len(bound)
    assert {group.kind: group.parameters for group in groups} == transformers_parameters(model)
    for group in groups:
        itemsize = 4 if group.kind is WeightKind.ROUTER else dtype.itemsize
        assert group.num_bytes == group.parameters * itemsize == sum(group.bytes_by_dtype.values())


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_groups_of_fp8_checkpoints_are_what_is_bound(tmp_path, model_type):
    made = make_checkpoint(tmp_path / "hf", model_type, dtype="bfloat16", num_layers=3, first_k_dense_replace=1)
    path, model = quantize_checkpoint(made, exclude=("q_a_proj",))
    network = convert(path, tmp_path / "network", plugin=MlaPluginConfig())
    groups = {group.kind: group for group in weight_groups(network.weights, network.dtype)}
    bound = bind(network.weights, Checkpoint.open(path), network.dtype)
    assert sum(group.num_bytes for group in groups.values()) == sum(array.nbytes for array in bound.values())
    assert {kind: group.parameters for kind, group in groups.items()} == transformers_parameters(model)
    # Of each dense MLP and shared expert: a byte a weight, and the scales of blocks, of which none is whole.
    dense = groups[WeightKind.DENSE_MLP]
    assert dense.bytes_by_dtype == {"int8": 3 * 112 * 80, "float32": 4 * 3}
    assert dense.dequantized_bytes == 0
    up = groups[WeightKind.UP_PROJECTION]
    assert up.bytes_by_dtype == {"bfloat16": 2 * up.parameters}
    assert up.dequantized_bytes == up.num_bytes


def test_a_weight_of_no_kind_is_an_error():
    source = TensorSource(tensor="model.layers.0.novelty.weight", shape=(3, 5))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.novelty\.weight"):
        weight_groups(WeightMap(weights={source.tensor: source}), DType.BFLOAT16)


class TestDeepSeekV3ByHand:
    """61 layers of which 3 are dense; 128 heads of 128 + 64 and 128; latents 512 + 64 and 1536."""

    HIDDEN, VOCABULARY, EXPERT = 7168, 129280, 3 * 2048 * 7168
    UP = 61 * 128 * (128 + 128) * 512
    QUERY_DOWN, QUERY_UP, KEY_DOWN, OUTPUT = 1536 * 7168, 128 * 192 * 1536, 576 * 7168, 7168 * 128 * 128
    ATTENTION = 61 * (QUERY_DOWN + QUERY_UP + KEY_DOWN + OUTPUT)
    DENSE = 3 * 3 * 18432 * 7168
    ROUTER = 58 * (256 * 7168 + 256)
    NORM = 61 * (2 * 7168 + 1536 + 512) + 7168
    PARAMETERS: ClassVar = {
        WeightKind.EMBEDDING: VOCABULARY * HIDDEN,
        WeightKind.ATTENTION: ATTENTION,
        WeightKind.UP_PROJECTION: UP,
        WeightKind.DENSE_MLP: DENSE,
        WeightKind.SHARED_EXPERTS: 58 * EXPERT,
        WeightKind.ROUTED_EXPERTS: 58 * 256 * EXPERT,
        WeightKind.ROUTER: ROUTER,
        WeightKind.NORM: NORM,
        WeightKind.HEAD: VOCABULARY * HIDDEN,
    }

    def test_parameters(self):
        groups = weight_groups(build_weight_map(published_spec("deepseek_v3")), DType.BFLOAT16)
        assert {group.kind: group.parameters for group in groups} == self.PARAMETERS
        assert sum(self.PARAMETERS.values()) == 671_026_419_200

    def test_fp8_is_a_byte_a_weight_and_four_a_block(self):
        spec = replace(published_spec("deepseek_v3"), quantization=Fp8Spec())
        groups = {group.kind: group for group in weight_groups(build_weight_map(spec), DType.BFLOAT16)}
        blocks = {
            WeightKind.ATTENTION: 61 * (12 * 56 + 192 * 12 + 5 * 56 + 56 * 128),
            WeightKind.DENSE_MLP: 3 * 3 * 144 * 56,
            WeightKind.SHARED_EXPERTS: 58 * 3 * 16 * 56,
            WeightKind.ROUTED_EXPERTS: 58 * 256 * 3 * 16 * 56,
        }
        for kind, count in blocks.items():
            assert groups[kind].num_bytes == self.PARAMETERS[kind] + 4 * count
        for kind in (WeightKind.EMBEDDING, WeightKind.UP_PROJECTION, WeightKind.NORM, WeightKind.HEAD):
            assert groups[kind].num_bytes == 2 * self.PARAMETERS[kind]

    @pytest.mark.parametrize("grid", [RankGrid(1), RankGrid(2), RankGrid(8), RankGrid(8, 8), RankGrid(16, 4)])
    def test_a_ranks_part_by_hand(self, grid):
        weights = build_weight_map(published_spec("deepseek_v3"))
        ranks, whole = grid.tp_size, self.QUERY_DOWN + self.KEY_DOWN
        expected = {
            **{kind: 2 * count // ranks for kind, count in self.PARAMETERS.items()},
            WeightKind.EMBEDDING: 2 * self.VOCABULARY * self.HIDDEN,
            WeightKind.ATTENTION: 2 * 61 * (whole + (self.QUERY_UP + self.OUTPUT) // ranks),
            WeightKind.ROUTER: 4 * self.ROUTER,
            WeightKind.NORM: 2 * self.NORM,
        }
        assert rank_weight_bytes(weights, DType.BFLOAT16, grid) == expected


@pytest.mark.parametrize("grid", [RankGrid(1), RankGrid(2), RankGrid(4, 2), RankGrid(8), RankGrid(8, 8)])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v2", "kimi_k2"])
def test_a_ranks_part_is_that_of_tensorrt_llms_layout(name, grid):
    """Which has the keys' up projection twice, and may have rows of zeros below the head."""
    spec = published_spec(name)
    types = rank_types(spec, grid)
    expected = sum(tensor.nbytes for key, tensor in types.items() if not key.endswith("k_b_proj_trans"))
    assert sum(rank_weight_bytes(build_weight_map(spec), spec.dtype, grid).values()) == expected


def test_skipped_tensors_by_reason(tmp_path):
    path, model = make_checkpoint(tmp_path, "deepseek_v3", dtype="bfloat16", num_layers=3)
    checkpoint = Checkpoint.open(path)
    weights = build_weight_map(read_model_spec(checkpoint), 1)
    (group,) = skipped_groups(check_checkpoint(weights, checkpoint), checkpoint)
    left_out = (".layers.1.", ".layers.2.")
    expected = [
        tensor.numel() for name, tensor in model.state_dict().items() if any(part in name for part in left_out)
    ]
    assert group.reason == "the network has 1 layers"
    assert (group.num_tensors, group.elements) == (len(expected), sum(expected))
    assert group.num_bytes == 2 * group.elements
