"""The four MLA operations in float64, written to be obviously right.

Each function takes the tensors and attributes of the operation's contract (any element types), upcasts floating
point values to float64, and returns the operation's outputs in float64. Values that an operation must not read
(unused slots, padded entries of page tables) are never touched here either, so a NaN or a wild number in them cannot
show.
"""

from __future__ import annotations

import torch

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
) -> tuple[Tensor, Tensor]:
    """Returns (output, log_sum_exp). The index matrices repeat what the offsets say and are not used."""
    tokens, heads, _ = q_nope.shape
    output = torch.zeros(tokens, heads, v.shape[-1], dtype=torch.float64)
    log_sum_exp = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    for request in range(len(query_offsets) - 1):
        begin, end = query_offsets[request : request + 2].tolist()
        first, last = key_offsets[request : request + 2].tolist()
        for token in range(begin, end):
            visible = max(0, (last - first) - (end - token) + 1)
            seen = slice(first, first + visible)
            for head in range(heads):
                query = torch.cat([q_nope[token, head], q_pe[token, head]])
                key = torch.cat([k_nope[seen, head], k_pe[seen]], dim=-1)
                output[token, head], log_sum_exp[token, head] = attend(query, key, v[seen, head], softmax_scale)
    return output, log_sum_exp
