"""docs/adding_an_architecture.md, followed for an architecture that does not exist."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.network.ort_network import OrtNetwork
from tests.support.hf import HfCheckpoint, make_checkpoint
from trtllm_mla.checkpoint import architectures as package
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.errors import UserError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_an_architecture.md").read_text()

# A Youtu whose embedding is scaled.
MODULE = """
from typing import Any, Literal

from trtllm_mla.checkpoint.architectures.base import Architecture, Dimension, Flag, HfConfig, PositiveNumber, TokenId


class SableConfig(HfConfig):
    vocab_size: Dimension = 128256
    hidden_size: Dimension = 2048
    intermediate_size: Dimension = 6144
    num_hidden_layers: Dimension = 32
    num_attention_heads: Dimension = 16
    q_lora_rank: Dimension | None = 1536
    kv_lora_rank: Dimension = 512
    qk_nope_head_dim: Dimension = 128
    qk_rope_head_dim: Dimension = 64
    v_head_dim: Dimension = 128
    max_position_embeddings: Dimension = 131072
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 1
    tie_word_embeddings: Flag = True
    rope_interleave: Literal[True] = True
    scale_emb: PositiveNumber = 12.0

    @property
    def extras(self) -> dict[str, Any]:
        return {"embedding_multiplier": self.scale_emb}


ARCHITECTURE = Architecture("sable", ("SableForCausalLM",), SableConfig)
"""


@pytest.fixture
def sable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module beside the others', and a checkpoint with the config of such a model, without weights."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sable.py").write_text(MODULE)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(modules)])
    package.architectures.cache_clear()
    yield tmp_path / "checkpoint"
    package.architectures.cache_clear()
    sys.modules.pop(f"{package.__name__}.sable", None)


def test_one_module_is_enough(sable: Path) -> None:
    """Its logits are those of transformers' model with a scaled embedding."""
    path, model = make_checkpoint(sable, "youtu", rope="yarn", seed=31)
    config = json.loads((path / "config.json").read_text())
    changes = {"model_type": "sable", "architectures": ["SableForCausalLM"], "scale_emb": 3.0}
    (path / "config.json").write_text(json.dumps(config | changes))
    tokens = torch.randint(131, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = model(tokens[None]).logits[0]
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: 3.0 * output)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    assert (expected - plain).abs().max() > 0.5
    network = OrtNetwork(HfCheckpoint(path, model))
    request = network.request(40)
    found = network.step([(request, tokens[:25].tolist())]) + network.step((), [(request, tokens[25:].tolist())])
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=2e-4)


def test_a_value_that_nobody_computes_is_refused(sable: Path) -> None:
    sable.mkdir()
    (sable / "config.json").write_text(json.dumps({"model_type": "sable", "rope_interleave": False}))
    with pytest.raises(UserError, match="rope_interleave"):
        package.read_model_spec(Checkpoint.open(sable))


class TestPage:
    def test_under_60_lines(self) -> None:
        assert len(PAGE.splitlines()) < 60

    def test_files_that_it_names_exist(self) -> None:
        paths = re.findall(r"[`(]([\w/]+\.(?:py|md))[`)]", PAGE)
        assert len(paths) > 8
        assert not [path for path in paths if find(path) is None]

    def test_names_that_it_gives_files_are_there(self) -> None:
        pairs = re.findall(r"`(\w+)` in `([\w/]+\.py)`", PAGE)
        assert len(pairs) >= 4
        for name, path in pairs:
            file = find(path)
            assert file is not None
            assert re.search(rf"\b{name}\b", file.read_text()), (name, path)


def find(path: str) -> Path | None:
    """A file that the page names from the root, from the package, from beside itself or from among architectures."""
    places = ("", "trtllm_mla", "docs", "trtllm_mla/checkpoint/architectures")
    return next((ROOT / place / path for place in places if (ROOT / place / path).is_file()), None)
