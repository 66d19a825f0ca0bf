"""The reference against the model that made the checkpoint, and against cached rows computed without transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.fp8 import DEEPSEEK_CONFIG, PROJECTIONS, dequantize, quantize, quantize_checkpoint
from tests.support.hf import make_checkpoint
from tests.validation.cases import make_case
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.validation.reference import ReferenceModel, deinterleave, interleave

TOKENS = [5, 17, 17, 130, 0, 42, 99]


def test_interleave_puts_pairs_side_by_side():
    stored = np.array([[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]])
    assert interleave(stored).tolist() == [[0.0, 10.0, 1.0, 11.0, 2.0, 12.0]]


def test_deinterleave_undoes_interleave():
    rows = np.random.default_rng(0).standard_normal((3, 8))
    np.testing.assert_array_equal(deinterleave(interleave(rows)), rows)
    np.testing.assert_array_equal(interleave(deinterleave(rows)), rows)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "youtu"])
def test_reading_its_own_rows_changes_nothing(tmp_path, model_type, interleaved):
    case = make_case(tmp_path, model_type, rope="linear", rope_interleave=interleaved, seed=3)
    reference = case.load_reference()
    expected = reference.run(TOKENS)
    output = reference.run(TOKENS, cached_rows=expected.latents)
    np.testing.assert_array_equal(output.logits, expected.logits)
    np.testing.assert_array_equal(output.latents, expected.latents)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "youtu"])
def test_reading_other_rows(tmp_path, model_type, interleaved):
    """Beside the model with hooks that change what its layers make, and with rotary keys turned by the same angle."""
    case = make_case(tmp_path, model_type, rope="linear", rope_interleave=interleaved, seed=3)
    model, spec = case.checkpoint.model, case.spec
    rank, half = spec.kv_lora_rank, spec.qk_rope_head_dim // 2
    random = np.random.default_rng(4)
    shape = (spec.num_hidden_layers, len(TOKENS))
    latents = random.standard_normal((*shape, rank)).astype(np.float32)
    keys = random.standard_normal((*shape, half)) + 1j * random.standard_normal((*shape, half))
    angle = np.arange(len(TOKENS))[:, None] / 4.0 * 10000.0 ** (-np.arange(half) / half)

    def as_stored(pairs):
        parts = [pairs.real, pairs.imag]
        joined = np.stack(parts, -1).reshape(*shape, -1) if interleaved else np.concatenate(parts, -1)
        return joined.astype(np.float32)

    made, own = as_stored(keys), []
    handles = []
    for layer, module in enumerate(model.model.layers):

        def project(_module, _inputs, output, layer=layer):
            own.append(output[0].numpy())
            return torch.cat([output[..., :rank], torch.from_numpy(made[layer])[None]], -1)

        def normalise(_module, _inputs, output, layer=layer):
            own.append(output[0].numpy())
            return torch.from_numpy(latents[layer])[None]

        handles.append(module.self_attn.kv_a_proj_with_mqa.register_forward_hook(project))
        handles.append(module.self_attn.kv_a_layernorm.register_forward_hook(normalise))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    for handle in handles:
        handle.remove()

    rows = np.concatenate([latents, as_stored(keys * np.exp(1j * angle))], -1)
    reference = case.load_reference()
    output = reference.run(TOKENS, cached_rows=list(rows))
    np.testing.assert_allclose(output.logits, expected, atol=2e-5)
    assert np.abs(output.logits - reference.run(TOKENS).logits).max() > 0.5
    # What it would have cached itself is what comes back.
    for layer, found in enumerate(output.latents):
        np.testing.assert_allclose(found[:, :rank], own[2 * layer + 1], atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_logits_and_cached_rows(tmp_path, interleaved):
    case = make_case(tmp_path, rope="linear", rope_interleave=interleaved, seed=3)
    model, spec = case.checkpoint.model, case.spec
    captured = []
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _m, _i, output: captured.append(output))
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(lambda _m, _i, output: captured.append(output))
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    output = case.load_reference().run(TOKENS)
    np.testing.assert_array_equal(output.logits, logits)
    assert len(output.latents) == spec.num_hidden_layers

    half = spec.qk_rope_head_dim // 2
    angle = np.arange(len(TOKENS))[:, None] / 4.0 * 10000.0 ** (-np.arange(half) / half)
    rotation = np.exp(1j * angle)
    for layer, rows in enumerate(output.latents):
        projected, latent = (item[0].numpy() for item in captured[2 * layer : 2 * layer + 2])
        np.testing.assert_array_equal(rows[:, : spec.kv_lora_rank], latent)
        k_pe, stored = projected[:, spec.kv_lora_rank :], rows[:, spec.kv_lora_rank :]
        if interleaved:
            pairs, found = k_pe[:, ::2] + 1j * k_pe[:, 1::2], stored[:, ::2] + 1j * stored[:, 1::2]
        else:
            pairs, found = k_pe[:, :half] + 1j * k_pe[:, half:], stored[:, :half] + 1j * stored[:, half:]
        np.testing.assert_allclose(found, pairs * rotation, atol=2e-6)


def test_generate_is_greedy_and_nothing_stops_it(tmp_path):
    case = make_case(tmp_path, seed=5)
    expected = list(TOKENS)
    for _ in range(9):
        with torch.no_grad():
            expected.append(int(case.checkpoint.model(torch.tensor([expected])).logits[0, -1].argmax()))
    expected = expected[len(TOKENS) :]
    # A generation config that samples, stops at the first token it would choose, and forbids repetition.
    values = {"do_sample": True, "temperature": 5.0, "eos_token_id": expected[0], "repetition_penalty": 9.0}
    (case.checkpoint.path / "generation_config.json").write_text(json.dumps(values))
    reference = case.load_reference()
    assert reference.generate(TOKENS, 9) == expected
    assert reference.generate(TOKENS, 9) == expected


def test_dtype_of_the_reference(yarn_case):
    reference = ReferenceModel.load(yarn_case.checkpoint.path, yarn_case.spec, DType.BFLOAT16)
    assert "bfloat16" in reference.description
    exact = yarn_case.load_reference().run(TOKENS).logits
    rounded = reference.run(TOKENS).logits
    assert rounded.dtype == np.float32
    assert 1e-4 < np.abs(rounded - exact).max() < 1.0


def test_fewer_layers(yarn_case):
    reference = ReferenceModel.load(yarn_case.checkpoint.path, replace(yarn_case.spec, num_hidden_layers=1))
    output = reference.run(TOKENS)
    assert len(output.latents) == 1
    np.testing.assert_array_equal(output.latents[0], yarn_case.load_reference().run(TOKENS).latents[0])


def test_loading_prints_nothing(yarn_case, capfd):
    yarn_case.load_reference().generate(TOKENS, 2)
    assert capfd.readouterr() == ("", "")


def test_a_missing_weight_is_refused(yarn_case, tmp_path):
    shutil.copytree(yarn_case.checkpoint.path, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight, and would fill"):
        ReferenceModel.load(tmp_path / "copy", yarn_case.spec)


def test_a_checkpoint_without_weights_or_with_pickles_is_refused(yarn_case, tmp_path):
    shutil.copytree(yarn_case.checkpoint.path, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="complete checkpoint"):
        ReferenceModel.load(tmp_path / "copy", yarn_case.spec)
    torch.save(yarn_case.checkpoint.model.state_dict(), tmp_path / "copy" / "pytorch_model.bin")
    with pytest.raises(UserError, match="complete checkpoint"):
        ReferenceModel.load(tmp_path / "copy", yarn_case.spec)


def test_code_in_a_checkpoint_does_not_run(yarn_case, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(yarn_case.checkpoint.path, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match="cannot load it"):
        ReferenceModel.load(copy, yarn_case.spec)
    assert not (tmp_path / "ran").exists()


def test_fp8_weights_are_dequantised(tmp_path):
    """Sizes that blocks of 128 do not divide, which transformers would refuse."""
    made = make_checkpoint(tmp_path / "checkpoint", hidden_size=144, intermediate_size=300, first_k_dense_replace=1)
    checkpoint = quantize_checkpoint(made)
    spec = read_model_spec(Checkpoint.open(checkpoint.path))
    output = ReferenceModel.load(checkpoint.path, spec).run([3, 1, 4, 1, 5])
    with torch.no_grad():
        expected = checkpoint.model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0].numpy()
    assert np.abs(output.logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("table", ["text_config", None])
def test_fp8_weights_of_a_language_model_inside_another(tmp_path, table):
    """As transformers' own loading of the dequantised weights; the config may say it for the part or the whole."""
    path, model = make_checkpoint(tmp_path / "checkpoint", "kimi_k25", rope="yarn", seed=5)
    plain = tmp_path / "plain"
    shutil.copytree(path, plain)
    stored, values = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stored[name] = values[name] = tensor
        if name.startswith("language_model.") and name.removesuffix(".weight").rpartition(".")[2] in PROJECTIONS:
            stored[name], stored[f"{name}_scale_inv"] = quantize(tensor)
            values[name] = dequantize(stored[name], stored[f"{name}_scale_inv"])
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (config if table is None else config[table])["quantization_config"] = DEEPSEEK_CONFIG
    (path / "config.json").write_text(json.dumps(config))

    spec = read_model_spec(Checkpoint.open(path))
    assert spec.quantization is not None
    output = ReferenceModel.load(path, spec).run(TOKENS)
    loaded = type(model).from_pretrained(plain, attn_implementation="eager")
    with torch.no_grad():
        expected, before = (each(torch.tensor([TOKENS])).logits[0].numpy() for each in (loaded, model))
    assert np.abs(output.logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(before - expected).max() > 1e-3 * np.abs(expected).max()
