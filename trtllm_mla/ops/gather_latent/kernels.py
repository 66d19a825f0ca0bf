"""Kernels of GatherLatent, for rows of values and for quantised rows."""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import narrow, widen
from trtllm_mla.ops.quantized_rows import decode_e4m3, decode_fp8, decode_nvfp4


@triton.jit
def gather_latent(
    latent_cache,
    kv_slots,
    latent,
    k_pe,
    keys,
    slots,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Copies cache rows, chosen by slot, and converts them to the model's type.

    Programs: one for each BLOCK_S rows. The pool is contiguous, so a slot is a row of [slots, width]; a slot outside
    [0, slots) gives zeros. Memory: BLOCK_S * (BLOCK_LATENT + BLOCK_ROPE) elements in registers, all loads
    independent of one another; no shared memory.
    """
    offs_s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    slot = tl.load(kv_slots + offs_s, mask=offs_s < keys, other=-1).to(tl.int64)
    in_pool = (slot >= 0) & (slot < slots)
    rows = latent_cache + slot * (KV_LORA_RANK + ROPE_DIM)

    offs_latent = tl.arange(0, BLOCK_LATENT)
    offs_rope = tl.arange(0, BLOCK_ROPE)
    latent_mask = offs_latent[None, :] < KV_LORA_RANK
    rope_mask = offs_rope[None, :] < ROPE_DIM
    latents = tl.load(rows[:, None] + offs_latent[None, :], mask=in_pool[:, None] & latent_mask, other=0.0)
    rotary_keys = tl.load(
        rows[:, None] + (KV_LORA_RANK + offs_rope)[None, :], mask=in_pool[:, None] & rope_mask, other=0.0
    )
    if latent_cache.dtype.element_ty != latent.dtype.element_ty:
        latents = narrow(widen(latents, INTERPRET), latent.dtype.element_ty, INTERPRET)
        rotary_keys = narrow(widen(rotary_keys, INTERPRET), latent.dtype.element_ty, INTERPRET)
    written = (offs_s < keys)[:, None]
    tl.store(latent + offs_s[:, None] * KV_LORA_RANK + offs_latent[None, :], latents, mask=written & latent_mask)
    tl.store(k_pe + offs_s[:, None] * ROPE_DIM + offs_rope[None, :], rotary_keys, mask=written & rope_mask)


@triton.jit
def gather_quantized_latent(
    latent_cache,
    kv_slots,
    latent,
    k_pe,
    latent_scale,
    keys,
    slots,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    FP8: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Reads quantised cache rows, chosen by slot, as values of the model's type.

    A latent is its value times ``latent_scale`` in fp32, rounded once. Programs and slots out of range: as in
    ``gather_latent``; the pool is [slots, ROW_BYTES] bytes. Memory: BLOCK_S * BLOCK_LATENT fp32 values in registers;
    shared memory for layouts.
    """
    offs_s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    slot = tl.load(kv_slots + offs_s, mask=offs_s < keys, other=-1).to(tl.int64)
    in_pool = ((slot >= 0) & (slot < slots))[:, None]
    rows = (latent_cache + slot * ROW_BYTES)[:, None]

    WORDS: tl.constexpr = BLOCK_LATENT // 4 if FP8 else BLOCK_LATENT // 8
    offs_word = tl.arange(0, WORDS)[None, :]
    words = tl.load(
        rows.to(tl.pointer_type(tl.int32)) + offs_word, mask=in_pool & (offs_word < (CODE_BYTES + 3) // 4), other=0
    )
    offs_scale = tl.arange(0, BLOCK_SCALES)[None, :]
    scale_rows = rows + SCALE_OFFSET
    scale_mask = in_pool & (offs_scale < NUM_SCALES)
    if FP8:
        scales = tl.load(scale_rows.to(tl.pointer_type(tl.float32)) + offs_scale, mask=scale_mask, other=0.0)
        values = decode_fp8(words, scales, tl.float32, INTERPRET)
    else:
        scales = decode_e4m3(tl.load(scale_rows + offs_scale, mask=scale_mask, other=0))
        even = decode_nvfp4(words, scales, False, tl.float32, INTERPRET)
        odd = decode_nvfp4(words, scales, True, tl.float32, INTERPRET)
        values = tl.reshape(tl.join(even, odd), [BLOCK_S, BLOCK_LATENT])
    offs_rope = tl.arange(0, BLOCK_ROPE)[None, :]
    rotary_keys = tl.load(
        (rows + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16)) + offs_rope,
        mask=in_pool & (offs_rope < ROPE_DIM),
        other=0.0,
    )

    dtype: tl.constexpr = latent.dtype.element_ty
    offs_latent = tl.arange(0, BLOCK_LATENT)[None, :]
    written = (offs_s < keys)[:, None]
    values = narrow(values * latent_scale, dtype, INTERPRET)
    rotary_keys = narrow(widen(rotary_keys, INTERPRET), dtype, INTERPRET)
    tl.store(
        latent + offs_s[:, None] * KV_LORA_RANK + offs_latent, values, mask=written & (offs_latent < KV_LORA_RANK)
    )
    tl.store(k_pe + offs_s[:, None] * ROPE_DIM + offs_rope, rotary_keys, mask=written & (offs_rope < ROPE_DIM))
