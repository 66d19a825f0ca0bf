"""The rotary table against transformers' own rotary embedding, and against fp64 where fp32 itself is in question."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.rope import MAX_POSITIONS, inverse_frequencies, rotary_cos_sin
from trtllm_mla.checkpoint.spec import RopeSpec

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.7},
    "yarn": YARN,
    "yarn with mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn with equal mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn with one mscale": YARN | {"mscale": 0.7},
    "yarn with attention_factor": YARN | {"attention_factor": 0.9, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn without truncation": YARN | {"truncate": False},
    "yarn with other betas": YARN | {"beta_fast": 20.5, "beta_slow": 2.5, "truncate": False},
    "yarn that keeps every frequency": YARN | {"original_max_position_embeddings": 1 << 22},
    "yarn that divides every frequency": YARN | {"original_max_position_embeddings": 2},
    "yarn with a factor below 1": YARN | {"factor": 0.5},
    "yarn of DeepSeek-V3": YARN
    | {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def both(rope: dict[str, Any], dim: int, theta: float) -> tuple[RopeSpec, DeepseekV3RotaryEmbedding]:
    """Our spec and transformers' module for the same config."""
    values = {"qk_rope_head_dim": dim, "max_position_embeddings": 512, "first_k_dense_replace": 61}
    values["rope_parameters"] = rope | {"rope_theta": theta}
    spec = get_architecture("deepseek_v3", source="test").model_spec(values, None, source="test").rope
    return spec, DeepseekV3RotaryEmbedding(DeepseekV3Config(**values))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize(
    ("dim", "theta"), [(32, 10_000.0), (64, 10_000.0), (64, 1_600_000.0), (10, 10_007.3), (2, 5e5)]
)
def test_equals_transformers(rope: dict[str, Any], dim: int, theta: float) -> None:
    spec, module = both(rope, dim, theta)
    assert spec.attention_factor == module.attention_scaling
    np.testing.assert_array_equal(inverse_frequencies(spec), module.inv_freq.numpy())
    positions = 3000  # far beyond the original maximum of most
    cos, sin = module(torch.zeros(1), torch.arange(positions)[None])
    table = rotary_cos_sin(spec, positions)
    assert table.shape == (positions, dim)
    assert table.dtype == np.float32
    half = dim // 2
    tolerance = 1.5e-7 * spec.attention_factor
    np.testing.assert_allclose(table[:, :half], cos[0, :, :half].numpy(), rtol=0, atol=tolerance)
    np.testing.assert_allclose(table[:, half:], sin[0, :, :half].numpy(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dim", [16, 40, 64, 96, 128])
def test_frequencies_of_any_base_are_within_two_ulps_of_transformers(dim: int) -> None:
    for theta in np.random.default_rng(dim).uniform(2, 1e7, 20):
        spec, module = both({"rope_type": "default"}, dim, float(theta))
        expected = module.inv_freq.numpy()
        assert (np.abs(inverse_frequencies(spec) - expected) <= 2 * np.spacing(expected)).all()


@pytest.mark.parametrize("theta", [10_000.0, 50_000.0, 123_456.7])
def test_frequencies_are_the_rounded_formula(theta: float) -> None:
    spec = RopeSpec(dim=64, theta=theta, rope_type="default", interleaved=True)
    exact = np.float64(theta) ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(inverse_frequencies(spec), exact, rtol=1.3e-7)


def test_angle_is_the_fp32_product() -> None:
    """At large positions the rounding of position times frequency is part of the result."""
    spec = RopeSpec(dim=64, theta=10_000.0, rope_type="default", interleaved=True)
    table = rotary_cos_sin(spec, 150_001)
    angles = torch.tensor(150_000.0) * torch.from_numpy(inverse_frequencies(spec))
    np.testing.assert_allclose(table[150_000, :32], angles.double().cos().numpy(), rtol=0, atol=6e-8)
    np.testing.assert_allclose(table[150_000, 32:], angles.double().sin().numpy(), rtol=0, atol=6e-8)


def test_rows_do_not_depend_on_how_many_are_asked_for() -> None:
    spec, _ = both(YARN, 32, 10_000.0)
    np.testing.assert_array_equal(rotary_cos_sin(spec, 5), rotary_cos_sin(spec, 700)[:5])
    assert rotary_cos_sin(spec, 0).shape == (0, 32)


@pytest.mark.parametrize("positions", [-1, MAX_POSITIONS + 1])
def test_positions_that_fp32_cannot_count(positions: int) -> None:
    with pytest.raises(ValueError, match="positions"):
        rotary_cos_sin(RopeSpec(dim=2, theta=10_000.0, rope_type="default", interleaved=True), positions)


def test_yarn_without_original_positions() -> None:
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        inverse_frequencies(RopeSpec(dim=4, theta=10_000.0, rope_type="yarn", interleaved=True, factor=2.0))
