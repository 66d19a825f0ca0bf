"""Kernels of AppendLatent, for rows of values and for quantised rows."""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import narrow, widen
from trtllm_mla.ops.quantized_rows import encode_fp8, encode_nvfp4


@triton.jit
def append_latent(
    present_latent,
    latent,
    k_pe,
    q_pe,
    position_ids,
    slot_mapping,
    rotary_cos_sin,
    rotated_q_pe,
    slots,
    positions,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROPE_INTERLEAVE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rotates one token's key and query heads, and writes its cache row.

    Programs: (token, part). Part 0 writes the row [latent, rotated k_pe] to the token's slot, part i > 0 rotates the
    heads from (i - 1) * BLOCK_H on. The pool is contiguous, so a slot is a row of [slots, width]. A slot outside
    [0, slots) is not written. A position outside [0, positions) has no cosines: its rotated parts are 0.

    Memory: everything stays in registers, at most BLOCK_LATENT + 2 * BLOCK_HALF or BLOCK_H * 2 * BLOCK_HALF elements a
    program; no shared memory but for exchanging pairs.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)

    cos, sin = _load_angles(rotary_cos_sin, tl.load(position_ids + token), positions, ROPE_DIM, BLOCK_HALF)

    if part == 0:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if (slot >= 0) & (slot < slots):
            row = present_latent + slot * (KV_LORA_RANK + ROPE_DIM)
            offs_latent = tl.arange(0, BLOCK_LATENT)
            latent_mask = offs_latent < KV_LORA_RANK
            values = tl.load(latent + token * KV_LORA_RANK + offs_latent, mask=latent_mask, other=0.0)
            if latent.dtype.element_ty != present_latent.dtype.element_ty:
                values = narrow(widen(values, INTERPRET), present_latent.dtype.element_ty, INTERPRET)
            tl.store(row + offs_latent, values, mask=latent_mask)
            _rotate(
                k_pe + token * ROPE_DIM,
                row + KV_LORA_RANK,
                tl.arange(0, 1),
                1,
                cos,
                sin,
                ROPE_DIM,
                ROPE_INTERLEAVE,
                BLOCK_HALF,
                INTERPRET,
            )
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate(
            q_pe + token * (HEADS * ROPE_DIM),
            rotated_q_pe + token * (HEADS * ROPE_DIM),
            heads,
            HEADS,
            cos,
            sin,
            ROPE_DIM,
            ROPE_INTERLEAVE,
            BLOCK_HALF,
            INTERPRET,
        )


