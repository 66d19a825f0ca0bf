"""Configs read as transformers reads them, and unusable ones refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, YoutuConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.support.hf import RopeKind, make_checkpoint
from trtllm_mla.checkpoint.architectures import architectures, get_architecture, read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.rope import inverse_frequencies
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 131,
    "hidden_size": 80,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 56,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 40,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}

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
]
OTHER_KEYS = ["rms_norm_eps", "hidden_act", "attention_bias", "tie_word_embeddings", "bos_token_id"]


def spec_of(directory: Path, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return read_model_spec(Checkpoint.open(directory))


def refusal(directory: Path, config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        spec_of(directory, config)
    message = str(caught.value)
    assert "config.json" in message
    assert "\n" not in message
    return message


class TestAgainstTransformers:
    @pytest.mark.parametrize(
        ("model_type", "config_class"), [("deepseek_v3", DeepseekV3Config), ("youtu", YoutuConfig)]
    )
    def test_defaults_of_missing_keys(self, tmp_path: Path, model_type: str, config_class: Any) -> None:
        layers = {"num_hidden_layers": 3} if model_type == "deepseek_v3" else {}
        spec = spec_of(tmp_path, {"model_type": model_type} | layers)
        expected = config_class(**layers)
        for name in [*SIZES, *OTHER_KEYS]:
            assert getattr(spec, name) == getattr(expected, name), name
        assert spec.eos_token_ids == (expected.eos_token_id,)
        assert spec.rope.interleaved == expected.rope_interleave
        assert spec.rope.theta == expected.rope_parameters["rope_theta"]
        assert spec.rope.rope_type == expected.rope_parameters["rope_type"] == "default"
        assert spec.dtype is DType.FLOAT32

    @pytest.mark.parametrize("model_type", ["deepseek_v3", "youtu"])
    @pytest.mark.parametrize("rope", ["default", "linear", "yarn"])
    @pytest.mark.parametrize("variant", [{}, {"q_lora_rank": None, "attention_bias": True, "tie": True}])
    def test_saved_model(self, tmp_path: Path, model_type: Any, rope: RopeKind, variant: dict[str, Any]) -> None:
        path, model = make_checkpoint(
            tmp_path / "checkpoint", model_type, rope=rope, rope_interleave=False, dtype="float16", **variant
        )
        checkpoint = Checkpoint.open(path)
        spec = read_model_spec(checkpoint)
        attention = model.model.layers[0].self_attn
        assert spec.softmax_scale == pytest.approx(attention.scaling, rel=1e-15)
        assert spec.latent_norm_eps == attention.kv_a_layernorm.variance_epsilon
        assert spec.rms_norm_eps == model.model.norm.variance_epsilon
        assert spec.dtype is DType.FLOAT16
        assert not spec.rope.interleaved
        assert spec.eos_token_ids == ()
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert get_architecture(model_type, source="test").tensors(spec) == shapes

    @pytest.mark.parametrize(
        "keys",
        [
            {"rope_theta": 50000.0},
            {"rope_scaling": None, "rope_theta": 7777},
            {"rope_scaling": {}, "rope_parameters": {"rope_theta": 123.0}},
            {"rope_scaling": {"other": 1}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
            {"rope_scaling": {"type": "linear", "factor": 3}},
            {"rope_scaling": {"type": "linear", "factor": 3, "mscale_all_dim": 1.0}},
            {"rope_scaling": {"type": "default", "mscale_all_dim": 1.0, "factor": 4.0}},
            {"rope_scaling": {"type": "linear", "factor": 3}, "rope_parameters": {"rope_theta": 77.0}},
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            {"rope_parameters": {"type": "linear", "factor": 3.0}, "rope_theta": 9000.0},
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 8.0}, "rope_theta": 9000.0},
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 100},
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                "original_max_position_embeddings": 100,
            },
            {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
            {"rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": None, "beta_slow": 2, "mscale": 0.707}},
            {
                "rope_theta": 10000,
                "rope_scaling": {
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "factor": 40,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                    "type": "yarn",
                },
            },
        ],
        ids=str,
    )
    def test_spellings_of_rope(self, tmp_path: Path, keys: dict[str, Any]) -> None:
        spec = spec_of(tmp_path, SMALL | keys)
        config = AutoConfig.from_pretrained(tmp_path)
        module = DeepseekV3RotaryEmbedding(config)
        assert spec.rope.rope_type == module.rope_type
        assert spec.rope.attention_factor == module.attention_scaling
        torch.testing.assert_close(
            torch.from_numpy(inverse_frequencies(spec.rope)), module.inv_freq, rtol=2e-7, atol=0
        )
        assert spec.softmax_scale == pytest.approx(DeepseekV3Attention(config, 0).scaling, rel=1e-15)

    @pytest.mark.parametrize(
        ("config_eos", "generation_config", "expected"),
        [
            (7, None, (7,)),
            ([7, 9], None, (7, 9)),
            (None, None, ()),
            (7, {"eos_token_id": [9, 11]}, (9, 11)),
            (7, {"eos_token_id": 3}, (3,)),
            (7, {}, ()),
        ],
    )
    def test_stop_tokens(
        self, tmp_path: Path, config_eos: Any, generation_config: dict[str, Any] | None, expected: tuple[int, ...]
    ) -> None:
        path, _ = make_checkpoint(tmp_path, eos_token_id=config_eos)
        if generation_config is None:
            (path / "generation_config.json").unlink()
        else:
            (path / "generation_config.json").write_text(json.dumps(generation_config))
        assert read_model_spec(Checkpoint.open(path)).eos_token_ids == expected
        used = AutoModelForCausalLM.from_pretrained(path).generation_config.eos_token_id
        assert (() if used is None else (used,) if isinstance(used, int) else tuple(used)) == expected

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"dtype": "float16"}, DType.FLOAT16),
            ({"torch_dtype": "bfloat16"}, DType.BFLOAT16),
            ({"dtype": "float16", "torch_dtype": "bfloat16"}, DType.FLOAT16),
            ({"torch_dtype": "torch.bfloat16"}, DType.BFLOAT16),
            ({"dtype": None}, DType.FLOAT32),
        ],
    )
    def test_dtype(self, tmp_path: Path, keys: dict[str, Any], expected: DType) -> None:
        config = {name: value for name, value in SMALL.items() if name != "dtype"}
        assert spec_of(tmp_path, config | keys).dtype is expected


def test_softmax_scale_of_deepseek_v3(tmp_path: Path) -> None:
    """The factor that is forgotten most often: 1.874 for V3's context extension."""
    rope = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    spec = spec_of(tmp_path, {"model_type": "deepseek_v3", "first_k_dense_replace": 61, "rope_scaling": rope})
    assert spec.softmax_scale * math.sqrt(192) == pytest.approx(1.874, abs=5e-4)
    assert spec.rope.attention_factor == 1.0
    assert spec.latent_width == 576


