"""Checkpoints of any size that take no room on the disk: right headers, and holes in the place of values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trtllm_mla.checkpoint.architectures import get_architecture

_SIZES = {"BF16": 2, "F32": 4}


def write_sparse_checkpoint(directory: Path, config: dict[str, Any], num_files: int) -> int:
    """Writes a checkpoint in bfloat16, all zeros, with float32 biases of routers.

    Args:
        directory: Where to; made if need be.
        config: Its ``config.json``.
        num_files: Shards, of about equally many tensors.

    Returns:
        The number of its tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    architecture = get_architecture(config["model_type"], source="config")
    tensors = list(architecture.tensors(architecture.model_spec(config, None, source="config")).items())
    share = math.ceil(len(tensors) / num_files)
    weight_map = {}
    for number in range(num_files):
        header: dict[str, Any] = {}
        position = 0
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        for name, shape in tensors[number * share : (number + 1) * share]:
            dtype = "F32" if name.endswith("e_score_correction_bias") else "BF16"
            stop = position + math.prod(shape) * _SIZES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}
            position = stop
            weight_map[name] = file
        raw = json.dumps(header).encode()
        with (directory / file).open("wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.truncate(8 + len(raw) + position)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))
    return len(tensors)
