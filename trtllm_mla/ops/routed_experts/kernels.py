"""Kernels of RoutedExperts: a grouped matrix product over the tokens of each expert.

A slot is one choice of one token: slot ``token * top_k + choice``. Slots are sorted by expert into row blocks of
``block_m``, each of one expert, so that a block is an ordinary matrix product with that expert's weights.

Dimensions of tiles: M slots, N columns of the product, K the dimension it sums over, X experts, S slots looked at
together. Kernels run one after the other; no program reads what another program of the same launch writes.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import dot, narrow, tile_of


@triton.jit
def sort_slots(
    expert_ids,
    num_blocks,
    block_expert,
    block_slots,
    slots,
    first_expert,
    block_m,
    EXPERTS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_PADDING: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Lists the slots of each expert in ascending order, in row blocks of ``block_m``.

    Programs: one for each expert. All count the slots of all experts, which tells each where its row blocks begin,
    and then each lists its own. Written are ``num_blocks``, and for each of that many row blocks its expert and its
    ``block_m`` slots, -1 behind the last slot of an expert. ``block_m`` is at most BLOCK_PADDING.

    Memory: BLOCK_S ids and BLOCK_X counts in registers; the counts are made in BLOCK_X words of shared memory.
    """
    expert = tl.program_id(0)
    offs_x = tl.arange(0, BLOCK_X)
    count_X = tl.zeros((BLOCK_X,), tl.int32)
    for start in range(0, slots, BLOCK_S):
        local_S, known_S = _local_experts(expert_ids, start + tl.arange(0, BLOCK_S), slots, first_expert, EXPERTS)
        count_X += tl.histogram(local_S, BLOCK_X, mask=known_S)

    blocks_X = (count_X + block_m - 1) // block_m
    first_block = tl.sum(tl.where(offs_x < expert, blocks_X, 0))
    blocks = tl.sum(tl.where(offs_x == expert, blocks_X, 0))
    if expert == EXPERTS - 1:
        tl.store(num_blocks, first_block + blocks)
    for block in range(first_block, first_block + blocks):
        tl.store(block_expert + block, expert)

    if blocks > 0:
        block_slots += first_block.to(tl.int64) * block_m
        listed = 0
        for start in range(0, slots, BLOCK_S):
            offs_s = start + tl.arange(0, BLOCK_S)
            local_S, known_S = _local_experts(expert_ids, offs_s, slots, first_expert, EXPERTS)
            mine_S = known_S & (local_S == expert)
            rank_S = tl.cumsum(mine_S.to(tl.int32), 0)
            tl.store(block_slots + (listed + rank_S - 1), offs_s, mask=mine_S)
            listed += tl.max(rank_S, 0)
        offs_padding = listed + tl.arange(0, BLOCK_PADDING)
        tl.store(block_slots + offs_padding, -1, mask=offs_padding < blocks * block_m)


