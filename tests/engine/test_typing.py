"""The engine stage against TensorRT's own API, on machines where only TensorRT-RTX is installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKED = ("trtllm_mla/engine", "trtllm_mla/runtime/executors/tensorrt.py")

# The stubs (tensorrt-stubs 10.13) leave out parameters and conversions, so that most findings are theirs. A name that
# does not exist is found reliably.
CODES = ("attr-defined", "name-defined", "call-arg")

CONTROL = """
import tensorrt as trt

builder: trt.Builder = trt.Builder(trt.Logger())
builder.no_such_method()
trt.NoSuchClass()
"""


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """The stubs without their syntax errors, which mypy does not get past."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    folders = [Path(item) for item in (spec.submodule_search_locations or ())] if spec else []
    source = next((item for item in folders if (item / "tensorrt.pyi").is_file()), None)
    if source is None:
        pytest.skip("tensorrt-stubs is not installed")
    copy = tmp_path / "stubs"
    for package in ("tensorrt", "tensorrt_bindings"):
        shutil.copytree(source.parent / package, copy / package)
    path = copy / "tensorrt_bindings" / "tensorrt.pyi"
    text = re.sub(r"\bin: list", "in_: list", path.read_text())
    path.write_text(re.sub(r"(= None, channel_axis: int)\)", r"\1 = ...)", text))
    return copy


@pytest.mark.slow
def test_every_name_is_in_tensorrts_api(stubs: Path, tmp_path: Path) -> None:
    """Takes a quarter of a minute: mypy reads everything that the engine stage imports."""
    control = tmp_path / "control.py"
    control.write_text(CONTROL)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path / 'cache'}", *CHECKED, str(control)],
        cwd=ROOT,
        env={"MYPYPATH": str(stubs), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in result.stdout.splitlines() if any(f"[{code}]" in line for code in CODES)]
    assert "no_such_method" in result.stdout, result.stdout + result.stderr
    assert "NoSuchClass" in result.stdout
    assert [line for line in found if line.startswith("trtllm_mla/")] == []
