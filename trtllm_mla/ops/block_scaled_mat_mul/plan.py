"""Launch plan of BlockScaledMatMul: one product, or parts of it along in_features and their sum.

A few rows leave a product with few tiles, each with a long way through in_features. Where there are fewer tiles than
multiprocessors, several programs share a tile: each multiplies some of the steps, and a second launch adds up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_mla.dtypes import FP8_BLOCK_SIZE, DType
from trtllm_mla.ops.expression import minimum
from trtllm_mla.ops.plan import (
    MAX_INT32,
    KernelVariant,
    Launch,
    LaunchPlan,
    ScalarArgument,
    TensorArgument,
    WorkspaceLayout,
    ceil_div,
)
from trtllm_mla.targets import KIB

if TYPE_CHECKING:
    from trtllm_mla.ops.definition import Problem
    from trtllm_mla.targets import Target

# Row blocks that go through the column blocks together.
_GROUP_BLOCKS = 8
# Programs of split products on a multiprocessor, the fewest products that one of them sums, and the most parts.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_LEAST_SPLIT = 512
_MAX_SPLITS = 16
# Elements of a program of sum_splits: one load of 16 bytes for each of its 128 threads.
_SUM_ELEMENTS = 512


@dataclass(frozen=True)
class Tile:
    """How a program of the product is laid out.

    Attributes:
        block_m: Rows of a program.
        block_n: Columns of the output that it computes; a divisor of ``FP8_BLOCK_SIZE``, so that a step has one scale.
        block_k: Products that it sums before it scales them; a divisor of ``FP8_BLOCK_SIZE``.
        num_warps: Warps.
        num_stages: Software pipelining depth.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Split:
    """How the steps along in_features are divided.

    Attributes:
        parts: Programs that share a tile; each has at least one step.
        steps: Steps of each but the last, which may have fewer.
    """

    parts: int
    steps: int


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launches."""
    dims, rows = problem.dims, problem.dims["rows"]
    _check(problem)
    if rows == 0:
        return LaunchPlan(())
    tile = choose_tile(problem)
    split = choose_split(problem, tile)
    tiles = _num_tiles(problem, tile)
    inputs = (TensorArgument("x"), TensorArgument("weight"), TensorArgument("scale"))
    out_steps = ScalarArgument(dims["out_features"] // _step(dims["out_features"]))
    in_steps = ScalarArgument(dims["in_features"] // _step(dims["in_features"]))
    sizes = (ScalarArgument(rows), out_steps, in_steps, ScalarArgument(split.steps))
    grid = (tiles * split.parts, 1, 1)
    if split.parts == 1:
        output = TensorArgument("output")
        return LaunchPlan((Launch(_multiply(problem, tile, partial=False), grid, (*inputs, output, *sizes)),))
    elements = rows * dims["out_features"]
    layout = WorkspaceLayout()
    partial = layout.reserve("fp32", split.parts * elements)
    launches = (
        Launch(_multiply(problem, tile, partial=True), grid, (*inputs, partial, *sizes)),
        Launch(
            _sum_splits(problem),
            (ceil_div(elements, _SUM_ELEMENTS), 1, 1),
            (partial, TensorArgument("output"), ScalarArgument(rows), out_steps, ScalarArgument(split.parts)),
        ),
    )
    return LaunchPlan(launches, layout.size)


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """The variants of all tiles, and for those that may be split also with partial results."""
    tiles = tile_choices(problem.model_dtype, problem.target)
    found = [_multiply(problem, tile, partial=False) for tile in tiles]
    if problem.dims["in_features"] >= 2 * _LEAST_SPLIT:
        found += [_multiply(problem, tile, partial=True) for tile in tiles]
        found.append(_sum_splits(problem))
    return tuple(dict.fromkeys(found))


def max_workspace_bytes(problem: Problem) -> int:
    """Workspace for all numbers of rows up to the problem's.

    A product is split among a limited number of programs, each with a result of one tile at most.
    """
    rows, dims = problem.dims["rows"], problem.dims
    if dims["in_features"] < 2 * _LEAST_SPLIT or rows == 0:
        return 0
    largest = max(tile.block_m * tile.block_n for tile in tile_choices(problem.model_dtype, problem.target))
    elements = minimum(_MAX_SPLITS * rows * dims["out_features"], _most_programs(problem.target) * largest)
    layout = WorkspaceLayout()
    layout.reserve("fp32", elements)
    return layout.size


def tile_choices(dtype: DType, target: Target) -> tuple[Tile, ...]:
    """Tiles for ever more rows.

    Few rows leave the time to reading weights, for which many bytes in flight are enough. With many, a tile's weights
    are decoded once for as many rows as registers hold. Fp32 is multiplied without tensor cores, from registers.
    """
    if dtype is DType.FLOAT32:
        return (Tile(16, 64, 32, 4, 2),)
    return (Tile(16, 64, 128, 4, 4), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3))


def choose_tile(problem: Problem) -> Tile:
    """The smallest tile that holds all rows, or the largest there is."""
    choices = tile_choices(problem.model_dtype, problem.target)
    return next((tile for tile in choices if problem.dims["rows"] <= tile.block_m), choices[-1])


def choose_split(problem: Problem, tile: Tile) -> Split:
    """Divides the steps so that programs are about twice as many as multiprocessors, if there are fewer tiles."""
    steps = ceil_div(problem.dims["in_features"], tile.block_k)
    tiles = _num_tiles(problem, tile)
    if tiles >= problem.target.multiprocessors:
        return Split(1, steps)
    wanted = minimum(_most_programs(problem.target) // tiles, steps * tile.block_k // _LEAST_SPLIT, _MAX_SPLITS)
    if wanted < 2 or problem.dims["in_features"] < 2 * _LEAST_SPLIT:
        return Split(1, steps)
    share = ceil_div(steps, wanted)
    return Split(ceil_div(steps, share), share)


def shared_memory_bytes(tile: Tile, dtype: DType) -> int:
    """Upper bound on the shared memory of a program of the product, as Triton 3.9 compiles it.

    The rows' and the weight's tiles are loaded ahead; the decoded weight takes one tile more. The product is
    rearranged for storing where they were.
    """
    step = tile.block_m * tile.block_k * dtype.itemsize + tile.block_n * tile.block_k
    decoded = tile.block_n * tile.block_k * dtype.itemsize
    return max(tile.num_stages * step + decoded, 4 * tile.block_m * tile.block_n) + KIB


def _check(problem: Problem) -> None:
    dims = problem.dims
    for name, features in (("scale_rows", "out_features"), ("scale_columns", "in_features")):
        expected = ceil_div(dims[features], FP8_BLOCK_SIZE)
        if dims[name] != expected:
            raise ValueError(
                f"BlockScaledMatMul: found {dims[name]} {name.replace('_', ' ')}, expected {expected} for "
                f"{dims[features]} {features}"
            )
    if dims["rows"] > MAX_INT32 - 2 * FP8_BLOCK_SIZE:
        raise ValueError(f"BlockScaledMatMul: found {dims['rows']} rows, expected int32 numbers of rows")


def _step(features: int) -> int:
    """The largest power of two up to ``FP8_BLOCK_SIZE`` that divides a size.

    All that a kernel has to know of the size when it is compiled: a model has many sizes, and few of these.
    """
    return math.gcd(features, FP8_BLOCK_SIZE)


def _num_tiles(problem: Problem, tile: Tile) -> int:
    dims = problem.dims
    return ceil_div(dims["rows"], tile.block_m) * ceil_div(dims["out_features"], tile.block_n)


def _most_programs(target: Target) -> int:
    """Most programs that a split product has."""
    return _PROGRAMS_PER_MULTIPROCESSOR * target.multiprocessors


def _multiply(problem: Problem, tile: Tile, *, partial: bool) -> KernelVariant:
    model = problem.model_dtype.triton
    return KernelVariant(
        op="BlockScaledMatMul",
        kernel="multiply",
        signature=(
            ("x", f"*{model}"),
            ("weight", "*i8"),
            ("scale", "*fp32"),
            ("result", "*fp32" if partial else f"*{model}"),
            ("rows", "i32"),
            ("out_steps", "i32"),
            ("in_steps", "i32"),
            ("split_steps", "i32"),
        ),
        constants=(
            ("OUT_STEP", _step(problem.dims["out_features"])),
            ("IN_STEP", _step(problem.dims["in_features"])),
            ("BLOCK_SIZE", FP8_BLOCK_SIZE),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_N", tile.block_n),
            ("BLOCK_K", tile.block_k),
            ("GROUP_BLOCKS", _GROUP_BLOCKS),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _sum_splits(problem: Problem) -> KernelVariant:
    return KernelVariant(
        op="BlockScaledMatMul",
        kernel="sum_splits",
        signature=(
            ("partial", "*fp32"),
            ("output", f"*{problem.model_dtype.triton}"),
            ("rows", "i32"),
            ("out_steps", "i32"),
            ("splits", "i32"),
        ),
        constants=(("OUT_STEP", _step(problem.dims["out_features"])), ("BLOCK", _SUM_ELEMENTS)),
        num_warps=4,
        num_stages=1,
    )
