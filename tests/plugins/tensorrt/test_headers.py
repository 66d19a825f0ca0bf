"""Without headers, CMake says where they come from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.plugins.conftest import PLUGINS


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("TENSORRT_INCLUDE_DIR", "https://github.com/NVIDIA/TensorRT"),
        ("CUDA_INCLUDE_DIR", "folder `include` of a CUDA"),
    ],
)
def test_missing_headers(tools: None, tmp_path: Path, header: str, expected: str) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    if header == "CUDA_INCLUDE_DIR":
        (headers / "NvInferRuntime.h").touch()
    data = tmp_path / "library.bin"
    data.touch()
    # Nothing of the machine's own is to be found.
    environment = {key: value for key, value in os.environ.items() if key not in (header, "CUDA_HOME")}
    options = [f"-DTRTLLM_MLA_LIBRARY_DATA={data}", f"-DTENSORRT_INCLUDE_DIR={headers}"]
    options += ["-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY"]
    options += [f"-DCMAKE_FIND_ROOT_PATH={tmp_path}"]
    result = subprocess.run(
        ["cmake", "-S", str(PLUGINS), "-B", str(tmp_path / "build"), *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    message = " ".join(result.stderr.split())
    assert result.returncode != 0
    assert f"{header}: found no" in message
    assert expected in message
