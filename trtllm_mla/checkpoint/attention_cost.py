"""Floating-point operations of MLA in its two forms: absorbed (on the latents) and decompressed (on keys and values).

Counts are for one head; a multiplication and an addition are two operations. DeepSeek-V2
(https://arxiv.org/abs/2405.04434, section 2.1.2) describes both forms.
"""

from __future__ import annotations

import math
from typing import Protocol


class HeadSizes(Protocol):
    """The widths that decide the cost; ``ModelSpec`` has them."""

    @property
    def qk_nope_head_dim(self) -> int:
        """Width of a head's part without rotary embedding."""

    @property
    def qk_rope_head_dim(self) -> int:
        """Width of the rotary part."""

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent."""

    @property
    def v_head_dim(self) -> int:
        """Width of a value head."""


def absorbed_flops_per_pair(sizes: HeadSizes) -> int:
    """Operations of a query and a cached token: scores at the row's width, output at the latent's."""
    return 2 * (sizes.kv_lora_rank + sizes.qk_rope_head_dim) + 2 * sizes.kv_lora_rank


def decompressed_flops_per_pair(sizes: HeadSizes) -> int:
    """Operations of a query and a key: scores at the key's width, output at the value's."""
    return 2 * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim) + 2 * sizes.v_head_dim


def up_projection_flops(sizes: HeadSizes) -> int:
    """Operations of applying ``kv_b_proj``: once a key if decompressed, once a query if absorbed."""
    return 2 * sizes.kv_lora_rank * (sizes.qk_nope_head_dim + sizes.v_head_dim)


def break_even_queries(sizes: HeadSizes) -> float:
    """Queries, sharing many keys, at which both forms cost the same; infinite if absorbed is always cheaper."""
    saved = absorbed_flops_per_pair(sizes) - decompressed_flops_per_pair(sizes)
    return up_projection_flops(sizes) / saved if saved > 0 else math.inf
