"""The checkpoints other tests rely on must not be so plain that mistakes stay invisible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hf import ModelType, RopeKind, make_checkpoint


@pytest.mark.parametrize(
    ("model_type", "tie"),
    [
        *((model_type, tie) for model_type in ("deepseek_v3", "youtu") for tie in (False, True)),
        *((model_type, False) for model_type in ("deepseek_v2", "glm4_moe_lite", "kimi_k2", "sarvam_mla")),
    ],
)
@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_generation_and_attention_are_lively(tmp_path: Path, model_type: ModelType, tie: bool, rope: RopeKind) -> None:
    path, model = make_checkpoint(tmp_path / "checkpoint", model_type, tie=tie, rope=rope)
    prompt = torch.randint(0, 131, (1, 70), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        output = model(prompt, output_attentions=True)
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    assert len(set(generated[0, 70:].tolist())) >= 8
    assert output.logits.std() > 1
    for weights in output.attentions:
        last_row = weights[0, :, -1]
        entropy = -(last_row.clamp_min(1e-30).log() * last_row).sum(-1).mean()
        assert 0.5 < entropy < 3.5  # ln(70) = 4.25 is uniform
    assert path.joinpath("model.safetensors").is_file()


def test_weights_on_disk_are_the_models(tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path / "checkpoint", dtype="bfloat16", attention_bias=True)
    stored = load_file(path / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    state = model.state_dict()
    assert stored.keys() == state.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor.float(), state[name], rtol=0, atol=0)
        assert tensor.float().std() > 0, f"{name} is constant"


def test_same_seed_same_weights(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "first", seed=5).model.state_dict()
    again = make_checkpoint(tmp_path / "again", seed=5).model.state_dict()
    other = make_checkpoint(tmp_path / "other", seed=6).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
