"""Launch plan of LatentAttention: pieces of row blocks and keys, then a merge of the pieces.

Limits: pieces lie on the x axis of a grid, which CUDA bounds at 2**31 - 1 blocks; a launch beyond is refused when the
plan is made.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trtllm_mla.cache_rows import CacheDType, tile_bytes
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.ops.definition import row_layout
from trtllm_mla.ops.expression import maximum, minimum
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

_CODE_BITS = {CacheDType.FP8: 8, CacheDType.NVFP4: 4}
# Writing 64 partial rows and reading them again moves about as many bytes as two tiles of 64 keys.
_MIN_TILES = 2
_WAVES = 2
# Rows of a warpgroup's MMA.
_WARPGROUP_ROWS = 64
_COMBINE_BLOCK_B = 64
_COMBINE_BLOCK_C = 128
_COMBINE_WARPS = 4
# Programs of ``combine`` that a multiprocessor holds at once, by its registers.
_COMBINE_OCCUPANCY = 4
# Barriers and the reductions' scratch memory.
_SHARED_MEMORY_SLACK = KIB

_INPUTS = ("q_latent", "q_pe", "latent_cache", "block_offsets", "sequence_length", "query_offsets")
_OUTPUTS = ("output", "log_sum_exp")
_PARTIALS = ("partial_output", "partial_max", "partial_sum")
_SIZES = ("tokens", "pages", "requests", "pages_per_request")


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launches.

    A request's rows (new token, head) are cut into row blocks of BLOCK_M, the smallest available that holds
    ``longest_query * heads`` rows, or the largest. There are at most requests * ceil(longest_query * heads / BLOCK_M)
    of them, and at most floor(tokens * heads / BLOCK_M) + requests.

    A request's keys are tiles of BLOCK_N, of which all of its row blocks need each. With P row blocks running at once
    (slots), and over the requests' lengths, which the kernels read on the device::

        total    = sum of row blocks * tiles
        largest  = max(2, ceil(total / (2 * P)))          tiles in the largest piece
        pieces   = max(1, ceil(tiles / largest))          of a request's row block, as equal as tiles allow

    *Worst case.* A multiprocessor takes the next piece when it has finished one, so that the last piece begins
    before total / P tiles are done on each, and ends at most ``largest`` tiles later (Graham's bound for list
    scheduling): at most 1.5 * total / P + 2 tiles, whatever the lengths, beside what a piece costs beyond its tiles.
    With two more tiles for each piece's partial results, a batch of one request of 131072 tokens and 15 of 1024 at 128
    heads takes 40 tiles on 132 slots (35 at best); cut into equal numbers of pieces, as page-table widths alone allow,
    514. Equal lengths lose a little: 70 requests of 8192 take 198 (136 at best), and 178 in equal numbers of pieces.

    *Bounds.* At most row blocks + 2 * P pieces are launched; of those at most 4 * P belong to split row blocks and
    have a slot in the workspace, and at most 2 * P row blocks are split. Where the page table holds no more than 2
    tiles, nothing can be split: one launch writes the outputs, and there is no workspace.

    *CUDA graphs.* The plan depends on shapes and attributes alone. Grids and buffers do not change with lengths or
    pages, so one plan, captured once, serves every step of the same shapes.

    Args:
        problem: The problem. Of its dynamic dimensions, ``tokens`` may be smaller than what ``requests`` and
            ``longest_query`` say.

    Raises:
        UserError: No row block fits the target's shared memory beside the tiles.
    """
    _check(problem)
    dims = problem.dims
    if dims["tokens"] == 0 or dims["requests"] == 0:
        return LaunchPlan(())
    block_m = _choose_row_block(problem)
    row_blocks = _row_block_count(problem, block_m)

    scale_log2e = ScalarArgument(problem.attributes["softmax_scale"] * math.log2(math.e))
    latent_scale = ScalarArgument(problem.attributes["latent_scale"])
    inputs = tuple(TensorArgument(name) for name in _INPUTS)
    outputs = tuple(TensorArgument(name) for name in _OUTPUTS)
    sizes = tuple(ScalarArgument(dims[name]) for name in _SIZES)
    pieces = _piece_count(problem, block_m, row_blocks)
    target_pieces = _WAVES * _slots(problem, block_m)
    slots = minimum(2 * target_pieces, pieces) if pieces > row_blocks else 0
    workspace, partials = _layout(slots * block_m, dims["kv_lora_rank"])
    attend = Launch(
        _attend_variant(problem, block_m),
        (pieces, 1, 1),
        (
            *inputs,
            *outputs,
            *partials,
            scale_log2e,
            latent_scale,
            *sizes,
            ScalarArgument(target_pieces),
            ScalarArgument(slots),
        ),
    )
    if slots == 0:
        return LaunchPlan((attend,))
    split_blocks = minimum(target_pieces, row_blocks)
    parts = block_m * ceil_div(dims["kv_lora_rank"], _COMBINE_BLOCK_C)
    programs = ceil_div(_COMBINE_OCCUPANCY * problem.target.multiprocessors, split_blocks)
    combine = Launch(
        _combine_variant(problem),
        (split_blocks, minimum(programs, parts), 1),
        (
            *partials,
            TensorArgument("sequence_length"),
            TensorArgument("query_offsets"),
            *outputs,
            scale_log2e,
            *(ScalarArgument(dims[name]) for name in ("tokens", "requests", "pages_per_request")),
            ScalarArgument(target_pieces),
            ScalarArgument(slots),
            ScalarArgument(block_m),
        ),
    )
    return LaunchPlan((attend, combine), workspace.size)


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """Every variant that ``plan`` can use: each row block that fits, and the merge.

    Raises:
        UserError: No row block fits the target's shared memory beside the tiles.
    """
    _check(problem)
    return (*(_attend_variant(problem, block_m) for block_m in _row_blocks(problem)), _combine_variant(problem))


