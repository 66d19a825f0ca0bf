"""Triton kernels of LatentAttention: split-KV flash decoding over a paged latent cache.

Dimensions: M rows of a row block, N keys of a tile, L ``kv_lora_rank``, R ``rope_dim``, S splits, B splits read
at a time; BLOCK_L and BLOCK_R are padded to powers of two, BLOCK_S is the largest number of splits.

Tiling
    A program owns ``BLOCK_M`` rows of one request and one split of its keys. Row m of a request is its new token
    m // HEADS and head m % HEADS, so that all heads of several new tokens share each tile of keys. A tile is
    ``BLOCK_N`` cached rows, loaded once: latent and rotary key give the scores (two products), and the same latent is
    the value.

Memory budget
    Shared memory: the query block, BLOCK_M * (BLOCK_L + BLOCK_R) elements, and the tiles in flight, BLOCK_N *
    (BLOCK_L + BLOCK_R) elements each: ``num_stages`` of them where a warpgroup's MMA reads them from shared memory,
    one fewer otherwise. 216 KiB on sm_90 for 64 rows, tiles of 64, 2 stages at 512 + 64 in bf16.
    ``plan.shared_memory_bytes`` bounds it.
    Registers: the fp32 accumulator takes BLOCK_M * BLOCK_L / threads in each thread: 128 for 64 rows and 8 warps, 64
    for 16 rows and 4 warps at a latent of 512. Without a warpgroup's MMA the query is kept in registers as well.

Safety
    Whatever the integer tensors hold (TensorRT times kernels on arbitrary data), nothing outside the tensors is read
    or written: pages, keys and rows out of range are masked, and addresses are 64-bit.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import add_scores, dot, narrow, widen

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _find_request(row_block, query_offsets, requests, blocks_per_request, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the request that a row block belongs to, and the number of that request's first row block.

    Either every request has ``blocks_per_request`` row blocks, or (0) those of request r begin at
    query_offsets[r] * HEADS // BLOCK_M + r, which leaves each request at least as many as its rows need. The request
    is then the last one that begins at or before ``row_block``.
    """
    request = row_block // tl.maximum(blocks_per_request, 1)
    first_block = request * blocks_per_request
    if blocks_per_request == 0:
        request = row_block * 0
        end = request + requests
        while end - request > 1:
            middle = (request + end) // 2
            begins_before = tl.load(query_offsets + middle).to(tl.int64) * HEADS // BLOCK_M + middle <= row_block
            request = tl.where(begins_before, middle, request)
            end = tl.where(begins_before, end, middle)
        first_block = (tl.load(query_offsets + request).to(tl.int64) * HEADS // BLOCK_M + request).to(tl.int32)
    return request, first_block


@triton.jit
def _attend(
    q_latent,
    q_pe,
    latent_cache,
    block_offsets,
    sequence_length,
    query_offsets,
    scale_log2e,
    tokens,
    pages,
    requests,
    pages_per_request,
    blocks_per_request,
    HEADS: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HOIST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of row block ``program_id(0)`` over split ``program_id(1)`` of its request's keys.

    ``HOIST`` lets the compiler move what does not change out of the loop over tiles: the query into registers. A
    warpgroup's MMA reads it from shared memory, and what else moves then costs 64 rows spilled registers.

    Returns:
        The block's first row in tensors seen as [tokens * HEADS, ...] (int64) and how many rows it has there, the
        unnormalised output [M, L], the largest unscaled score [M] (-inf where no key is visible), and the sum [M] of
        2 ** ((score - largest) * scale_log2e). All fp32.
    """
    row_block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    request, first_block = _find_request(row_block, query_offsets, requests, blocks_per_request, HEADS, BLOCK_M)
    length = tl.load(sequence_length + request)
    query_begin = tl.load(query_offsets + request)
    query_count = tl.load(query_offsets + request + 1) - query_begin

    first_row = (row_block - first_block) * BLOCK_M
    base = query_begin.to(tl.int64) * HEADS + first_row
    rows = tl.minimum(query_count.to(tl.int64) * HEADS - first_row, tokens.to(tl.int64) * HEADS - base)
    rows = tl.where((base >= 0) & (first_row >= 0), tl.maximum(tl.minimum(rows, BLOCK_M), 0), 0).to(tl.int32)

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
    q_latent_ML = tl.load(
        q_latent + base * KV_LORA_RANK + m_M[:, None] * KV_LORA_RANK + l_L[None, :], mask=q_latent_mask, other=0.0
    )
    q_pe_MR = tl.load(q_pe + base * ROPE_DIM + m_M[:, None] * ROPE_DIM + r_R[None, :], mask=q_pe_mask, other=0.0)

    # Causality is aligned to the end: the last new token sees all keys of its request. Splits cut the request's own
    # keys at multiples of BLOCK_N; a row block stops at the last key that one of its rows sees.
    visible_M = length - query_count + (first_row + m_M) // HEADS + 1
    last_visible = length - query_count + (first_row + rows - 1) // HEADS + 1
    keys = tl.maximum(tl.minimum(length, pages_per_request * PAGE_SIZE), 0)
    keys_per_split = tl.cdiv(tl.cdiv(keys, BLOCK_N), splits) * BLOCK_N
    begin = split * keys_per_split
    end = tl.minimum(tl.minimum(begin + keys_per_split, keys), tl.where(rows > 0, last_visible, 0))

    acc_ML = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
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
            cached_N = latent_cache + slot * (KV_LORA_RANK + ROPE_DIM) + n_N * (KV_LORA_RANK + ROPE_DIM)
        else:
            page_N = tl.load(table + (start + n_N) // PAGE_SIZE, mask=n_N < end - start, other=-1)
            valid_N = (page_N >= 0) & (page_N < pages)
            slot_N = page_N.to(tl.int64) * PAGE_SIZE + (start + n_N) % PAGE_SIZE
            cached_N = latent_cache + slot_N * (KV_LORA_RANK + ROPE_DIM)
        latent_mask = valid_N[:, None]
        k_pe_mask = valid_N[:, None]
        if BLOCK_L != KV_LORA_RANK:
            latent_mask = latent_mask & (l_L < KV_LORA_RANK)[None, :]
        if BLOCK_R != ROPE_DIM:
            k_pe_mask = k_pe_mask & (r_R < ROPE_DIM)[None, :]
        latent_NL = tl.load(cached_N[:, None] + l_L[None, :], mask=latent_mask, other=0.0)
        k_pe_NR = tl.load(cached_N[:, None] + (KV_LORA_RANK + r_R)[None, :], mask=k_pe_mask, other=0.0)
        if latent_NL.dtype != q_latent_ML.dtype:
            latent_NL = narrow(widen(latent_NL, INTERPRET), q_latent_ML.dtype, INTERPRET)
            k_pe_NR = narrow(widen(k_pe_NR, INTERPRET), q_pe_MR.dtype, INTERPRET)

        score_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        score_MN = add_scores(score_MN, q_pe_MR, k_pe_NR, INTERPRET)
        score_MN = add_scores(score_MN, q_latent_ML, latent_NL, INTERPRET)
        score_MN = tl.where((n_N[None, :] < (visible_M - start)[:, None]) & valid_N[None, :], score_MN, float("-inf"))

        # Scaled after the largest is subtracted: the rounding error is then relative to the difference.
        new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
        finite_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        p_MN = tl.exp2((score_MN - finite_max_M[:, None]) * scale_log2e)
        rescale_M = tl.exp2((max_M - finite_max_M) * scale_log2e)
        sum_M = sum_M * rescale_M + tl.sum(p_MN, 1)
        acc_ML = dot(narrow(p_MN, latent_NL.dtype, INTERPRET), latent_NL, acc_ML * rescale_M[:, None], INTERPRET)
        max_M = new_max_M
    return base, rows, acc_ML, max_M, sum_M


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
    scale_log2e,
    tokens,
    pages,
    requests,
    pages_per_request,
    blocks_per_request,
    HEADS: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HOIST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One program a row block, over all keys of its request; writes the operation's outputs.

    Grid: (row blocks, 1, 1). Tiling and memory budget: see the module. A row without a visible key becomes 0, its
    log-sum-exp -inf.
    """
    base, rows, acc_ML, max_M, sum_M = _attend(
        q_latent,
        q_pe,
        latent_cache,
        block_offsets,
        sequence_length,
        query_offsets,
        scale_log2e,
        tokens,
        pages,
        requests,
        pages_per_request,
        blocks_per_request,
        HEADS,
        KV_LORA_RANK,
        ROPE_DIM,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_L,
        BLOCK_R,
        HOIST,
        INTERPRET,
    )
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
def attend_split(
    q_latent,
    q_pe,
    latent_cache,
    block_offsets,
    sequence_length,
    query_offsets,
    partial_output,
    partial_max,
    partial_sum,
    scale_log2e,
    tokens,
    pages,
    requests,
    pages_per_request,
    blocks_per_request,
    HEADS: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HOIST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One program a row block and split of the keys; writes the partial results that ``combine`` merges.

    Grid: (row blocks, splits, 1), so that programs reading the same keys run together. Tiling and memory budget: see
    the module.

    ``partial_max`` and ``partial_sum`` are [splits, tokens, heads]. ``partial_output`` [splits, tokens, heads,
    kv_lora_rank] is unnormalised and written only where ``partial_max`` is not -inf. Largest score and sum are kept
    apart, because the rounding of a log-sum-exp near 10 would put a relative error of 5e-7 on a split's weight.
    """
    base, rows, acc_ML, max_M, sum_M = _attend(
        q_latent,
        q_pe,
        latent_cache,
        block_offsets,
        sequence_length,
        query_offsets,
        scale_log2e,
        tokens,
        pages,
        requests,
        pages_per_request,
        blocks_per_request,
        HEADS,
        KV_LORA_RANK,
        ROPE_DIM,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_L,
        BLOCK_R,
        HOIST,
        INTERPRET,
    )
    m_M = tl.arange(0, BLOCK_M)
    l_L = tl.arange(0, BLOCK_L)
    base += tl.program_id(1) * (tokens.to(tl.int64) * HEADS)
    mask = ((m_M < rows) & (max_M != float("-inf")))[:, None] & (l_L < KV_LORA_RANK)[None, :]
    tl.store(partial_output + base * KV_LORA_RANK + m_M[:, None] * KV_LORA_RANK + l_L[None, :], acc_ML, mask=mask)
    tl.store(partial_max + base + m_M, max_M, mask=m_M < rows)
    tl.store(partial_sum + base + m_M, sum_M, mask=m_M < rows)


@triton.jit
def combine(
    partial_output,
    partial_max,
    partial_sum,
    output,
    log_sum_exp,
    scale_log2e,
    rows,
    splits,
    KV_LORA_RANK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One program a row (new token and head): merges the partial results of its splits.

    Grid: (rows, 1, 1) with rows = tokens * heads. Partial outputs are read ``BLOCK_B`` splits at a time: BLOCK_B *
    BLOCK_L fp32 values in registers, 64 a thread for 16 x 512 and 4 warps; shared memory holds reductions only.
    Partial outputs of splits without a visible key are not read.
    """
    row = tl.program_id(0).to(tl.int64)
    l_L = tl.arange(0, BLOCK_L)

    s_S = tl.arange(0, BLOCK_S)
    max_S = tl.load(partial_max + s_S * rows.to(tl.int64) + row, mask=s_S < splits, other=float("-inf"))
    sum_S = tl.load(partial_sum + s_S * rows.to(tl.int64) + row, mask=s_S < splits, other=0.0)
    row_max = tl.max(max_S, 0)
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(sum_S * tl.exp2((max_S - finite_max) * scale_log2e), 0)
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)

    acc_L = tl.zeros([BLOCK_L], tl.float32)
    for start in range(0, splits, BLOCK_B):
        split_B = start + tl.arange(0, BLOCK_B)
        at_B = split_B * rows.to(tl.int64) + row
        max_B = tl.load(partial_max + at_B, mask=split_B < splits, other=float("-inf"))
        mask = (max_B != float("-inf"))[:, None] & (l_L < KV_LORA_RANK)[None, :]
        part_BL = tl.load(partial_output + at_B[:, None] * KV_LORA_RANK + l_L[None, :], mask=mask, other=0.0)
        acc_L += tl.sum(part_BL * tl.exp2((max_B - finite_max) * scale_log2e)[:, None], 0)
    output_L = narrow(acc_L / divisor, output.dtype.element_ty, INTERPRET)
    tl.store(output + row * KV_LORA_RANK + l_L, output_L, mask=l_L < KV_LORA_RANK)
    tl.store(log_sum_exp + row, (row_max * scale_log2e + tl.log2(divisor)) * LN2)
