from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf import make_checkpoint
from trtllm_mla.cli import main
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.directory import NetworkDirectory, convert, store_latent_scales


@dataclass(frozen=True)
class Outcome:
    """Exit status and output of one command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs ``trtllm-mla`` in this process, as its entry point does."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["trtllm-mla", *map(str, arguments)])
        with pytest.raises(SystemExit) as raised:
            main.run()
        captured = capsys.readouterr()
        return Outcome(int(raised.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random checkpoint with YaRN, and its transformers model."""
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint", rope="yarn", seed=5)


@pytest.fixture(scope="session")
def network(checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its network in float32, with small pages and a small threshold."""
    path = tmp_path_factory.mktemp("cli") / "network"
    plugin = MlaPluginConfig(page_size=16, prefill_absorption_threshold=8)
    convert(checkpoint[0], path, plugin=plugin, dtype=DType.FLOAT32)
    return path


@pytest.fixture(scope="session", params=["fp8", "nvfp4"])
def quantized(
    request: pytest.FixtureRequest, checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> NetworkDirectory:
    """The checkpoint's network in float32 with a quantised cache, whose outer scales are not 1."""
    path = tmp_path_factory.mktemp("cli") / request.param
    plugin = MlaPluginConfig(page_size=16, prefill_absorption_threshold=8, kv_cache_dtype=request.param)
    return store_latent_scales(convert(checkpoint[0], path, plugin=plugin, dtype=DType.FLOAT32), (0.37, 1.7))
