"""Triton kernels of LatentAttention: split-KV flash decoding over a paged latent cache.

Dimensions: M rows of a row block, N keys of a tile, L ``kv_lora_rank``, R ``rope_dim``, V requests looked at together,
B pieces and C columns merged at a time; BLOCK_L and BLOCK_R are padded to powers of two.

Tiling
    A program owns ``BLOCK_M`` rows of one request and a piece of its keys. Row m of a request is its new token
    m // HEADS and head m % HEADS, so that all heads of several new tokens share each tile of keys. A tile is
    ``BLOCK_N`` cached rows, loaded once: latent and rotary key give the scores (two products), and the same latent is
    the value. Queries are the rows of both products, [M, N] and [M, L], or where ``KEYS_AS_M`` their columns, [N, M]
    and [L, M], so that 64 keys fill the rows of a warpgroup's MMA that few queries would not.

Quantised rows
    Codes are read as 32-bit words in 16-byte loads and decoded in registers to the network's type, in which the
    products are done. Elements of 4 bits come apart as even and odd ones: the query is split alike, and each half has
    its own products and accumulator. The outer scale g multiplies the query (in fp32, then rounded) and the output.

Pieces
    How many pieces a request's keys are cut into follows from the lengths of all requests, which are on the device.
    The host launches as many programs as there can be pieces; each adds up the requests' tiles, from that knows the
    size of a piece, and finds its own. ``plan`` states the rule and its bounds.

Memory budget
    Shared memory: the query block, BLOCK_M * (BLOCK_L + BLOCK_R) elements, and the tiles in flight, BLOCK_N *
    (BLOCK_L + BLOCK_R) elements each: ``num_stages`` of them where a warpgroup's MMA reads them from shared memory,
    one fewer otherwise; and decoded latents, where the cache is quantised. 216 KiB on sm_90 for 64 rows, tiles of 64,
    2 stages at 512 + 64 in bf16. ``plan.shared_memory_bytes`` bounds it.
    Registers: the fp32 accumulator takes BLOCK_M * BLOCK_L / threads in each thread: 128 for 64 rows and 8 warps, 64
    for 16 rows and 4 warps at a latent of 512. Without a warpgroup's MMA, or decoding, the query is kept in registers
    as well.

Safety
    Whatever the integer tensors hold (TensorRT times kernels on arbitrary data), nothing outside the tensors is read
    or written: pages, keys, rows and slots out of range are masked, and addresses are 64-bit.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import add_scores, dot, narrow, widen
from trtllm_mla.ops.quantized_rows import decode_e4m3, decode_fp8, decode_nvfp4

LN2 = tl.constexpr(0.6931471805599453)
# Requests whose lengths a program looks at together.
REQUESTS_AT_ONCE = tl.constexpr(128)


@triton.jit
def _work(
    first,
    sequence_length,
    query_offsets,
    tokens,
    requests,
    pages_per_request,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    block_m,
    BLOCK_N: tl.constexpr,
):
    """Row blocks and tiles of keys of the requests ``first`` to ``first`` + V, int64 [V]; 0 where there is none.

    Whatever the integers are, none is negative.
    """
    r_V = first + tl.arange(0, REQUESTS_AT_ONCE)
    exists_V = r_V < requests
    length_V = tl.load(sequence_length + r_V, mask=exists_V, other=0).to(tl.int64)
    begin_V = tl.load(query_offsets + r_V, mask=exists_V, other=0).to(tl.int64)
    end_V = tl.load(query_offsets + r_V + 1, mask=exists_V, other=0)
    rows_V = tl.minimum(tl.maximum(end_V - begin_V, 0), tokens) * HEADS
    keys_V = tl.minimum(tl.maximum(length_V, 0), pages_per_request.to(tl.int64) * PAGE_SIZE)
    return tl.cdiv(rows_V, block_m), tl.cdiv(keys_V, BLOCK_N)


@triton.jit
def _tiles_per_piece(
    sequence_length,
    query_offsets,
    tokens,
    requests,
    pages_per_request,
    target_pieces,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    block_m,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Tiles in the largest piece: what makes ``target_pieces`` equal pieces of all tiles, at least ``MIN_TILES``."""
    total_V = tl.zeros([REQUESTS_AT_ONCE], tl.int64)
    for first in range(0, requests, REQUESTS_AT_ONCE):
        blocks_V, tiles_V = _work(
            first, sequence_length, query_offsets, tokens, requests, pages_per_request, HEADS, PAGE_SIZE, block_m,
            BLOCK_N,
        )  # fmt: skip
        total_V += blocks_V * tiles_V
    return tl.maximum(tl.cdiv(tl.sum(total_V, 0), target_pieces), MIN_TILES)


