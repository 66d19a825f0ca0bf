"""The operations in float64, written to be obviously right.

Each function takes the tensors and attributes of the operation's contract (any element types), upcasts floating
point values to float64, and returns the operation's outputs in float64. Values that an operation must not read
(unused slots, padded entries of page tables) are never touched here either, so a NaN or a wild number in them cannot
show.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from trtllm_mla.cache_rows import CacheDType, RowLayout

Tensor = torch.Tensor


def rotate(x: Tensor, position_ids: Tensor, rotary_cos_sin: Tensor, *, rope_interleave: bool) -> Tensor:
    """Rotates the pairs of ``x`` [tokens, ..., rope] in place: pair i is (2i, 2i+1) or (i, i + rope / 2)."""
    x = x.double()
    half = x.shape[-1] // 2
    rotated = torch.empty_like(x)
    for token in range(x.shape[0]):
        row = rotary_cos_sin[int(position_ids[token])].double()
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if rope_interleave else (i, i + half)
            cos, sin = row[i], row[half + i]
            rotated[token, ..., a] = x[token, ..., a] * cos - x[token, ..., b] * sin
            rotated[token, ..., b] = x[token, ..., b] * cos + x[token, ..., a] * sin
    return rotated


def append_latent(
    past_latent: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    q_pe: Tensor,
    position_ids: Tensor,
    slot_mapping: Tensor,
    rotary_cos_sin: Tensor,
    *,
    rope_interleave: bool | int,
) -> tuple[Tensor, Tensor]:
    """Returns (present_latent, rotated_q_pe). Slots outside the pool are not written."""
    pages, page_size, width = past_latent.shape
    interleaved = bool(rope_interleave)
    rotated_k_pe = rotate(k_pe, position_ids, rotary_cos_sin, rope_interleave=interleaved)
    present = past_latent.double().reshape(pages * page_size, width).clone()
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < pages * page_size:
            present[slot] = torch.cat([latent[token].double(), rotated_k_pe[token]])
    rotated_q_pe = rotate(q_pe, position_ids, rotary_cos_sin, rope_interleave=interleaved)
    return present.reshape(past_latent.shape), rotated_q_pe


def gather_latent(
    latent_cache: Tensor, kv_slots: Tensor, *, kv_lora_rank: int, rope_dim: int
) -> tuple[Tensor, Tensor]:
    """Returns (latent, k_pe). Slots outside the pool give zeros."""
    pages, page_size, width = latent_cache.shape
    assert width == kv_lora_rank + rope_dim
    rows = latent_cache.reshape(pages * page_size, width)
    gathered = torch.zeros(len(kv_slots), width, dtype=torch.float64)
    for key, slot in enumerate(kv_slots.tolist()):
        if 0 <= slot < pages * page_size:
            gathered[key] = rows[slot].double()
    return gathered[:, :kv_lora_rank], gathered[:, kv_lora_rank:]


def quantize_rows(rows: np.ndarray, layout: RowLayout, latent_scale: float = 1.0) -> np.ndarray:
    """Bytes uint8 [n, row_bytes] of quantised rows from fp32 [n, kv_lora_rank + rope_dim], block after block."""
    result = np.zeros((len(rows), layout.row_bytes), np.uint8)
    for row, target in zip(np.asarray(rows, np.float32), result, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            latent = row[: layout.kv_lora_rank] / np.float32(latent_scale)
            quantize = {CacheDType.FP8: quantize_fp8, CacheDType.NVFP4: quantize_nvfp4}[layout.dtype]
            codes, scales = b"", b""
            for begin in range(0, layout.kv_lora_rank, layout.block_size):
                block = latent[begin : begin + layout.block_size]
                block_codes, scale = quantize(block) if np.isfinite(block).all() else (b"\0" * len(block), None)
                codes += block_codes
                scales += scale or {CacheDType.FP8: b"\x00\x00\xc0\x7f", CacheDType.NVFP4: b"\x7f"}[layout.dtype]
        if layout.dtype is CacheDType.NVFP4:
            codes += b"\0" * (len(codes) % 2)
            codes = bytes(low + 16 * high for low, high in zip(codes[0::2], codes[1::2], strict=True))
        k_pe = row[layout.kv_lora_rank :].astype(ml_dtypes.bfloat16).view(np.uint16)
        k_pe = np.where(np.isnan(row[layout.kv_lora_rank :]), 0x7FFF, k_pe).astype(np.uint16).tobytes()
        for begin, section in ((0, codes), (layout.scale_offset, scales), (layout.rope_offset, k_pe)):
            target[begin : begin + len(section)] = np.frombuffer(section, np.uint8)
    return result


def quantize_fp8(block: np.ndarray) -> tuple[bytes, bytes]:
    """E4M3 codes of a block and its scale: the least power of two from 2^-64 to 2^7 that keeps it within 448."""
    amax = float(np.abs(block).max())
    exponent = next((k for k in range(-64, 8) if 448.0 * 2.0**k >= amax), 7)
    codes = np.clip(block.astype(np.float64) / 2.0**exponent, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    # A zero has a sign only if the value was below zero.
    codes = np.where(block == 0, 0, codes.view(np.uint8)).astype(np.uint8)
    return codes.tobytes(), np.float32(2.0**exponent).tobytes()


def quantize_nvfp4(block: np.ndarray, divisors: tuple[int, ...] = (6, 4)) -> tuple[bytes, bytes]:
    """E2M1 codes of a block, one a byte, and its E4M3 scale: the best of amax over each divisor."""
    magnitudes = np.abs(block)
    best = None
    for divisor in divisors:
        scale = np.minimum(magnitudes.max() / np.float32(divisor), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        quotients = np.zeros(len(block))
        if scale > 0:
            # Exact enough: no fp32 number is closer to a midpoint without being it.
            quotients = np.minimum(magnitudes.astype(np.float64) / float(scale), 6.0)
        nearest = quotients.astype(ml_dtypes.float4_e2m1fn)
        errors = np.zeros(16, np.float32)
        errors[: len(block)] = (nearest.astype(np.float32) * np.float32(scale) - magnitudes) ** 2
        for half in (8, 4, 2, 1):
            errors = errors[:half] + errors[half:]
        if best is None or errors[0] < best[0]:
            best = (errors[0], nearest.view(np.uint8) & 7, scale)
    assert best is not None
    return (best[1] + np.where(block < 0, 8, 0)).astype(np.uint8).tobytes(), best[2].tobytes()


def round_nvfp4(block: np.ndarray, divisor: int) -> np.ndarray:
    """What a block of finite values becomes with the one scale amax / divisor."""
    codes, scale = quantize_nvfp4(block, (divisor,))
    values = np.frombuffer(codes, np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return values * float(np.frombuffer(scale, ml_dtypes.float8_e4m3fn)[0])


def dequantize_rows(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Values [n, kv_lora_rank + rope_dim] in float64 of rows of bytes [n, row_bytes], before the outer scale."""
    rows = np.ascontiguousarray(rows).view(np.uint8)
    values = np.empty((len(rows), layout.kv_lora_rank + layout.rope_dim))
    for row, value in zip(rows, values, strict=True):
        for i in range(layout.kv_lora_rank):
            block = i // layout.block_size
            if layout.dtype is CacheDType.FP8:
                code = row[i : i + 1].view(ml_dtypes.float8_e4m3fn)[0]
                scale = row[layout.scale_offset + 4 * block :][:4].view(np.float32)[0]
            else:
                code = np.uint8(row[i // 2] >> 4 * (i % 2) & 15).view(ml_dtypes.float4_e2m1fn)
                scale = row[layout.scale_offset + block :][:1].view(ml_dtypes.float8_e4m3fn)[0]
            value[i] = float(code) * float(scale)
        k_pe = row[layout.rope_offset :][: 2 * layout.rope_dim].view(ml_dtypes.bfloat16)
        value[layout.kv_lora_rank :] = k_pe.astype(np.float64)
    return values


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query [d] over the keys [n, d] and values [n, w] it sees: output [w] and the natural log-sum-exp."""
    if k.shape[0] == 0:
        return torch.zeros(v.shape[-1], dtype=torch.float64), torch.tensor(-torch.inf, dtype=torch.float64)
    scores = (k.double() @ q.double()) * scale
    return torch.softmax(scores, dim=0) @ v.double(), torch.logsumexp(scores, dim=0)


def latent_attention(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    block_offsets: Tensor,
    sequence_length: Tensor,
    query_offsets: Tensor,
    query_index: Tensor | None = None,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns (output, log_sum_exp). ``query_index`` repeats what ``query_offsets`` says and is not used."""
    tokens, heads, kv_lora_rank = q_latent.shape
    page_size = latent_cache.shape[1]
    output = torch.zeros(tokens, heads, kv_lora_rank, dtype=torch.float64)
    log_sum_exp = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    for request, length in enumerate(sequence_length.tolist()):
        begin, end = query_offsets[request : request + 2].tolist()
        used = block_offsets[request, : -(-length // page_size)].tolist()
        rows = [latent_cache[page] for page in used]
        keys = torch.cat(rows)[:length] if rows else latent_cache.reshape(-1, latent_cache.shape[-1])[:0]
        for token in range(begin, end):
            visible = max(0, length - (end - token) + 1)
            for head in range(heads):
                query = torch.cat([q_latent[token, head], q_pe[token, head]])
                output[token, head], log_sum_exp[token, head] = attend(
                    query, keys[:visible], keys[:visible, :kv_lora_rank], softmax_scale
                )
    return output, log_sum_exp


def context_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    query_index: Tensor | None = None,
    key_index: Tensor | None = None,
    *,
    softmax_scale: float,
    causal: int = 1,
) -> tuple[Tensor, Tensor]:
    """Returns (output, log_sum_exp). The index matrices repeat what the offsets say and are not used."""
    tokens, heads, _ = q_nope.shape
    output = torch.zeros(tokens, heads, v.shape[-1], dtype=torch.float64)
    log_sum_exp = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    for request in range(len(query_offsets) - 1):
        begin, end = query_offsets[request : request + 2].tolist()
        first, last = key_offsets[request : request + 2].tolist()
        for token in range(begin, end):
            visible = max(0, (last - first) - (end - token) + 1) if causal else last - first
            seen = slice(first, first + visible)
            for head in range(heads):
                query = torch.cat([q_nope[token, head], q_pe[token, head]])
                key = torch.cat([k_nope[seen, head], k_pe[seen]], dim=-1)
                output[token, head], log_sum_exp[token, head] = attend(query, key, v[seen, head], softmax_scale)
    return output, log_sum_exp


def routed_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    first_expert: int,
) -> Tensor:
    """Returns the output. Weights of experts that no token chose are not touched."""
    experts, hidden_size, intermediate_size = down_proj.shape
    output = torch.zeros(hidden.shape[0], hidden_size, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(expert_ids.tolist(), expert_weights.double(), strict=True)):
        for expert_id, weight in zip(ids, weights, strict=True):
            expert = expert_id - first_expert
            if 0 <= expert < experts:
                rows = gate_up_proj[expert].double() @ hidden[token].double()
                gate, up = rows[:intermediate_size], rows[intermediate_size:]
                output[token] += weight * (down_proj[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return output


def block_scaled_routed_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    gate_up_scale: Tensor,
    down_proj: Tensor,
    down_scale: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    first_expert: int,
) -> Tensor:
    """Returns the output: that of experts whose gate, up and down projections are dequantised one by one."""
    gate, up = (
        dequantize_weight(codes, scale)
        for codes, scale in zip(gate_up_proj.chunk(2, dim=1), gate_up_scale.chunk(2, dim=1), strict=True)
    )
    weights = (torch.cat([gate, up], dim=1), dequantize_weight(down_proj, down_scale))
    return routed_experts(hidden, *weights, expert_ids, expert_weights, first_expert=first_expert)


def block_scaled_mat_mul(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Returns the output."""
    return x.double() @ dequantize_weight(weight, scale).T


def dequantize_weight(codes: Tensor, scale: Tensor) -> Tensor:
    """FP8 weights [..., rows, columns]. Scales are repeated over their blocks, the last of which may be cut off."""
    rows, columns = codes.shape[-2:]
    scales = scale.double().repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    return codes.view(torch.float8_e4m3fn).double() * scales