@triton.jit
def gate_up(
    hidden,
    gate_up_proj,
    num_blocks,
    block_expert,
    block_slots,
    gated,
    row_blocks,
    TOP_K: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    INTERMEDIATE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Computes ``silu(gate x) * up x`` [slots, INTERMEDIATE_SIZE] for the slots of a row block, BLOCK_N columns.

    Programs: ``row_blocks`` times the column blocks, in the order of ``tile_of``. Row blocks from ``num_blocks`` on
    do not exist, and end at once.

    Arithmetic: both products are fp32, and so is what follows, up to one rounding to the model's type.

    Memory: ``num_stages`` tiles of (BLOCK_M + 2 * BLOCK_N) * BLOCK_K in shared memory
    (``plan.shared_memory_bytes``), two fp32 accumulators of BLOCK_M * BLOCK_N in registers. Weights are read once for
    each row block, 16 bytes at a time.
    """
    block, column = tile_of(tl.program_id(0), row_blocks, tl.cdiv(INTERMEDIATE_SIZE, BLOCK_N), GROUP_BLOCKS)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot_M = tl.load(block_slots + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = slot_M >= 0
    offs_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = offs_n < INTERMEDIATE_SIZE

    x_M = hidden + (slot_M // TOP_K).to(tl.int64) * HIDDEN_SIZE
    gate_N = gate_up_proj + expert * (2 * INTERMEDIATE_SIZE * HIDDEN_SIZE) + offs_n.to(tl.int64) * HIDDEN_SIZE
    up_N = gate_N + INTERMEDIATE_SIZE * HIDDEN_SIZE
    gate_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, HIDDEN_SIZE, BLOCK_K):
        x_MK = load_columns(x_M, row_mask, start, HIDDEN_SIZE, BLOCK_K, False)
        gate_NK = load_columns(gate_N, column_mask, start, HIDDEN_SIZE, BLOCK_K, INTERMEDIATE_SIZE % BLOCK_N == 0)
        up_NK = load_columns(up_N, column_mask, start, HIDDEN_SIZE, BLOCK_K, INTERMEDIATE_SIZE % BLOCK_N == 0)
        gate_MN = dot(x_MK, tl.trans(gate_NK), gate_MN, INTERPRET)
        up_MN = dot(x_MK, tl.trans(up_NK), up_MN, INTERPRET)

    gated_MN = gate_MN * tl.sigmoid(gate_MN) * up_MN
    rows = gated + slot_M.to(tl.int64) * INTERMEDIATE_SIZE
    tl.store(
        rows[:, None] + offs_n[None, :],
        narrow(gated_MN, gated.dtype.element_ty, INTERPRET),
        mask=row_mask[:, None] & column_mask[None, :],
    )


@triton.jit
def down(
    gated,
    down_proj,
    num_blocks,
    block_expert,
    block_slots,
    partial,
    row_blocks,
    first_step,
    band_steps,
    HIDDEN_SIZE: tl.constexpr,
    INTERMEDIATE_SIZE: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Computes ``down gated`` in fp32 for the slots of a row block, BLOCK_N of a band of the output's columns.

    The band is ``band_steps`` steps of COLUMN_STEP columns, a multiple of BLOCK_N, from step ``first_step`` on;
    ``partial`` is [slots, columns of the band]. Programs, arithmetic and memory: as in ``gate_up``, with one weight
    tile and one accumulator.
    """
    columns = band_steps * COLUMN_STEP
    block, column = tile_of(tl.program_id(0), row_blocks, columns // BLOCK_N, GROUP_BLOCKS)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot_M = tl.load(block_slots + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = slot_M >= 0
    offs_band = column * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_n = first_step * COLUMN_STEP + offs_band
    column_mask = offs_n < HIDDEN_SIZE

    x_M = gated + slot_M.to(tl.int64) * INTERMEDIATE_SIZE
    down_N = down_proj + expert * (HIDDEN_SIZE * INTERMEDIATE_SIZE) + offs_n.to(tl.int64) * INTERMEDIATE_SIZE
    partial_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INTERMEDIATE_SIZE, BLOCK_K):
        x_MK = load_columns(x_M, row_mask, start, INTERMEDIATE_SIZE, BLOCK_K, False)
        down_NK = load_columns(down_N, column_mask, start, INTERMEDIATE_SIZE, BLOCK_K, HIDDEN_SIZE % BLOCK_N == 0)
        partial_MN = dot(x_MK, tl.trans(down_NK), partial_MN, INTERPRET)

    rows = partial + slot_M.to(tl.int64) * columns
    tl.store(rows[:, None] + offs_band[None, :], partial_MN, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def weighted_sum(
    partial,
    expert_ids,
    expert_weights,
    output,
    tokens,
    first_expert,
    first_step,
    band_steps,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Adds a token's partial results, each times its weight, in fp32 and in the order of its choices.

    Programs: tokens times blocks of BLOCK_N columns of the band (see ``down``), tokens fastest. Memory: BLOCK_N fp32
    values in registers. Slots whose expert is not among the EXPERTS are not read.
    """
    token = (tl.program_id(0) % tokens).to(tl.int64)
    columns = band_steps * COLUMN_STEP
    offs_band = tl.program_id(0) // tokens * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_n = first_step * COLUMN_STEP + offs_band
    column_mask = (offs_band < columns) & (offs_n < HIDDEN_SIZE)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        local = tl.load(expert_ids + slot) - first_expert
        weight = tl.load(expert_weights + slot, mask=(local >= 0) & (local < EXPERTS), other=0.0)
        local_N = tl.full((BLOCK_N,), local, tl.int32)
        mask = column_mask & (local_N >= 0) & (local_N < EXPERTS)
        total += weight * tl.load(partial + slot * columns + offs_band, mask=mask, other=0.0)
    tl.store(
        output + token * HIDDEN_SIZE + offs_n, narrow(total, output.dtype.element_ty, INTERPRET), mask=column_mask
    )


@triton.jit
def _local_experts(expert_ids, offs_s, slots, first_expert, EXPERTS: tl.constexpr):
    """Indices of the slots' experts among those whose weights are here, and which slots have one."""
    in_slots = offs_s < slots
    # An id so low that the difference wraps around becomes too large, as first_expert + EXPERTS is below 2^31.
    local = tl.load(expert_ids + offs_s, mask=in_slots, other=0) - first_expert
    return local, in_slots & (local >= 0) & (local < EXPERTS)


@triton.jit
def load_columns(rows, row_mask, start, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Columns [start, start + BLOCK_K) of rows of WIDTH; zeros where ``row_mask`` is false or the row ends."""
    offs_k = start + tl.arange(0, BLOCK_K)
    if WIDTH % BLOCK_K == 0 and ALL_ROWS:
        return tl.load(rows[:, None] + offs_k[None, :])
    mask = row_mask[:, None]
    if WIDTH % BLOCK_K != 0:
        mask = mask & (offs_k < WIDTH)[None, :]
    return tl.load(rows[:, None] + offs_k[None, :], mask=mask, other=0.0)
