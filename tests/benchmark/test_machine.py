from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version

from trtllm_mla.benchmark.machine import Machine


def test_machine_describes_this_host():
    machine = Machine.here()
    assert machine.name
    assert 1 <= machine.usable_cores <= machine.logical_cores
    assert machine.memory_bytes > 1 << 28
    assert machine.python == platform.python_version()
    assert machine.packages["numpy"] == version("numpy")
    assert "tensorrt" not in machine.packages or machine.packages["tensorrt"] == version("tensorrt")
    json.dumps(asdict(machine))
