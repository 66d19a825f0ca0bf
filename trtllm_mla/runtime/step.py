"""One step's inputs: chunks of several requests, packed into the arrays that a network reads.

Legend of shape names: T new tokens (C of the context group, then G of the generation group), R requests of a group,
S cached tokens in a pass of the context group, W pages of the longest request of the generation group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.network.contract import history_inputs, step_inputs
from trtllm_mla.ops.plan import MAX_INT32

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class LogitRows(IntEnum):
    """For which of a chunk's new tokens logits are computed."""

    NONE = 0
    LAST = 1
    ALL = 2


@dataclass(frozen=True)
class Chunk:
    """New tokens of one request.

    Attributes:
        token_ids: The new tokens, one or more.
        start: Position of the first of them, which is the number of tokens cached before the step.
        pages: The request's pages, in order. They cover all its tokens up to the last new one; there may be more.
        logits: Rows whose logits are wanted.
    """

    token_ids: Int32Array
    start: int
    pages: Int32Array
    logits: LogitRows = LogitRows.LAST

    @property
    def length(self) -> int:
        """Cached tokens of the request after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ContextPasses:
    """Passes of the context group's attention.

    Attributes:
        count: How many the network has.
        max_keys: Cached tokens in a pass, the new ones included.
    """

    count: int = 1
    max_keys: int = MAX_INT32

    @property
    def total_keys(self) -> int:
        """Cached tokens in a step."""
        return self.count * self.max_keys


ONE_PASS = ContextPasses()


@dataclass(frozen=True)
class HistoryPass:
    """Step inputs of a pass over older tokens.

    Attributes:
        kv_slots: [S], 0 or more.
        key_offsets: [R + 1].
        key_index: [R, longest_history_key].
    """

    kv_slots: Int32Array
    key_offsets: Int32Array
    key_index: Int32Array


@dataclass(frozen=True)
class StepInputs:
    """The step inputs of ``trtllm_mla.network.contract``, all int32, under the same names.

    ``rotary_cos_sin`` is missing: it is the same in every step, so an executor binds it once. Index matrices and page
    tables have at least one column, also where their group is empty. Rows of ``logits`` follow ``last_token_ids``:
    chunk after chunk, context group first.

    Attributes:
        input_ids: [T].
        slot_mapping: [T].
        last_token_ids: [logit_rows].
        context_position_ids: [C].
        context_kv_slots: [S].
        context_query_offsets: [R + 1].
        context_key_offsets: [R + 1].
        context_query_index: [R, context_longest_query].
        context_key_index: [R, context_longest_key].
        context_history: Those of the passes over older tokens, in order.
        generation_position_ids: [G].
        generation_query_offsets: [R + 1].
        generation_sequence_length: [R].
        generation_query_index: [R, generation_longest_query].
        kv_cache_block_offsets: [R, W], padded with 0.
    """

    input_ids: Int32Array
    slot_mapping: Int32Array
    last_token_ids: Int32Array
    context_position_ids: Int32Array
    context_kv_slots: Int32Array
    context_query_offsets: Int32Array
    context_key_offsets: Int32Array
    context_query_index: Int32Array
    context_key_index: Int32Array
    context_history: tuple[HistoryPass, ...]
    generation_position_ids: Int32Array
    generation_query_offsets: Int32Array
    generation_sequence_length: Int32Array
    generation_query_index: Int32Array
    kv_cache_block_offsets: Int32Array

    @property
    def num_context_keys(self) -> int:
        """Cached tokens that the context group decompresses, over all passes."""
        return len(self.context_kv_slots) + sum(len(item.kv_slots) for item in self.context_history)

    def arrays(self, *, absorption: bool, context_passes: int = 1) -> dict[str, Int32Array]:
        """The arrays by input name.

        Args:
            absorption: Whether the network has a generation group.
            context_passes: Passes of the context group's attention in the network.

        Raises:
            ValueError: There are generation tokens, and the network has no generation group; or the step was built
                for another number of passes.
        """
        if not absorption and len(self.generation_position_ids):
            raise ValueError(
                f"found {len(self.generation_position_ids)} generation tokens, expected none: the network was "
                "converted without matrix absorption"
            )
        if len(self.context_history) != context_passes - 1:
            raise ValueError(
                f"found a step of {len(self.context_history) + 1} passes of the context group, expected the "
                f"{context_passes} of the network"
            )
        mine = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "context_history"}
        for number, item in enumerate(self.context_history, 1):
            names = (contract.name for contract in history_inputs(number))
            mine |= zip(names, (item.kv_slots, item.key_offsets, item.key_index), strict=True)
        wanted = step_inputs(absorption=absorption, context_passes=context_passes)
        return {contract.name: mine[contract.name] for contract in wanted if contract.name in mine}


@dataclass(frozen=True)
class _Group:
    """Arrays of one group, in int64 while they are being computed.

    Attributes:
        counts: [R] new tokens of each request.
        lengths: [R] cached tokens of each request, the new ones included.
        query_offsets: [R + 1] prefix sums of ``counts``.
        positions: [T] position of each new token.
        page_table: [R, W] pages in use, padded with 0.
        wanted: [T] whether a new token's logits are wanted.
    """

    counts: Int64Array
    lengths: Int64Array
    query_offsets: Int64Array
    positions: Int64Array
    page_table: Int64Array
    wanted: npt.NDArray[np.bool_]


def build_step(
    context: Sequence[Chunk],
    generation: Sequence[Chunk],
    *,
    page_size: int,
    num_pages: int,
    context_passes: ContextPasses = ONE_PASS,
) -> StepInputs:
    """Packs chunks into a step.

    The first pass of the context group takes all new tokens and, request after request, as much of the newest history
    as it has room for. What is left of the histories lies end to end over the further passes, each full before the
    next begins; a history may begin in one and end in another.

    Args:
        context: Chunks whose attention is decompressed.
        generation: Chunks whose attention is absorbed.
        page_size: Tokens in a page.
        num_pages: Pages in the pool.
        context_passes: Passes of the context group's attention, and what each has room for.

    Raises:
        ValueError: A chunk is empty or starts before position 0, its pages do not cover it or lie outside the pool,
            two new tokens share a slot, the passes have no room for the context group, or slots do not fit in int32.
    """
    if num_pages * page_size > MAX_INT32:
        raise ValueError(f"found a pool of {num_pages} pages of {page_size} tokens, expected slots that fit in int32")
    first = _pack(context, page_size, num_pages)
    second = _pack(generation, page_size, num_pages)
    slots_T = np.concatenate([_new_slots(group, page_size) for group in (first, second)])
    if len(np.unique(slots_T)) != len(slots_T):
        raise ValueError("two new tokens share a cache slot; expected that no page is written for two requests")

    newest, *older = _split_keys(first, context_passes)

    def kv_slots(part: _Keys) -> Int32Array:
        rows_S = np.repeat(np.arange(len(context)), np.diff(part.offsets))
        return _int32(_slots(first.page_table, rows_S, _ranges(part.offsets, part.starts), page_size))

    tokens = [chunk.token_ids for chunk in (*context, *generation)]
    return StepInputs(
        input_ids=_int32(np.concatenate(tokens) if tokens else np.zeros(0)),
        slot_mapping=_int32(slots_T),
        last_token_ids=_int32(np.flatnonzero(np.concatenate([first.wanted, second.wanted]))),
        context_position_ids=_int32(first.positions),
        context_kv_slots=kv_slots(newest),
        context_query_offsets=_int32(first.query_offsets),
        context_key_offsets=_int32(newest.offsets),
        context_query_index=_index_matrix(first.query_offsets),
        context_key_index=_index_matrix(newest.offsets),
        context_history=tuple(
            HistoryPass(kv_slots(part), _int32(part.offsets), _index_matrix(part.offsets)) for part in older
        ),
        generation_position_ids=_int32(second.positions),
        generation_query_offsets=_int32(second.query_offsets),
        generation_sequence_length=_int32(second.lengths),
        generation_query_index=_index_matrix(second.query_offsets),
        kv_cache_block_offsets=_int32(second.page_table),
    )


@dataclass(frozen=True)
class _Keys:
    """Cached tokens of a pass.

    Attributes:
        starts: [R] position of each request's first one.
        offsets: [R + 1] prefix sums of how many follow on it.
    """

    starts: Int64Array
    offsets: Int64Array


def _split_keys(group: _Group, passes: ContextPasses) -> list[_Keys]:
    """Cached tokens of each pass: the newest ones first, then the older ones."""
    new_tokens, keys = int(group.counts.sum()), int(group.lengths.sum())
    if new_tokens > passes.max_keys or keys > passes.total_keys:
        raise ValueError(
            f"found {new_tokens} new tokens and {keys} cached ones in the context group, expected at most "
            f"{passes.max_keys} and {passes.total_keys}: {passes.count} passes of {passes.max_keys}"
        )
    history_R = group.lengths - group.counts
    beside_R = np.diff(np.minimum(_prefix_sums(history_R), passes.max_keys - new_tokens))
    older_R = history_R - beside_R
    parts = [_Keys(older_R, _prefix_sums(group.counts + beside_R))]
    laid_out = _prefix_sums(older_R)
    for number in range(passes.count - 1):
        # The window of this pass in the histories laid end to end, and what each request has of it.
        window = np.clip(laid_out, number * passes.max_keys, (number + 1) * passes.max_keys)
        parts.append(_Keys(window[:-1] - laid_out[:-1], window - window[0]))
    return parts


def _pack(chunks: Sequence[Chunk], page_size: int, num_pages: int) -> _Group:
    counts_R = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    starts_R = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    owned_R = np.array([len(chunk.pages) for chunk in chunks], dtype=np.int64)
    lengths_R = starts_R + counts_R
    needed_R = -(-lengths_R // page_size)
    if (counts_R < 1).any() or (starts_R < 0).any():
        raise ValueError(f"found chunks of {counts_R} tokens at {starts_R}, expected at least one token from 0 on")
    if (owned_R < needed_R).any():
        raise ValueError(f"found {owned_R} pages for chunks that need {needed_R} of {page_size} tokens")

    table_RW = np.zeros((len(chunks), max(needed_R.max(initial=0), 1)), dtype=np.int64)
    in_use_RW = np.arange(table_RW.shape[1]) < needed_R[:, None]
    if chunks:
        table_RW[in_use_RW] = np.concatenate(
            [chunk.pages[:needed] for chunk, needed in zip(chunks, needed_R, strict=True)]
        )
    if ((table_RW < 0) | (table_RW >= num_pages)).any():
        raise ValueError(f"found pages {table_RW[in_use_RW]}, expected numbers from 0 to {num_pages - 1}")

    query_offsets = _prefix_sums(counts_R)
    logits_R = np.array([chunk.logits for chunk in chunks], dtype=np.int64)
    wanted_T = np.repeat(logits_R == LogitRows.ALL, counts_R)
    wanted_T[query_offsets[1:] - 1] = logits_R != LogitRows.NONE
    return _Group(counts_R, lengths_R, query_offsets, _ranges(query_offsets, starts_R), table_RW, wanted_T)


def _new_slots(group: _Group, page_size: int) -> Int64Array:
    rows_T = np.repeat(np.arange(len(group.counts)), group.counts)
    return _slots(group.page_table, rows_T, group.positions, page_size)


def _slots(table_RW: Int64Array, rows: Int64Array, positions: Int64Array, page_size: int) -> Int64Array:
    """Cache slot of each position of the request in the same place of ``rows``."""
    return table_RW[rows, positions // page_size] * page_size + positions % page_size


def _prefix_sums(counts_R: Int64Array) -> Int64Array:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts_R)])


def _ranges(offsets: Int64Array, starts_R: Int64Array) -> Int64Array:
    """Ranges of the lengths that ``offsets`` sums, one after the other, each counted from its own start."""
    return np.arange(offsets[-1]) + np.repeat(starts_R - offsets[:-1], np.diff(offsets))


def _index_matrix(offsets: Int64Array) -> Int32Array:
    """[R, longest]: packed rows of each request, padded with 0."""
    counts_R = np.diff(offsets)
    columns = np.arange(max(counts_R.max(initial=0), 1))
    return _int32(np.where(columns < counts_R[:, None], offsets[:-1, None] + columns, 0))


def _int32(values: npt.NDArray[Any]) -> Int32Array:
    return np.ascontiguousarray(values, dtype=np.int32)
