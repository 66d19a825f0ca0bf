from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plugins.evaluator import Evaluator

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture(scope="session")
def tools() -> None:
    """What builds the plugin library."""
    missing = [name for name in ("cmake", "g++") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"found no {' and no '.join(missing)}, which build the plugin library")


@pytest.fixture(scope="session")
def evaluator(tools: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    """The evaluator, built as users get it."""
    directory = tmp_path_factory.mktemp("evaluator")
    build(directory, "trtllm_mla_plan_shared")
    return Evaluator(directory / "libtrtllm_mla_plan.so")


@pytest.fixture(scope="session")
def sanitized(tools: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the evaluator and the fuzzer, built with sanitizers."""
    directory = tmp_path_factory.mktemp("sanitized")
    # Optimising code with sanitizers in it takes most of a build's time.
    build(directory, "all", "-DTRTLLM_MLA_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug")
    return directory


def build(directory: Path, target: str, *options: str) -> None:
    """Builds with CMake, warnings being errors."""
    strict = ("-DTRTLLM_MLA_TESTS=ON", "-DTRTLLM_MLA_WERROR=ON")
    for command in (
        ["cmake", "-S", str(PLUGINS), "-B", str(directory), *strict, *options],
        ["cmake", "--build", str(directory), "--target", target, "--parallel", "2"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
