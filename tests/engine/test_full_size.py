from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.models import write_config

pytest.importorskip("tensorrt_rtx")

DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

SCRIPT = """
import json, resource, sys
from pathlib import Path
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.engine.builder import build
from trtllm_mla.network.directory import convert

path = Path(sys.argv[1])
convert(path / "checkpoint", path / "network", plugin=MlaPluginConfig())
report = build(path / "network", path / "engine", config=BuildConfig(), targets=("sm_89", "sm_120"),
               cache_dir=path / "cache")
usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({
    "layers": report.directory.info.num_plugin_layers,
    "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in usages),
    "bytes": max(usage.ru_maxrss * 1024 for usage in usages),
}))
"""


@pytest.mark.slow
def test_a_model_of_deepseek_v3s_size_from_its_config_alone(tmp_path: Path) -> None:
    """Takes half a minute: 61 layers, and every kernel compiled for two targets.

    Processor time stands for time, which depends on what else the machine does. Assemblers run, one at a time, before
    TensorRT builds, so the largest process is what the machine needs.
    """
    write_config(tmp_path / "checkpoint", **DEEPSEEK_V3)
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["layers"] == 4 * 61
    assert measured["cpu_seconds"] < 60
    assert measured["bytes"] < 1.5e9
