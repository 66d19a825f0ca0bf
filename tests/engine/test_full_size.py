from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.configs import write_published

pytest.importorskip("tensorrt_rtx")

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
@pytest.mark.parametrize(
    ("name", "moe_layers", "fp8_projections"),
    [("deepseek_v3", 58, 0), ("kimi_k2", 60, 0), pytest.param("deepseek_v3", 58, 61 * 7, id="deepseek_v3 in FP8")],
)
def test_a_model_of_full_size_from_its_config_alone(
    tmp_path: Path, name: str, moe_layers: int, fp8_projections: int
) -> None:
    """Takes a minute: 61 layers, all but the first ones with hundreds of experts, and every kernel for two targets.

    Processor time stands for time, which depends on what else the machine does. Assemblers run, one at a time, before
    TensorRT builds, so the largest process is what the machine needs.
    """
    path = write_published(name, tmp_path / "checkpoint") / "config.json"
    if fp8_projections:
        quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["layers"] == 4 * 61 + moe_layers + fp8_projections
    assert measured["cpu_seconds"] < 120
    assert measured["bytes"] < 2e9
