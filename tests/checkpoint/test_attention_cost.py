import math
from types import SimpleNamespace

import pytest

from trtllm_mla.checkpoint.attention_cost import (
    absorbed_flops_per_pair,
    break_even_queries,
    decompressed_flops_per_pair,
    up_projection_flops,
)


def sizes(nope, rope, latent, value):
    return SimpleNamespace(qk_nope_head_dim=nope, qk_rope_head_dim=rope, kv_lora_rank=latent, v_head_dim=value)


def test_deepseek_v3():
    v3 = sizes(128, 64, 512, 128)
    assert absorbed_flops_per_pair(v3) == 2176
    assert decompressed_flops_per_pair(v3) == 640
    assert up_projection_flops(v3) == 262144
    assert break_even_queries(v3) == pytest.approx(262144 / 1536)


def test_every_width_counts():
    """Distinct primes: each product is recognisable."""
    odd = sizes(11, 5, 23, 7)
    assert absorbed_flops_per_pair(odd) == 2 * (23 + 5 + 23)
    assert decompressed_flops_per_pair(odd) == 2 * (11 + 5 + 7)
    assert up_projection_flops(odd) == 2 * 23 * (11 + 7)


def test_a_latent_narrower_than_the_heads_is_always_cheaper():
    assert break_even_queries(sizes(128, 64, 96, 128)) == math.inf
