"""The programs in bench/ run as the README shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def run_on_the_example(program: str, *options: object) -> subprocess.CompletedProcess[str]:
    example = BENCH.parent / "examples"
    texts = ("--text", example / "tiny-mla" / "held_out.txt", "--calibration-text", example / "calibration.txt")
    command = [sys.executable, BENCH / program, example / "tiny-mla", *texts, *options]
    return subprocess.run([str(item) for item in command], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_cache_perplexity(tmp_path):
    """Slow: it converts and runs ten networks."""
    outputs = ("--json", tmp_path / "out.json", "--plot", tmp_path / "out.svg")
    result = run_on_the_example("cache_perplexity.py", "--max-tokens", 1500, *outputs)
    assert result.returncode == 0, result.stderr
    assert "FAILED" not in result.stdout
    values = json.loads((tmp_path / "out.json").read_text())
    found = {(item["latent_size"], item["kv_cache_dtype"], item["calibrated"]): item for item in values}
    assert len(found) == len(values) == 10
    # The small latents are the same function: only nvfp4 tells them apart, and only uncalibrated.
    for cache, calibrated in (("bf16", False), ("fp8", False), ("nvfp4", True)):
        as_trained, small = (found[size, cache, calibrated] for size in (1.0, 2.0**-10))
        assert small["perplexity"] == pytest.approx(as_trained["perplexity"], rel=1e-3)
    assert found[2.0**-10, "nvfp4", False]["increase"] > 1
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_cache_perplexity_refuses_what_is_no_text(tmp_path):
    result = run_on_the_example("cache_perplexity.py", "--text", tmp_path / "absent.txt")
    assert result.returncode == 2
    assert "no such file" in result.stderr


def test_scale_objective():
    result = run_on_the_example("scale_objective.py", "--tokens", 256)
    assert result.returncode == 0, result.stderr
    for row in ("fp8", "nvfp4"):
        assert result.stdout.count(row) == 4
