"""``bench/convert_speed.py`` runs as the README shows it, on a checkpoint of a few megabytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "convert_speed.py"
SIZES = {
    "vocab_size": 131,
    "hidden_size": 80,
    "intermediate_size": 112,
    "moe_intermediate_size": 48,
    "num_attention_heads": 8,
    "q_lora_rank": 56,
    "kv_lora_rank": 96,
}


@pytest.mark.parametrize("options", [[], ["--sparse"]])
def test_convert_speed(tmp_path, options):
    command = [sys.executable, PROGRAM, "--gigabytes", "0.003", "--tp", "4", "--moe-ep", "2", *options]
    command += ["--config", json.dumps(SIZES), "--json", tmp_path / "out.json", "--directory", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Came back bit by bit: yes" in result.stdout
    values = json.loads((tmp_path / "out.json").read_text())
    names = [item["name"] for item in values["results"]]
    assert names == (["to ranks", "back"] if options else ["cp", "to ranks", "back"])
    assert all(item["nbytes"] >= 3e6 for item in values["results"])
    assert {path.name for path in tmp_path.iterdir()} == {"out.json"}
