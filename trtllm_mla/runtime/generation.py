"""Driving an executor to the end: generation from prompts, and logits of given texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.base import Executor, Float32Array
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.request import ActiveRequest, FinishReason, Request
from trtllm_mla.runtime.scheduler import Scheduler, SchedulerConfig, SchedulerStatistics
from trtllm_mla.runtime.step import ONE_PASS, Chunk, ContextPasses, Int32Array, LogitRows, build_step

# Tokens of a window that a long text is cut into.
DEFAULT_WINDOW = 256


@dataclass(frozen=True)
class GenerationResult:
    """What a request came to.

    Attributes:
        output_ids: The new tokens, with the stop token where one ended it.
        finish_reason: ``length``, ``stop`` or ``cancelled``.
        token_times: Seconds from the call of ``generate`` to each new token.
        pages: int32 page table: the pages that held its rows. They are free again, so the rows stay only until another
            request takes them. The last new token has none.
        num_preemptions: How often it lost its pages.
        num_reused_tokens: Prompt tokens whose rows were in the cache already.
    """

    output_ids: list[int]
    finish_reason: FinishReason
    token_times: tuple[float, ...]
    pages: Int32Array
    num_preemptions: int = 0
    num_reused_tokens: int = 0

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the call of ``generate`` to the first new token, waiting for admission included."""
        return self.token_times[0]


@dataclass(frozen=True)
class StepStats:
    """What a step ran and took.

    Attributes:
        context_tokens: New tokens of the context group.
        context_keys: Cached tokens that the context group decompressed, over all passes.
        generation_tokens: New tokens of the generation group.
        num_requests: Requests in the step.
        num_running: Requests that hold pages after it.
        num_waiting: Requests that wait for pages or for their turn after it.
        pages_in_use: Pages that are held after it.
        scheduler_seconds: The scheduler's share: choosing who runs, and keeping the books.
        host_seconds: What else happens beside the executor: packing, sampling.
        executor_seconds: The executor's share.
    """

    context_tokens: int
    context_keys: int
    generation_tokens: int
    num_requests: int
    num_running: int
    num_waiting: int
    pages_in_use: int
    scheduler_seconds: float
    host_seconds: float
    executor_seconds: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.scheduler_seconds + self.host_seconds + self.executor_seconds


class GenerationSession:
    """Serves requests on an executor with in-flight batching: requests join and leave between steps.

    Not thread-safe; ``trtllm_mla.runtime.llm.LLM`` drives a session from many threads.

    Args:
        executor: What runs the steps. The session has its pool to itself.
        config: Limits; its pool is the executor's.
    """

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        if (executor.num_pages, executor.page_size) != (config.num_pages, config.page_size):
            raise ValueError(
                f"found a pool of {executor.num_pages} pages of {executor.page_size} tokens, expected "
                f"{config.num_pages} of {config.page_size}"
            )
        self._executor = executor
        self._config = config
        self._scheduler = Scheduler(config)

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return self._scheduler.has_work

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._scheduler.num_free_pages

    @property
    def statistics(self) -> SchedulerStatistics:
        """Counts since the session was made."""
        return self._scheduler.statistics

    def submit(self, request: Request) -> ActiveRequest:
        """Queues a request.

        Returns:
            Its record, which ``step`` brings forward.

        Raises:
            UserError: It can never be served.
        """
        return self._scheduler.submit(request)

    def cancel(self, active: ActiveRequest) -> None:
        """Ends a request at once; what it has so far stays its output. Nothing happens if it has ended."""
        self._scheduler.cancel(active)

    def generate(
        self, requests: Sequence[Request], *, on_step: Callable[[StepStats], None] | None = None
    ) -> list[GenerationResult]:
        """Serves requests until all have ended.

        Args:
            requests: The requests, first come, first served.
            on_step: Called after each step.

        Returns:
            Their results, in the same order.

        Raises:
            UserError: A request can never be served; then none is. Or a step failed; then all are cancelled.
        """
        for request in requests:
            self._config.check(request)
        begin = time.perf_counter()
        active = [self.submit(request) for request in requests]
        try:
            while self.has_work:
                stats = self.step()
                if on_step is not None:
                    on_step(stats)
        finally:
            for item in active:
                self.cancel(item)
        return [_result(item, begin) for item in active]

    def step(self) -> StepStats:
        """Runs one step. Call only while ``has_work``.

        Raises:
            UserError: The network computed something that is no number, or the executor cannot run the step. No
                request has advanced.
        """
        scheduler = self._scheduler
        begin = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        step = build_step(
            [item.chunk for item in plan.context],
            [item.chunk for item in plan.generation],
            page_size=self._config.page_size,
            num_pages=self._config.num_pages,
            context_passes=self._config.context_passes,
        )
        run_begin = time.perf_counter()
        logits = self._executor.run(step)
        run_end = time.perf_counter()
        tokens = plan.choose_tokens(logits)
        chosen = time.perf_counter()
        scheduler.complete(plan, tokens)
        end = time.perf_counter()
        return StepStats(
            context_tokens=len(step.context_position_ids),
            context_keys=step.num_context_keys,
            generation_tokens=len(step.generation_position_ids),
            num_requests=len(plan.chunks),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            pages_in_use=self._config.num_pages - scheduler.num_free_pages,
            scheduler_seconds=scheduled - begin + end - chosen,
            host_seconds=run_begin - scheduled + chosen - run_end,
            executor_seconds=run_end - run_begin,
        )


