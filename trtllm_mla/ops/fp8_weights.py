"""Device functions that read E4M3 weights.

Codes are read as 32-bit words, four of them in one, and taken apart with integers: GPUs before sm_89 do not have the
type. Codes of an E4M3 NaN (0x7F and 0xFF) are no weights: they decode to any number.

Dimensions: N rows of a weight, K the dimension that a product sums over, W words of four codes.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import narrow, widen


@triton.jit
def load_words(rows_N, row_mask, step, steps, STEP: tl.constexpr, BLOCK_K: tl.constexpr, ALL_ROWS: tl.constexpr):
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
def decode(words_NW, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """E4M3 numbers [N, 4 * W] in fp32, fp16 or bf16, exactly, but for the factor that ``missing_factor`` names.

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
def missing_factor(dtype: tl.constexpr):
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
