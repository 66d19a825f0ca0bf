"""Launch plan of LatentAttention: row blocks times splits of the keys, then a merge of the splits.

Limits: row blocks lie on the x axis of a grid, which CUDA bounds at 2**31 - 1 blocks; a launch beyond is refused when
the plan is made. Splits lie on the y axis: at most 64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trtllm_mla.config import tile_bytes
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.ops.plan import (
    KernelVariant,
    Launch,
    LaunchPlan,
    ScalarArgument,
    TensorArgument,
    WorkspaceArgument,
    WorkspaceLayout,
    ceil_div,
    next_power_of_two,
)
from trtllm_mla.targets import KIB

if TYPE_CHECKING:
    from trtllm_mla.ops.definition import Problem
    from trtllm_mla.targets import Target

_MAX_SPLITS = 64
_MIN_TILES_PER_SPLIT = 2
# What a split costs beside its tiles, in tiles: writing 64 partial rows and reading them again moves about as many
# bytes as two tiles of 64 keys.
_SPLIT_COST = 2
_MAX_WAVES = 4
_COMBINE_BLOCK_B = 16
_COMBINE_WARPS = 4
# Barriers and the reductions' scratch memory.
_SHARED_MEMORY_SLACK = KIB

_INPUTS = ("q_latent", "q_pe", "latent_cache", "block_offsets", "sequence_length", "query_offsets")
_SIZES = ("tokens", "pages", "requests", "pages_per_request", "blocks_per_request")


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launches.

    A request's rows (new token, head) are cut into row blocks of BLOCK_M, the smallest available that holds
    ``longest_query * heads`` rows, or the largest. There are requests * ceil(longest_query * heads / BLOCK_M) of them,
    or floor(tokens * heads / BLOCK_M) + requests where requests of different lengths make that fewer. With one split,
    one launch writes the outputs. With more, partial results go through the workspace and a second launch merges
    them; see ``split_count`` for their number and ``max_workspace_bytes`` for the size.

    Args:
        problem: The problem. Of its dynamic dimensions, ``tokens`` may be smaller than what ``requests`` and
            ``longest_query`` say.

    Raises:
        UserError: No row block fits the target's shared memory beside the tiles.
    """
    _check(problem)
    dims = problem.dims
    tokens, heads, requests = dims["tokens"], dims["heads"], dims["requests"]
    if tokens == 0 or requests == 0:
        return LaunchPlan(())
    block_m = _choose_row_block(problem)
    blocks_per_request = ceil_div(dims["longest_query"] * heads, block_m)
    row_blocks = tokens * heads // block_m + requests
    # A builder may ask with sizes that do not belong together, with fewer queries than tokens.
    if requests * blocks_per_request <= row_blocks and requests * dims["longest_query"] >= tokens:
        row_blocks = requests * blocks_per_request
    else:
        blocks_per_request = 0
    splits = split_count(problem, block_m, row_blocks)

    scale_log2e = ScalarArgument(float(problem.attributes["softmax_scale"]) * math.log2(math.e))
    inputs = tuple(TensorArgument(name) for name in _INPUTS)
    outputs = (TensorArgument("output"), TensorArgument("log_sum_exp"))
    sizes = tuple(
        ScalarArgument(value)
        for value in (tokens, dims["pages"], requests, dims["pages_per_request"], blocks_per_request)
    )
    if splits == 1:
        variant = _attend_variant(problem, "attend", block_m)
        return LaunchPlan((Launch(variant, (row_blocks, 1, 1), (*inputs, *outputs, scale_log2e, *sizes)),))

    workspace, partials = _layout(splits, tokens * heads, dims["kv_lora_rank"])
    attend = Launch(
        _attend_variant(problem, "attend_split", block_m),
        (row_blocks, splits, 1),
        (*inputs, *partials, scale_log2e, *sizes),
    )
    combine = Launch(
        _combine_variant(problem),
        (tokens * heads, 1, 1),
        (*partials, *outputs, scale_log2e, ScalarArgument(tokens * heads), ScalarArgument(splits)),
    )
    return LaunchPlan((attend, combine), workspace.size)


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """Every variant that ``plan`` can use: each row block that fits, with and without splits, and the merge.

    Raises:
        UserError: No row block fits the target's shared memory beside the tiles.
    """
    _check(problem)
    return (
        *(
            _attend_variant(problem, kernel, block_m)
            for block_m in _row_blocks(problem)
            for kernel in ("attend", "attend_split")
        ),
        _combine_variant(problem),
    )


