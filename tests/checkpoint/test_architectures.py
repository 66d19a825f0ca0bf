"""Configs read as transformers reads them, and unusable ones refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.support.configs import published_spec
from tests.support.hf import ModelType, RopeKind, make_checkpoint
from trtllm_mla.checkpoint.architectures import architectures, get_architecture, read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.rope import inverse_frequencies
from trtllm_mla.checkpoint.spec import ModelSpec, MoeSpec
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
MOE_KEYS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "n_group": "n_group",
    "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
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
        "model_type", ["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu"]
    )
    def test_defaults_of_missing_keys(self, tmp_path: Path, model_type: str) -> None:
        # transformers has no usable default for it in V2.
        keys = {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}
        spec = spec_of(tmp_path, {"model_type": model_type} | keys)
        expected: Any = AutoConfig.for_model(model_type, **keys)
        for name in [*SIZES, *OTHER_KEYS]:
            assert getattr(spec, name) == getattr(expected, name), name
        assert spec.eos_token_ids == (expected.eos_token_id,)
        assert spec.rope.interleaved == getattr(expected, "rope_interleave", True)
        assert spec.rope.theta == expected.rope_parameters["rope_theta"]
        assert spec.rope.rope_type == expected.rope_parameters["rope_type"] == "default"
        assert spec.dtype is DType.FLOAT32
        if model_type == "youtu":
            assert spec.moe is None
            return
        assert spec.moe is not None
        for ours, theirs in MOE_KEYS.items():
            assert getattr(spec.moe, ours) == (getattr(expected, theirs) or 1), theirs
        assert spec.moe.shared_intermediate_size == expected.n_shared_experts * expected.moe_intermediate_size
        assert spec.moe.norm_topk_prob == expected.norm_topk_prob
        types = getattr(expected, "mlp_layer_types", None)
        first_sparse = types.index("sparse") if types else expected.first_k_dense_replace
        assert spec.moe.first_k_dense_replace == first_sparse
        assert spec.num_moe_layers(spec.num_hidden_layers) == expected.num_hidden_layers - first_sparse

    @pytest.mark.parametrize("model_type", ["deepseek_v3", "youtu"])
    @pytest.mark.parametrize("rope", ["default", "linear", "yarn"])
    @pytest.mark.parametrize("variant", [{}, {"q_lora_rank": None, "attention_bias": True, "tie": True}])
    def test_saved_model(self, tmp_path: Path, model_type: Any, rope: RopeKind, variant: dict[str, Any]) -> None:
        self.check_saved(tmp_path, model_type, rope=rope, rope_interleave=False, **variant)

    @pytest.mark.parametrize(
        ("model_type", "variant"),
        [
            ("deepseek_v2", {}),
            ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True}),
            ("deepseek_v3", {"first_k_dense_replace": 1, "rope_interleave": False}),
            ("deepseek_v3", {"first_k_dense_replace": 0, "num_layers": 1, "tie": True}),
            ("glm4_moe_lite", {"num_layers": 3}),
            ("kimi_k2", {}),
            ("sarvam_mla", {"q_lora_rank": None}),
        ],
    )
    def test_saved_mixture_of_experts(self, tmp_path: Path, model_type: ModelType, variant: dict[str, Any]) -> None:
        spec = self.check_saved(tmp_path, model_type, rope="yarn", **variant)
        assert spec.moe is not None
        assert spec.moe.correction_bias == (model_type != "deepseek_v2")
        assert spec.moe.scoring_func == ("softmax" if model_type == "deepseek_v2" else "sigmoid")

    @staticmethod
    def check_saved(directory: Path, model_type: ModelType, **values: Any) -> ModelSpec:
        """Checks the spec of a saved model, and that its tensors are those on disk."""
        path, model = make_checkpoint(directory / "checkpoint", model_type, dtype="float16", **values)
        checkpoint = Checkpoint.open(path)
        spec = read_model_spec(checkpoint)
        attention = model.model.layers[0].self_attn
        assert spec.softmax_scale == pytest.approx(attention.scaling, rel=1e-15)
        assert spec.latent_norm_eps == attention.kv_a_layernorm.variance_epsilon
        assert spec.rms_norm_eps == model.model.norm.variance_epsilon
        assert spec.dtype is DType.FLOAT16
        assert spec.rope.interleaved == values.get("rope_interleave", True)
        assert spec.eos_token_ids == ()
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        assert get_architecture(model_type, source="test").tensors(spec) == shapes
        for number, layer in enumerate(model.model.layers):
            assert spec.is_moe_layer(number) == hasattr(layer.mlp, "experts")
        return spec

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
    @pytest.mark.parametrize("model_type", ["deepseek_v1", "llama", None, 3, ["youtu"]])
    def test_model_type(self, tmp_path: Path, model_type: object) -> None:
        message = refusal(tmp_path, SMALL | {"model_type": model_type})
        assert ", ".join(sorted(architectures())) in message

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"first_k_dense_replace": None}, "first_k_dense_replace"),
            ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
            ({"moe_layer_freq": 0}, "moe_layer_freq"),
            ({"n_routed_experts": 0}, "n_routed_experts"),
            ({"n_routed_experts": 1 << 20}, "n_routed_experts"),
            ({"n_shared_experts": 0}, "n_shared_experts"),
            ({"n_shared_experts": 4096, "moe_intermediate_size": 1 << 20}, "n_shared_experts * moe_intermediate_size"),
            ({"moe_intermediate_size": None}, "moe_intermediate_size"),
            ({"num_experts_per_tok": 129}, "num_experts_per_tok: found 129, expected at most 128: the experts of"),
            ({"n_group": 1, "topk_group": 1, "num_experts_per_tok": 257}, "at most 256: n_routed_experts"),
            ({"n_group": 7}, "n_group: found 7, expected a divisor of n_routed_experts = 256"),
            ({"n_group": 256}, "groups of at least 2"),
            ({"topk_group": 9}, "topk_group: found 9, expected at most n_group = 8"),
            ({"scoring_func": "softmax"}, "'sigmoid'"),
            ({"topk_method": "greedy"}, "'noaux_tc'"),
            ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
            ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ],
        ids=str,
    )
    def test_experts(self, tmp_path: Path, change: dict[str, Any], expected: str) -> None:
        assert expected in refusal(tmp_path, SMALL | change)

    @pytest.mark.parametrize(
        ("model_type", "change", "expected"),
        [
            ("deepseek_v2", {}, "num_experts_per_tok: missing"),
            ("deepseek_v2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "routed_scaling_factor"),
            ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "noaux_tc"}, "topk_method"),
            ("deepseek_v2", {"num_experts_per_tok": 6, "mlp_bias": True}, "mlp_bias"),
            ("deepseek_v2", {"num_experts_per_tok": 6, "rope_interleave": False}, "rope_interleave"),
            ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
            ("glm4_moe_lite", {"mlp_layer_types": "dense"}, "mlp_layer_types"),
            ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 46}, "found 46 layers, expected num_hidden_layers = 47"),
            ("glm4_moe_lite", {"mlp_layer_types": [["sparse"]]}, "mlp_layer_types"),
            ("sarvam_mla", {"rope_scaling": {"type": "deepseek_yarn"}}, "factor"),
        ],
        ids=str,
    )
    def test_keys_of_an_architecture(
        self, tmp_path: Path, model_type: str, change: dict[str, Any], expected: str
    ) -> None:
        assert expected in refusal(tmp_path, {"model_type": model_type} | change)

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
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method: found 'gptq'"),
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
    expected = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "sarvam_mla", "youtu"}
    assert architectures().keys() >= expected


class TestExperts:
    """Which layers have experts, and configs as they were published."""

    @pytest.mark.parametrize(
        ("first", "frequency", "expected"),
        [(0, 1, [0, 1, 2, 3, 4]), (1, 2, [2, 4]), (3, 2, [4]), (5, 1, []), (3, 5, [])],
    )
    def test_layers(self, tmp_path: Path, first: int, frequency: int, expected: list[int]) -> None:
        keys = {"num_hidden_layers": 5, "first_k_dense_replace": first, "moe_layer_freq": frequency}
        spec = spec_of(tmp_path, SMALL | keys)
        assert [layer for layer in range(5) if spec.is_moe_layer(layer)] == expected
        assert [spec.num_moe_layers(layers) for layers in (0, 5)] == [0, len(expected)]
        assert (spec.moe is None) == (not expected)

    def test_glm_lists_its_layers(self, tmp_path: Path) -> None:
        keys: dict[str, Any] = {"model_type": "glm4_moe_lite", "num_hidden_layers": 4}
        spec = spec_of(tmp_path, keys | {"mlp_layer_types": ["dense"] * 3 + ["sparse"]})
        assert [spec.is_moe_layer(layer) for layer in range(4)] == [False, False, False, True]
        assert spec_of(tmp_path, keys | {"mlp_layer_types": ["dense"] * 4}).moe is None

    def test_a_greedy_router_has_no_groups(self, tmp_path: Path) -> None:
        keys = {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}
        for method, groups in (("greedy", (1, 1)), ("group_limited_greedy", (8, 3))):
            moe = spec_of(tmp_path, keys | {"topk_method": method}).moe
            assert moe is not None
            assert (moe.n_group, moe.topk_group) == groups

    def test_sarvam_as_first_published(self, tmp_path: Path) -> None:
        """The older names of keys and of the rope type, and a ``head_dim`` that means something else."""
        rope = {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
        config = {
            "model_type": "sarvam_mla",
            "architectures": ["SarvamMLAForCausalLM"],
            "num_experts": 96,
            "num_shared_experts": 2,
            "q_head_dim": 192,
            "head_dim": 576,
            "rope_scaling": rope | {"type": "deepseek_yarn"},
        }
        spec = spec_of(tmp_path, config)
        theirs: Any = AutoConfig.from_pretrained(tmp_path)
        assert spec.moe is not None
        assert spec.moe.num_experts == theirs.n_routed_experts == 96
        assert spec.moe.shared_intermediate_size == 2 * 2048
        assert spec.rope.rope_type == "yarn" == theirs.rope_parameters["rope_type"]
        assert spec.softmax_scale == pytest.approx(DeepseekV3Attention(theirs, 0).scaling, rel=1e-15)
        torch.testing.assert_close(
            torch.from_numpy(inverse_frequencies(spec.rope)),
            DeepseekV3RotaryEmbedding(theirs).inv_freq,
            rtol=2e-7,
            atol=0,
        )

    def test_deepseek_v3_as_published(self) -> None:
        spec = published_spec("deepseek_v3")
        assert spec.moe == MoeSpec(
            num_experts=256,
            top_k=8,
            intermediate_size=2048,
            shared_intermediate_size=2048,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            correction_bias=True,
            first_k_dense_replace=3,
            moe_layer_freq=1,
        )
        assert spec.softmax_scale * math.sqrt(192) == pytest.approx(1.874, abs=5e-4)

    def test_deepseek_v2_lite_as_published(self) -> None:
        """YaRN with mscale 0.707: 1.59 times the usual scale, and cosines that stay as they are."""
        spec = published_spec("deepseek_v2_lite")
        assert spec.q_lora_rank is None
        assert spec.softmax_scale * math.sqrt(192) == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)
        assert spec.rope.attention_factor == 1.0
