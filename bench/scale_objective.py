"""Which objective finds the better outer scale: the error of the latents, or that of the keys and values made of them?

Both choose a scale for one layer at a time, among eighths of an octave, on the calibration text. The judge is the
divergence (KL) of the logits on the other text, relative to that with scale 1. The transformers model computes them;
its latents go through the numpy codec.

    tiny=examples/tiny-mla
    python bench/scale_objective.py $tiny --text $tiny/held_out.txt --calibration-text examples/calibration.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.tokenizer import read_text
from trtllm_mla.ops.row_codec import Float32Array, decode_rows, encode_rows

SCALES = [float(np.float32(2.0 ** (step / 8))) for step in range(-4, 4)]

# Relative squared error of latents [rows, kv_lora_rank] and of what came back for them.
Objective = Callable[[Float32Array, Float32Array], float]


def main() -> None:
    """Prints a row for each cache and layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration-text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each text, in windows of 256")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = Model(arguments.checkpoint)
    texts = [
        torch.tensor(read_text(path, arguments.checkpoint)[: arguments.tokens // 256 * 256]).reshape(-1, 256)
        for path in (arguments.calibration_text, arguments.text)
    ]
    latents = model.latents(texts[0])
    exact = model.log_probabilities(texts[1])

    table = Table(title="Divergence of the logits, relative to that with scale 1", title_justify="left")
    headings = ("cache", "layer", "scale by latents", "KL", "scale by keys, values", "KL", "least KL")
    for heading in headings:
        table.add_column(heading, justify="right")
    for cache in (CacheDType.FP8, CacheDType.NVFP4):
        for layer, values in enumerate(latents):
            divergence = {
                scale: divergence_of(model.log_probabilities(texts[1], {layer: (cache, scale)}), exact)
                for scale in SCALES
            }
            cells = []
            for objective in (squared_error, model.lifted_error(layer)):
                scale = min(SCALES, key=lambda scale: objective(values, quantized(values, cache, scale)))
                cells += [f"{scale:.3f}", f"{divergence[scale] / divergence[1.0]:.2f}"]
            table.add_row(cache, str(layer), *cells, f"{min(divergence.values()) / divergence[1.0]:.2f}")
    Console().print(table)


class Model:
    """The transformers model, whose latents can be read and replaced."""

    def __init__(self, checkpoint: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
        self._latents: dict[int, Float32Array] = {}
        self._caches: dict[int, tuple[CacheDType, float]] = {}
        for index, layer in enumerate(self._model.model.layers):
            layer.self_attn.kv_a_layernorm.register_forward_hook(
                lambda module, inputs, output, index=index: self._pass_through_cache(index, output)
            )

    def log_probabilities(
        self, token_ids: torch.Tensor, caches: dict[int, tuple[CacheDType, float]] | None = None
    ) -> torch.Tensor:
        """[windows, window, vocab_size], with the cache and outer scale of some layers."""
        self._caches = caches or {}
        with torch.inference_mode():
            result: torch.Tensor = self._model(token_ids).logits.log_softmax(-1)
        return result

    def latents(self, token_ids: torch.Tensor) -> list[Float32Array]:
        """Latents of each layer: [tokens, kv_lora_rank]."""
        self.log_probabilities(token_ids)
        return [self._latents[layer] for layer in range(len(self._latents))]

    def lifted_error(self, layer: int) -> Objective:
        """The error of every head's keys and values, for which ``kv_b_proj`` weights the latents' errors."""
        weight = self._model.model.layers[layer].self_attn.kv_b_proj.weight.detach().numpy()
        return lambda values, stored: squared_error(values @ weight.T, stored @ weight.T)

    def _pass_through_cache(self, layer: int, output: torch.Tensor) -> torch.Tensor | None:
        self._latents[layer] = output.numpy().reshape(-1, output.shape[-1])
        if layer not in self._caches:
            return None
        return torch.from_numpy(quantized(output.numpy(), *self._caches[layer]))


def quantized(values: Float32Array, cache: CacheDType, scale: float) -> Float32Array:
    """What a cache with this outer scale gives back for latents."""
    layout = cache.layout(values.shape[-1], rope_dim=0)
    return decode_rows(encode_rows(values, layout, scale), layout, scale)


def squared_error(values: Float32Array, stored: Float32Array) -> float:
    """Squared error, relative to the squares."""
    return float(((stored - values) ** 2).sum() / (values**2).sum())


def divergence_of(log_probabilities: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence from the exact distribution of a token."""
    return float((exact.exp() * (exact - log_probabilities)).sum(-1).mean())


if __name__ == "__main__":
    main()
