"""Device functions that the operations' kernels share.

Most hide two gaps of Triton's interpreter (3.9), which keeps bfloat16 as 16-bit integers: its ``tl.dot`` multiplies
those integers, and its conversion from fp32 cuts bits off instead of rounding to the nearest value. A kernel therefore
multiplies with ``dot`` or ``add_scores``, widens with ``widen`` and narrows with ``narrow``. It does not store fp32
values through a bfloat16 pointer, which would convert behind the scenes. Compiled, ``widen`` and ``narrow`` are plain
conversions.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, accumulator, INTERPRET: tl.constexpr):
    """Returns ``accumulator + a @ b`` in fp32; fp32 operands are multiplied without TF32."""
    if INTERPRET:
        return tl.dot(widen(a, INTERPRET), widen(b, INTERPRET), accumulator)
    if a.dtype == tl.float32:
        return tl.dot(a, b, accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator)


@triton.jit
def add_scores(scores_MN, q_MK, k_NK, INTERPRET: tl.constexpr):
    """Returns ``scores + q @ k^T`` in fp32.

    Fp32 operands are multiplied in parts of 32 whose sums are added pairwise: a running sum of some hundred products
    would lose more digits than the scores themselves, as fp32 numbers, have to.
    """
    if q_MK.dtype != tl.float32:
        return dot(q_MK, tl.trans(k_NK), scores_MN, INTERPRET)
    M: tl.constexpr = q_MK.shape[0]
    N: tl.constexpr = k_NK.shape[0]
    K: tl.constexpr = min(q_MK.shape[1], 32)
    PARTS: tl.constexpr = q_MK.shape[1] // K
    q_PMK = tl.permute(tl.reshape(q_MK, [M, PARTS, K]), [1, 0, 2])
    k_PKN = tl.permute(tl.reshape(k_NK, [N, PARTS, K]), [1, 2, 0])
    sums_PMN = dot(q_PMK, k_PKN, tl.zeros([PARTS, M, N], tl.float32), INTERPRET)
    for _ in tl.static_range(10):
        if sums_PMN.shape[0] > 1:
            sums_PMN = tl.sum(tl.reshape(sums_PMN, [2, sums_PMN.shape[0] // 2, M, N]), 0)
    return scores_MN + tl.reshape(sums_PMN, [M, N])


@triton.jit
def widen(x, INTERPRET: tl.constexpr):
    """Converts fp32, fp16 or bf16 to fp32, exactly."""
    if INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Converts fp32 to fp32, fp16 or bf16, to the nearest value, ties to even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Half of the last kept bit's weight, less one where that bit is 0: a tie goes to the even neighbour.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def tile_of(index, row_blocks, column_blocks, GROUP_BLOCKS: tl.constexpr):
    """Row block and column block of a tile of a product.

    GROUP_BLOCKS row blocks go through the column blocks together, row blocks fastest: programs that run at the same
    time share the rows of few blocks, and weights.
    """
    in_group = GROUP_BLOCKS * column_blocks
    first = index // in_group * GROUP_BLOCKS
    group_rows = tl.minimum(row_blocks - first, GROUP_BLOCKS)
    index = index % in_group
    return first + index % group_rows, index // group_rows
