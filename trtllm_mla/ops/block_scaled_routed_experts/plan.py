"""Launch plan of BlockScaledRoutedExperts: that of RoutedExperts, with other products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_mla.dtypes import FP8_BLOCK_SIZE, DType
from trtllm_mla.ops.plan import KernelVariant, LaunchPlan, ceil_div
from trtllm_mla.ops.routed_experts.plan import (
    Products,
    Tile,
    Tiles,
    experts_variants,
    max_experts_workspace_bytes,
    plan_experts,
)
from trtllm_mla.targets import KIB

if TYPE_CHECKING:
    from trtllm_mla.ops.definition import Problem
    from trtllm_mla.targets import Target


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launches."""
    _check(problem)
    return plan_experts(problem, PRODUCTS)


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """The variants of all tiles."""
    return experts_variants(problem, PRODUCTS)


def max_workspace_bytes(problem: Problem) -> int:
    """Workspace for all numbers of tokens up to the problem's."""
    return max_experts_workspace_bytes(problem, PRODUCTS)


def tile_choices(dtype: DType, target: Target) -> tuple[Tiles, ...]:
    """Tiles for ever more slots an expert.

    Rows and depth of a tile divide ``FP8_BLOCK_SIZE``, so that a step has one scale. As in BlockScaledMatMul, few
    slots leave the time to reading weights, for which many bytes in flight are enough; with many, a tile's weights are
    decoded once for as many slots as registers hold. Fp32 is multiplied without tensor cores, from registers.
    """
    if dtype is DType.FLOAT32:
        return (Tiles(Tile(16, 64, 32, 4, 2), Tile(16, 64, 32, 4, 2)),)
    return (
        Tiles(Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 4)),
        Tiles(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
        Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    )


PRODUCTS = Products(
    op="BlockScaledRoutedExperts",
    gate_up_weights=(("gate_up_proj", "int8"), ("gate_up_scale", "float32")),
    down_weights=(("down_proj", "int8"), ("down_scale", "float32")),
    constants=(("BLOCK_SIZE", FP8_BLOCK_SIZE),),
    tile_choices=tile_choices,
)


def shared_memory_bytes(tile: Tile, weight_tiles: int, dtype: DType) -> int:
    """Upper bound on the shared memory of a program of a product, as Triton 3.9 compiles it.

    The slots' and the weights' tiles are loaded ahead; the decoded weights take one tile more each. The product is
    rearranged for storing where they were.

    Args:
        tile: The tile.
        weight_tiles: Weight tiles of a step: 2 for gate and up, 1 for down.
        dtype: The model's type.
    """
    codes = weight_tiles * tile.block_n * tile.block_k
    step = tile.block_m * tile.block_k * dtype.itemsize + codes
    return max(tile.num_stages * step + codes * dtype.itemsize, 4 * tile.block_m * tile.block_n) + KIB


def _check(problem: Problem) -> None:
    dims = problem.dims
    for name, expected in (
        ("hidden_blocks", ceil_div(dims["hidden_size"], FP8_BLOCK_SIZE)),
        ("intermediate_blocks", ceil_div(dims["intermediate_size"], FP8_BLOCK_SIZE)),
        ("gate_up_blocks", 2 * ceil_div(dims["intermediate_size"], FP8_BLOCK_SIZE)),
    ):
        if dims[name] != expected:
            raise ValueError(
                f"BlockScaledRoutedExperts: found {dims[name]} {name}, expected {expected} for hidden_size "
                f"{dims['hidden_size']} and intermediate_size {dims['intermediate_size']}"
            )
