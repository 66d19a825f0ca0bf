"""The programs in bench/ run as the README shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.hf import make_checkpoint

BENCH = Path(__file__).parents[2] / "bench"


def test_latency_vs_huggingface(tmp_path):
    make_checkpoint(tmp_path / "checkpoint", "youtu")
    command = [sys.executable, BENCH / "latency_vs_huggingface.py", tmp_path / "checkpoint"]
    lengths = ["--input-len", "9", "--output-len", "4", "--batch-size", "2", "--warmup", "1", "--iterations", "2"]
    result = subprocess.run(
        [*command, *lengths, "--attention", "eager", "--json", tmp_path / "out.json"],
        capture_output=True,
        text=True,
        check=True,
    )
    for row in ("trtllm_mla, onnxruntime", "transformers, generate, eager", "transformers, forward passes, eager"):
        assert row in result.stdout
    values = json.loads((tmp_path / "out.json").read_text())
    for times in values["transformers"].values():
        assert len(times["prefill_ms"]) == 2
        assert len(times["decode_step_ms"]) == 2 * 3
    assert values["trtllm_mla"]["onnxruntime"]["request_info"]["num_requests"] == 4


def test_latency_vs_huggingface_refuses_what_is_no_checkpoint(tmp_path):
    command = [sys.executable, BENCH / "latency_vs_huggingface.py", tmp_path / "absent"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "no such directory" in result.stderr


def test_absorption():
    result = subprocess.run(
        [sys.executable, BENCH / "absorption.py", "--keys", "100"], capture_output=True, text=True, check=True
    )
    for title in ("Absorption check in float32", "Absorption check in bfloat16"):
        assert title in result.stdout
    assert "FAILED" not in result.stdout