@triton.jit
def _find(
    index,
    sequence_length,
    query_offsets,
    tokens,
    requests,
    pages_per_request,
    tiles_per_piece,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    block_m,
    BLOCK_N: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
):
    """Finds piece ``index`` of all requests, or, where ``SPLIT_BLOCKS``, row block ``index`` of those that are split.

    Returns:
        Whether there is one; the request; its row blocks; its pieces of a row block; the place of ``index`` among the
        request's own; and the first slot of the workspace that the request has if it is split.
    """
    blocks_V = tl.zeros([REQUESTS_AT_ONCE], tl.int64)
    pieces_V, slots_V, items_V = blocks_V, blocks_V, blocks_V
    first = requests * 0
    items_before = first.to(tl.int64)
    items_after, slots_before, slots_after = items_before, items_before, items_before
    while (items_after <= index) & (first < requests):
        blocks_V, tiles_V = _work(
            first, sequence_length, query_offsets, tokens, requests, pages_per_request, HEADS, PAGE_SIZE, block_m,
            BLOCK_N,
        )  # fmt: skip
        pieces_V = tl.maximum(tl.cdiv(tiles_V, tiles_per_piece), 1)
        slots_V = tl.where(pieces_V > 1, blocks_V * pieces_V, 0)
        items_V = tl.where(pieces_V > 1, blocks_V, 0) if SPLIT_BLOCKS else blocks_V * pieces_V
        items_before, slots_before = items_after, slots_after
        items_after += tl.sum(items_V, 0)
        slots_after += tl.sum(slots_V, 0)
        first += REQUESTS_AT_ONCE

    # The request is among the last ones looked at.
    items_up_to_V = items_before + tl.cumsum(items_V, 0)
    chosen = tl.sum((items_up_to_V <= index).to(tl.int32), 0)
    is_chosen_V = tl.arange(0, REQUESTS_AT_ONCE) == chosen
    is_before_V = tl.arange(0, REQUESTS_AT_ONCE) < chosen
    blocks = tl.sum(tl.where(is_chosen_V, blocks_V, 0), 0)
    pieces = tl.sum(tl.where(is_chosen_V, pieces_V, 0), 0)
    place = index - items_before - tl.sum(tl.where(is_before_V, items_V, 0), 0)
    first_slot = slots_before + tl.sum(tl.where(is_before_V, slots_V, 0), 0)
    request = tl.minimum(first - REQUESTS_AT_ONCE + chosen, requests - 1)
    return items_after > index, request, tl.maximum(blocks, 1), tl.maximum(pieces, 1), place, first_slot


@triton.jit
def _rows(exists, request, row_block, query_offsets, tokens, HEADS: tl.constexpr, block_m):
    """Where a row block of a request lies.

    Returns:
        Its first row in tensors seen as [tokens * HEADS, ...] (int64), how many rows it has there, none unless it
        ``exists``, the request's new tokens, and the new token and head of the first row.
    """
    query_begin = tl.load(query_offsets + request).to(tl.int64)
    query_end = tl.load(query_offsets + request + 1).to(tl.int64)
    query_count = tl.minimum(tl.maximum(query_end - query_begin, 0), tokens.to(tl.int64))
    first_row = row_block * block_m
    base = query_begin * HEADS + first_row
    rows = tl.minimum(query_count * HEADS - first_row, tokens.to(tl.int64) * HEADS - base)
    rows = tl.where(exists & (base >= 0), tl.maximum(tl.minimum(rows, block_m), 0), 0).to(tl.int32)
    return base, rows, query_count, first_row // HEADS, (first_row % HEADS).to(tl.int32)


