"""Parts of the ONNX function bodies that make and read quantised cache rows, and read FP8 weights.

``trtllm_mla.ops.row_codec`` states the arithmetic. Neither TensorRT nor ONNX has an operator that reinterprets bits,
and TensorRT has none for bits at all, so bytes are made and read with exact arithmetic: comparisons, products with
powers of two, rounding to whole numbers, which is to even at ties, and look-ups in tables. Bytes are numbers from -128
to 127 until the whole row is converted to int8. Choices are sums of constants where they can be: ONNX Runtime chooses
between constants ten times as fast as between tensors.

Legend: T rows, L kv_lora_rank, R rope_dim, N blocks that share a scale, B elements of a block, C bytes
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import FP8_BLOCK_SIZE
from trtllm_mla.ops.functions import INDEX_MAX, arange, reshape, size
from trtllm_mla.ops.row_codec import E2M1_MIDPOINTS, E2M1_VALUES, E4M3_MAX, FP8_SCALE_EXPONENTS, NVFP4_DIVISORS

if TYPE_CHECKING:
    from trtllm_mla.cache_rows import RowLayout

_FP32_MAX = float(np.finfo(np.float32).max)
_BYTES = np.arange(-128, 128).astype(np.int8).view(np.uint8)
_E4M3_OF_BYTE = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_SIGNED_E2M1 = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], np.float32)
_E2M1_OF_BYTE = np.stack([_SIGNED_E2M1[_BYTES & 0xF], _SIGNED_E2M1[_BYTES >> 4]], -1)


def encode_rows(op: Any, latent_TL: Any, k_pe_TR: Any, layout: RowLayout) -> Any:
    """Makes quantised rows.

    Args:
        op: Operator builder.
        latent_TL: fp32, the latents over their outer scale.
        k_pe_TR: fp32, the rotated rotary keys.
        layout: The cache's row.

    Returns:
        int8 [T, layout.width].
    """
    import onnx_ir

    encode = _encode_fp8 if layout.dtype is CacheDType.FP8 else _encode_nvfp4
    codes_TC, scales_TC = encode(op, latent_TL, layout)
    scale_bytes = layout.num_scales * (4 if layout.dtype is CacheDType.FP8 else 1)
    sections = (
        _padded(op, codes_TC, layout.scale_offset - layout.code_bytes),
        _padded(op, scales_TC, layout.rope_offset - layout.scale_offset - scale_bytes),
        _padded(op, _bfloat16_bytes(op, k_pe_TR), layout.row_bytes - layout.rope_offset - 2 * layout.rope_dim),
    )
    return op.Cast(op.Concat(*sections, axis=1), to=onnx_ir.DataType.INT8)


def decode_rows(op: Any, rows_TC: Any, layout: RowLayout) -> tuple[Any, Any]:
    """Reads quantised rows.

    Args:
        op: Operator builder.
        rows_TC: int8 [T, layout.width].
        layout: The cache's row.

    Returns:
        fp32 latents [T, L], before the outer scale, and rotary keys [T, R].
    """

    def section(begin: int, count: int) -> Any:
        return op.Slice(rows_TC, [begin], [begin + count], [1])

    codes_TC = section(0, layout.code_bytes)
    if layout.dtype is CacheDType.FP8:
        values_TL = _look_up_byte(op, _E4M3_OF_BYTE, codes_TC)
        scales_TN = _power_of_two(op, section(layout.scale_offset, 4 * layout.num_scales), layout.num_scales)
    else:
        pairs_TC2 = _look_up_byte(op, _E2M1_OF_BYTE, codes_TC)
        values_TL = reshape(op, pairs_TC2, size(op, rows_TC, 0), [2 * layout.code_bytes])
        if layout.kv_lora_rank % 2:
            values_TL = op.Slice(values_TL, [0], [layout.kv_lora_rank], [1])
        scales_TN = _look_up_byte(op, _E4M3_OF_BYTE, section(layout.scale_offset, layout.num_scales))
    # Groups of equal scale that tile the latent, although its last block may be short.
    group = math.gcd(layout.kv_lora_rank, layout.block_size)
    groups = layout.kv_lora_rank // group
    if groups != layout.num_scales:
        scales_TN = op.Gather(scales_TN, [index * group // layout.block_size for index in range(groups)], axis=1)
    rows = size(op, rows_TC, 0)
    scaled = op.Mul(reshape(op, values_TL, rows, [groups], [group]), op.Unsqueeze(scales_TN, [2]))
    latent_TL = reshape(op, scaled, rows, [layout.kv_lora_rank])
    return latent_TL, _bfloat16_values(op, section(layout.rope_offset, 2 * layout.rope_dim), layout.rope_dim)


def dequantize_weight(op: Any, codes: Any, scales: Any, row_blocks: Any) -> Any:
    """FP8 weights in fp32.

    Args:
        op: Operator builder.
        codes: int8 [..., rows, columns], the bytes of E4M3 numbers.
        scales: fp32 [..., blocks of rows, blocks of columns].
        row_blocks: The block of each row: int64 [rows].
    """
    column_blocks = blocks_of(op, op.Shape(codes, start=-1))
    scales = op.Gather(op.Gather(scales, row_blocks, axis=-2), column_blocks, axis=-1)
    return op.Mul(_look_up_byte(op, _E4M3_OF_BYTE, codes), scales)


def blocks_of(op: Any, count: Any) -> Any:
    """The block that each of ``count`` [1] rows or columns of an FP8 weight belongs to: int64 [count]."""
    return op.Div(arange(op, count), op.Constant(value_ints=[FP8_BLOCK_SIZE]))


def _encode_fp8(op: Any, latent_TL: Any, layout: RowLayout) -> tuple[Any, Any]:
    """Bytes of the codes [T, L] and of the scales [T, 4 * N]."""
    rows = size(op, latent_TL, 0)
    padded = layout.num_scales * layout.block_size
    blocks = _padded(op, latent_TL, padded - layout.kv_lora_rank)
    blocks_TNB = reshape(op, blocks, rows, [layout.num_scales], [layout.block_size])
    finite_TN1, blocks_TNB = _finite_blocks(op, blocks_TNB, 2)
    magnitudes_TNB = op.Abs(blocks_TNB)
    amax_TN1 = op.ReduceMax(magnitudes_TNB, [2])

    powers = np.exp2(np.array(FP8_SCALE_EXPONENTS, np.float32))
    too_small = _number(op, op.Less(_table(op, E4M3_MAX * powers), amax_TN1))
    index_TN1 = op.Min(op.ReduceSum(too_small, [2]), float(len(powers) - 1))
    inverse_TN1 = op.Gather(_table(op, 1 / powers), _integer(op, index_TN1))
    codes_TNB = _e4m3_codes(op, op.Mul(magnitudes_TNB, inverse_TN1))
    codes_TNB = op.Add(codes_TNB, op.Where(op.Less(blocks_TNB, 0.0), -128.0, 0.0))
    codes_TL = reshape(op, codes_TNB, rows, [padded])
    if padded != layout.kv_lora_rank:
        codes_TL = op.Slice(codes_TL, [0], [layout.kv_lora_rank], [1])

    scale_bytes = np.append(powers, np.float32(np.nan)).view(np.int8).reshape(-1, 4)
    scale_index_TN1 = _integer(op, op.Where(finite_TN1, index_TN1, float(len(powers))))
    scales = op.Gather(_table(op, scale_bytes), scale_index_TN1)
    return codes_TL, reshape(op, scales, rows, [4 * layout.num_scales])


def _encode_nvfp4(op: Any, latent_TL: Any, layout: RowLayout) -> tuple[Any, Any]:
    """Bytes of the pairs of codes [T, ceil(L / 2)] and of the scales [T, N].

    Blocks are columns here, TN of them: what they share, such as scales, is then repeated along whole rows.
    """
    rows = size(op, latent_TL, 0)
    blocks = op.Mul(rows, [layout.num_scales])
    padded = layout.num_scales * layout.block_size
    latent = _padded(op, latent_TL, padded - layout.kv_lora_rank)
    values = op.Transpose(reshape(op, latent, blocks, [layout.block_size]), perm=[1, 0])
    finite, values = _finite_blocks(op, values, 0)
    magnitudes = op.Abs(values)
    amax = op.ReduceMax(magnitudes, [0])

    candidates = []
    for divisor in NVFP4_DIVISORS:
        scale_codes = _e4m3_codes(op, op.Div(amax, divisor))
        candidates.append((*_e2m1_codes(op, magnitudes, scale_codes), scale_codes))
    (codes_6, error_6, scales_6), (codes_4, error_4, scales_4) = candidates
    finer = op.Less(error_4, error_6)
    codes = op.Add(codes_6, op.Mul(op.Sub(codes_4, codes_6), _number(op, finer)))
    scales = op.Where(finite, op.Where(finer, scales_4, scales_6), 127.0)

    # The odd element's sign is the sign of the byte.
    weights = np.tile([[1.0], [16.0]], (layout.block_size // 2, 1))
    signs = np.tile([[8.0], [-128.0]], (layout.block_size // 2, 1))
    parts = op.Add(op.Mul(codes, _table(op, weights)), op.Where(op.Less(values, 0.0), _table(op, signs), 0.0))
    pairs = op.ReduceSum(reshape(op, parts, [layout.block_size // 2], [2], blocks), [1], keepdims=0)
    codes_TC = reshape(op, op.Transpose(pairs, perm=[1, 0]), rows, [padded // 2])
    if layout.code_bytes != padded // 2:
        codes_TC = op.Slice(codes_TC, [0], [layout.code_bytes], [1])
    return codes_TC, reshape(op, scales, rows, [layout.num_scales])


def _finite_blocks(op: Any, blocks: Any, axis: int) -> tuple[Any, Any]:
    """Which blocks, along ``axis``, have finite values only, and the blocks with all others set to 0."""
    # Scaled down, so that finite values do not add up to infinity.
    finite = op.LessOrEqual(op.Abs(op.ReduceSum(op.Mul(blocks, 2.0**-32), [axis])), _FP32_MAX)
    return finite, op.Where(finite, blocks, 0.0)


def _e4m3_codes(op: Any, magnitudes: Any) -> Any:
    """The nearest E4M3 code of each magnitude, ties to the even code, at most that of 448.

    Numbers below 2^-5 are multiples of 2^-9, and the distance doubles with each binade from there: a magnitude in the
    n-th of these is rounded as a multiple of 2^(n - 9), from 8 to 16 of them, on top of 8 * n.
    """
    magnitudes = op.Min(magnitudes, E4M3_MAX)
    large = op.GreaterOrEqual(magnitudes, 4.0)  # n >= 8
    magnitudes = op.Mul(magnitudes, op.Where(large, 2.0**-8, 1.0))
    # The binade is that of the whole part of a number, here up to 127.
    index = _integer(op, op.Mul(magnitudes, 32.0))
    binade = np.array([number.bit_length() for number in range(128)])
    multiples = op.Round(op.Mul(magnitudes, op.Gather(_table(op, 2.0 ** (9 - binade)), index)))
    offset = op.Add(op.Gather(_table(op, 8 * binade), index), op.Where(large, 64.0, 0.0))
    return op.Add(multiples, offset)


def _e2m1_codes(op: Any, magnitudes: Any, scale_codes: Any) -> tuple[Any, Any]:
    """The nearest E2M1 code of each magnitude over its block's scale, and each block's squared error.

    Args:
        op: Operator builder.
        magnitudes: [B, blocks].
        scale_codes: E4M3 codes [1, blocks].
    """
    scales = op.Gather(_table(op, _E4M3_OF_BYTE[128:]), _integer(op, scale_codes))
    # All magnitudes of a block whose scale rounds to 0 are below the first midpoint of a scale of 1.
    scales = op.Where(op.Greater(scales, 0.0), scales, 1.0)
    # A binary search. Midpoints below an even code belong to it, those below an odd code do not.
    m_0, m_1, m_2, m_3, m_4, m_5, m_6 = E2M1_MIDPOINTS
    bit_2 = op.GreaterOrEqual(magnitudes, op.Mul(scales, m_3))
    bit_1 = op.GreaterOrEqual(magnitudes, op.Mul(scales, op.Where(bit_2, m_5, m_1)))
    midpoint = op.Add(op.Where(bit_2, m_4, m_0), op.Where(bit_1, m_2 - m_0, 0.0))
    midpoint = op.Add(midpoint, op.Where(op.And(bit_1, bit_2), m_6 - m_4 - (m_2 - m_0), 0.0))
    bit_0 = op.Greater(magnitudes, op.Mul(scales, midpoint))
    codes = op.Add(op.Add(op.Where(bit_2, 4.0, 0.0), op.Where(bit_1, 2.0, 0.0)), _number(op, bit_0))

    values = op.Gather(_table(op, np.array(E2M1_VALUES)), _integer(op, codes))
    difference = op.Sub(op.Mul(values, scales), magnitudes)
    error = op.Mul(difference, difference)
    for half in (8, 4, 2, 1):
        error = op.Add(op.Slice(error, [0], [half], [0]), op.Slice(error, [half], [INDEX_MAX], [0]))
    return codes, error


def _bfloat16_bytes(op: Any, values_TR: Any) -> Any:
    """Bytes [T, 2 * R], the lower one first, of fp32 values rounded to bfloat16.

    Bits but for the sign are 128 * n + m: a magnitude is m * 2^(n - 133) with m from 128 to 256, or below with n = 0.
    n is found by a binary search.
    """
    import onnx_ir

    rounded = op.Cast(op.Cast(values_TR, to=onnx_ir.DataType.BFLOAT16), to=onnx_ir.DataType.FLOAT)
    # The reciprocal tells -0 from 0.
    negative = op.Or(op.Less(rounded, 0.0), op.Less(op.Reciprocal(rounded), 0.0))
    magnitudes = op.Abs(rounded)

    # 128 and 64 are taken together, so that no intermediate is outside fp32's normal numbers.
    large = op.GreaterOrEqual(magnitudes, 4.0)
    m = op.Mul(magnitudes, op.Where(large, 2.0**-59, 2.0**69))
    n = op.Where(large, 128.0, 0.0)
    upper = op.GreaterOrEqual(m, 128.0)
    m, n = op.Mul(m, op.Where(upper, 1.0, 2.0**64)), op.Add(n, op.Where(upper, 64.0, 0.0))
    for step in (32, 16, 8, 4, 2, 1):
        at_least = op.GreaterOrEqual(m, 2.0 ** (7 + step))
        m, n = op.Mul(m, op.Where(at_least, 2.0**-step, 1.0)), op.Add(n, op.Where(at_least, float(step), 0.0))
    bits = op.Add(op.Mul(n, 128.0), m)
    bits = op.Where(
        op.LessOrEqual(magnitudes, _FP32_MAX), bits, op.Where(op.IsNaN(rounded), float(0x7FFF), float(0x7F80))
    )

    high = op.Floor(op.Mul(bits, 2.0**-8))
    low = op.Sub(bits, op.Mul(high, 256.0))
    low = op.Where(op.GreaterOrEqual(low, 128.0), op.Sub(low, 256.0), low)
    high = op.Where(negative, op.Sub(high, 128.0), high)
    pairs = op.Concat(op.Unsqueeze(low, [2]), op.Unsqueeze(high, [2]), axis=2)
    return reshape(op, pairs, size(op, values_TR, 0), op.Mul(size(op, values_TR, 1), [2]))


def _bfloat16_values(op: Any, bytes_TC: Any, rope_dim: int) -> Any:
    """fp32 values [T, R] of bfloat16 numbers, given as pairs of bytes."""
    pairs = _number(op, reshape(op, bytes_TC, size(op, bytes_TC, 0), [rope_dim], [2]))
    low, high = (op.Squeeze(part, [2]) for part in op.Split(pairs, axis=2, num_outputs=2, _outputs=2))
    upper_half, negative = op.Less(low, 0.0), op.Less(high, 0.0)
    exponent = op.Add(op.Mul(op.Where(negative, op.Add(high, 128.0), high), 2.0), _number(op, upper_half))
    mantissa = op.Where(upper_half, op.Add(low, 128.0), low)
    index = _integer(op, exponent)
    biased = np.arange(256)
    # Numbers with an exponent below 255; the rest is infinity, or NaN with a mantissa.
    leading = np.where(biased > 0, 128.0, 0.0)
    weight = np.exp2(np.clip(biased, 1, 254) - 134.0)
    values = op.Mul(op.Add(mantissa, op.Gather(_table(op, leading), index)), op.Gather(_table(op, weight), index))
    beyond = op.Where(op.Greater(mantissa, 0.0), math.nan, math.inf)
    values = op.Where(op.Less(exponent, 255.0), values, beyond)
    return op.Mul(values, op.Where(negative, -1.0, 1.0))


def _power_of_two(op: Any, bytes_TC: Any, count: int) -> Any:
    """fp32 [T, count] of four bytes each that are a power of two, 0 or NaN in fp32; only the upper two are read."""
    quads = _number(op, reshape(op, bytes_TC, size(op, bytes_TC, 0), [count], [4]))
    low, high = (op.Squeeze(op.Slice(quads, [begin], [begin + 1], [2]), [2]) for begin in (2, 3))
    exponent = op.Add(op.Mul(high, 2.0), op.Where(op.Less(low, 0.0), 1.0, 0.0))
    index = _integer(op, op.Where(op.Less(high, 0.0), 255.0, exponent))
    powers = np.exp2(np.arange(255) - 127.0)
    return op.Gather(_table(op, [0.0, *powers[1:], math.nan]), index)


def _look_up_byte(op: Any, table: Any, values: Any) -> Any:
    """Entries of a table [256, ...] that begins with the entry of byte -128."""
    return op.Gather(_table(op, table), op.Add(_integer(op, values), _table(op, 128, np.int32)))


def _padded(op: Any, values: Any, count: int) -> Any:
    """Values [T, ...] with ``count`` zeros behind each row."""
    return op.Pad(values, [0, 0, 0, count]) if count else values


def _table(op: Any, values: Any, dtype: Any = np.float32) -> Any:
    import onnx_ir

    return op.Constant(value=onnx_ir.tensor(np.asarray(values, dtype)))


def _number(op: Any, values: Any) -> Any:
    import onnx_ir

    return op.Cast(values, to=onnx_ir.DataType.FLOAT)


def _integer(op: Any, values: Any) -> Any:
    """Whole parts of numbers that are not negative, or integers, as int32."""
    import onnx_ir

    return op.Cast(values, to=onnx_ir.DataType.INT32)
