"""Architectures with factors, names and layers of their own: configs read as transformers reads them, and tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, MiniCPM3Config, Mistral4Config
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3RotaryEmbedding
from transformers.models.mistral4.modeling_mistral4 import Mistral4Attention, Mistral4RotaryEmbedding

from tests.support.hf import ModelType, make_checkpoint
from trtllm_mla.checkpoint.architectures import get_architecture, read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.footprint import weight_footprint
from trtllm_mla.checkpoint.rope import inverse_frequencies, rotary_cos_sin
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import bind, build_weight_map, check_checkpoint
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "tie_word_embeddings",
    "bos_token_id",
]


def spec_of(directory: Path, **config: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_spec(Checkpoint.open(directory))


def refusal(directory: Path, **config: Any) -> str:
    with pytest.raises(UserError) as caught:
        spec_of(directory, **config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model_type", ["longcat_flash", "minicpm3", "mistral4"])
def test_defaults_of_missing_keys(tmp_path: Path, model_type: str) -> None:
    spec, expected = spec_of(tmp_path, model_type=model_type), AutoConfig.for_model(model_type)
    for name in SIZES:
        assert getattr(spec, name) == getattr(expected, name), name
    assert spec.eos_token_ids == (expected.eos_token_id,)
    assert spec.rope.theta == expected.rope_parameters["rope_theta"]
    assert spec.rope.rope_type == expected.rope_parameters["rope_type"]
    assert spec.rope.interleaved == (model_type != "minicpm3")
    if model_type == "minicpm3":
        assert spec.moe is None
        return
    assert spec.moe is not None
    assert spec.moe.num_experts == expected.n_routed_experts
    assert spec.moe.top_k == expected.num_experts_per_tok
    assert spec.moe.intermediate_size == expected.moe_intermediate_size
    assert spec.moe.routed_scaling_factor == expected.routed_scaling_factor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("axk1", {"rope": "yarn", "num_layers": 3, "first_k_dense_replace": 2}),
        ("longcat_flash", {"rope": "linear", "num_layers": 4, "attention_bias": True}),
        ("longcat_flash", {"zero_expert_num": 0}),
        ("minicpm3", {"rope": "longrope", "q_lora_rank": None}),
        ("minicpm3", {"scale_depth": None, "dim_model_base": None, "tie": False}),
        ("mistral4", {"rope": "mistral", "rope_interleave": False}),
    ],
    ids=str,
)
def test_saved_model(tmp_path: Path, model_type: ModelType, values: dict[str, Any], dtype: Any) -> None:
    path, model = make_checkpoint(tmp_path, model_type, dtype=dtype, **values)
    checkpoint = Checkpoint.open(path)
    spec = read_model_spec(checkpoint)
    attention = model.model.layers[0].self_attn
    attention = attention[0] if model_type == "longcat_flash" else attention
    assert spec.softmax_scale == pytest.approx(attention.scaling, rel=1e-15)
    assert spec.latent_norm_eps == attention.kv_a_layernorm.variance_epsilon
    assert spec.rms_norm_eps == model.model.norm.variance_epsilon
    skipped = check_checkpoint(build_weight_map(spec), checkpoint)
    stored = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name not in skipped}
    assert get_architecture(model_type, source="test").tensors(spec) == stored
    bias = {"model.layers.2.mlp.gate.e_score_correction_bias"}
    gates = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        for layer in range(spec.num_hidden_layers // 2)
        for expert in range(9, 14)
        for name in ("gate", "up")
    }
    if model_type == "axk1":
        assert skipped.keys() == bias
    else:
        has_gates = model_type == "longcat_flash" and values.get("zero_expert_num") != 0
        assert skipped.keys() == (gates if has_gates else set())
    bound = bind(build_weight_map(spec), checkpoint, spec.dtype)
    if spec.moe is not None and model_type != "longcat_flash":
        experts = model.model.layers[spec.num_hidden_layers - 1].mlp.experts
        name = f"model.layers.{spec.num_hidden_layers - 1}.mlp.experts.gate_up_proj"
        np.testing.assert_array_equal(bound[name].astype(np.float32), experts.gate_up_proj.detach().numpy())


class TestMiniCPM3:
    def test_factors(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, model_type="minicpm3")
        assert (spec.embedding_multiplier, spec.logits_scaling) == (12.0, 10.0)
        assert spec.residual_multiplier == 1.4 / math.sqrt(62)
        spec = spec_of(tmp_path, model_type="minicpm3", scale_depth=None, dim_model_base=None, scale_emb=1)
        assert (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_scaling) == (1.0, 1.0, 1.0)

    def test_width_of_values(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, model_type="minicpm3", hidden_size=96, num_attention_heads=3)
        assert spec.v_head_dim == 32

    @pytest.mark.parametrize("factor", [None, 0.5, 3.0])
    @pytest.mark.parametrize("attention_factor", [None, 1.3])
    def test_longrope(self, tmp_path: Path, factor: float | None, attention_factor: float | None) -> None:
        """Factors for long texts are those for short ones, as released: they hold beyond the original positions."""
        factors = [1.0 + 0.3 * pair for pair in range(16)]
        rope = {"rope_type": "longrope", "rope_theta": 9000.0, "original_max_position_embeddings": 64}
        rope |= {"short_factor": factors, "long_factor": factors}
        rope |= {} if factor is None else {"factor": factor}
        rope |= {} if attention_factor is None else {"attention_factor": attention_factor}
        keys = {"rope_parameters": rope, "max_position_embeddings": 200}
        spec = spec_of(tmp_path, model_type="minicpm3", **keys).rope
        module = MiniCPM3RotaryEmbedding(MiniCPM3Config(**keys))
        assert spec.attention_factor == module.attention_scaling
        np.testing.assert_array_equal(inverse_frequencies(spec), module.inv_freq.numpy())
        cos, sin = module(torch.zeros(1), torch.arange(200)[None])
        expected = torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=1).numpy()
        np.testing.assert_allclose(rotary_cos_sin(spec, 200), expected, rtol=0, atol=3e-7)

    def test_factors_that_depend_on_the_text(self, tmp_path: Path) -> None:
        rope: dict[str, Any] = {"type": "longrope", "original_max_position_embeddings": 64}
        rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        keys = {"model_type": "minicpm3", "rope_scaling": rope}
        assert "short_factor and long_factor differ" in refusal(tmp_path, **keys)
        spec = spec_of(tmp_path, **keys, max_position_embeddings=64)
        assert spec.rope.frequency_factors == (1.0,) * 16
        assert spec.rope.attention_factor == 1.0
        rope["long_factor"] = [2.0] * 15
        assert "long_factor: found 15, expected a list of qk_rope_head_dim / 2 = 16" in refusal(tmp_path, **keys)
        del rope["short_factor"]
        assert "short_factor: found none" in refusal(tmp_path, **keys)

    @pytest.mark.parametrize(
        "change",
        [{"scale_emb": 0}, {"scale_depth": "1"}, {"dim_model_base": 0}, {"mlp_bias": True}, {"v_head_dim": -1}],
        ids=str,
    )
    def test_refusals(self, tmp_path: Path, change: dict[str, Any]) -> None:
        assert next(iter(change)) in refusal(tmp_path, model_type="minicpm3", **change)


class TestMistral4:
    def test_rope_of_an_empty_config(self, tmp_path: Path) -> None:
        spec, config = spec_of(tmp_path, model_type="mistral4"), Mistral4Config()
        module = Mistral4RotaryEmbedding(config)
        np.testing.assert_allclose(inverse_frequencies(spec.rope), module.inv_freq.numpy(), rtol=2e-7)
        assert spec.rope.attention_factor == module.attention_scaling == 1.0
        assert spec.softmax_scale == pytest.approx(Mistral4Attention(config, 0).scaling, rel=1e-15)
        assert spec.query_scaling_beta == 0.1
        assert spec.rope.original_max_position_embeddings == 8192

    def test_no_scaling_without_beta(self, tmp_path: Path) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        assert spec_of(tmp_path, model_type="mistral4", rope_parameters=rope).query_scaling_beta == 0

    @pytest.mark.parametrize("part", [0.25, 1.0, "half"])
    def test_rotary_width(self, tmp_path: Path, part: object) -> None:
        rope = {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": part}
        assert "partial_rotary_factor" in refusal(tmp_path, model_type="mistral4", rope_parameters=rope)
        assert "partial_rotary_factor" in refusal(tmp_path, model_type="mistral4", partial_rotary_factor=part)

    def test_beta_without_positions(self, tmp_path: Path) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
        assert "llama_4_scaling_beta" in refusal(tmp_path, model_type="mistral4", rope_parameters=rope)

    def test_stacked_experts_are_views_of_the_file(self, tmp_path: Path) -> None:
        path, _ = make_checkpoint(tmp_path, "mistral4", rope="mistral")
        checkpoint = Checkpoint.open(path)
        bound = bind(build_weight_map(read_model_spec(checkpoint)), checkpoint, DType.FLOAT32)
        assert not bound["model.layers.1.mlp.experts.down_proj"].flags.owndata
        footprint = weight_footprint(read_model_spec(checkpoint))
        assert footprint.expert_bytes == 4 * 12 * 3 * 36 * 80


class TestAXK1:
    def test_layers(self, tmp_path: Path) -> None:
        keys: dict[str, Any] = {"model_type": "axk1", "num_hidden_layers": 4}
        for change, expected in (
            ({}, [1, 2, 3]),
            ({"first_k_dense_replace": 2}, [2, 3]),
            ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2]),
            ({"mlp_layer_types": ["dense"] * 3 + ["sparse"], "moe_layer_freq": 2}, [3]),
        ):
            spec = spec_of(tmp_path, **keys, **change)
            assert [layer for layer in range(4) if spec.is_moe_layer(layer)] == expected
            if "mlp_layer_types" not in change:
                theirs: Any = AutoConfig.from_pretrained(tmp_path)
                assert [i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"] == expected

    def test_as_released(self, tmp_path: Path) -> None:
        """A norm that dense layers have and do not use, and no correction bias."""
        path, _ = make_checkpoint(tmp_path, "axk1", rope="yarn")
        file = path / "model.safetensors"
        tensors = load_file(file)
        del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(80)
        save_file(tensors, file)
        checkpoint = Checkpoint.open(path)
        skipped = check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint)
        assert skipped.keys() == {"model.layers.0.post_mlp_layernorm.weight"}

    @pytest.mark.parametrize("value", [1e-30, float("nan")])
    def test_a_bias_that_is_not_zero_is_refused(self, tmp_path: Path, value: float) -> None:
        path, _ = make_checkpoint(tmp_path, "axk1", rope="yarn")
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.mlp.gate.e_score_correction_bias"][7] = value
        save_file(tensors, file)
        checkpoint = Checkpoint.open(path)
        with pytest.raises(UserError, match=r"should hold zeros only .*: model\.layers\.1\.mlp\.gate\.e_score_corr"):
            check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint)

    def test_queries_always_have_a_latent(self, tmp_path: Path) -> None:
        assert "q_lora_rank" in refusal(tmp_path, model_type="axk1", q_lora_rank=None)


class TestLongcatFlash:
    def test_factors(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, model_type="longcat_flash")
        assert (spec.query_multiplier, spec.latent_multiplier) == (2.0, math.sqrt(12))
        assert [spec.is_moe_layer(layer) for layer in range(4)] == [True, False, True, False]
        assert all(spec.has_dense_mlp(layer) for layer in range(4))

    def test_published_sizes(self, tmp_path: Path) -> None:
        """560 billion parameters, of which 27 billion take part on average (arXiv:2509.01322)."""
        footprint = weight_footprint(spec_of(tmp_path, model_type="longcat_flash", dtype="bfloat16"))
        assert footprint.parameters == pytest.approx(560e9, rel=5e-3)
        assert footprint.multiplied == pytest.approx(27e9, rel=1e-2)

    def test_prediction_layers_are_skipped(self, tmp_path: Path) -> None:
        path, _ = make_checkpoint(tmp_path, "longcat_flash")
        file = path / "model.safetensors"
        extra = {"model.mtp.layers.0.eh_proj.weight": torch.ones(3), "model.mtp.norm.weight": torch.ones(80)}
        save_file(load_file(file) | extra, file)
        checkpoint = Checkpoint.open(path)
        skipped = check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint)
        assert {skipped[name] for name in extra} == {"multi-token prediction layer"}

    def test_layers_are_kept_in_pairs(self, tmp_path: Path) -> None:
        path, _ = make_checkpoint(tmp_path, "longcat_flash", num_layers=4)
        checkpoint = Checkpoint.open(path)
        spec = read_model_spec(checkpoint)
        skipped = check_checkpoint(build_weight_map(spec, 2), checkpoint)
        second = {name for name in checkpoint.tensors if name.startswith("model.layers.1.")}
        assert {name for name in skipped if not name.startswith("model.layers.0.mlp.experts.")} == second
        with pytest.raises(UserError, match="--num-layers: found 3, expected a multiple of 2"):
            build_weight_map(spec, 3)

    def test_missing_expert(self, tmp_path: Path) -> None:
        path, _ = make_checkpoint(tmp_path, "longcat_flash")
        file = path / "model.safetensors"
        name = "model.layers.0.mlp.experts.8.gate_proj.weight"
        save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)
        checkpoint = Checkpoint.open(path)
        with pytest.raises(UserError, match=f"missing: {name}"):
            check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint)

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"num_layers": 2.5}, "num_layers"),
            ({"num_hidden_layers": 3}, "num_hidden_layers: found 3, expected an even number"),
            ({"head_dim": 128}, "head_dim"),
            ({"router_bias": True}, "router_bias"),
            ({"zero_expert_type": "drop"}, "zero_expert_type"),
            ({"mla_scale_q_lora": False}, "mla_scale_q_lora"),
            ({"q_lora_rank": None}, "q_lora_rank"),
            ({"moe_topk": 769}, "moe_topk: found 769, expected at most 768"),
            ({"zero_expert_num": -1}, "zero_expert_num"),
        ],
        ids=str,
    )
    def test_refusals(self, tmp_path: Path, change: dict[str, Any], expected: str) -> None:
        assert expected in refusal(tmp_path, model_type="longcat_flash", **change)