def max_workspace_bytes(problem: Problem) -> int:
    """Bound of ``plan``'s workspace for all dynamic dimensions up to the problem's.

    However large the step, at most 4 * P slots of BLOCK_M partial rows: with 132 multiprocessors and 64 rows of a
    latent of 512 in fp32, 69 MB. A small step has fewer pieces.
    """
    dims = problem.dims
    rows = 0
    for block_m in _row_blocks(problem):
        row_blocks = dims["tokens"] * dims["heads"] // block_m + dims["requests"]
        pieces = _piece_count(problem, block_m, row_blocks)
        rows = maximum(rows, minimum(2 * _WAVES * _slots(problem, block_m), pieces) * block_m)
    return _layout(rows, dims["kv_lora_rank"])[0].size


def shared_memory_bytes(
    block_m: int,
    block_n: int,
    num_stages: int,
    *,
    kv_lora_rank: int,
    rope_dim: int,
    model_dtype: DType,
    cache_dtype: CacheDType,
    target: Target,
) -> int:
    """Bound of the shared memory that Triton 3.9 gives to a block of the attention kernels.

    The query block, the tiles in flight, the probabilities, and a tile's latents once more in another type where cache
    and network differ (decoded, where the cache is quantised), and once more in another layout where the network is
    fp32 or codes have 4 bits. With a warpgroup's MMA there are ``num_stages`` tiles in flight, otherwise one fewer:
    there the next tile is fetched when this one has been read to registers.

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
    sizes = (kv_lora_rank, rope_dim, model_dtype, cache_dtype)
    # Without pipelining, Triton keeps two copies of a tile instead of one.
    tiles = max(2, num_stages)
    if not _uses_warpgroup_mma(block_m, block_n, num_stages, *sizes, target):
        tiles -= 1
    return _shared_memory_with(block_m, block_n, tiles, *sizes)


def _shared_memory_with(
    block_m: int,
    block_n: int,
    tiles: int,
    kv_lora_rank: int,
    rope_dim: int,
    model_dtype: DType,
    cache_dtype: CacheDType,
) -> int:
    """``shared_memory_bytes`` with so many tiles in flight."""
    width = _padded(kv_lora_rank) + _padded(rope_dim)
    total = block_m * width * model_dtype.itemsize
    total += block_n * tiles * cache_dtype.layout(_padded(kv_lora_rank), _padded(rope_dim)).row_bytes
    total += block_m * block_n * model_dtype.itemsize
    copies = (model_dtype is DType.FLOAT32) + (model_dtype is not cache_dtype.element)
    if cache_dtype is CacheDType.NVFP4:
        copies = 2
    total += copies * block_n * _padded(kv_lora_rank) * model_dtype.itemsize
    return total + _SHARED_MEMORY_SLACK


def default_tile(
    *, kv_lora_rank: int, rope_dim: int, model_dtype: DType, cache_dtype: CacheDType, target: Target
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
    row_bytes = cache_dtype.layout(kv_lora_rank, rope_dim).row_bytes
    tiles: tuple[tuple[int, int], ...] = ((64, 2), (32, 3), (32, 2))
    if model_dtype is DType.FLOAT32:
        tiles = ((_fp32_block_n(kv_lora_rank), 2),)
    sizes = (kv_lora_rank, rope_dim, model_dtype, cache_dtype, target)
    row_blocks = _row_block_sizes(model_dtype, cache_dtype, target)
    candidates = [
        (block_m, tile)
        for block_m in reversed(row_blocks)
        for tile in tiles
        # 64 rows without a warpgroup's MMA spill beside tiles of 64.
        if tile[0] * block_m < 64 * 64 or _uses_warpgroup_mma(block_m, tile[0], tile[1], *sizes)
    ]
    for block_m, tile in (*candidates, (row_blocks[0], (16, 2))):
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
    row_layout("LatentAttention", problem, problem.dims["kv_lora_rank"], problem.dims["rope_dim"])
    scale = problem.attributes["softmax_scale"]
    if not 0.0 < scale < math.inf:
        # The kernels take the largest score before they scale it.
        raise ValueError(f"LatentAttention: found softmax_scale {scale}, expected a positive number")


def _padded(width: int) -> int:
    """Width of a block that holds ``width`` elements: a power of two, and at least an MMA's depth."""
    return max(16, next_power_of_two(width))


