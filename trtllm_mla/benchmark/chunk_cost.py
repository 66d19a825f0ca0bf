"""What a prefill chunk takes in either form of attention, and the threshold that follows.

A chunk is run again and again as the only one of its step, in the context group (decompressed) and in the generation
group (absorbed), after so many cached tokens. All lengths, histories and forms take turns in an order that is drawn
anew in every repetition, so that a machine that becomes slower meanwhile slows all of them down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_mla.benchmark.spread import MedianInterval, Spread
from trtllm_mla.checkpoint.attention_cost import (
    HeadSizes,
    absorbed_flops_per_pair,
    decompressed_flops_per_pair,
    up_projection_flops,
)
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.runtime.step import Chunk, Int32Array, LogitRows, build_step

LENGTHS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MAX_DEFAULT_HISTORY = 2048
# The threshold under which no prefill chunk is absorbed.
NEVER = 1

_MS = 1e3
_SEED_STREAM = 1


@dataclass(frozen=True)
class ChunkSizes:
    """Which chunks are measured.

    Attributes:
        histories: Cached tokens before a chunk.
        lengths: New tokens of a chunk.
    """

    histories: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def choose(
        cls, config: SchedulerConfig, histories: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> ChunkSizes:
        """The chunks asked for, or those of ``LENGTHS`` that fit, without a history and with a long one.

        Raises:
            UserError: A chunk that was asked for does not fit the limits.
        """
        if histories is None:
            histories = (0, min(config.max_seq_len // 2, MAX_DEFAULT_HISTORY))
        if lengths is None:
            lengths = [length for length in LENGTHS if not any(_misfit(config, item, length) for item in histories)]
        sizes = cls(tuple(sorted(set(histories))), tuple(sorted(set(lengths))))
        for history in sizes.histories:
            for length in sizes.lengths:
                misfit = _misfit(config, history, length)
                if misfit:
                    raise UserError(f"A chunk of {length} tokens after {history} cached ones: {misfit}.")
        if not sizes.histories or not sizes.lengths:
            raise UserError(
                f"No chunk fits after {max(histories, default=0)} cached tokens. Lower --history, or name chunks that "
                "fit with --chunk-lengths."
            )
        return sizes

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest request."""
        return self.histories[-1] + self.lengths[-1]


@dataclass(frozen=True)
class ChunkCost:
    """A chunk in both forms.

    Attributes:
        history: Cached tokens before it.
        num_tokens: Its new tokens.
        absorbed_ms: Milliseconds of each repetition in the generation group.
        decompressed_ms: The same in the context group.
    """

    history: int
    num_tokens: int
    absorbed_ms: tuple[float, ...]
    decompressed_ms: tuple[float, ...]

    @property
    def differences_ms(self) -> list[float]:
        """Absorbed minus decompressed, of each repetition."""
        return [first - second for first, second in zip(self.absorbed_ms, self.decompressed_ms, strict=True)]


@dataclass(frozen=True)
class Recommendation:
    """The threshold with which the measured chunks, each run once, take the least time.

    Attributes:
        threshold: The value.
        low: Smallest value that the measurement does not tell from it.
        high: Largest such value; None where even the longest chunk does not set a limit.
        undecided: Lengths of chunks whose two forms differ by less than the noise, next to the threshold.
        contrary: Lengths on the wrong side of it that are measurably faster in the other form.
    """

    threshold: int
    low: int
    high: int | None
    undecided: tuple[int, ...]
    contrary: tuple[int, ...]

    @property
    def is_decided(self) -> bool:
        """Whether some threshold is measurably worse."""
        return self.low > NEVER or self.high is not None

    def allows(self, threshold: int) -> bool:
        """Whether a threshold is as good as this one, within noise."""
        return self.low <= threshold and (self.high is None or threshold <= self.high)


