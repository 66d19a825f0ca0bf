"""In-flight batching: which tokens of which requests run in the next step, and in which group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from trtllm_mla.checkpoint.rope import MAX_POSITIONS
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.pages import PageAllocator, pages_for
from trtllm_mla.runtime.sampling import Sampler, SamplingParams
from trtllm_mla.runtime.step import Chunk, ContextPasses, Int32Array, LogitRows

FinishReason = Literal["length", "stop"]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt_ids: The prompt's tokens.
        max_new_tokens: Tokens after which generation ends.
        sampling: How tokens are chosen.
        stop_token_ids: Tokens that end generation. The one that does is part of the output.
        on_token: Called with each new token as soon as it is known.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    on_token: Callable[[int], None] | None = None


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of a request.

    Attributes:
        vocab_size: Token ids are below it.
        num_pages: Pages in the pool.
        page_size: Tokens in a page.
        max_batch_size: Requests in a step.
        max_num_tokens: New tokens in a step, at least ``max_batch_size``.
        max_input_len: Tokens of a prompt.
        max_seq_len: Tokens of a request, prompt and output together.
        max_context_kv_tokens: Cached tokens in one pass of the context group, the new ones included.
        enable_matrix_absorption: Whether there is a generation group.
        prefill_absorption_threshold: Prefill chunks of fewer new tokens join the generation group.
        max_chunk_tokens: Prompt tokens of one request in a step; None leaves it to ``max_num_tokens``.
        max_context_passes: Passes of the network's context group. All new tokens of a step fit in the first of them.
    """

    vocab_size: int
    num_pages: int
    page_size: int
    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    max_context_kv_tokens: int
    enable_matrix_absorption: bool
    prefill_absorption_threshold: int
    max_chunk_tokens: int | None = None
    max_context_passes: int = 1

    def __post_init__(self) -> None:
        if self.max_chunk_tokens is not None and self.max_chunk_tokens < 1:
            raise UserError(f"max_chunk_tokens: found {self.max_chunk_tokens}, expected at least 1.")
        if self.max_seq_len > MAX_POSITIONS:
            raise UserError(f"max_seq_len: found {self.max_seq_len}, expected at most {MAX_POSITIONS} positions.")
        if not 1 <= self.max_batch_size <= self.max_num_tokens:
            raise ValueError(f"found max_batch_size {self.max_batch_size}, expected 1 to {self.max_num_tokens}")

    @classmethod
    def from_build_config(
        cls,
        build: BuildConfig,
        plugin: MlaPluginConfig,
        *,
        vocab_size: int,
        num_pages: int,
        max_chunk_tokens: int | None = None,
    ) -> SchedulerConfig:
        """Limits of a network or an engine.

        Args:
            build: Limits on steps and requests.
            plugin: The effective plugin config: the network's, with what the build config changed.
            vocab_size: The model's.
            num_pages: Pages in the executor's pool.
            max_chunk_tokens: Prompt tokens of one request in a step.
        """
        return cls(
            vocab_size=vocab_size,
            num_pages=num_pages,
            page_size=plugin.page_size,
            max_batch_size=build.max_batch_size,
            max_num_tokens=build.max_num_tokens,
            max_input_len=build.effective_max_input_len,
            max_seq_len=build.max_seq_len,
            max_context_kv_tokens=build.max_context_kv_tokens,
            enable_matrix_absorption=plugin.enable_matrix_absorption,
            prefill_absorption_threshold=plugin.prefill_absorption_threshold,
            max_chunk_tokens=max_chunk_tokens,
            max_context_passes=plugin.max_context_passes,
        )

    @property
    def context_passes(self) -> ContextPasses:
        """Passes of the context group, and what each has room for."""
        return ContextPasses(self.max_context_passes, self.max_context_kv_tokens)

    def absorbs_prefill(self, num_tokens: int) -> bool:
        """Whether a prefill chunk of so many new tokens belongs to the generation group by its size."""
        return self.enable_matrix_absorption and num_tokens < self.prefill_absorption_threshold

    def check(self, request: Request) -> None:
        """Checks that a request can be served at all.

        Raises:
            UserError: It cannot; the message names the limit.
        """
        prompt = _token_array(request.prompt_ids)
        self.check_lengths(len(prompt), request.max_new_tokens)
        outside = (prompt < 0) | (prompt >= self.vocab_size)
        if outside.any():
            raise UserError(
                f"The prompt holds token id {prompt[outside][0]} at position {int(np.argmax(outside))}, expected ids "
                f"from 0 to {self.vocab_size - 1}. Use the tokenizer of this checkpoint."
            )

    def check_lengths(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Checks that a prompt of ``prompt_tokens`` can be served.

        Raises:
            UserError: It cannot; the message names the limit.
        """
        length = prompt_tokens + max_new_tokens
        if prompt_tokens < 1:
            raise UserError("The prompt is empty; expected at least one token.")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: found {max_new_tokens}, expected at least 1.")
        if prompt_tokens > self.max_input_len:
            raise UserError(
                f"The prompt has {prompt_tokens} tokens, expected at most max_input_len = {self.max_input_len}. "
                "Shorten it, or raise max_input_len in the build config."
            )
        if length > self.max_seq_len:
            raise UserError(
                f"The prompt's {prompt_tokens} tokens and max_new_tokens = {max_new_tokens} make {length}, "
                f"expected at most max_seq_len = {self.max_seq_len}. Ask for fewer new tokens, or raise max_seq_len "
                "in the build config."
            )
        needed = pages_for(length, self.page_size)
        if needed > self.num_pages:
            raise UserError(
                f"The request's {length} tokens need {needed} pages of {self.page_size} tokens, and the pool has "
                f"{self.num_pages}. Ask for fewer new tokens, or make the pool larger."
            )
        # The last new token is never cached.
        if not self.enable_matrix_absorption and length - 1 > self.context_passes.total_keys:
            passes = f" in {self.max_context_passes} passes" if self.max_context_passes > 1 else ""
            raise UserError(
                f"The request's {length} tokens exceed max_context_kv_tokens = {self.max_context_kv_tokens}{passes}, "
                "and without matrix absorption there is no other way to attend to them. Raise max_context_kv_tokens "
                "in the build config, or convert with enable_matrix_absorption or a larger max_context_passes."
            )


class RequestState(Enum):
    """Where a request is on its way."""

    WAITING = "waiting"
    CONTEXT = "context"
    GENERATION = "generation"
    FINISHED = "finished"


class ActiveRequest:
    """A request, its tokens so far, and its pages.

    Attributes:
        request: What was asked for.
        pages: int32 page table; empty while waiting and when finished.
        num_cached: Tokens in the cache.
        num_tokens: Tokens known: the prompt and the output.
        token_times: ``time.perf_counter()`` at each new token.
        finish_reason: Why generation ended, or None while it has not.
    """

    def __init__(self, request: Request) -> None:
        prompt = _token_array(request.prompt_ids)
        self.request = request
        self.pages: Int32Array = np.zeros(0, dtype=np.int32)
        self.num_cached = 0
        self.num_tokens = len(prompt)
        self.token_times: list[float] = []
        self.finish_reason: FinishReason | None = None
        self._tokens = np.concatenate([prompt, np.zeros(request.max_new_tokens)]).astype(np.int32)
        self._sampler = Sampler(request.sampling)

    @property
    def state(self) -> RequestState:
        """Where the request is on its way."""
        if self.finish_reason is not None:
            return RequestState.FINISHED
        if not len(self.pages):
            return RequestState.WAITING
        return RequestState.CONTEXT if self.num_tokens == self.prompt_len else RequestState.GENERATION

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self._tokens) - self.request.max_new_tokens

    @property
    def num_uncached(self) -> int:
        """Known tokens that are not in the cache: what is left of the prompt, or one new token."""
        return self.num_tokens - self.num_cached

    @property
    def output_ids(self) -> list[int]:
        """The new tokens."""
        output: list[int] = self._tokens[self.prompt_len : self.num_tokens].tolist()
        return output

    def chunk(self, num_tokens: int) -> Chunk:
        """The next ``num_tokens`` uncached tokens; logits are wanted of the last one known."""
        end = self.num_cached + num_tokens
        rows = LogitRows.LAST if end == self.num_tokens else LogitRows.NONE
        return Chunk(self._tokens[self.num_cached : end], self.num_cached, self.pages, rows)

    def append(self, logits_V: npt.NDArray[np.float32]) -> None:
        """Chooses the next token, appends it, and sees whether it is the last one."""
        token = self._sampler(logits_V)
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.token_times.append(time.perf_counter())
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_tokens == len(self._tokens):
            self.finish_reason = "length"
        if self.request.on_token is not None:
            self.request.on_token(token)


@dataclass(frozen=True)
class ScheduledChunk:
    """A chunk of a step and the request it belongs to.

    Attributes:
        owner: The request.
        chunk: Its new tokens.
    """

    owner: ActiveRequest
    chunk: Chunk


@dataclass(frozen=True)
class StepPlan:
    """What runs in a step.

    Attributes:
        context: Chunks whose attention is decompressed.
        generation: Chunks whose attention is absorbed.
    """

    context: tuple[ScheduledChunk, ...]
    generation: tuple[ScheduledChunk, ...]


class Scheduler:
    """Forms steps out of requests, first come, first served.

    A request is admitted when the pages for its prompt and all its new tokens are free, and keeps them until it ends
    (TensorRT-LLM's ``GUARANTEED_NO_EVICT``): once started, it cannot run out of pages. Requests in generation go into
    every step; prompts share what is left of ``max_num_tokens``, oldest first, and none overtakes one that waits.

    Args:
        config: The limits.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._allocator = PageAllocator(config.num_pages)
        self._waiting: deque[ActiveRequest] = deque()
        self._running: list[ActiveRequest] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return bool(self._waiting or self._running)

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._allocator.num_free

    def submit(self, request: Request) -> ActiveRequest:
        """Queues a request.

        Returns:
            Its record, which ``complete`` brings forward.

        Raises:
            UserError: It can never be served.
        """
        self._config.check(request)
        active = ActiveRequest(request)
        self._waiting.append(active)
        return active

    def schedule(self) -> StepPlan:
        """Forms the next step and admits the requests that start in it. Call only while ``has_work``."""
        step = _StepBuilder(self._config)
        for active in self._running:
            if active.state is RequestState.GENERATION:
                step.add_decode(active)
        if all(step.add_prefill(active) for active in self._running if active.state is RequestState.CONTEXT):
            self._admit(step)
        plan = step.plan()
        if not plan.context and not plan.generation:
            raise ValueError("found no request to schedule, expected one: the oldest fits in every step")
        return plan

    def complete(self, plan: StepPlan, logits: npt.NDArray[np.float32]) -> None:
        """Takes the outcome of a step: tokens are chosen, and finished requests give their pages back.

        Args:
            plan: The step, as ``schedule`` returned it.
            logits: float32 [logit_rows, vocab_size], as the executor returned them.
        """
        rows = iter(logits)
        for scheduled in (*plan.context, *plan.generation):
            scheduled.owner.num_cached += len(scheduled.chunk.token_ids)
            if scheduled.chunk.logits is LogitRows.LAST:
                scheduled.owner.append(next(rows))
        for active in self._running:
            if active.state is RequestState.FINISHED:
                self._allocator.free(active.pages)
                active.pages = active.pages[:0]
        self._running = [active for active in self._running if active.state is not RequestState.FINISHED]

    def _admit(self, step: _StepBuilder) -> None:
        while self._waiting and len(self._running) < self._config.max_batch_size:
            active = self._waiting[0]
            needed = pages_for(active.prompt_len + active.request.max_new_tokens, self._config.page_size)
            if needed > self._allocator.num_free:
                return
            active.pages = self._allocator.allocate(needed)
            if not step.add_prefill(active):
                self._allocator.free(active.pages)
                active.pages = active.pages[:0]
                return
            self._running.append(self._waiting.popleft())


class _StepBuilder:
    """The step being formed, and what is left of its limits."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tokens_left = config.max_num_tokens
        self._context_keys_left = config.context_passes.total_keys
        self._context_tokens_left = config.max_context_kv_tokens
        self._context: list[ScheduledChunk] = []
        self._generation: list[ScheduledChunk] = []

    def plan(self) -> StepPlan:
        return StepPlan(tuple(self._context), tuple(self._generation))

    def add_decode(self, active: ActiveRequest) -> None:
        """Adds a request's newest token, or leaves the request out where the context group has no room for it."""
        self._add(active, 1, absorbed=self._config.enable_matrix_absorption)

    def add_prefill(self, active: ActiveRequest) -> bool:
        """Adds as much of a prompt as there is room for.

        Returns:
            Whether anything was added. If not, no later prompt may be, lest it overtake this one.
        """
        config = self._config
        count = min(active.num_uncached, self._tokens_left, config.max_chunk_tokens or active.num_uncached)
        if not count:
            return False
        if config.max_context_passes > 1:
            # New tokens beyond the first pass would send the whole chunk through the generation group.
            count = min(count, config.max_context_kv_tokens)
        too_long = active.num_cached + count > config.context_passes.total_keys
        return self._add(active, count, absorbed=config.absorbs_prefill(count) or too_long)

    def _add(self, active: ActiveRequest, count: int, *, absorbed: bool) -> bool:
        chunk = active.chunk(count)
        if not absorbed:
            if chunk.length > self._context_keys_left or count > self._context_tokens_left:
                return False
            self._context_keys_left -= chunk.length
            self._context_tokens_left -= count
        self._tokens_left -= count
        (self._generation if absorbed else self._context).append(ScheduledChunk(active, chunk))
        return True


def _token_array(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    array = np.asarray(token_ids)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise UserError("The prompt holds something that is not a token id; expected one list of whole numbers.")
    return array.astype(np.int64)
