"""Language models inside models that also see: released names, and all else of such checkpoints left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.fp8 import quantize_checkpoint
from tests.support.hf import ModelType, RopeKind, make_checkpoint
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.spec import Fp8Spec, ModelSpec
from trtllm_mla.checkpoint.weights import bind, build_weight_map, check_checkpoint
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

WHOLE: dict[ModelType, tuple[ModelType, RopeKind]] = {
    "mistral3": ("mistral4", "mistral"),
    "kimi_k25": ("kimi_k2", "yarn"),
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_k25",
    "architectures": ["KimiK25ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"},
    "vision_config": {"hidden_size": 3},
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "text_config": {"model_type": "mistral4"},
    "vision_config": {"hidden_size": 3},
}
# As Mistral-Small-4 and Kimi-K2.5 are released.
STATIC_FP8 = {
    "activation_scheme": "static",
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
PACKED_INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def spec_of(directory: Path, config: dict[str, Any]) -> ModelSpec:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_spec(Checkpoint.open(directory))


def refusal(directory: Path, config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        spec_of(directory, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def table(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with changes of its ``text_config``."""
    return config | {"text_config": config["text_config"] | changes}


@pytest.mark.parametrize("model_type", WHOLE)
def test_same_network_as_the_language_model_alone(tmp_path: Path, model_type: ModelType) -> None:
    text_type, rope = WHOLE[model_type]
    path, model = make_checkpoint(tmp_path / "whole", model_type, rope=rope, seed=3, dtype="bfloat16")
    alone = Checkpoint.open(make_checkpoint(tmp_path / "alone", text_type, rope=rope, seed=3, dtype="bfloat16").path)
    whole = Checkpoint.open(path)
    spec, text_spec = read_model_spec(whole), read_model_spec(alone)
    assert spec == replace(text_spec, model_type=model_type, hf_architecture=type(model).__name__)
    assert spec.dtype is DType.BFLOAT16
    bound = bind(build_weight_map(spec), whole, spec.dtype)
    expected = bind(build_weight_map(text_spec), alone, spec.dtype)
    assert list(bound) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(bound[name], expected[name])
    skipped = check_checkpoint(build_weight_map(spec), whole)
    assert skipped.keys() == {name for name in whole.tensors if not name.startswith("language_model.")}
    assert set(skipped.values()) == {"not part of the language model"}
    assert len(skipped) > 10


@pytest.mark.parametrize("model_type", WHOLE)
def test_transformers_reads_the_same_checkpoint(tmp_path: Path, model_type: ModelType) -> None:
    """The names in it are those of released files, and every one is used there too."""
    path, model = make_checkpoint(tmp_path, model_type, rope=WHOLE[model_type][1], seed=3)
    loaded, info = type(model).from_pretrained(path, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values())
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_layers_that_predict_or_are_left_out(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path, "kimi_k25", num_layers=3)
    file = path / "model.safetensors"
    extra = {f"language_model.model.layers.3.{name}": torch.ones(2) for name in ("eh_proj.weight", "mlp.gate.weight")}
    save_file(load_file(file) | extra, file)
    checkpoint = Checkpoint.open(path)
    skipped = check_checkpoint(build_weight_map(read_model_spec(checkpoint), 2), checkpoint)
    assert {skipped[name] for name in extra} == {"multi-token prediction layer"}
    third = {name for name in checkpoint.tensors if name.startswith("language_model.model.layers.2.")}
    assert {skipped[name] for name in third} == {"the network has 2 layers"}


def test_a_tied_head(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path, "kimi_k25", tie=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    save_file(tensors | {head: tensors[embedding].clone()}, file)
    checkpoint = Checkpoint.open(path)
    assert head in check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint)
    save_file(tensors | {head: tensors[embedding] + 1}, file)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(UserError, match=r"found language_model\.lm_head\.weight that differs"):
        check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint)


def test_an_unknown_part_is_an_error(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path, "mistral3", rope="mistral")
    file = path / "model.safetensors"
    save_file(load_file(file) | {"audio_tower.weight": torch.ones(2)}, file)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(UserError, match=r"not part of the network: audio_tower\.weight"):
        check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint)