def measure_chunks(
    executor: Executor,
    config: SchedulerConfig,
    sizes: ChunkSizes,
    *,
    warmup: int,
    repetitions: int,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> list[ChunkCost]:
    """Runs every chunk in both forms; the clock encloses the packing of its step and the executor.

    Args:
        executor: What runs the steps; the first pages of its pool are used.
        config: Limits of a step.
        sizes: The chunks, which fit the limits.
        warmup: Repetitions before the first that counts.
        repetitions: Those that count.
        seed: Decides tokens and order.
        on_progress: Called with a line before each repetition.

    Returns:
        A chunk for each history and length, in this order.
    """
    say = on_progress or (lambda _: None)
    generator = np.random.default_rng([_SEED_STREAM, seed])
    pages = np.arange(pages_for(sizes.num_tokens, config.page_size), dtype=np.int32)
    _fill(executor, config, pages, generator.integers(config.vocab_size, size=sizes.histories[-1], dtype=np.int32))
    keys = [
        (history, length, absorbed)
        for history in sizes.histories
        for length in sizes.lengths
        for absorbed in (True, False)
    ]
    samples: dict[tuple[int, int, bool], list[float]] = {key: [] for key in keys}
    for index in range(-warmup, repetitions):
        say(
            f"chunks: warm-up {index + warmup + 1} of {warmup}"
            if index < 0
            else f"chunks: {index + 1} of {repetitions}"
        )
        for position in generator.permutation(len(keys)):
            history, length, absorbed = key = keys[position]
            tokens = generator.integers(config.vocab_size, size=length, dtype=np.int32)
            seconds = _run(executor, config, Chunk(tokens, history, pages), absorbed=absorbed)
            if index >= 0:
                samples[key].append(seconds * _MS)
    return [
        ChunkCost(history, length, tuple(samples[history, length, True]), tuple(samples[history, length, False]))
        for history in sizes.histories
        for length in sizes.lengths
    ]


def recommend(costs: Sequence[ChunkCost]) -> Recommendation:
    """The threshold for chunks that were measured, each counting once.

    A threshold sends the chunks below it one way and the others the other way, so its cost is a sum that changes by
    one chunk's difference from one length to the next. Where the sign of the difference changes, the threshold lies
    between the two lengths, as if the difference grew evenly.

    Args:
        costs: The same lengths for every history.
    """
    lengths = sorted({cost.num_tokens for cost in costs})
    intervals = [
        MedianInterval.of(
            [sum(parts) for parts in zip(*(c.differences_ms for c in costs if c.num_tokens == length), strict=True)]
        )
        for length in lengths
    ]
    sums = np.cumsum([0.0, *(interval.median for interval in intervals)])
    cut = int(np.argmin(sums))
    sides = [interval.side_of(0.0) for interval in intervals]
    first, last = cut, cut
    while first > 0 and sides[first - 1] == 0:
        first -= 1
    while last < len(lengths) and sides[last] == 0:
        last += 1
    return Recommendation(
        threshold=_crossing(lengths, intervals, cut),
        low=lengths[first - 1] + 1 if first > 0 else NEVER,
        high=lengths[last] if last < len(lengths) else None,
        undecided=tuple(lengths[first:last]),
        contrary=tuple(
            length
            for position, (length, side) in enumerate(zip(lengths, sides, strict=True))
            if side == (1 if position < cut else -1)
        ),
    )


def cost_ms(costs: Sequence[ChunkCost], threshold: int) -> float:
    """Median times of all chunks, each in the form that a threshold gives it."""
    return sum(
        Spread.of(cost.absorbed_ms if cost.num_tokens < threshold else cost.decompressed_ms).median for cost in costs
    )


def break_even_tokens(sizes: HeadSizes, history: int) -> float | None:
    """New tokens at which both forms take as many operations, after ``history`` cached tokens.

    With M new tokens, H cached ones and P = M H + M (M + 1) / 2 pairs of a query and a key it sees, the absorbed form
    applies ``kv_b_proj`` to M queries, and the decompressed one to H + M keys but saves operations in every pair. With
    H growing, M approaches ``break_even_queries``.

    Returns:
        The number, 0 where the decompressed form never takes more; None where it never takes fewer.
    """
    saved = absorbed_flops_per_pair(sizes) - decompressed_flops_per_pair(sizes)
    if saved <= 0:
        return None
    # saved * P = H * up_projection: a quadratic equation in M.
    half = history + 0.5
    return math.sqrt(half**2 + 2 * history * up_projection_flops(sizes) / saved) - half


def _crossing(lengths: Sequence[int], intervals: Sequence[MedianInterval], cut: int) -> int:
    """The threshold between the lengths before and after a cut."""
    if cut == 0:
        return NEVER
    if cut == len(lengths):
        return lengths[-1] + 1
    below, above = intervals[cut - 1].median, intervals[cut].median
    share = -below / (above - below) if above > below else 1.0
    exact = lengths[cut - 1] + share * (lengths[cut] - lengths[cut - 1])
    return min(max(math.ceil(exact), lengths[cut - 1] + 1), lengths[cut])


def _misfit(config: SchedulerConfig, history: int, length: int) -> str | None:
    """Why a chunk does not fit; None if it does."""
    if history < 0 or length < 1:
        return "expected 0 cached tokens or more and 1 new token or more"
    limits = (
        (length, min(config.max_num_tokens, config.max_context_kv_tokens), "max_num_tokens and max_context_kv_tokens"),
        (history + length, config.max_seq_len, "max_seq_len"),
        (history + length, config.context_passes.total_keys, "max_context_kv_tokens in all passes"),
    )
    return next(
        (f"found {found} tokens, expected at most {limit} ({name})" for found, limit, name in limits if found > limit),
        None,
    )


def _fill(executor: Executor, config: SchedulerConfig, pages: Int32Array, token_ids: Int32Array) -> None:
    """Caches a text, so that a chunk finds a history."""
    size = min(config.max_num_tokens, config.max_context_kv_tokens)
    for start in range(0, len(token_ids), size):
        _run(executor, config, Chunk(token_ids[start : start + size], start, pages, LogitRows.LAST), absorbed=False)


def _run(executor: Executor, config: SchedulerConfig, chunk: Chunk, *, absorbed: bool) -> float:
    """Seconds of a step with one chunk."""
    begin = time.perf_counter()
    step = build_step(
        [] if absorbed else [chunk],
        [chunk] if absorbed else [],
        page_size=config.page_size,
        num_pages=config.num_pages,
        context_passes=config.context_passes,
    )
    executor.run(step)
    return time.perf_counter() - begin