def _block_l(kv_lora_rank: int, cache_dtype: CacheDType) -> int:
    """Width of a latent's block; each half of it is multiplied by itself where codes have 4 bits."""
    return max(32 if cache_dtype is CacheDType.NVFP4 else 16, _padded(kv_lora_rank))


def _fp32_block_n(kv_lora_rank: int) -> int:
    """Keys of a tile of an fp32 network: what its products, scalar code without TF32, have registers for."""
    return min(64, 16 * max(1, 512 // _padded(kv_lora_rank)))


def _uses_warpgroup_mma(
    block_m: int,
    block_n: int,
    num_stages: int,
    kv_lora_rank: int,
    rope_dim: int,
    model_dtype: DType,
    cache_dtype: CacheDType,
    target: Target,
) -> bool:
    """Whether the products run as wgmma (sm_90) or tcgen05.mma (sm_100), which read both operands' tiles in place.

    They take 64 rows: of queries, or else of keys if the additional tile in flight fits. Beside the decoding of
    quantised rows either form spills hundreds of bytes on sm_90; mma.sync has registers for both, and fewer
    instructions.
    """
    if target.name not in ("sm_90", "sm_100") or model_dtype is DType.FLOAT32 or cache_dtype.is_quantized:
        return False
    if block_m >= _WARPGROUP_ROWS:
        return True
    needed = _shared_memory_with(
        block_m, block_n, max(2, num_stages), kv_lora_rank, rope_dim, model_dtype, cache_dtype
    )
    return block_n >= _WARPGROUP_ROWS and needed <= target.shared_memory_bytes


def _is_warpgroup(problem: Problem, block_m: int) -> bool:
    return _uses_warpgroup_mma(
        block_m,
        problem.tile_s,
        problem.num_stages,
        problem.dims["kv_lora_rank"],
        problem.dims["rope_dim"],
        problem.model_dtype,
        problem.cache_dtype,
        problem.target,
    )


def _hoist(problem: Problem, block_m: int) -> bool:
    """Whether the query is kept in registers: where they suffice, and no warpgroup's MMA reads it in place."""
    if problem.cache_dtype.is_quantized:
        return problem.cache_dtype is CacheDType.FP8 and block_m <= 16
    return not _is_warpgroup(problem, block_m)


def _keys_as_m(problem: Problem, block_m: int) -> bool:
    """Whether keys are the rows of the products, and queries their columns: they fill a warpgroup's MMA.

    Its 64 rows would be mostly empty with the rows of a small row block.
    """
    return block_m < _WARPGROUP_ROWS and _is_warpgroup(problem, block_m)


def _row_block_sizes(model_dtype: DType, cache_dtype: CacheDType, target: Target) -> tuple[int, ...]:
    # fp32 products have no MMA without TF32: they run as scalar code, which needs registers for its operands too.
    if model_dtype is DType.FLOAT32:
        return (4, 8, 16)
    # Decoding needs registers too; before sm_90, two halves of 32 rows leave too few.
    if cache_dtype is CacheDType.NVFP4 and target.compute_capability < 90:
        return (16,)
    return (16, 32) if cache_dtype.is_quantized else (16, 32, 64)


def _shared_memory(problem: Problem, block_m: int) -> int:
    return shared_memory_bytes(
        block_m,
        problem.tile_s,
        problem.num_stages,
        kv_lora_rank=problem.dims["kv_lora_rank"],
        rope_dim=problem.dims["rope_dim"],
        model_dtype=problem.model_dtype,
        cache_dtype=problem.cache_dtype,
        target=problem.target,
    )


def _row_blocks(problem: Problem) -> tuple[int, ...]:
    """The sizes of row blocks that fit, ascending."""
    target, heads = problem.target, problem.dims["heads"]
    sizes = _row_block_sizes(problem.model_dtype, problem.cache_dtype, problem.target)
    if problem.cache_dtype.is_quantized and target.name in ("sm_90", "sm_100") and heads & (heads - 1):
        # Finding heads that are no power of two takes the last registers that decoding leaves beside 32 rows.
        sizes = tuple(size for size in sizes if size < 32)
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
    # columns for as many, or with keys as their rows not enough rows.
    small = block_m == 16 and problem.model_dtype is not DType.FLOAT32 and not problem.cache_dtype.is_quantized
    return 4 if small and (problem.tile_s <= 32 or _keys_as_m(problem, block_m)) else 8


def _slots(problem: Problem, block_m: int) -> int:
    """Blocks that run at once: two on a multiprocessor where registers (4 warps) and shared memory allow."""
    fitting = problem.target.shared_memory_bytes // _shared_memory(problem, block_m)
    return problem.target.multiprocessors * min(fitting, 8 // _num_warps(problem, block_m))


def _row_block_count(problem: Problem, block_m: int) -> int:
    """Bound of the row blocks of all requests together."""
    dims = problem.dims
    row_blocks = dims["tokens"] * dims["heads"] // block_m + dims["requests"]
    # A builder may ask with sizes that do not belong together, with fewer queries than tokens.
    if dims["requests"] * dims["longest_query"] >= dims["tokens"]:
        row_blocks = minimum(row_blocks, dims["requests"] * ceil_div(dims["longest_query"] * dims["heads"], block_m))
    return row_blocks


def _piece_count(problem: Problem, block_m: int, row_blocks: int) -> int:
    """Bound of the pieces of ``row_blocks`` row blocks; as many as these where nothing can be split."""
    tiles = ceil_div(problem.dims["pages_per_request"] * problem.dims["page_size"], problem.tile_s)
    most = maximum(1, ceil_div(tiles, _MIN_TILES))
    return minimum(row_blocks + _WAVES * _slots(problem, block_m), row_blocks * most)


def _layout(rows: int, kv_lora_rank: int) -> tuple[WorkspaceLayout, tuple[WorkspaceArgument, ...]]:
    workspace = WorkspaceLayout()
    partial_output = workspace.reserve("fp32", rows * kv_lora_rank)
    partial_max = workspace.reserve("fp32", rows)
    partial_sum = workspace.reserve("fp32", rows)
    return workspace, (partial_output, partial_max, partial_sum)


def _attend_variant(problem: Problem, block_m: int) -> KernelVariant:
    dims, model, cache = problem.dims, problem.model_dtype, problem.cache_dtype
    types = {"q_latent": model.triton, "q_pe": model.triton, "latent_cache": cache.triton, "output": model.triton}
    types |= {"log_sum_exp": "fp32", "partial_output": "fp32", "partial_max": "fp32", "partial_sum": "fp32"}
    layout = row_layout("LatentAttention", problem, dims["kv_lora_rank"], dims["rope_dim"])
    return KernelVariant(
        op="LatentAttention",
        kernel="attend",
        signature=(
            *((name, f"*{types.get(name, 'i32')}") for name in (*_INPUTS, *_OUTPUTS, *_PARTIALS)),
            ("scale_log2e", "fp32"),
            ("latent_scale", "fp32"),
            *((name, "i32") for name in (*_SIZES, "target_pieces", "slots")),
        ),
        constants=(
            ("HEADS", dims["heads"]),
            ("KV_LORA_RANK", dims["kv_lora_rank"]),
            ("ROPE_DIM", dims["rope_dim"]),
            ("CODE_BITS", _CODE_BITS.get(cache, 0)),
            ("WIDTH", layout.width),
            ("SCALE_OFFSET", layout.scale_offset),
            ("ROPE_OFFSET", layout.rope_offset),
            ("PAGE_SIZE", dims["page_size"]),
            ("BLOCK_M", block_m),
            ("BLOCK_N", problem.tile_s),
            ("BLOCK_L", _block_l(dims["kv_lora_rank"], cache)),
            ("BLOCK_R", _padded(dims["rope_dim"])),
            ("MIN_TILES", _MIN_TILES),
            ("KEYS_AS_M", _keys_as_m(problem, block_m)),
            ("HOIST", _hoist(problem, block_m)),
        ),
        num_warps=_num_warps(problem, block_m),
        num_stages=problem.num_stages,
    )


def _combine_variant(problem: Problem) -> KernelVariant:
    dims = problem.dims
    sizes = ("tokens", "requests", "pages_per_request", "target_pieces", "slots", "block_m")
    return KernelVariant(
        op="LatentAttention",
        kernel="combine",
        signature=(
            ("partial_output", "*fp32"),
            ("partial_max", "*fp32"),
            ("partial_sum", "*fp32"),
            ("sequence_length", "*i32"),
            ("query_offsets", "*i32"),
            ("output", f"*{problem.model_dtype.triton}"),
            ("log_sum_exp", "*fp32"),
            ("scale_log2e", "fp32"),
            *((name, "i32") for name in sizes),
        ),
        constants=(
            ("HEADS", dims["heads"]),
            ("KV_LORA_RANK", dims["kv_lora_rank"]),
            ("PAGE_SIZE", dims["page_size"]),
            ("BLOCK_N", problem.tile_s),
            ("BLOCK_C", min(_COMBINE_BLOCK_C, _padded(dims["kv_lora_rank"]))),
            ("BLOCK_B", _COMBINE_BLOCK_B),
            ("MIN_TILES", _MIN_TILES),
        ),
        num_warps=_COMBINE_WARPS,
        num_stages=2,
    )