def split_count(problem: Problem, block_m: int, row_blocks: int) -> int:
    """Into how many parts the keys are split.

    With ``slots`` row blocks running at once and ``tiles`` = ceil(pages_per_request * page_size / BLOCK_N) of the
    longest request, the cost of s splits is ceil(row_blocks * s / slots) * (ceil(tiles / s) + c), with c = 2 tiles for
    the partial results where s > 1. The cheapest s is taken, the smallest of equals, of those with at least 2 tiles a
    split, at most 64 splits, and at most 4 waves of ``slots`` (the last bounds the workspace).

    Args:
        problem: The problem; its tile and target count, and its page table's width.
        block_m: Rows of a row block.
        row_blocks: Row blocks of the launch.
    """
    slots = _slots(problem, block_m)
    tiles = ceil_div(problem.dims["pages_per_request"] * problem.dims["page_size"], _tile(problem)[0])

    def cost(splits: int) -> int:
        return ceil_div(row_blocks * splits, slots) * (ceil_div(tiles, splits) + (_SPLIT_COST if splits > 1 else 0))

    limit = min(_MAX_SPLITS, tiles // _MIN_TILES_PER_SPLIT, _MAX_WAVES * slots // row_blocks)
    return min(range(1, max(limit, 1) + 1), key=cost)


def max_workspace_bytes(problem: Problem) -> int:
    """Bound of ``plan``'s workspace for all dynamic dimensions up to the problem's.

    More tokens can mean fewer splits, so the largest step need not have the largest workspace. Rows times splits are
    at most 64 * tokens * heads, and at most 4 * slots * BLOCK_M, because row blocks hold all rows and the keys are
    split only within 4 waves: with 132 multiprocessors and 64 rows of a latent of 512 in fp32, 69 MB.
    """
    dims = problem.dims
    rows = max(_MAX_WAVES * _slots(problem, block_m) * block_m for block_m in _row_blocks(problem))
    rows = min(rows, _MAX_SPLITS * dims["tokens"] * dims["heads"])
    return _layout(1, rows, dims["kv_lora_rank"])[0].size


def shared_memory_bytes(
    block_m: int,
    block_n: int,
    num_stages: int,
    *,
    kv_lora_rank: int,
    rope_dim: int,
    model_dtype: DType,
    cache_dtype: DType,
    target: Target,
) -> int:
    """Bound of the shared memory that Triton 3.9 gives to a block of the attention kernels.

    The query block, the tiles in flight, the probabilities, and a tile's latents once more in another type where cache
    and network differ, and once more in another layout where the network is fp32. With a warpgroup's MMA (64 rows on
    sm_90 and sm_100) there are ``num_stages`` tiles in flight, otherwise one fewer: there the next tile is fetched
    when this one has been read to registers.

    Args:
        block_m: Rows of a row block.
        block_n: Keys of a tile.
        num_stages: Software pipelining depth.
        kv_lora_rank: Width of the latent.
        rope_dim: Width of the rotary key.
        model_dtype: Type of query and output.
        cache_dtype: Type of the cached rows.
        target: The GPU generation.
    """
    width = _padded(kv_lora_rank) + _padded(rope_dim)
    depth = _pipeline_depth(num_stages)
    tiles = depth if _uses_warpgroup_mma(block_m, model_dtype, target) else depth - 1
    total = block_m * width * model_dtype.itemsize
    total += block_n * tiles * width * cache_dtype.itemsize
    total += block_m * block_n * model_dtype.itemsize
    copies = (model_dtype is DType.FLOAT32) + (model_dtype != cache_dtype)
    total += copies * block_n * _padded(kv_lora_rank) * model_dtype.itemsize
    return total + _SHARED_MEMORY_SLACK


def default_tile(
    *, kv_lora_rank: int, rope_dim: int, model_dtype: DType, cache_dtype: DType, target: Target
) -> tuple[int, int]:
    """The (tile_s, num_stages) for a config that gives none.

    Each compiles without spilled registers at 512 + 64 together with every row block that fits beside it. The more
    rows can share a tile the better; then the more keys are in flight.

    Args:
        kv_lora_rank: Width of the latent.
        rope_dim: Width of the rotary key.
        model_dtype: The network's type.
        cache_dtype: The latent cache's type.
        target: The GPU generation.

    Raises:
        UserError: Rows are too wide for the target's shared memory.
    """
    row_bytes = (kv_lora_rank + rope_dim) * cache_dtype.itemsize
    tiles: tuple[tuple[int, int], ...] = ((64, 2), (32, 3), (32, 2))
    if model_dtype is DType.FLOAT32:
        tiles = ((_fp32_block_n(kv_lora_rank), 2),)
    candidates = [
        (block_m, tile)
        for block_m in reversed(_row_block_sizes(model_dtype))
        for tile in tiles
        # 64 rows without a warpgroup's MMA spill beside tiles of 64.
        if tile[0] * block_m < 64 * 64 or _uses_warpgroup_mma(block_m, model_dtype, target)
    ]
    for block_m, tile in (*candidates, (_row_block_sizes(model_dtype)[0], (16, 2))):
        needed = shared_memory_bytes(
            block_m,
            *tile,
            kv_lora_rank=kv_lora_rank,
            rope_dim=rope_dim,
            model_dtype=model_dtype,
            cache_dtype=cache_dtype,
            target=target,
        )
        if max(needed, tile_bytes(*tile, row_bytes)) <= target.shared_memory_bytes:
            return tile
    raise UserError(
        f"Cached rows of {row_bytes} bytes (latent {kv_lora_rank} + rope {rope_dim} in {cache_dtype}) are too wide "
        f"for {target.name} ({target.example}): the smallest kernel takes {needed} bytes of shared memory, of "
        f"{target.shared_memory_bytes}. Build for a target with more, or use a 16-bit cache and network."
    )


def _check(problem: Problem) -> None:
    dims = problem.dims
    if dims["width"] != dims["kv_lora_rank"] + dims["rope_dim"]:
        raise ValueError(
            f"LatentAttention: found rows of width {dims['width']}, expected kv_lora_rank + rope_dim = "
            f"{dims['kv_lora_rank']} + {dims['rope_dim']}"
        )
    scale = problem.attributes["softmax_scale"]
    if not 0.0 < scale < math.inf:
        # The kernels take the largest score before they scale it.
        raise ValueError(f"LatentAttention: found softmax_scale {scale}, expected a positive number")


def _padded(width: int) -> int:
    """Width of a block that holds ``width`` elements: a power of two, and at least an MMA's depth."""
    return max(16, next_power_of_two(width))


def _pipeline_depth(num_stages: int) -> int:
    # Without pipelining, Triton keeps two copies of a tile instead of one.
    return max(2, num_stages)


def _fp32_block_n(kv_lora_rank: int) -> int:
    """Keys of a tile of an fp32 network: what its products, scalar code without TF32, have registers for."""
    return min(64, 16 * max(1, 512 // _padded(kv_lora_rank)))


def _tile(problem: Problem) -> tuple[int, int]:
    """Keys of a tile and software pipelining depth: the config's, but for fp32 networks at most what they can take."""
    if problem.model_dtype is DType.FLOAT32:
        return min(problem.tile_s, _fp32_block_n(problem.dims["kv_lora_rank"])), 2
    return problem.tile_s, _pipeline_depth(problem.num_stages)


def _uses_warpgroup_mma(block_m: int, model_dtype: DType, target: Target) -> bool:
    """Whether the products run as wgmma (sm_90) or tcgen05.mma (sm_100), which read both operands' tiles in place."""
    return target.name in ("sm_90", "sm_100") and block_m >= 64 and model_dtype is not DType.FLOAT32


def _row_block_sizes(model_dtype: DType) -> tuple[int, ...]:
    # fp32 products have no MMA without TF32: they run as scalar code, which needs registers for its operands too.
    return (4, 8, 16) if model_dtype is DType.FLOAT32 else (16, 32, 64)


def _shared_memory(problem: Problem, block_m: int) -> int:
    return shared_memory_bytes(
        block_m,
        *_tile(problem),
        kv_lora_rank=problem.dims["kv_lora_rank"],
        rope_dim=problem.dims["rope_dim"],
        model_dtype=problem.model_dtype,
        cache_dtype=problem.cache_dtype,
        target=problem.target,
    )


def _row_blocks(problem: Problem) -> tuple[int, ...]:
    """The sizes of row blocks that fit, ascending."""
    target = problem.target
    sizes = _row_block_sizes(problem.model_dtype)
    fitting = tuple(size for size in sizes if _shared_memory(problem, size) <= target.shared_memory_bytes)
    if not fitting:
        dims = problem.dims
        tile_s, num_stages = default_tile(
            kv_lora_rank=dims["kv_lora_rank"],
            rope_dim=dims["rope_dim"],
            model_dtype=problem.model_dtype,
            cache_dtype=problem.cache_dtype,
            target=target,
        )
        raise UserError(
            f"tile_s {problem.tile_s} with num_stages {problem.num_stages} takes {_shared_memory(problem, sizes[0])} "
            f"bytes of shared memory with a {problem.model_dtype} query block of {sizes[0]} rows and a "
            f"{problem.cache_dtype} cache; {target.name} ({target.example}) has {target.shared_memory_bytes} bytes. "
            f"Use tile_s {tile_s} with num_stages {num_stages}."
        )
    return fitting


def _choose_row_block(problem: Problem) -> int:
    rows = problem.dims["longest_query"] * problem.dims["heads"]
    sizes = _row_blocks(problem)
    return next((size for size in sizes if size >= rows), sizes[-1])


def _num_warps(problem: Problem, block_m: int) -> int:
    # 8 warps share an accumulator of 64 x 512 at 128 registers a thread; the smallest products do not have enough
    # columns for as many.
    small = block_m == 16 and problem.tile_s <= 32 and problem.model_dtype is not DType.FLOAT32
    return 4 if small else 8


def _slots(problem: Problem, block_m: int) -> int:
    """Blocks that run at once: two on a multiprocessor where registers (4 warps) and shared memory allow."""
    fitting = problem.target.shared_memory_bytes // _shared_memory(problem, block_m)
    return problem.target.multiprocessors * min(fitting, 8 // _num_warps(problem, block_m))


def _layout(splits: int, rows: int, kv_lora_rank: int) -> tuple[WorkspaceLayout, tuple[WorkspaceArgument, ...]]:
    workspace = WorkspaceLayout()
    partial_output = workspace.reserve("fp32", splits * rows * kv_lora_rank)
    partial_max = workspace.reserve("fp32", splits * rows)
    partial_sum = workspace.reserve("fp32", splits * rows)
    return workspace, (partial_output, partial_max, partial_sum)


def _attend_variant(problem: Problem, kernel: str, block_m: int) -> KernelVariant:
    dims, model, cache = problem.dims, problem.model_dtype, problem.cache_dtype
    block_n, num_stages = _tile(problem)
    types = {"q_latent": model.triton, "q_pe": model.triton, "latent_cache": cache.triton, "output": model.triton}
    types |= {"log_sum_exp": "fp32", "partial_output": "fp32", "partial_max": "fp32", "partial_sum": "fp32"}
    results = (
        ("partial_output", "partial_max", "partial_sum") if kernel == "attend_split" else ("output", "log_sum_exp")
    )
    return KernelVariant(
        op="LatentAttention",
        kernel=kernel,
        signature=(
            *((name, f"*{types.get(name, 'i32')}") for name in (*_INPUTS, *results)),
            ("scale_log2e", "fp32"),
            *((name, "i32") for name in _SIZES),
        ),
        constants=(
            ("HEADS", dims["heads"]),
            ("KV_LORA_RANK", dims["kv_lora_rank"]),
            ("ROPE_DIM", dims["rope_dim"]),
            ("PAGE_SIZE", dims["page_size"]),
            ("BLOCK_M", block_m),
            ("BLOCK_N", block_n),
            ("BLOCK_L", _padded(dims["kv_lora_rank"])),
            ("BLOCK_R", _padded(dims["rope_dim"])),
            ("HOIST", not _uses_warpgroup_mma(block_m, model, problem.target)),
        ),
        num_warps=_num_warps(problem, block_m),
        num_stages=num_stages,
    )


def _combine_variant(problem: Problem) -> KernelVariant:
    kv_lora_rank = problem.dims["kv_lora_rank"]
    return KernelVariant(
        op="LatentAttention",
        kernel="combine",
        signature=(
            ("partial_output", "*fp32"),
            ("partial_max", "*fp32"),
            ("partial_sum", "*fp32"),
            ("output", f"*{problem.model_dtype.triton}"),
            ("log_sum_exp", "*fp32"),
            ("scale_log2e", "fp32"),
            ("rows", "i32"),
            ("splits", "i32"),
        ),
        constants=(
            ("KV_LORA_RANK", kv_lora_rank),
            ("BLOCK_L", _padded(kv_lora_rank)),
            ("BLOCK_B", _COMBINE_BLOCK_B),
            ("BLOCK_S", _MAX_SPLITS),
        ),
        num_warps=_COMBINE_WARPS,
        num_stages=2,
    )
