"""Kernel of ContextAttention: variable-length flash attention with a rotary key that all heads share.

Dimensions of tiles: M query rows, N keys, D ``nope_dim``, R ``rope_dim``, V ``v_dim``; head sizes are padded to powers
of two (``BLOCK_...``) and masked.
"""

import triton
import triton.language as tl

from trtllm_mla.ops.device_functions import add_scores, dot, narrow


@triton.jit
def context_attention(
    q_nope,
    q_pe,
    k_nope,
    k_pe,
    v,
    query_offsets,
    key_offsets,
    output,
    log_sum_exp,
    tokens,
    keys,
    requests,
    causal,
    softmax_scale_log2,
    HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attends BLOCK_M query rows of one request and one head to the keys they see.

    Programs: (head, row block), row blocks fastest, so that programs that read the same keys run together. Request r
    owns the row blocks from query_offsets[r] // BLOCK_M + r on; some are empty and end at once. Query row j of a
    request with n of them and ``length`` keys sees the keys before length - n + j + 1, or all of them where
    ``causal`` is 0. Keys are read BLOCK_N at a time: tiles that every row sees without masks, then those on the
    diagonal, or the one with the last key; tiles above it are not read. ``causal`` only moves the ends of the two
    loops, so it is a run-time number and one kernel serves both.

    Arithmetic: scores, maximum, sum and output are fp32 (online softmax in powers of two; ``softmax_scale_log2``, a
    positive number, holds log2(e)); the weights are rounded to the model's type for the second product. Scores are
    scaled after the maximum is subtracted: the larger a weight, the smaller the rounding error of its exponent.
    ``log_sum_exp`` is the natural logarithm. A row that sees no key gets 0 and -inf.

    Memory: the query block BLOCK_M * (BLOCK_NOPE + BLOCK_ROPE), ``num_stages`` tiles of BLOCK_N * (BLOCK_NOPE +
    BLOCK_ROPE + BLOCK_V) in shared memory (``plan.shared_memory_bytes``); fp32 accumulator BLOCK_M * BLOCK_V and
    scores BLOCK_M * BLOCK_N in registers. At 128 + 64 and 128 in 16 bits: 168 KiB on sm_90, 145 on sm_100, 88
    elsewhere; in fp32: 40.

    Whatever the offsets hold, nothing outside the tensors is read or written; addresses are 64-bit.
    """
    row_blocks = tl.num_programs(0) // HEADS
    head = tl.program_id(0) // row_blocks
    # Later rows see more keys: they start first, so that the last programs to run are short ones.
    block = row_blocks - 1 - tl.program_id(0) % row_blocks

    # The last request whose first block is not behind this one; first blocks ascend strictly.
    request = 0
    end = requests
    while end - request > 1:
        middle = (request + end) // 2
        if tl.load(query_offsets + middle) // BLOCK_M + middle <= block:
            request = middle
        else:
            end = middle

    q_begin = tl.load(query_offsets + request)
    q_end = tl.load(query_offsets + request + 1)
    first_row = (block - q_begin // BLOCK_M - request) * BLOCK_M
    k_begin = tl.minimum(tl.maximum(tl.load(key_offsets + request), 0), keys)
    k_end = tl.minimum(tl.maximum(tl.load(key_offsets + request + 1), k_begin), keys)
    queries = q_end - q_begin
    length = k_end - k_begin
    if first_row >= queries:
        return

    offs_m = first_row + tl.arange(0, BLOCK_M)
    rows = q_begin.to(tl.int64) + offs_m
    row_mask = (offs_m < queries) & (rows >= 0) & (rows < tokens)
    offs_nope = tl.arange(0, BLOCK_NOPE)
    offs_rope = tl.arange(0, BLOCK_ROPE)
    offs_v = tl.arange(0, BLOCK_V)
    q_rows = rows * HEADS + head
    q_nope_MD = tl.load(
        q_nope + q_rows[:, None] * NOPE_DIM + offs_nope[None, :],
        mask=row_mask[:, None] & (offs_nope < NOPE_DIM)[None, :],
        other=0.0,
    )
    q_pe_MR = tl.load(
        q_pe + q_rows[:, None] * ROPE_DIM + offs_rope[None, :],
        mask=row_mask[:, None] & (offs_rope < ROPE_DIM)[None, :],
        other=0.0,
    )

    k_row = k_begin.to(tl.int64)
    k_nope += (k_row * HEADS + head) * NOPE_DIM
    k_pe += k_row * ROPE_DIM
    v += (k_row * HEADS + head) * V_DIM
    # Row i of the block sees the keys before visible[i].
    visible = length + causal * (offs_m + 1 - queries)
    whole = tl.minimum(tl.maximum(length + causal * (first_row + 1 - queries), 0), length) // BLOCK_N * BLOCK_N
    partial = tl.minimum(length + causal * (first_row + BLOCK_M - queries), length)

    accumulator = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, whole, BLOCK_N):
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, q_nope_MD, q_pe_MR, k_nope, k_pe, v, start, length, visible,
            softmax_scale_log2, HEADS, NOPE_DIM, ROPE_DIM, V_DIM, BLOCK_N, BLOCK_NOPE, BLOCK_ROPE, BLOCK_V,
            False, INTERPRET,
        )  # fmt: skip
    for start in range(whole, partial, BLOCK_N):
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, q_nope_MD, q_pe_MR, k_nope, k_pe, v, start, length, visible,
            softmax_scale_log2, HEADS, NOPE_DIM, ROPE_DIM, V_DIM, BLOCK_N, BLOCK_NOPE, BLOCK_ROPE, BLOCK_V,
            True, INTERPRET,
        )  # fmt: skip

    LN_2: tl.constexpr = 0.6931471805599453
    blind = total == 0
    accumulator = accumulator / tl.where(blind, 1.0, total)[:, None]
    tl.store(
        output + q_rows[:, None] * V_DIM + offs_v[None, :],
        narrow(accumulator, output.dtype.element_ty, INTERPRET),
        mask=row_mask[:, None] & (offs_v < V_DIM)[None, :],
    )
    lse = tl.where(blind, float("-inf"), (maximum * softmax_scale_log2 + tl.log2(tl.where(blind, 1.0, total))) * LN_2)
    tl.store(log_sum_exp + q_rows, lse, mask=row_mask)


@triton.jit
def _attend(
    accumulator,
    maximum,
    total,
    q_nope_MD,
    q_pe_MR,
    k_nope,
    k_pe,
    v,
    start,
    length,
    visible,
    softmax_scale_log2,
    HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One step of the online softmax: the keys [start, start + BLOCK_N), all of them visible unless MASKED."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_nope = tl.arange(0, BLOCK_NOPE)
    offs_rope = tl.arange(0, BLOCK_ROPE)
    offs_v = tl.arange(0, BLOCK_V)
    nope_mask = (offs_nope < NOPE_DIM)[None, :]
    rope_mask = (offs_rope < ROPE_DIM)[None, :]
    v_mask = (offs_v < V_DIM)[None, :]
    if MASKED:
        key_mask = (start + offs_n < length)[:, None]
        nope_mask = key_mask & nope_mask
        rope_mask = key_mask & rope_mask
        v_mask = key_mask & v_mask

    first = tl.cast(start, tl.int64)
    k_nope_ND = tl.load(
        k_nope + first * (HEADS * NOPE_DIM) + offs_n[:, None] * (HEADS * NOPE_DIM) + offs_nope[None, :],
        mask=nope_mask,
        other=0.0,
    )
    k_pe_NR = tl.load(
        k_pe + first * ROPE_DIM + offs_n[:, None] * ROPE_DIM + offs_rope[None, :], mask=rope_mask, other=0.0
    )
    v_NV = tl.load(
        v + first * (HEADS * V_DIM) + offs_n[:, None] * (HEADS * V_DIM) + offs_v[None, :], mask=v_mask, other=0.0
    )

    scores = tl.zeros((accumulator.shape[0], BLOCK_N), dtype=tl.float32)
    scores = add_scores(scores, q_nope_MD, k_nope_ND, INTERPRET)
    scores = add_scores(scores, q_pe_MR, k_pe_NR, INTERPRET)
    if MASKED:
        scores = tl.where((start + offs_n)[None, :] < visible[:, None], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen no key yet has maximum -inf; subtracting 0 instead keeps its weights at exp2(-inf) = 0.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
    weights = tl.exp2((scores - shift[:, None]) * softmax_scale_log2)
    correction = tl.exp2((maximum - shift) * softmax_scale_log2)
    total = total * correction + tl.sum(weights, 1)
    accumulator = dot(narrow(weights, v_NV.dtype, INTERPRET), v_NV, accumulator * correction[:, None], INTERPRET)
    return accumulator, new_maximum, total