@pytest.mark.parametrize("of_the_whole", [True, False])
def test_fp8_language_model(tmp_path: Path, of_the_whole: bool) -> None:
    """Block scales are found under the prefix; the config may say it in either table."""
    alone = quantize_checkpoint(make_checkpoint(tmp_path / "alone", "kimi_k2", seed=4)).path
    config = json.loads((alone / "config.json").read_text())
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(alone / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.weight": torch.ones(2)}, whole / "model.safetensors")
    top = {"quantization_config": config.pop("quantization_config")} if of_the_whole else {}
    spec = spec_of(whole, {"model_type": "kimi_k25", "tie_word_embeddings": False, "text_config": config} | top)
    assert spec.quantization == Fp8Spec()
    bound = bind(build_weight_map(spec), Checkpoint.open(whole), DType.FLOAT32)
    opened = Checkpoint.open(alone)
    expected = bind(build_weight_map(read_model_spec(opened)), opened, DType.FLOAT32)
    assert list(bound) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(bound[name], expected[name])


class TestConfig:
    def test_defaults_are_those_of_the_language_model(self, tmp_path: Path) -> None:
        kimi, mistral = spec_of(tmp_path, KIMI), spec_of(tmp_path, MISTRAL)
        assert (kimi.model_type, kimi.hf_architecture) == ("kimi_k25", "KimiK25ForConditionalGeneration")
        assert (kimi.num_hidden_layers, kimi.hidden_size, kimi.dtype) == (61, 7168, DType.BFLOAT16)
        assert (mistral.num_hidden_layers, mistral.kv_lora_rank, mistral.dtype) == (36, 256, DType.BFLOAT16)
        assert mistral.query_scaling_beta == 0.1
        assert not mistral.tie_word_embeddings

    def test_what_the_whole_says_in_place_of_the_table(self, tmp_path: Path) -> None:
        whole = {"eos_token_id": 7, "bos_token_id": 6, "torch_dtype": "float16"}
        spec = spec_of(tmp_path, table(KIMI, dtype=None) | whole)
        assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((7,), 6, DType.FLOAT16)
        spec = spec_of(tmp_path, table(KIMI, eos_token_id=3) | whole)
        assert (spec.eos_token_ids, spec.dtype) == ((3,), DType.BFLOAT16)

    def test_the_head_is_tied_as_the_whole_says(self, tmp_path: Path) -> None:
        """transformers reads it there only, and its default there is true."""
        assert spec_of(tmp_path, {name: KIMI[name] for name in ("model_type", "text_config")}).tie_word_embeddings
        assert not spec_of(tmp_path, table(KIMI, tie_word_embeddings=True)).tie_word_embeddings

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (MISTRAL | {"text_config": None}, "text_config: found none, expected a table"),
            (MISTRAL | {"text_config": [1]}, "text_config: found list, expected a table"),
            (table(MISTRAL, model_type="mistral"), "text_config.model_type: found 'mistral', expected 'mistral4'"),
            (table(MISTRAL, model_type=None), "text_config.model_type: found None, expected 'mistral4'"),
            (table(KIMI, model_type="llama"), "found 'llama', expected 'kimi_k2' or 'deepseek_v3'"),
            (table(KIMI, kv_lora_rank=0), "text_config.kv_lora_rank: found 0"),
            (table(KIMI, rope_scaling={"type": "yarn"}), "factor"),
            (KIMI | {"architectures": ["KimiK25Model"]}, "expected Kimi_K25ForConditionalGeneration or KimiK25"),
            (KIMI | {"tie_word_embeddings": 3}, "config.json: tie_word_embeddings: found 3"),
            (MISTRAL | {"dtype": "float8_e4m3fn"}, "found dtype 'float8_e4m3fn'"),
            (
                MISTRAL | {"quantization_config": STATIC_FP8},
                "config.json: quantization_config.weight_block_size: found null, which is one scale for a whole",
            ),
            (
                table(KIMI, quantization_config=PACKED_INT4),
                "text_config.quantization_config.quant_method: found 'compressed-tensors', expected 'fp8'",
            ),
        ],
    )
    def test_refusals(self, tmp_path: Path, config: dict[str, Any], expected: str) -> None:
        assert expected in refusal(tmp_path, config)
