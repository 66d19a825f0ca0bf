"""transformers with a cache that quantises what it is given: an oracle for networks with such a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from trtllm_mla.cache_rows import RowLayout
from trtllm_mla.ops.row_codec import decode_rows, encode_rows


class QuantizingCache(DynamicCache):
    """A cache that gives back rows as numpy encodes and decodes them.

    Args:
        config: The model's.
        layout: A row.
        latent_scales: Outer scale of each layer.
        jitter: Relative change of every value before it is encoded, drawn at random: what arithmetic may do to it.
    """

    def __init__(self, config: Any, layout: RowLayout, latent_scales: Sequence[float], *, jitter: float = 0.0) -> None:
        super().__init__(config=config)
        self._layout = layout
        self._latent_scales = latent_scales
        self._jitter = jitter

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *arguments: Any, **values: Any) -> Any:
        """Caches latents and rotated keys of new tokens, [1, 1, tokens, ...]; returns those of all tokens."""
        latent, k_pe = super().update(key_states, value_states, layer_idx, *arguments, **values)
        rows = torch.cat([latent, k_pe], -1).numpy()
        noise = np.random.default_rng(layer_idx).uniform(-self._jitter, self._jitter, rows.shape)
        rows = (rows * (1 + noise)).astype(np.float32)
        scale = self._latent_scales[layer_idx]
        decoded = torch.from_numpy(decode_rows(encode_rows(rows, self._layout, scale), self._layout, scale))
        return decoded.split([latent.shape[-1], k_pe.shape[-1]], dim=-1)


def greedy_ids(
    model: Any, prompt: Sequence[int], count: int, layout: RowLayout, latent_scales: Sequence[float]
) -> list[int]:
    """The likeliest continuation of a prompt, ``count`` tokens long.

    A value next to the middle of two codes may become either of them, depending on the last bit of the arithmetic. So
    that a continuation does not hang on that, it is asserted to be the same where all values are off by 1e-6.
    """
    continuations = []
    for jitter in (0.0, 1e-6):
        tokens = list(prompt)
        for _ in range(count):
            cache = QuantizingCache(model.config, layout, latent_scales, jitter=jitter)
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), cache=cache, use_cache=True).logits[0, -1]
            tokens.append(int(logits.argmax()))
        continuations.append(tokens[len(prompt) :])
    assert continuations[0] == continuations[1], "the prompt is meant to have a continuation that is no matter of luck"
    return continuations[0]
