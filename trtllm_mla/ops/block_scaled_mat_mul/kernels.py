"""Kernels of BlockScaledMatMul.

The product is computed transposed, as weight times rows: tensor cores want at least 64 rows of their first operand,
which a weight always has, and as few as 8 columns of their second, which is enough for the tokens of a decode step.

Dimensions of tiles: N rows of the weight, which are columns of the output, K the dimension it sums over, M rows of x,
W words of four codes.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import dot, narrow, tile_of
from trtllm_mla.ops.fp8_weights import decode, load_words, missing_factor


@triton.jit
def multiply(
    x,
    weight,
    scale,
    result,
    rows,
    out_steps,
    in_steps,
    split_steps,
    OUT_STEP: tl.constexpr,
    IN_STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Computes BLOCK_M rows and BLOCK_N columns of the output, from ``split_steps`` steps of BLOCK_K products.

    The weight is [out_steps * OUT_STEP, in_steps * IN_STEP], so that one kernel serves weights of many sizes and knows
    how they are aligned.

    Programs: parts of in_features times row blocks times column blocks, in the order of ``tile_of``. ``result`` is
    [parts, rows, out_features], of the model's type, or fp32 where there are several parts.

    Arithmetic: codes are decoded exactly, to the model's type; the fp32 sum of a step's products is multiplied by the
    scale of its block and added in fp32.

    Memory: ``num_stages`` tiles of x and of codes and one decoded tile in shared memory
    (``plan.shared_memory_bytes``), two fp32 tiles of BLOCK_N * BLOCK_M in registers. Codes are read once for each row
    block, 16 bytes at a time.
    """
    out_features, in_features = out_steps * OUT_STEP, in_steps * IN_STEP
    row_blocks, column_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    split = tl.program_id(0) // (row_blocks * column_blocks)
    block, column = tile_of(tl.program_id(0) % (row_blocks * column_blocks), row_blocks, column_blocks, GROUP_BLOCKS)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = offs_m < rows, offs_n < out_features
    x_M = x + offs_m.to(tl.int64) * in_features
    weight_N = weight + offs_n.to(tl.int64) * in_features
    scale += (column * BLOCK_N // BLOCK_SIZE) * tl.cdiv(in_features, BLOCK_SIZE)

    begin = split * split_steps
    end = tl.minimum(begin + split_steps, tl.cdiv(in_features, BLOCK_K))
    result_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(begin, end):
        start = step * BLOCK_K
        words_NW = load_words(weight_N, column_mask, step, in_steps, IN_STEP, BLOCK_K, OUT_STEP % BLOCK_N == 0)
        offs_k = start + tl.arange(0, BLOCK_K)
        mask = row_mask[:, None]
        if IN_STEP % BLOCK_K != 0:
            mask = mask & (offs_k < in_features)[None, :]
        x_MK = tl.load(x_M[:, None] + offs_k[None, :], mask=mask, other=0.0)
        block_scale = tl.load(scale + start // BLOCK_SIZE)
        weight_NK = decode(words_NW, x.dtype.element_ty, INTERPRET)
        products_NM = dot(weight_NK, tl.trans(x_MK), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), INTERPRET)
        result_NM += products_NM * (block_scale * missing_factor(x.dtype.element_ty))

    result += split.to(tl.int64) * rows * out_features
    tl.store(
        (result + offs_m.to(tl.int64) * out_features)[None, :] + offs_n[:, None],
        narrow(result_NM, result.dtype.element_ty, INTERPRET),
        mask=row_mask[None, :] & column_mask[:, None],
    )


@triton.jit
def sum_splits(
    partial,
    output,
    rows,
    out_steps,
    splits,
    OUT_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Adds up ``splits`` partial products [rows, out_steps * OUT_STEP] in their order.

    Programs: blocks of BLOCK elements. Memory: BLOCK fp32 values in registers.
    """
    elements = rows * out_steps * OUT_STEP
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(partial + split * elements + offs, mask=mask, other=0.0)
    tl.store(output + offs, narrow(total, output.dtype.element_ty, INTERPRET), mask=mask)
