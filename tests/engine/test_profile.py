from __future__ import annotations

import pytest

from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.engine.profile import SizeRange, shape_ranges, size_ranges
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import LATENT_DIMS, step_inputs


def config(**values: object) -> BuildConfig:
    plugin = {key: values.pop(key) for key in tuple(values) if key in MlaPluginConfig.model_fields}
    limits = {"max_batch_size": 3, "max_num_tokens": 96, "max_seq_len": 440, "max_context_kv_tokens": 500, **values}
    return BuildConfig(mla_plugin=MlaPluginConfig(**plugin), **limits)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("absorption", [True, False])
def test_covers_every_dimension_of_the_contract(absorption: bool, passes: int) -> None:
    ranges = size_ranges(config(enable_matrix_absorption=absorption, max_context_passes=passes))
    sizes = {**ranges, "qk_rope_head_dim": SizeRange(32, 32, 32), "latent_width": SizeRange(128, 128, 128)}
    for item in step_inputs(absorption=absorption, context_passes=passes):
        least, usual, greatest = shape_ranges(item.dims, sizes)
        assert all(0 <= a <= b <= c for a, b, c in zip(least, usual, greatest, strict=True)), item.name
    assert shape_ranges(LATENT_DIMS, sizes) == ((1, 64, 128), (21, 64, 128), (21, 64, 128))


def test_tokens_are_the_sum_of_the_groups_everywhere() -> None:
    ranges = size_ranges(config(prefill_absorption_threshold=20))
    assert ranges["context_tokens"] == SizeRange(0, 96, 96)
    assert ranges["generation_tokens"] == SizeRange(0, 3, 57)  # three requests of 19 tokens
    assert ranges["tokens"] == SizeRange(0, 99, 153)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prefill_absorption_threshold": 0}, 3),  # one new token of each request
        ({"prefill_absorption_threshold": 256}, 96),
        # A chunk whose history is too long to decompress goes absorbed, however many tokens it has.
        ({"prefill_absorption_threshold": 20, "max_context_kv_tokens": 439}, 96),
        ({"prefill_absorption_threshold": 20, "max_context_kv_tokens": 440}, 57),
        ({"prefill_absorption_threshold": 20, "max_context_kv_tokens": 109, "max_context_passes": 4}, 96),
        ({"prefill_absorption_threshold": 20, "max_context_kv_tokens": 110, "max_context_passes": 4}, 57),
    ],
)
def test_generation_tokens(values: dict[str, int], expected: int) -> None:
    ranges = size_ranges(config(**values))
    assert ranges["generation_tokens"].max == expected
    assert ranges["generation_longest_query"].max == expected


def test_each_pass_may_be_empty_or_full() -> None:
    ranges = size_ranges(config(max_context_kv_tokens=110, max_context_passes=3))
    assert ranges["context_keys"] == SizeRange(0, 96, 110)
    assert ranges["context_longest_key"] == SizeRange(1, 96, 110)
    for number in (1, 2):
        assert ranges[f"context_history_keys_{number}"] == SizeRange(0, 110, 110)
        assert ranges[f"context_longest_history_key_{number}"] == SizeRange(1, 110, 110)
    assert "context_history_keys_3" not in ranges


def test_without_absorption_there_is_no_generation_group() -> None:
    ranges = size_ranges(config(enable_matrix_absorption=False))
    assert not [name for name in ranges if name.startswith("generation")]
    assert ranges["tokens"] == ranges["context_tokens"]


def test_offsets_are_one_longer() -> None:
    assert shape_ranges(("n+1", 7), {"n": SizeRange(0, 2, 5)}) == ((1, 7), (3, 7), (6, 7))


@pytest.mark.parametrize("page_size", [16, 128])
def test_pages(page_size: int) -> None:
    ranges = size_ranges(config(page_size=page_size))
    table = -(-440 // page_size)
    assert ranges["pages_per_request"] == SizeRange(1, table, table)
    assert ranges["pages"].max == 3 * table
    assert ranges["page_size"] == SizeRange(page_size, page_size, page_size)


def test_refuses_a_pool_whose_slots_overflow() -> None:
    with pytest.raises(UserError, match=r"max_batch_size 4096 and max_seq_len 1048576.*32-bit"):
        size_ranges(config(max_batch_size=4096, max_num_tokens=4096, max_seq_len=1 << 20))


def test_refuses_tokens_that_overflow() -> None:
    with pytest.raises(UserError, match="max_num_tokens: found 2147483000, expected at most"):
        size_ranges(config(max_num_tokens=2_147_483_000))