class TestRefusals:
    @pytest.mark.parametrize("model_type", ["kimi_k2", "llama", "deepseek_v2", None, 3, ["youtu"]])
    def test_model_type(self, tmp_path: Path, model_type: object) -> None:
        message = refusal(tmp_path, SMALL | {"model_type": model_type})
        assert "deepseek_v3, youtu" in message

    @pytest.mark.parametrize(
        ("dense", "expected"), [(0, "layers 0 to 1"), (1, "layer 1 has"), (None, "first_k_dense_replace")]
    )
    def test_mixture_of_experts(self, tmp_path: Path, dense: int | None, expected: str) -> None:
        assert expected in refusal(tmp_path, SMALL | {"first_k_dense_replace": dense})

    def test_mixture_of_experts_by_default(self, tmp_path: Path) -> None:
        assert "layers 3 to 60" in refusal(tmp_path, {"model_type": "deepseek_v3"})

    @pytest.mark.parametrize(
        "change",
        [{name: value} for name in SIZES for value in (0, -8, "64", 64.0, True, (1 << 24) + 2, [64], float("nan"))],
        ids=str,
    )
    def test_sizes(self, tmp_path: Path, change: dict[str, Any]) -> None:
        assert next(iter(change)) in refusal(tmp_path, SMALL | change)

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"kv_lora_rank": None}, "kv_lora_rank"),
            ({"v_head_dim": None}, "v_head_dim"),
            ({"num_key_value_heads": 1}, "expected num_attention_heads = 5"),
            ({"qk_rope_head_dim": 33}, "even"),
            ({"head_dim": 64}, "head_dim: found 64, expected qk_rope_head_dim = 32"),
            ({"hidden_act": "gelu"}, "silu"),
            ({"rms_norm_eps": 0}, "rms_norm_eps"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
            ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
            ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
            ({"dtype": 16}, "dtype"),
            ({"attention_bias": "yes"}, "attention_bias"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
            ({"rope_interleave": "no"}, "rope_interleave"),
            ({"eos_token_id": -1}, "eos_token_id"),
            ({"eos_token_id": [1, "2"]}, "eos_token_id"),
            ({"bos_token_id": 1.5}, "bos_token_id"),
            ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
            ({"architectures": ["DeepseekV3ForSequenceClassification"]}, "DeepseekV3ForCausalLM"),
            ({"architectures": "DeepseekV3ForCausalLM"}, "architectures"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"rope_theta": 0}, "rope_theta"),
            ({"rope_theta": float("inf")}, "rope_theta"),
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
            ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "'longrope'"),
            ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3'"),
            ({"rope_scaling": {"type": "linear"}}, "factor"),
            ({"rope_scaling": {"type": "yarn"}}, "factor"),
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
            ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": -14.0}}, "mscale"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1e7}}, "mscale_all_dim"),
            ({"num_hidden_layers": 4096, "first_k_dense_replace": 4096}, "num_hidden_layers"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "original"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
            ({"rope_scaling": "yarn"}, "rope_scaling"),
            ({"rope_scaling": [1]}, "rope_scaling"),
        ],
        ids=str,
    )
    def test_values(self, tmp_path: Path, change: dict[str, Any], expected: str) -> None:
        assert expected in refusal(tmp_path, SMALL | change)

    def test_stop_tokens_of_the_generation_config(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id"):
            spec_of(tmp_path, SMALL, {"eos_token_id": "x"})


def test_registry_finds_each_architecture_by_its_module() -> None:
    assert architectures().keys() == {"deepseek_v3", "youtu"}