@triton.jit
def append_quantized_latent(
    present_latent,
    latent,
    k_pe,
    q_pe,
    position_ids,
    slot_mapping,
    rotary_cos_sin,
    rotated_q_pe,
    latent_scale,
    slots,
    positions,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROPE_INTERLEAVE: tl.constexpr,
    FP8: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rotates one token's key and query heads, and writes its quantised cache row.

    Programs and what is out of range: as in ``append_latent``; the pool is [slots, ROW_BYTES] bytes. All of a row is
    written, bytes between its sections as 0. ``latent_scale`` is positive. To have the bits of ``row_codec`` it is
    compiled without fused multiply-adds.

    Memory: everything stays in registers: for the row BLOCK_LATENT values, their codes, and for nvfp4 codes and errors
    for two scales; BLOCK_SCALES rows of BLOCK_LATENT / BLOCK_SCALES elements, each with its own scale. Shared memory
    for exchanging pairs and for layouts.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos, sin = _load_angles(rotary_cos_sin, tl.load(position_ids + token), positions, ROPE_DIM, BLOCK_HALF)

    if part == 0:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if (slot >= 0) & (slot < slots):
            row = present_latent + slot * ROW_BYTES
            BLOCK_SIZE: tl.constexpr = BLOCK_LATENT // BLOCK_SCALES
            offs_scale = tl.arange(0, BLOCK_SCALES)
            offs_latent = offs_scale[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
            values = tl.load(latent + token * KV_LORA_RANK + offs_latent, mask=offs_latent < KV_LORA_RANK, other=0.0)
            values = widen(values, INTERPRET)
            values = tl.div_rn(values, tl.zeros_like(values) + latent_scale)
            if FP8:
                codes, scales = encode_fp8(values)
                scale_rows = (row + SCALE_OFFSET).to(tl.pointer_type(tl.int32))
            else:
                codes, scales = encode_nvfp4(values)
                scales = scales.to(tl.int8)
                scale_rows = row + SCALE_OFFSET
            WIDTH: tl.constexpr = codes.shape[1]
            offs_code = offs_scale[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.store(row + offs_code, codes.to(tl.int8), mask=offs_code < CODE_BYTES)
            tl.store(scale_rows + offs_scale, scales, mask=offs_scale < NUM_SCALES)
            _rotate(
                k_pe + token * ROPE_DIM,
                (row + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16)),
                tl.arange(0, 1),
                1,
                cos,
                sin,
                ROPE_DIM,
                ROPE_INTERLEAVE,
                BLOCK_HALF,
                INTERPRET,
            )
            _clear(row, CODE_BYTES, SCALE_OFFSET)
            _clear(row, SCALE_OFFSET + (4 if FP8 else 1) * NUM_SCALES, ROPE_OFFSET)
            _clear(row, ROPE_OFFSET + 2 * ROPE_DIM, ROW_BYTES)
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate(
            q_pe + token * (HEADS * ROPE_DIM),
            rotated_q_pe + token * (HEADS * ROPE_DIM),
            heads,
            HEADS,
            cos,
            sin,
            ROPE_DIM,
            ROPE_INTERLEAVE,
            BLOCK_HALF,
            INTERPRET,
        )


@triton.jit
def _clear(row, BEGIN: tl.constexpr, END: tl.constexpr):
    """Sets the bytes of a row from BEGIN to END, fewer than 16, to 0."""
    if BEGIN < END:
        offs = tl.arange(0, 16)
        tl.store(row + BEGIN + offs, tl.zeros([16], tl.int8), mask=offs < END - BEGIN)


@triton.jit
def _load_angles(rotary_cos_sin, position, positions, ROPE_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Cosines and sines of a position; 0 where the table has none."""
    position = position.to(tl.int64)
    # Scalars enter masks as bounds: the interpreter (Triton 3.9) turns a scalar condition in a mask into integers.
    known_angles = tl.where((position >= 0) & (position < positions), ROPE_DIM // 2, 0)
    offs_half = tl.arange(0, BLOCK_HALF)
    angles = rotary_cos_sin + position * ROPE_DIM + offs_half
    cos = tl.load(angles, mask=offs_half < known_angles, other=0.0)
    sin = tl.load(angles + ROPE_DIM // 2, mask=offs_half < known_angles, other=0.0)
    return cos, sin


@triton.jit
def _rotate(
    source,
    destination,
    rows,
    count,
    cos,
    sin,
    ROPE_DIM: tl.constexpr,
    ROPE_INTERLEAVE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rotates those of ``rows`` before ``count`` in fp32, ROPE_DIM elements each; every pair stays where it is.

    Pair i is (2i, 2i + 1) with ROPE_INTERLEAVE, else (i, i + ROPE_DIM / 2). Interleaved rows are moved whole and
    taken apart in registers, so that memory is read and written in wide accesses.
    """
    HALF: tl.constexpr = ROPE_DIM // 2
    R: tl.constexpr = rows.shape[0]
    if ROPE_INTERLEAVE:
        offs = tl.arange(0, 2 * BLOCK_HALF)
        mask = (rows < count)[:, None] & (offs < ROPE_DIM)[None, :]
        offsets = rows[:, None] * ROPE_DIM + offs[None, :]
        x = widen(tl.load(source + offsets, mask=mask, other=0.0), INTERPRET)
        first, second = tl.split(tl.reshape(x, (R, BLOCK_HALF, 2)))
    else:
        offs = tl.arange(0, BLOCK_HALF)
        mask = (rows < count)[:, None] & (offs < HALF)[None, :]
        offsets = rows[:, None] * ROPE_DIM + offs[None, :]
        first = widen(tl.load(source + offsets, mask=mask, other=0.0), INTERPRET)
        second = widen(tl.load(source + offsets + HALF, mask=mask, other=0.0), INTERPRET)

    rotated_first = first * cos[None, :] - second * sin[None, :]
    rotated_second = second * cos[None, :] + first * sin[None, :]

    dtype: tl.constexpr = destination.dtype.element_ty
    if ROPE_INTERLEAVE:
        rotated = tl.reshape(tl.join(rotated_first, rotated_second), (R, 2 * BLOCK_HALF))
        tl.store(destination + offsets, narrow(rotated, dtype, INTERPRET), mask=mask)
    else:
        tl.store(destination + offsets, narrow(rotated_first, dtype, INTERPRET), mask=mask)
        tl.store(destination + offsets + HALF, narrow(rotated_second, dtype, INTERPRET), mask=mask)
