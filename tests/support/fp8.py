"""Quantises checkpoints to FP8 with block scales."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.hf import HfCheckpoint

BLOCK = 128
DEEPSEEK_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
PROJECTIONS = (
    "gate_proj", "up_proj", "down_proj", "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
)  # fmt: skip


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers and fp32 scales of a weight, block by block: the largest number of a block becomes 448."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = weight[block].float().abs().max() / 448
            codes[block] = (weight[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes and scales stand for, in fp32."""
    rows, columns = codes.shape
    return codes.float() * scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def quantize_checkpoint(
    checkpoint: HfCheckpoint,
    *,
    exclude: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> HfCheckpoint:
    """Makes the projections of a checkpoint FP8, in its directory; the model gets the weights that these stand for.

    Args:
        checkpoint: A checkpoint of one file.
        exclude: Ends of the names of modules that stay as they are, also written to the config.
        config: ``quantization_config``; None is DeepSeek-V3's.
        edit: Changes the tensors before they are stored.
    """
    path = checkpoint.path / "model.safetensors"
    tensors = load_file(path)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in PROJECTIONS and not module.endswith(tuple(exclude)):
            codes, scales = quantize(tensor)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            plain[name] = dequantize(codes, scales)
        else:
            stored[name] = plain[name] = tensor
    if edit is not None:
        edit(stored)
    save_file(stored, path, metadata={"format": "pt"})
    _load(checkpoint.model, plain)
    values = json.loads((checkpoint.path / "config.json").read_text())
    values["quantization_config"] = dict(DEEPSEEK_CONFIG) if config is None else config
    if exclude:
        values["quantization_config"]["modules_to_not_convert"] = list(exclude)
    (checkpoint.path / "config.json").write_text(json.dumps(values))
    return checkpoint


def _load(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Gives a model the values of a checkpoint's tensors; transformers stacks those of the experts."""
    state = model.state_dict()
    with torch.no_grad():
        for name, value in state.items():
            if name.endswith("experts.gate_up_proj"):
                prefix = name.removesuffix("gate_up_proj")
                for expert in range(len(value)):
                    parts = [tensors[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up")]
                    value[expert] = torch.cat(parts)
            elif name.endswith("experts.down_proj"):
                prefix = name.removesuffix("down_proj")
                for expert in range(len(value)):
                    value[expert] = tensors[f"{prefix}{expert}.down_proj.weight"]
            else:
                value.copy_(tensors[name])
