"""Kernel of GatherLatent."""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import narrow, widen


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