@triton.jit
def _load_rows(
    latent_cache,
    slot,
    n_N,
    valid_N,
    dtype: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    CODE_BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Loads the cached rows ``slot + n_N`` (64-bit plus 32-bit) that are valid, as ``dtype``; the others are 0.

    Returns:
        The latents and the rotary keys [N, R]. Latents are [N, L] and an unused constant, or with 4-bit codes, whose
        even and odd elements have their own bits of a word, two halves [N, L / 2].
    """
    valid_N1 = valid_N[:, None]
    r_R = tl.arange(0, BLOCK_R)
    k_pe_mask = valid_N1
    if BLOCK_R != ROPE_DIM:
        k_pe_mask = k_pe_mask & (r_R < ROPE_DIM)[None, :]
    if CODE_BITS == 0:
        l_L = tl.arange(0, BLOCK_L)
        latent_mask = valid_N1
        if BLOCK_L != KV_LORA_RANK:
            latent_mask = latent_mask & (l_L < KV_LORA_RANK)[None, :]
        cached_N1 = (latent_cache + slot * WIDTH + n_N * WIDTH)[:, None]
        latent = tl.load(cached_N1 + l_L[None, :], mask=latent_mask, other=0.0)
        k_pe_NR = tl.load(cached_N1 + (KV_LORA_RANK + r_R)[None, :], mask=k_pe_mask, other=0.0)
        if latent.dtype != dtype:
            latent = narrow(widen(latent, INTERPRET), dtype, INTERPRET)
        odd = 0
    else:
        words = latent_cache.to(tl.pointer_type(tl.int32), bitcast=True)
        w_W = tl.arange(0, BLOCK_L * CODE_BITS // 32)
        words_mask = valid_N1
        if BLOCK_L != KV_LORA_RANK:
            words_mask = words_mask & (w_W < (KV_LORA_RANK * CODE_BITS + 31) // 32)[None, :]
        row_words_N1 = (words + slot * (WIDTH // 4) + n_N * (WIDTH // 4))[:, None]
        words_NW = tl.load(row_words_N1 + w_W[None, :], mask=words_mask, other=0)
        if CODE_BITS == 8:
            s_S = tl.arange(0, max(BLOCK_L // 128, 1))
            scale_mask = valid_N1 & (s_S < (KV_LORA_RANK + 127) // 128)[None, :]
            bits_NS = tl.load(row_words_N1 + (SCALE_OFFSET // 4 + s_S)[None, :], mask=scale_mask, other=0)
            latent = decode_fp8(words_NW, bits_NS.to(tl.float32, bitcast=True), dtype, INTERPRET)
            odd = 0
        else:
            s_S = tl.arange(0, BLOCK_L // 16)
            scale_mask = valid_N1 & (s_S < (KV_LORA_RANK + 15) // 16)[None, :]
            codes_N1 = (latent_cache + slot * WIDTH + n_N * WIDTH)[:, None]
            scale_NS = decode_e4m3(tl.load(codes_N1 + (SCALE_OFFSET + s_S)[None, :], mask=scale_mask, other=0))
            latent = decode_nvfp4(words_NW, scale_NS, False, dtype, INTERPRET)
            odd = decode_nvfp4(words_NW, scale_NS, True, dtype, INTERPRET)
        rotary = latent_cache.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        row_rotary_N1 = (rotary + slot * (WIDTH // 2) + n_N * (WIDTH // 2))[:, None]
        k_pe_NR = tl.load(row_rotary_N1 + (ROPE_OFFSET // 2 + r_R)[None, :], mask=k_pe_mask, other=0.0)
    if k_pe_NR.dtype != dtype:
        k_pe_NR = narrow(widen(k_pe_NR, INTERPRET), dtype, INTERPRET)
    return latent, odd, k_pe_NR


@triton.jit
def _add_scores(scores, q_MK, k_NK, KEYS_AS_M: tl.constexpr, INTERPRET: tl.constexpr):
    """Returns ``scores`` + the scores of queries and keys: [M, N], or [N, M] where keys are the product's rows."""
    return add_scores(scores, k_NK, q_MK, INTERPRET) if KEYS_AS_M else add_scores(scores, q_MK, k_NK, INTERPRET)


@triton.jit
def _add_values(acc, p, v_NK, rescale_M, KEYS_AS_M: tl.constexpr, INTERPRET: tl.constexpr):
    """Returns ``acc`` * ``rescale`` + the weighted values: [M, K], or [K, M] where keys are the scores' rows."""
    p = narrow(p, v_NK.dtype, INTERPRET)
    if KEYS_AS_M:
        acc = dot(tl.trans(v_NK), p, acc * rescale_M[None, :], INTERPRET)
    else:
        acc = dot(p, v_NK, acc * rescale_M[:, None], INTERPRET)
    return acc


@triton.jit
def _attend(
    exists,
    request,
    row_block,
    piece,
    pieces,
    q_latent,
    q_pe,
    latent_cache,
    block_offsets,
    sequence_length,
    query_offsets,
    scale_log2e,
    latent_scale,
    tokens,
    pages,
    pages_per_request,
    HEADS: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    CODE_BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KEYS_AS_M: tl.constexpr,
    HOIST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of a request's row block over one of ``pieces`` pieces of its keys; nothing unless it ``exists``.

    A program without work comes here too: behind an early return, Triton 3.9 loses track of the addresses' alignment,
    and loads fall apart into 2-byte ones that are not pipelined.

    ``HOIST`` lets the compiler move what does not change out of the loop over tiles: the query into registers. A
    warpgroup's MMA reads it from shared memory, and what else moves then costs 64 rows spilled registers; so it does
    beside decoding.

    Returns:
        The block's first row in tensors seen as [tokens * HEADS, ...] (int64) and how many rows it has there, the
        unnormalised output [M, L], the largest unscaled score [M] (-inf where no key is visible), and the sum [M] of
        2 ** ((score - largest) * scale_log2e). All fp32.
    """
    base, rows, query_count, first_token, first_head = _rows(
        exists, request, row_block, query_offsets, tokens, HEADS, BLOCK_M
    )
    m_M = tl.arange(0, BLOCK_M)
    l_L = tl.arange(0, BLOCK_L)
    r_R = tl.arange(0, BLOCK_R)
    q_latent_mask = (m_M < rows)[:, None]
    q_pe_mask = (m_M < rows)[:, None]
    if BLOCK_L != KV_LORA_RANK:
        q_latent_mask = q_latent_mask & (l_L < KV_LORA_RANK)[None, :]
    if BLOCK_R != ROPE_DIM:
        q_pe_mask = q_pe_mask & (r_R < ROPE_DIM)[None, :]
    # 64-bit scalar bases and 32-bit offsets: whole tiles of 64-bit offsets would fill the registers.
    q_ML = tl.load(
        q_latent + base * KV_LORA_RANK + m_M[:, None] * KV_LORA_RANK + l_L[None, :], mask=q_latent_mask, other=0.0
    )
    q_pe_MR = tl.load(q_pe + base * ROPE_DIM + m_M[:, None] * ROPE_DIM + r_R[None, :], mask=q_pe_mask, other=0.0)
    if CODE_BITS != 0:
        q_ML = narrow(widen(q_ML, INTERPRET) * latent_scale, q_pe_MR.dtype, INTERPRET)
    if CODE_BITS == 4:
        q_even_MK, q_odd_MK = tl.split(tl.reshape(q_ML, [BLOCK_M, BLOCK_L // 2, 2]))

    # Causality is aligned to the end: the last new token sees all keys of its request. Pieces cut the request's own
    # keys at multiples of BLOCK_N; a row block stops at the last key that one of its rows sees.
    length = tl.load(sequence_length + request)
    visible = (length - query_count + first_token + 1).to(tl.int32)
    visible_M = visible + (first_head + m_M) // HEADS
    last_visible = tl.where(rows > 0, visible + (first_head + rows - 1) // HEADS, 0)
    keys = tl.maximum(tl.minimum(length, pages_per_request.to(tl.int64) * PAGE_SIZE), 0).to(tl.int32)
    tiles = tl.cdiv(keys, BLOCK_N)
    tiles_per_piece = tl.cdiv(tiles, pieces)
    first_tile = tl.minimum(piece.to(tl.int64) * tiles_per_piece, tiles).to(tl.int32)
    begin = tl.maximum(first_tile, 0) * BLOCK_N
    end = tl.minimum(begin + tl.minimum(tiles_per_piece * BLOCK_N, keys - begin), last_visible)

    KEY_AXIS: tl.constexpr = 0 if KEYS_AS_M else 1
    HALF_L: tl.constexpr = BLOCK_L // 2 if CODE_BITS == 4 else BLOCK_L
    acc = tl.zeros([HALF_L, BLOCK_M] if KEYS_AS_M else [BLOCK_M, HALF_L], tl.float32)
    # Of the odd elements, where they are apart.
    acc_odd = acc if CODE_BITS == 4 else 0
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    n_N = tl.arange(0, BLOCK_N)
    table = block_offsets + request.to(tl.int64) * pages_per_request
    for start in tl.range(begin, end, BLOCK_N, disable_licm=not HOIST):
        # Keys behind the end and keys on a page outside the pool are not loaded: what lies there may be NaN.
        if BLOCK_N <= PAGE_SIZE:
            page = tl.load(table + start // PAGE_SIZE)
            valid_N = n_N < tl.where((page >= 0) & (page < pages), end - start, 0)
            slot = page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE
            offset_N = n_N
        else:
            page_N = tl.load(table + (start + n_N) // PAGE_SIZE, mask=n_N < end - start, other=-1)
            valid_N = (page_N >= 0) & (page_N < pages)
            slot = page_N.to(tl.int64) * PAGE_SIZE + (start + n_N) % PAGE_SIZE
            offset_N = 0
        latent, odd, k_pe_NR = _load_rows(
            latent_cache, slot, offset_N, valid_N, q_pe_MR.dtype, KV_LORA_RANK, ROPE_DIM, CODE_BITS, WIDTH,
            SCALE_OFFSET, ROPE_OFFSET, BLOCK_L, BLOCK_R, INTERPRET,
        )  # fmt: skip

        score = tl.zeros([BLOCK_N, BLOCK_M] if KEYS_AS_M else [BLOCK_M, BLOCK_N], tl.float32)
        score = _add_scores(score, q_pe_MR, k_pe_NR, KEYS_AS_M, INTERPRET)
        if CODE_BITS == 4:
            score = _add_scores(score, q_even_MK, latent, KEYS_AS_M, INTERPRET)
            score = _add_scores(score, q_odd_MK, odd, KEYS_AS_M, INTERPRET)
        else:
            score = _add_scores(score, q_ML, latent, KEYS_AS_M, INTERPRET)
        n = tl.expand_dims(n_N, 1 - KEY_AXIS)
        is_visible = (n < tl.expand_dims(visible_M - start, KEY_AXIS)) & tl.expand_dims(valid_N, 1 - KEY_AXIS)
        score = tl.where(is_visible, score, float("-inf"))

        # Scaled after the largest is subtracted: the rounding error is then relative to the difference.
        new_max_M = tl.maximum(max_M, tl.max(score, KEY_AXIS))
        finite_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        p = tl.exp2((score - tl.expand_dims(finite_max_M, KEY_AXIS)) * scale_log2e)
        rescale_M = tl.exp2((max_M - finite_max_M) * scale_log2e)
        sum_M = sum_M * rescale_M + tl.sum(p, KEY_AXIS)
        acc = _add_values(acc, p, latent, rescale_M, KEYS_AS_M, INTERPRET)
        if CODE_BITS == 4:
            acc_odd = _add_values(acc_odd, p, odd, rescale_M, KEYS_AS_M, INTERPRET)
        max_M = new_max_M
    if KEYS_AS_M:
        acc = tl.trans(acc)
    if CODE_BITS == 4:
        if KEYS_AS_M:
            acc_odd = tl.trans(acc_odd)
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_L])
    if CODE_BITS != 0:
        acc *= latent_scale
    return base, rows, acc, max_M, sum_M


@triton.jit
def _store(
    output,
    log_sum_exp,
    base,
    rows,
    acc_ML,
    max_M,
    sum_M,
    scale_log2e,
    KV_LORA_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Writes the operation's outputs for a row block. A row without a visible key is 0, its log-sum-exp -inf."""
    m_M = tl.arange(0, BLOCK_M)
    l_L = tl.arange(0, BLOCK_L)
    divisor_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    tl.store(log_sum_exp + base + m_M, (max_M * scale_log2e + tl.log2(divisor_M)) * LN2, mask=m_M < rows)
    output_ML = narrow(acc_ML * (1.0 / divisor_M)[:, None], output.dtype.element_ty, INTERPRET)
    mask = (m_M < rows)[:, None]
    if BLOCK_L != KV_LORA_RANK:
        mask = mask & (l_L < KV_LORA_RANK)[None, :]
    tl.store(output + base * KV_LORA_RANK + m_M[:, None] * KV_LORA_RANK + l_L[None, :], output_ML, mask=mask)


@triton.jit
def attend(
    q_latent,
    q_pe,
    latent_cache,
    block_offsets,
    sequence_length,
    query_offsets,
    output,
    log_sum_exp,
    partial_output,
    partial_max,
    partial_sum,
    scale_log2e,
    latent_scale,
    tokens,
    pages,
    requests,
    pages_per_request,
    target_pieces,
    slots,
    HEADS: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    CODE_BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MIN_TILES: tl.constexpr,
    KEYS_AS_M: tl.constexpr,
    HOIST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One program a piece: a row block and a part of its request's keys.

    Grid: (pieces, 1, 1), as many as there can be; a program beyond the last piece ends at once. Pieces of a request
    that read the same keys are neighbours, so that they run together. Tiling and memory budget: see the module.

    A row block that is not split is written to the outputs. The others leave partial results for ``combine`` in slots
    of the workspace: ``partial_max`` and ``partial_sum`` are [slots, BLOCK_M]; ``partial_output`` [slots, BLOCK_M,
    kv_lora_rank] is unnormalised and written only where ``partial_max`` is not -inf. Largest score and sum are kept
    apart, because the rounding of a log-sum-exp near 10 would put a relative error of 5e-7 on a piece's weight.
    """
    tiles_per_piece = _tiles_per_piece(
        sequence_length, query_offsets, tokens, requests, pages_per_request, target_pieces, HEADS, PAGE_SIZE, BLOCK_M,
        BLOCK_N, MIN_TILES,
    )  # fmt: skip
    exists, request, blocks, pieces, place, first_slot = _find(
        tl.program_id(0), sequence_length, query_offsets, tokens, requests, pages_per_request, tiles_per_piece, HEADS,
        PAGE_SIZE, BLOCK_M, BLOCK_N, SPLIT_BLOCKS=False,
    )  # fmt: skip
    # One number says during the loop where the results go: -1 is to the outputs.
    slot = tl.where(pieces > 1, tl.minimum(tl.maximum(first_slot + place, 0), slots), -1).to(tl.int32)
    base, rows, acc_ML, max_M, sum_M = _attend(
        exists, request, place % blocks, place // blocks, pieces.to(tl.int32), q_latent, q_pe, latent_cache,
        block_offsets, sequence_length, query_offsets, scale_log2e, latent_scale, tokens, pages, pages_per_request,
        HEADS, KV_LORA_RANK, ROPE_DIM, CODE_BITS, WIDTH, SCALE_OFFSET, ROPE_OFFSET, PAGE_SIZE, BLOCK_M, BLOCK_N,
        BLOCK_L, BLOCK_R, KEYS_AS_M, HOIST, INTERPRET,
    )  # fmt: skip
    if slot < 0:
        _store(
            output, log_sum_exp, base, rows, acc_ML, max_M, sum_M, scale_log2e, KV_LORA_RANK, BLOCK_M, BLOCK_L,
            INTERPRET,
        )  # fmt: skip
    else:
        m_M = tl.arange(0, BLOCK_M)
        l_L = tl.arange(0, BLOCK_L)
        # Lengths that overflow a sum could ask for more slots than there are.
        rows = tl.where(slot < slots, rows, 0)
        at = slot.to(tl.int64) * BLOCK_M
        mask = ((m_M < rows) & (max_M != float("-inf")))[:, None] & (l_L < KV_LORA_RANK)[None, :]
        tl.store(partial_output + at * KV_LORA_RANK + m_M[:, None] * KV_LORA_RANK + l_L[None, :], acc_ML, mask=mask)
        tl.store(partial_max + at + m_M, max_M, mask=m_M < rows)
        tl.store(partial_sum + at + m_M, sum_M, mask=m_M < rows)


@triton.jit
def combine(
    partial_output,
    partial_max,
    partial_sum,
    sequence_length,
    query_offsets,
    output,
    log_sum_exp,
    scale_log2e,
    tokens,
    requests,
    pages_per_request,
    target_pieces,
    slots,
    block_m,
    HEADS: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MIN_TILES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Merges the partial results of the pieces of split row blocks.

    Grid: (split row blocks, programs each, 1), as many as there can be; a program beyond the last split row block
    ends at once. A row block's programs share its rows (new token and head) times ``BLOCK_C`` columns of the output.
    ``BLOCK_B`` pieces are read at a time: BLOCK_B * BLOCK_C fp32 values in registers, 64 a thread for 64 x 128 and 4
    warps; shared memory holds reductions only. Partial outputs of pieces without a visible key are not read.
    """
    tiles_per_piece = _tiles_per_piece(
        sequence_length, query_offsets, tokens, requests, pages_per_request, target_pieces, HEADS, PAGE_SIZE, block_m,
        BLOCK_N, MIN_TILES,
    )  # fmt: skip
    exists, request, blocks, pieces, row_block, first_slot = _find(
        tl.program_id(0), sequence_length, query_offsets, tokens, requests, pages_per_request, tiles_per_piece, HEADS,
        PAGE_SIZE, block_m, BLOCK_N, SPLIT_BLOCKS=True,
    )  # fmt: skip
    base, rows, _, _, _ = _rows(exists, request, row_block, query_offsets, tokens, HEADS, block_m)
    b_B = tl.arange(0, BLOCK_B)
    COLUMN_BLOCKS: tl.constexpr = (KV_LORA_RANK + BLOCK_C - 1) // BLOCK_C
    for part in range(tl.program_id(1), rows * COLUMN_BLOCKS, tl.num_programs(1)):
        row = part // COLUMN_BLOCKS
        c_C = part % COLUMN_BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
        row_max = float("-inf")
        for start in range(0, pieces.to(tl.int32), BLOCK_B):
            slot_B = first_slot + (start + b_B) * blocks + row_block
            exists_B = (start + b_B < pieces) & (slot_B >= 0) & (slot_B < slots)
            max_B = tl.load(partial_max + slot_B * block_m + row, mask=exists_B, other=float("-inf"))
            row_max = tl.maximum(row_max, tl.max(max_B, 0))
        finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)

        row_sum = 0.0
        acc_C = tl.zeros([BLOCK_C], tl.float32)
        for start in range(0, pieces.to(tl.int32), BLOCK_B):
            slot_B = first_slot + (start + b_B) * blocks + row_block
            exists_B = (start + b_B < pieces) & (slot_B >= 0) & (slot_B < slots)
            at_B = slot_B * block_m + row
            max_B = tl.load(partial_max + at_B, mask=exists_B, other=float("-inf"))
            sum_B = tl.load(partial_sum + at_B, mask=exists_B, other=0.0)
            weight_B = tl.exp2((max_B - finite_max) * scale_log2e)
            row_sum += tl.sum(sum_B * weight_B, 0)
            mask = (max_B != float("-inf"))[:, None] & (c_C < KV_LORA_RANK)[None, :]
            part_BC = tl.load(partial_output + at_B[:, None] * KV_LORA_RANK + c_C[None, :], mask=mask, other=0.0)
            acc_C += tl.sum(part_BC * weight_B[:, None], 0)
        divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
        output_C = narrow(acc_C / divisor, output.dtype.element_ty, INTERPRET)
        tl.store(output + (base + row) * KV_LORA_RANK + c_C, output_C, mask=c_C < KV_LORA_RANK)
        if part % COLUMN_BLOCKS == 0:
            tl.store(log_sum_exp + base + row, (row_max * scale_log2e + tl.log2(divisor)) * LN2)