def _result(active: ActiveRequest, begin: float) -> GenerationResult:
    if active.finish_reason is None:
        raise ValueError("found a request without a finish reason, expected that all have ended")
    return GenerationResult(
        active.output_ids,
        active.finish_reason,
        tuple(moment - begin for moment in active.token_times),
        active.last_pages,
        active.num_preemptions,
        active.num_reused_tokens,
    )


@dataclass(frozen=True)
class ForcedChunk:
    """A part of a given text that runs in one step.

    Attributes:
        num_tokens: Its tokens.
        absorbed: Whether it runs in the generation group.
    """

    num_tokens: int
    absorbed: bool


@dataclass(frozen=True)
class ForcedSequence:
    """A given text and how it is cut into steps (teacher forcing).

    Attributes:
        token_ids: The text.
        chunks: Its parts, in order; together they are the whole text.
        first_step: Step that the first of them runs in. Parts of different texts that fall on one step share it.
    """

    token_ids: Sequence[int]
    chunks: Sequence[ForcedChunk]
    first_step: int = 0


@dataclass(frozen=True)
class ForcedResult:
    """What a given text came to.

    Attributes:
        logits: float32 [tokens, vocab_size], the logits after each token.
        pages: int32 page table: which pages hold the text's rows.
    """

    logits: Float32Array
    pages: Int32Array


def cut_by_threshold(num_tokens: int, chunk_tokens: int, config: SchedulerConfig) -> tuple[ForcedChunk, ...]:
    """Cuts a text into parts of ``chunk_tokens`` and a rest, each in the group that the scheduler would choose.

    A part has at most the new tokens that the context group's first pass has room for.
    """
    chunk_tokens = min(chunk_tokens, config.max_context_kv_tokens)
    sizes = [min(chunk_tokens, num_tokens - start) for start in range(0, num_tokens, chunk_tokens)]
    return tuple(ForcedChunk(size, config.absorbs_prefill(size)) for size in sizes)


def run_forced(
    executor: Executor,
    sequences: Sequence[ForcedSequence],
    *,
    page_seed: int = 0,
    context_passes: ContextPasses = ONE_PASS,
) -> list[ForcedResult]:
    """Runs given texts and computes the logits of every position.

    Args:
        executor: What runs the steps; its whole pool is used.
        sequences: The texts.
        page_seed: Seed of the order in which pages are handed out. They are shuffled, so that a text's pages lie
            neither in order nor together.
        context_passes: Passes of the network's context group, and what each has room for.

    Returns:
        One result a text, in the same order.

    Raises:
        ValueError: The parts of a text are not the whole text, the pool is too small, or a step has more cached tokens
            than the passes have room for.
    """
    page_tables = _shuffled_page_tables(executor, sequences, page_seed)
    logits: list[list[Float32Array]] = [[] for _ in sequences]
    for members in _forced_steps(sequences, page_tables):
        context = [member for member in members if not member.absorbed]
        generation = [member for member in members if member.absorbed]
        step = build_step(
            [member.chunk for member in context],
            [member.chunk for member in generation],
            page_size=executor.page_size,
            num_pages=executor.num_pages,
            context_passes=context_passes,
        )
        rows = executor.run(step)
        for member in (*context, *generation):
            count = len(member.chunk.token_ids)
            logits[member.index].append(rows[:count])
            rows = rows[count:]
    return [ForcedResult(np.concatenate(rows), pages) for rows, pages in zip(logits, page_tables, strict=True)]


