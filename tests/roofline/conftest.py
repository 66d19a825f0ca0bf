from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., ModelSpec]:
    """Makes specs of dense models with DeepSeek-V3's sizes, where no others are given."""

    def make(**config: Any) -> ModelSpec:
        values = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"}
        values |= {"num_hidden_layers": 60, "first_k_dense_replace": 10_000} | config
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model_spec(Checkpoint.open(tmp_path))

    return make
