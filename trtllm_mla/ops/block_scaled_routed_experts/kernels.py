"""Kernels of BlockScaledRoutedExperts: the two products. The others are those of RoutedExperts.

Slots, row blocks and the letters of tiles are those of ``trtllm_mla.ops.routed_experts.kernels``. Products are
computed transposed, as weight times slots, as in BlockScaledMatMul: N rows of a weight, M slots, W words of codes.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import dot, narrow, tile_of
from trtllm_mla.ops.fp8_weights import decode, load_words, missing_factor
from trtllm_mla.ops.routed_experts.kernels import load_columns


@triton.jit
def gate_up(
    hidden,
    gate_up_proj,
    gate_up_scale,
    num_blocks,
    block_expert,
    block_slots,
    gated,
    row_blocks,
    TOP_K: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    INTERMEDIATE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Computes ``silu(gate x) * up x`` [slots, INTERMEDIATE_SIZE] for the slots of a row block, BLOCK_N columns.

    Programs: ``row_blocks`` times the column blocks, in the order of ``tile_of``. Row blocks from ``num_blocks`` on
    do not exist, and end at once.

    Arithmetic: codes are decoded exactly, to the model's type; the fp32 sum of a step's products is multiplied by the
    scale of its block and added in fp32. What follows is fp32, up to one rounding to the model's type.

    Memory: ``num_stages`` tiles of hidden and of codes and decoded tiles in shared memory
    (``plan.shared_memory_bytes``), three fp32 tiles of BLOCK_N * BLOCK_M in registers. Codes are read once for each
    row block, 16 bytes at a time.
    """
    BLOCKS_I: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_SIZE - 1) // BLOCK_SIZE
    BLOCKS_H: tl.constexpr = (HIDDEN_SIZE + BLOCK_SIZE - 1) // BLOCK_SIZE
    ALL_ROWS: tl.constexpr = INTERMEDIATE_SIZE % BLOCK_N == 0
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
    gate_scale = gate_up_scale + (expert * (2 * BLOCKS_I) + column * BLOCK_N // BLOCK_SIZE) * BLOCKS_H
    up_scale = gate_scale + BLOCKS_I * BLOCKS_H
    gate_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(tl.cdiv(HIDDEN_SIZE, BLOCK_K)):
        x_MK = load_columns(x_M, row_mask, step * BLOCK_K, HIDDEN_SIZE, BLOCK_K, False)
        gate_NW = load_words(gate_N, column_mask, step, 1, HIDDEN_SIZE, BLOCK_K, ALL_ROWS)
        up_NW = load_words(up_N, column_mask, step, 1, HIDDEN_SIZE, BLOCK_K, ALL_ROWS)
        scale_block = step * BLOCK_K // BLOCK_SIZE
        gate_NM = _add_scaled(gate_NM, gate_NW, tl.load(gate_scale + scale_block), x_MK, INTERPRET)
        up_NM = _add_scaled(up_NM, up_NW, tl.load(up_scale + scale_block), x_MK, INTERPRET)

    gated_NM = gate_NM * tl.sigmoid(gate_NM) * up_NM
    rows = gated + slot_M.to(tl.int64) * INTERMEDIATE_SIZE
    tl.store(
        rows[None, :] + offs_n[:, None],
        narrow(gated_NM, gated.dtype.element_ty, INTERPRET),
        mask=row_mask[None, :] & column_mask[:, None],
    )


@triton.jit
def down(
    gated,
    down_proj,
    down_scale,
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Computes ``down gated`` in fp32 for the slots of a row block, BLOCK_N of a band of the output's columns.

    The band is ``band_steps`` steps of COLUMN_STEP columns, a multiple of BLOCK_N, from step ``first_step`` on;
    ``partial`` is [slots, columns of the band]. Programs, arithmetic and memory: as in ``gate_up``, with one weight
    tile and two tiles in registers.
    """
    BLOCKS_I: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_SIZE - 1) // BLOCK_SIZE
    BLOCKS_H: tl.constexpr = (HIDDEN_SIZE + BLOCK_SIZE - 1) // BLOCK_SIZE
    columns = band_steps * COLUMN_STEP
    block, column = tile_of(tl.program_id(0), row_blocks, columns // BLOCK_N, GROUP_BLOCKS)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot_M = tl.load(block_slots + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = slot_M >= 0
    offs_band = column * BLOCK_N + tl.arange(0, BLOCK_N)
    first = first_step * COLUMN_STEP + column * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    column_mask = offs_n < HIDDEN_SIZE

    x_M = gated + slot_M.to(tl.int64) * INTERMEDIATE_SIZE
    down_N = down_proj + expert * (HIDDEN_SIZE * INTERMEDIATE_SIZE) + offs_n.to(tl.int64) * INTERMEDIATE_SIZE
    scale = down_scale + (expert * BLOCKS_H + first // BLOCK_SIZE) * BLOCKS_I
    partial_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(tl.cdiv(INTERMEDIATE_SIZE, BLOCK_K)):
        x_MK = load_columns(x_M, row_mask, step * BLOCK_K, INTERMEDIATE_SIZE, BLOCK_K, False)
        down_NW = load_words(down_N, column_mask, step, 1, INTERMEDIATE_SIZE, BLOCK_K, HIDDEN_SIZE % BLOCK_N == 0)
        partial_NM = _add_scaled(partial_NM, down_NW, tl.load(scale + step * BLOCK_K // BLOCK_SIZE), x_MK, INTERPRET)

    rows = partial + slot_M.to(tl.int64) * columns
    tl.store(rows[None, :] + offs_band[:, None], partial_NM, mask=row_mask[None, :] & column_mask[:, None])


@triton.jit
def _add_scaled(sum_NM, words_NW, scale, x_MK, INTERPRET: tl.constexpr):
    """``sum + scale * weight @ x^T``, the weight given by its codes."""
    weight_NK = decode(words_NW, x_MK.dtype, INTERPRET)
    products_NM = dot(weight_NK, tl.trans(x_MK), tl.zeros(sum_NM.shape, tl.float32), INTERPRET)
    return sum_NM + products_NM * (scale * missing_factor(x_MK.dtype))