def run_text(
    executor: Executor, config: SchedulerConfig, token_ids: Sequence[int], *, window: int
) -> Iterator[tuple[list[int], ForcedResult]]:
    """Runs a long text, window by window; see ``text_windows``.

    Each window runs in chunks as large as a step allows, each in the group that the scheduler would choose for it.

    Args:
        executor: What runs the steps; its whole pool is used, by one window after the other.
        config: Limits of steps and requests.
        token_ids: The text.
        window: Tokens of a window.

    Yields:
        A window's tokens and what they came to.

    Raises:
        UserError: The window is outside the limits, or a token outside the vocabulary.
    """
    limit = min(config.max_seq_len, config.num_pages * config.page_size, config.context_passes.total_keys)
    if not 2 <= window <= limit:
        raise UserError(f"window: found {window}, expected 2 to {limit}, the limits of this network and its pool.")
    if not 0 <= min(token_ids) <= max(token_ids) < config.vocab_size:
        raise UserError(
            f"The text holds token ids from {min(token_ids)} to {max(token_ids)}, expected ids from 0 to "
            f"{config.vocab_size - 1}. Use the tokenizer of this checkpoint."
        )
    for text in text_windows(token_ids, window):
        sequence = ForcedSequence(text, cut_by_threshold(len(text), config.max_num_tokens, config))
        yield text, run_forced(executor, [sequence], context_passes=config.context_passes)[0]


def text_windows(token_ids: Sequence[int], window: int) -> Iterator[list[int]]:
    """Consecutive windows of a text, between which nothing is carried over.

    A last one of a single token, which predicts nothing, is left out.
    """
    for start in range(0, len(token_ids) - 1, window):
        yield list(token_ids[start : start + window])


def read_cached_rows(executor: Executor, layer: int, pages: Int32Array, num_tokens: int) -> Float32Array:
    """The cached rows of one text.

    Args:
        executor: What ran it.
        layer: The layer, from 0.
        pages: Its page table.
        num_tokens: Its tokens.

    Returns:
        float32 [num_tokens, kv_lora_rank + qk_rope_head_dim], in the order of the text.
    """
    pool = executor.read_cache(layer)
    return pool[pages].reshape(-1, pool.shape[-1])[:num_tokens]


@dataclass(frozen=True)
class _ForcedMember:
    """A part of text number ``index`` in a step."""

    index: int
    absorbed: bool
    chunk: Chunk


def _forced_steps(
    sequences: Sequence[ForcedSequence], page_tables: Sequence[Int32Array]
) -> Iterator[list[_ForcedMember]]:
    """The parts that share a step, step after step; steps without any are left out."""
    steps: dict[int, list[_ForcedMember]] = {}
    for index, (sequence, pages) in enumerate(zip(sequences, page_tables, strict=True)):
        start = 0
        for number, forced in enumerate(sequence.chunks, sequence.first_step):
            tokens = np.array(sequence.token_ids[start : start + forced.num_tokens], dtype=np.int32)
            chunk = Chunk(tokens, start, pages, LogitRows.ALL)
            steps.setdefault(number, []).append(_ForcedMember(index, forced.absorbed, chunk))
            start += forced.num_tokens
    for number in sorted(steps):
        yield steps[number]


def _shuffled_page_tables(executor: Executor, sequences: Sequence[ForcedSequence], seed: int) -> list[Int32Array]:
    for sequence in sequences:
        cut = sum(chunk.num_tokens for chunk in sequence.chunks)
        if not cut == len(sequence.token_ids) > 0:
            raise ValueError(f"found chunks of {cut} tokens for a text of {len(sequence.token_ids)}")
    counts = [pages_for(len(sequence.token_ids), executor.page_size) for sequence in sequences]
    if sum(counts) > executor.num_pages:
        raise ValueError(f"found a pool of {executor.num_pages} pages, expected at least {sum(counts)} for the texts")
    order = np.random.default_rng(seed).permutation(executor.num_pages).astype(np.int32)
    return np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
