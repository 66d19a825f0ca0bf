"""Device functions that read and write the codes and scales of quantised cache rows.

``trtllm_mla.cache_rows`` says where they lie in a row, ``trtllm_mla.ops.row_codec`` what they mean. Types that GPUs
before sm_89 do not have (E4M3, E2M1) are taken apart with integers: the bits of a code are put where a wider format
has its sign, exponent and mantissa, and a power of two makes up for the difference between the exponents' biases.
That holds for a code's subnormal numbers too, because the wider format's are as evenly spaced; nothing may flush them
to zero. Every product is exact.

Codes are read as 32-bit words, so that a thread has four or eight of them in a register and no instruction is needed
to take bytes apart::

    words_NW = tl.load(rows_N.to(tl.pointer_type(tl.int32))[:, None] + w_W[None, :], ...)

A word beyond a row's codes may be loaded as 0; its values are 0 where its scale is finite. Codes of an E4M3 NaN (0x7F
and 0xFF) are not written by any encoder and decode to any value; scales that are NaN decode to NaN.

Dimensions: N rows, W words, S scales, L elements (4 in a word for fp8, 8 for nvfp4).
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import narrow, widen

# Differences between the exponents' biases: 127 for fp32 and bf16, 7 for E4M3, 1 for E2M1.
_E4M3_TO_FP32 = tl.constexpr(2.0**120)
# 448 * 2^126 would overflow: the power of two that is missing is split.
_E2M1_TO_FP32 = tl.constexpr(2.0**118)
_E2M1_REST = tl.constexpr(2.0**8)


@triton.jit
def decode_fp8(words_NW, scale_NS, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Values of fp8 rows.

    Args:
        words_NW: int32, four E4M3 codes each, the first in the lowest byte. W is a power of two.
        scale_NS: fp32, a scale for each 128 elements, or for all if there are fewer.
        dtype: The result's type: fp32, fp16 (rounded, since its exponents end at 2^-24) or bf16 (exact).
        INTERPRET: Whether Triton's interpreter runs this.

    Returns:
        Values [N, 4 * W], in order.
    """
    N: tl.constexpr = words_NW.shape[0]
    W: tl.constexpr = words_NW.shape[1]
    S: tl.constexpr = scale_NS.shape[1]
    words = tl.reshape(words_NW, [N, S, W // S])
    factor = (scale_NS * _E4M3_TO_FP32)[:, :, None]
    if dtype == tl.bfloat16:
        # Sign to bit 15, the other seven bits to bits 10 to 4.
        first, third = _scaled_halves(words << 8, words << 4, 0x07F007F0, factor, 1.0, INTERPRET)
        second, fourth = _scaled_halves(words, words >> 4, 0x07F007F0, factor, 1.0, INTERPRET)
    else:
        # An arithmetic shift leaves the sign where it is.
        first = narrow(_fp32(((words << 24) >> 4) & -0x78100000) * factor, dtype, INTERPRET)
        second = narrow(_fp32(((words << 16) >> 4) & -0x78100000) * factor, dtype, INTERPRET)
        third = narrow(_fp32(((words << 8) >> 4) & -0x78100000) * factor, dtype, INTERPRET)
        fourth = narrow(_fp32((words >> 4) & -0x78100000) * factor, dtype, INTERPRET)
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [N, 4 * W])


@triton.jit
def decode_nvfp4(words_NW, scale_NS, ODD: tl.constexpr, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Values of every second element of nvfp4 rows, exactly.

    ``tl.reshape(tl.join(even, odd), [N, 8 * W])`` has them all in order; who needs no order (a sum over elements)
    keeps the halves apart.

    Args:
        words_NW: int32, eight E2M1 codes each, the first in the lowest four bits. W is a power of two.
        scale_NS: fp32, from ``decode_e4m3``, a scale for each 16 elements.
        ODD: Elements 1, 3, 5, ... instead of 0, 2, 4, ...
        dtype: The result's type: fp32, fp16 or bf16.
        INTERPRET: Whether Triton's interpreter runs this.

    Returns:
        Values [N, 4 * W].
    """
    N: tl.constexpr = words_NW.shape[0]
    W: tl.constexpr = words_NW.shape[1]
    S: tl.constexpr = scale_NS.shape[1]
    words = tl.reshape(words_NW, [N, S, W // S])
    factor = (scale_NS * _E2M1_TO_FP32)[:, :, None]
    if dtype == tl.bfloat16:
        # Sign to bit 15, the other three bits to bits 8 to 6.
        if ODD:
            first, third = _scaled_halves(words << 8, words << 2, 0x01C001C0, factor, _E2M1_REST, INTERPRET)
            second, fourth = _scaled_halves(words, words >> 6, 0x01C001C0, factor, _E2M1_REST, INTERPRET)
        else:
            first, third = _scaled_halves(words << 12, words << 6, 0x01C001C0, factor, _E2M1_REST, INTERPRET)
            second, fourth = _scaled_halves(words << 4, words >> 2, 0x01C001C0, factor, _E2M1_REST, INTERPRET)
    else:
        START: tl.constexpr = 24 if ODD else 28
        first = narrow(_fp32(((words << START) >> 6) & -0x7E400000) * factor * _E2M1_REST, dtype, INTERPRET)
        second = narrow(_fp32(((words << START - 8) >> 6) & -0x7E400000) * factor * _E2M1_REST, dtype, INTERPRET)
        third = narrow(_fp32(((words << START - 16) >> 6) & -0x7E400000) * factor * _E2M1_REST, dtype, INTERPRET)
        fourth = narrow(_fp32(((words << START - 24) >> 6) & -0x7E400000) * factor * _E2M1_REST, dtype, INTERPRET)
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [N, 4 * W])


@triton.jit
def decode_e4m3(codes):
    """E4M3 codes (int8 or uint8, any shape) as fp32, exactly; NaN for 0x7F and 0xFF."""
    shifted = codes.to(tl.int8, bitcast=True).to(tl.int32) << 24
    values = _fp32((shifted >> 4) & -0x78100000) * _E4M3_TO_FP32
    return tl.where((shifted & 0x7F000000) == 0x7F000000, float("nan"), values)


@triton.jit
def encode_fp8(values_SB):
    """Codes and scales of latents, as ``row_codec.encode_rows`` makes them.

    Args:
        values_SB: fp32, latents over their outer scale; a row is a block that shares a scale. Padding is 0.

    Returns:
        int32 codes [S, B] from 0 to 255, and the fp32 scales' bits [S] as int32.
    """
    finite_S = _all_finite(values_SB)
    values_SB = tl.where(finite_S[:, None], values_SB, 0.0)
    amax_S = tl.max(tl.abs(values_SB), 1)
    # 448 is 1.75 * 2^8. Adding a quarter's worth of mantissa, less one, carries where the mantissa is above 1.75.
    exponent_S = (amax_S.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    exponent_S = tl.minimum(tl.maximum(exponent_S - 8, 127 - 64), 127 + 7)
    # Division by a power of two, exact but for values that are far too small for a code.
    inverse_S = _fp32((254 - exponent_S) << 23)
    codes_SB = _e4m3(tl.abs(values_SB) * inverse_S[:, None])
    codes_SB += tl.where(values_SB < 0.0, 0x80, 0)
    return codes_SB, tl.where(finite_S, exponent_S << 23, 0x7FC00000)


@triton.jit
def encode_nvfp4(values_SB):
    """Pairs of codes and scales of latents, as ``row_codec.encode_rows`` makes them.

    Compiled without fused multiply-adds, which would round the errors that are compared differently.

    Args:
        values_SB: fp32, latents over their outer scale, [S, 16]; a row is a block that shares a scale. Padding is 0.

    Returns:
        int32 pairs of codes [S, 8] from 0 to 255, and the scales' E4M3 codes [S] as int32.
    """
    finite_S = _all_finite(values_SB)
    values_SB = tl.where(finite_S[:, None], values_SB, 0.0)
    magnitudes_SB = tl.abs(values_SB)
    amax_S = tl.max(magnitudes_SB, 1)
    scale_6_S = _e4m3(tl.div_rn(amax_S, tl.full(amax_S.shape, 6.0, tl.float32)))
    scale_4_S = _e4m3(tl.div_rn(amax_S, tl.full(amax_S.shape, 4.0, tl.float32)))
    codes_6_SB, error_6_S = _e2m1(magnitudes_SB, scale_6_S)
    codes_4_SB, error_4_S = _e2m1(magnitudes_SB, scale_4_S)
    finer_S = error_4_S < error_6_S
    codes_SB = tl.where(finer_S[:, None], codes_4_SB, codes_6_SB) + tl.where(values_SB < 0.0, 8, 0)
    low, high = tl.split(tl.reshape(codes_SB, [codes_SB.shape[0], codes_SB.shape[1] // 2, 2]))
    scale_S = tl.where(finer_S, scale_4_S, scale_6_S)
    return low | (high << 4), tl.where(finite_S, scale_S, 0x7F)


@triton.jit
def _all_finite(values_SB):
    """Whether no value of a row is infinite or NaN."""
    return tl.max((values_SB.to(tl.int32, bitcast=True) & 0x7FFFFFFF), 1) < 0x7F800000


@triton.jit
def _e4m3(magnitudes):
    """The nearest E4M3 code of each magnitude, ties to the even code, at most that of 448."""
    magnitudes = tl.minimum(magnitudes, 448.0)
    bits = magnitudes.to(tl.int32, bitcast=True)
    # Half of the last kept bit's weight, less one where that bit is 0; then the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The last bit of numbers from 2^14 on weighs 2^-9 in fp32, as in E4M3's smallest numbers.
    subnormal = (magnitudes + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(magnitudes < 0.015625, subnormal, normal)


@triton.jit
def _e2m1(magnitudes_SB, scale_code_S):
    """The nearest E2M1 code of each magnitude over its scale, ties to the even code, and each row's squared error.

    A scale of 0 makes all codes 0. A magnitude is compared with the midpoints between E2M1 numbers times the scale,
    which are exact; those below a number with an even code belong to that code.
    """
    scale_S1 = decode_e4m3(scale_code_S.to(tl.int8))[:, None]
    codes_SB = (magnitudes_SB > 0.25 * scale_S1).to(tl.int32)
    codes_SB += (magnitudes_SB >= 0.75 * scale_S1).to(tl.int32)
    codes_SB += (magnitudes_SB > 1.25 * scale_S1).to(tl.int32)
    codes_SB += (magnitudes_SB >= 1.75 * scale_S1).to(tl.int32)
    codes_SB += (magnitudes_SB > 2.5 * scale_S1).to(tl.int32)
    codes_SB += (magnitudes_SB >= 3.5 * scale_S1).to(tl.int32)
    codes_SB += (magnitudes_SB > 5.0 * scale_S1).to(tl.int32)
    codes_SB = tl.where(scale_S1 > 0.0, codes_SB, 0)
    error = _fp32(codes_SB << 22) * (2.0**126) * scale_S1 - magnitudes_SB
    error = error * error
    for _ in tl.static_range(4):
        error = tl.sum(tl.reshape(error, [error.shape[0], 2, error.shape[1] // 2]), 1)
    return codes_SB, tl.reshape(error, [error.shape[0]])


@triton.jit
def _scaled_halves(signs, magnitudes, MAGNITUDE: tl.constexpr, factor, REST: tl.constexpr, INTERPRET: tl.constexpr):
    """Makes two bfloat16 in each 32-bit word and multiplies both by two factors in turn; every product is exact.

    Compiled, a factor takes one instruction for a word. Left to the compiler, many products stay single, and their
    16-bit registers spill.

    Args:
        signs: int32, whose bits 31 and 15 are the signs.
        magnitudes: int32, whose bits in MAGNITUDE are exponents and mantissas.
        MAGNITUDE: These bits, without 31 and 15.
        factor: The first factors in fp32, which are bfloat16 numbers.
        REST: The second factor, a power of two.
        INTERPRET: Whether Triton's interpreter runs this.

    Returns:
        The products of the lower and of the upper halves.
    """
    words = (magnitudes & MAGNITUDE) | (signs & -0x7FFF8000)
    if INTERPRET:
        low = narrow(widen(_low_half(words), INTERPRET) * factor * REST, tl.bfloat16, INTERPRET)
        high = narrow(widen(_low_half(words >> 16), INTERPRET) * factor * REST, tl.bfloat16, INTERPRET)
        return low, high
    words = _multiply_halves(words, factor)
    if REST != 1.0:
        words = _multiply_halves(words, tl.full(factor.shape, REST, tl.float32))
    return _low_half(words), _low_half(words >> 16)


@triton.jit
def _multiply_halves(words, factor):
    factor = factor.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    factor, words = tl.broadcast(factor | (factor << 16), words)
    # sm_80 has no product of bfloat16. A sum with -0 leaves the sign of zeros.
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [words, factor, tl.full(words.shape, -0x7FFF8000, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _low_half(words):
    return words.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _fp32(bits):
    return bits.to(tl.float32, bitcast=True)
