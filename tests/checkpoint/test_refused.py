"""Architectures that are refused by name, with a reason; and that none of transformers' is forgotten."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from trtllm_mla.checkpoint.architectures import architectures, read_model_spec
from trtllm_mla.checkpoint.architectures.refused import REFUSED, refusal
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.errors import UserError


def message(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        read_model_spec(Checkpoint.open(directory))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What transformers 5.24 has beside the supported ones, with a word of the reason.
UNSUPPORTED = {
    "axk2": "DSA",
    "bailing_hybrid": "KDA",
    "deepseek_v32": "DSA",
    "deepseek_v4": "no latent attention",
    "dots3_note": "DSA",
    "dots3_note_text": "DSA",
    "glm5_next": "KDA",
    "glm5_next_text": "KDA",
    "glm_moe_dsa": "DSA",
    "hy_v4": "DSA",
    "hy_v4_vl": "DSA",
    "hy_v4_vl_text": "DSA",
    "kimi_linear": "KDA",
    "mistral_large4": "DSA",
    "mistral_large4_text": "DSA",
}


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_reason_and_what_it_would_take(tmp_path: Path, model_type: str) -> None:
    assert REFUSED.keys() <= UNSUPPORTED.keys()
    found = message(tmp_path, {"model_type": model_type})
    assert UNSUPPORTED[model_type] in found
    assert f"found model_type '{model_type}', which is not supported: " in found
    assert "It would take" in found
    assert "deepseek_v3" in found


def test_no_architecture_is_both_supported_and_refused() -> None:
    assert not architectures().keys() & REFUSED.keys()


def test_every_type_that_the_registry_of_transformers_knows() -> None:
    """A name that is misspelt here would refuse nothing."""
    assert not UNSUPPORTED.keys() - transformers.CONFIG_MAPPING.keys()


def test_every_architecture_of_transformers_with_latent_attention_is_decided_on() -> None:
    models = Path(transformers.__file__).parent / "models"
    found = set()
    for path in models.glob("*/configuration_*.py"):
        for text in re.split(r"^class ", path.read_text(), flags=re.M)[1:]:
            name = re.search(r'^    model_type = "(\w+)"', text, re.M)
            if name is not None and re.search(r"^    kv_lora_rank:", text, re.M):
                found.add(name[1])
    assert len(found) > 15
    assert "deepseek_v3" in found
    assert not [name for name in found if name not in architectures() and refusal(name, {}) is None]


def test_a_language_model_inside_another_model(tmp_path: Path) -> None:
    part = {"model_type": "deepseek_v2", "kv_lora_rank": 256}
    found = message(tmp_path, {"model_type": "seer", "language_config": part, "vision_config": {"hidden_size": 3}})
    assert "its language model is the 'language_config', whose model_type is 'deepseek_v2'" in found


def test_unknown_latent_attention(tmp_path: Path) -> None:
    found = message(tmp_path, {"model_type": "deepseek_v9", "kv_lora_rank": 512})
    assert "latent attention" in found
    assert "docs/adding_an_architecture.md" in found


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": ["deepseek_v32"]}, {"x_config": 3}, {}])
def test_nothing_known(tmp_path: Path, config: dict[str, Any]) -> None:
    assert "expected one of the supported" in message(tmp_path, config)
