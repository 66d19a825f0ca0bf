from dataclasses import replace

import pytest

from trtllm_mla.ops.plan import (
    WORKSPACE_ALIGNMENT,
    KernelVariant,
    Launch,
    ScalarArgument,
    TensorArgument,
    WorkspaceArgument,
    WorkspaceLayout,
    ceil_div,
    next_power_of_two,
)

VARIANT = KernelVariant(
    op="GatherLatent",
    kernel="gather_latent",
    signature=(("latent", "*bf16"), ("keys", "i32")),
    constants=(("BLOCK_S", 8), ("FLAG", True)),
    num_warps=4,
    num_stages=1,
)
ARGUMENTS = (TensorArgument("latent"), ScalarArgument(3))


def test_equal_variants_have_one_key() -> None:
    assert VARIANT.key == replace(VARIANT).key
    assert VARIANT.key.startswith("gather_latent-")
    assert VARIANT.key.replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize(
    "change",
    [
        {"op": "AppendLatent"},
        {"signature": (("latent", "*fp16"), ("keys", "i32"))},
        {"signature": (("keys", "i32"), ("latent", "*bf16"))},
        {"constants": (("BLOCK_S", 16), ("FLAG", True))},
        {"constants": (("BLOCK_S", 8), ("FLAG", False))},
        {"num_warps": 8},
        {"num_stages": 2},
    ],
)
def test_different_variants_have_different_keys(change: dict[str, object]) -> None:
    assert replace(VARIANT, **change).key != VARIANT.key  # type: ignore[arg-type]


@pytest.mark.parametrize("grid", [(1, 1, 1), (2**31 - 1, 65535, 65535)])
def test_launches_within_the_limits(grid: tuple[int, int, int]) -> None:
    assert Launch(VARIANT, grid, ARGUMENTS).grid == grid


@pytest.mark.parametrize("grid", [(0, 1, 1), (2**31, 1, 1), (1, 65536, 1), (1, 1, 65536)])
def test_grids_beyond_the_limits_are_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="gather_latent: found grid"):
        Launch(VARIANT, grid, ARGUMENTS)


def test_every_parameter_needs_an_argument() -> None:
    with pytest.raises(ValueError, match="gather_latent: found 1 arguments, expected 2"):
        Launch(VARIANT, (1, 1, 1), ARGUMENTS[:1])


def test_workspace_parts_are_aligned_and_do_not_overlap() -> None:
    layout = WorkspaceLayout()
    assert layout.reserve("fp32", 65) == WorkspaceArgument(0, "fp32", 65)
    assert layout.reserve("bf16", 1) == WorkspaceArgument(2 * WORKSPACE_ALIGNMENT, "bf16", 1)
    assert layout.reserve("i32", 64) == WorkspaceArgument(3 * WORKSPACE_ALIGNMENT, "i32", 64)
    assert layout.size == 4 * WORKSPACE_ALIGNMENT


@pytest.mark.parametrize(("value", "divisor", "expected"), [(0, 8, 0), (1, 8, 1), (8, 8, 1), (9, 8, 2)])
def test_ceil_div(value: int, divisor: int, expected: int) -> None:
    assert ceil_div(value, divisor) == expected


@pytest.mark.parametrize(("value", "expected"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_two(value: int, expected: int) -> None:
    assert next_power_of_two(value) == expected
