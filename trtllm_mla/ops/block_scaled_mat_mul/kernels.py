"""Kernels of BlockScaledMatMul.

The product is computed transposed, as weight times rows: tensor cores want at least 64 rows of their first operand,
which a weight always has, and as few as 8 columns of their second, which is enough for the tokens of a decode step.

Dimensions of tiles: N rows of the weight, which are columns of the output, K the dimension it sums over, M rows of x,
W words of four codes.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import dot, narrow, widen


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

    Programs: parts of in_features times row blocks times column blocks, in the order of ``_tile_of``. ``result`` is
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
    block, column = _tile_of(tl.program_id(0) % (row_blocks * column_blocks), row_blocks, column_blocks, GROUP_BLOCKS)
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
        words_NW = _load_words(weight_N, column_mask, step, in_steps, IN_STEP, BLOCK_K, OUT_STEP % BLOCK_N == 0)
        offs_k = start + tl.arange(0, BLOCK_K)
        mask = row_mask[:, None]
        if IN_STEP % BLOCK_K != 0:
            mask = mask & (offs_k < in_features)[None, :]
        x_MK = tl.load(x_M[:, None] + offs_k[None, :], mask=mask, other=0.0)
        block_scale = tl.load(scale + start // BLOCK_SIZE)
        weight_NK = _decode(words_NW, x.dtype.element_ty, INTERPRET)
        products_NM = dot(weight_NK, tl.trans(x_MK), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), INTERPRET)
        result_NM += products_NM * (block_scale * _missing_factor(x.dtype.element_ty))

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


@triton.jit
def _tile_of(index, row_blocks, column_blocks, GROUP_BLOCKS: tl.constexpr):
    """Row block and column block of a tile.

    GROUP_BLOCKS row blocks go through the column blocks together, row blocks fastest: programs that run at the same
    time share weights, and the rows of few blocks.
    """
    in_group = GROUP_BLOCKS * column_blocks
    first = index // in_group * GROUP_BLOCKS
    group_rows = tl.minimum(row_blocks - first, GROUP_BLOCKS)
    index = index % in_group
    return first + index % group_rows, index // group_rows


@triton.jit
def _load_words(rows_N, row_mask, step, steps, STEP: tl.constexpr, BLOCK_K: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Codes [step * BLOCK_K, (step + 1) * BLOCK_K) of rows, four in an int32; 0 beyond the edges.

    A row has ``steps`` times STEP bytes. With ALL_ROWS there is no row beyond the edge.
    """
    W: tl.constexpr = BLOCK_K // 4
    offs_w = step * W + tl.arange(0, W)
    if STEP % 4 == 0:
        words = rows_N.to(tl.pointer_type(tl.int32))[:, None] + offs_w[None, :]
        if STEP % BLOCK_K == 0 and ALL_ROWS:
            return tl.load(words)
        mask = row_mask[:, None]
        if STEP % BLOCK_K != 0:
            mask = mask & (offs_w < steps * (STEP // 4))[None, :]
        return tl.load(words, mask=mask, other=0)
    words = tl.zeros((rows_N.shape[0], W), tl.int32)
    for byte in tl.static_range(4):
        offs_k = 4 * offs_w + byte
        mask = row_mask[:, None] & (offs_k < steps * STEP)[None, :]
        codes = tl.load(rows_N[:, None] + offs_k[None, :], mask=mask, other=0)
        words |= (codes.to(tl.int32) & 0xFF) << (8 * byte)
    return words


@triton.jit
def _decode(words_NW, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """E4M3 numbers [N, 4 * W] in fp32, fp16 or bf16, exactly, but for the factor that ``_missing_factor`` names.

    A code's exponent and mantissa are put where the wider type has its own. What the types' biases differ by is then
    a power of two, for subnormal numbers too. Fp16 holds the numbers without it; bf16 and fp32 are multiplied by it,
    since products of numbers so small would be lost.
    """
    N: tl.constexpr = words_NW.shape[0]
    K: tl.constexpr = 4 * words_NW.shape[1]
    if dtype == tl.float32:
        # An arithmetic shift leaves the sign where it is.
        first = _fp32(((words_NW << 24) >> 4) & -0x78100000)
        second = _fp32(((words_NW << 16) >> 4) & -0x78100000)
        third = _fp32(((words_NW << 8) >> 4) & -0x78100000)
        fourth = _fp32((words_NW >> 4) & -0x78100000)
    else:
        # Two of the four codes at a time, in the halves of a word: signs to bits 31 and 15, and below them the rest.
        MASK: tl.constexpr = -0x7FFF8000
        if dtype == tl.float16:
            first, third = _halves(((words_NW << 7) & 0x3F803F80) | ((words_NW << 8) & MASK), dtype, INTERPRET)
            second, fourth = _halves(((words_NW >> 1) & 0x3F803F80) | (words_NW & MASK), dtype, INTERPRET)
        else:
            first, third = _halves(((words_NW << 4) & 0x07F007F0) | ((words_NW << 8) & MASK), dtype, INTERPRET)
            second, fourth = _halves(((words_NW >> 4) & 0x07F007F0) | (words_NW & MASK), dtype, INTERPRET)
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [N, K])


@triton.jit
def _missing_factor(dtype: tl.constexpr):
    """What decoded numbers of a type have to be multiplied by: the biases of fp16 and E4M3 are 15 and 7."""
    return 256.0 if dtype == tl.float16 else 1.0


@triton.jit
def _halves(words, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """The lower and upper halves of words as fp16, or as bf16 times 2^120."""
    if dtype == tl.bfloat16:
        if INTERPRET:
            low = narrow(widen(_half(words, dtype), INTERPRET) * (2.0**120), dtype, INTERPRET)
            high = narrow(widen(_half(words >> 16, dtype), INTERPRET) * (2.0**120), dtype, INTERPRET)
            return low, high
        # Left to the compiler, both halves would be multiplied apart, or in fp32. sm_80 has no product of bf16, and
        # the sum with -0 changes nothing. 0x7B80 is 2^120.
        words = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [words, tl.full(words.shape, 0x7B807B80, tl.int32), tl.full(words.shape, -0x7FFF8000, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return _half(words, dtype), _half(words >> 16, dtype)


@triton.jit
def _half(words, dtype: tl.constexpr):
    return words.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _fp32(bits):
    return bits.to(tl.float32, bitcast=True) * (2.0**120)
