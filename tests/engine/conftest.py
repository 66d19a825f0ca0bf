from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.models import make_network
from trtllm_mla.config import BuildConfig
from trtllm_mla.engine.builder import BuildReport, build
from trtllm_mla.network.directory import NetworkDirectory

TARGETS = ("sm_89", "sm_120")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps compiled kernels for the session."""
    return tmp_path_factory.mktemp("kernel-cache")


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> NetworkDirectory:
    """A network of two layers in bfloat16."""
    return make_network(tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="session")
def build_config() -> BuildConfig:
    """Limits that give every dimension a size of its own."""
    return BuildConfig(max_batch_size=3, max_num_tokens=96, max_seq_len=448, max_context_kv_tokens=320)


@pytest.fixture(scope="session")
def built(
    network: NetworkDirectory, build_config: BuildConfig, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> BuildReport:
    """An engine of ``network`` for two targets."""
    engine_dir = tmp_path_factory.mktemp("engine") / "engine"
    return build(network.path, engine_dir, config=build_config, targets=TARGETS, cache_dir=cache_dir)
