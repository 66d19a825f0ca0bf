"""In-flight batching: which tokens of which requests run in the next step, and in which group."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_mla.checkpoint.rope import MAX_POSITIONS
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.pages import PagePool, pages_for
from trtllm_mla.runtime.request import ActiveRequest, Request, token_array
from trtllm_mla.runtime.step import Chunk, ContextPasses, LogitRows


class SchedulingPolicy(StrEnum):
    """When a waiting request is admitted, under TensorRT-LLM's names.

    ``GUARANTEED_NO_EVICT`` admits it when there are pages for all its tokens and for all that running requests can
    still ask for: once started, it cannot run out of them. ``MAX_UTILIZATION`` counts known tokens and one more: more
    requests run at once, and the youngest loses its pages when they run out, to be computed again.
    """

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


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
        policy: When a waiting request is admitted.
        enable_block_reuse: Whether requests share the full pages of a common beginning.
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
    policy: SchedulingPolicy = SchedulingPolicy.GUARANTEED_NO_EVICT
    enable_block_reuse: bool = True

    def __post_init__(self) -> None:
        if self.policy not in tuple(SchedulingPolicy):
            raise UserError(f"policy: found '{self.policy:.80}', expected {' or '.join(SchedulingPolicy)}.")
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
        policy: SchedulingPolicy = SchedulingPolicy.GUARANTEED_NO_EVICT,
        enable_block_reuse: bool = True,
    ) -> SchedulerConfig:
        """Limits of a network or an engine.

        Args:
            build: Limits on steps and requests.
            plugin: The effective plugin config: the network's, with what the build config changed.
            vocab_size: The model's.
            num_pages: Pages in the executor's pool.
            max_chunk_tokens: Prompt tokens of one request in a step.
            policy: When a waiting request is admitted.
            enable_block_reuse: Whether requests share the full pages of a common beginning.
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
            policy=policy,
            enable_block_reuse=enable_block_reuse,
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
        prompt = token_array(request.prompt_ids)
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

    @property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        """All chunks, in the step's order."""
        return self.context + self.generation

    def choose_tokens(self, logits: npt.NDArray[np.float32]) -> list[int]:
        """Chooses the next token of every request whose logits were computed.

        Args:
            logits: float32 [logit_rows, vocab_size], as the executor returned them.

        Returns:
            A token for each row.
        """
        owners = [item.owner for item in self.chunks if item.chunk.logits is LogitRows.LAST]
        return [owner.choose_token(row) for owner, row in zip(owners, logits, strict=True)]


@dataclass(frozen=True)
class SchedulerStatistics:
    """Counts since the scheduler was made.

    Attributes:
        num_preemptions: Times a request lost its pages.
        num_prompt_tokens: Prompt tokens of the requests that were admitted.
        num_reused_tokens: Of them, those whose rows were in the cache already.
        num_context_chunks: Prefill chunks in the context group.
        num_context_tokens: Their tokens.
        num_absorbed_chunks: Prefill chunks in the generation group.
        num_absorbed_tokens: Their tokens.
        num_decodes: Tokens of decode steps.
        peak_pages_in_use: Most pages that were held at once.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_context_chunks: int = 0
    num_context_tokens: int = 0
    num_absorbed_chunks: int = 0
    num_absorbed_tokens: int = 0
    num_decodes: int = 0
    peak_pages_in_use: int = 0


class Scheduler:
    """Forms steps out of requests, first come, first served.

    Requests in generation go into every step; prompts share what is left of ``max_num_tokens``, oldest first, and none
    overtakes one that waits. Pages are taken when tokens need them and given back when a request ends. When there are
    none for an older request, the youngest loses its own and waits at the head of the queue, to be computed again: its
    output stays, and so do its full pages until others need them.

    Args:
        config: The limits.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._pool = PagePool(config.num_pages)
        self._waiting: deque[ActiveRequest] = deque()
        self._running: list[ActiveRequest] = []  # oldest first
        self._counts: Counter[str] = Counter()
        self._peak_pages = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages or for their turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._pool.num_free

    @property
    def statistics(self) -> SchedulerStatistics:
        """Counts since the scheduler was made."""
        return SchedulerStatistics(**self._counts, peak_pages_in_use=self._peak_pages)

    def submit(self, request: Request) -> ActiveRequest:
        """Queues a request.

        Returns:
            Its record, which ``complete`` brings forward.

        Raises:
            UserError: It can never be served.
        """
        self._config.check(request)
        active = ActiveRequest(request, self._config.page_size)
        self._waiting.append(active)
        return active

    def cancel(self, active: ActiveRequest) -> None:
        """Ends a request at once; what it has so far stays its output. Nothing happens if it has ended.

        It may be in a step that runs: the step's outcome is then not used.
        """
        if active.finish_reason is not None:
            return
        active.finish_reason = "cancelled"
        if active.is_running:
            self._running.remove(active)
            self._release(active)
        else:
            self._waiting.remove(active)

    def schedule(self) -> StepPlan:
        """Forms the next step and admits the requests that start in it. Call only while ``has_work``."""
        step = _StepBuilder(self._config)
        running = tuple(self._running)
        decoding = [active for active in running if active.is_decoding]
        for active in decoding:
            self._advance(step, active)
        others = [active for active in running if not active.is_decoding]
        if all(self._advance(step, active) for active in others) and len(self._running) == len(running):
            self._admit(step)
        plan = step.plan()
        if not plan.context and not plan.generation:
            raise ValueError("found no request to schedule, expected one: the oldest fits in every step")
        self._count(plan)
        return plan

    def complete(self, plan: StepPlan, tokens: Sequence[int]) -> None:
        """Takes the outcome of a step: tokens are appended, and finished requests give their pages back.

        Args:
            plan: The step, as ``schedule`` returned it.
            tokens: What ``StepPlan.choose_tokens`` returned.
        """
        chosen = iter(tokens)
        for scheduled in plan.chunks:
            owner, chunk = scheduled.owner, scheduled.chunk
            token = next(chosen) if chunk.logits is LogitRows.LAST else None
            if not owner.is_running:  # cancelled while the step ran
                continue
            owner.num_cached += len(chunk.token_ids)
            if self._config.enable_block_reuse:
                self._publish(owner, chunk)
            if token is not None:
                owner.append(token)
                if owner.finish_reason is not None:
                    self._running.remove(owner)
                    self._release(owner)
                if owner.request.on_token is not None:
                    owner.request.on_token(token)

    def _advance(self, step: _StepBuilder, active: ActiveRequest) -> bool:
        """Adds the next tokens of a running request to the step.

        Returns:
            Whether any were added. There may be no room, or the request may have lost its pages to an older one.
        """
        if not active.is_running:
            return False
        part = step.fit(active)
        if part is None or not self._grow(step, active, part.num_tokens):
            return False
        step.add(active, part)
        return True

    def _grow(self, step: _StepBuilder, active: ActiveRequest, num_tokens: int) -> bool:
        """Takes the pages that the next ``num_tokens`` need, if need be from the youngest requests.

        Returns:
            Whether the request has them. It has not where it was the youngest itself.
        """
        missing = pages_for(active.num_cached + num_tokens, self._config.page_size) - active.num_pages
        while missing > self._pool.num_free:
            victim = self._running.pop()
            step.remove(victim)
            self._release(victim)
            victim.num_preemptions += 1
            self._counts["num_preemptions"] += 1
            self._waiting.appendleft(victim)
            if victim is active:
                return False
        if missing > 0:
            active.add_pages(self._pool.allocate(missing))
        return True

    def _admit(self, step: _StepBuilder) -> None:
        while self._waiting and len(self._running) < self._config.max_batch_size:
            active = self._waiting[0]
            available = self._pool.num_free - self._num_reserved()
            if available < 1:  # the last token's page is never shared
                return
            shared = self._find_shared(active)
            if self._pages_to_reserve(active) - len(shared) > available - self._pool.num_free_among(shared):
                return
            self._pool.share(shared)
            active.add_pages(shared)
            active.num_cached = len(shared) * self._config.page_size
            active.is_running = True
            part = step.fit(active)
            if part is None:
                self._release(active)
                return
            self._running.append(self._waiting.popleft())
            if not active.num_preemptions:
                active.num_reused_tokens = active.num_cached
                self._counts.update(num_prompt_tokens=active.prompt_len, num_reused_tokens=active.num_cached)
            if not self._grow(step, active, part.num_tokens):
                raise ValueError("found no pages for an admitted request, expected that they were counted")
            step.add(active, part)

    def _find_shared(self, active: ActiveRequest) -> list[int]:
        """Pages that hold the request's first tokens. The last token is left out: its logits are wanted."""
        if not self._config.enable_block_reuse:
            return []
        return self._pool.find(active.page_keys((active.num_tokens - 1) // self._config.page_size))

    def _pages_to_reserve(self, active: ActiveRequest) -> int:
        """Pages that a request is sure of once it is admitted."""
        if self._config.policy == SchedulingPolicy.GUARANTEED_NO_EVICT:
            tokens = active.max_tokens
        else:
            tokens = min(active.num_tokens + 1, active.max_tokens)
        return pages_for(tokens, self._config.page_size)

    def _num_reserved(self) -> int:
        """Free pages that running requests are sure of."""
        return sum(max(self._pages_to_reserve(active) - active.num_pages, 0) for active in self._running)

    def _publish(self, owner: ActiveRequest, chunk: Chunk) -> None:
        """Makes the pages known that a chunk has filled."""
        size = self._config.page_size
        first, end = chunk.start // size, owner.num_cached // size
        if first < end:
            for page, key in zip(owner.pages[first:end].tolist(), owner.page_keys(end)[first:], strict=True):
                self._pool.publish(page, key)

    def _release(self, active: ActiveRequest) -> None:
        if active.finish_reason is not None:
            active.last_pages = active.pages.copy()
        self._pool.release(active.take_pages())

    def _count(self, plan: StepPlan) -> None:
        counts = self._counts
        for group, chunks in (("context", plan.context), ("absorbed", plan.generation)):
            for item in chunks:
                if item.owner.is_decoding:
                    counts["num_decodes"] += 1
                else:
                    counts[f"num_{group}_chunks"] += 1
                    counts[f"num_{group}_tokens"] += len(item.chunk.token_ids)
        self._peak_pages = max(self._peak_pages, self._config.num_pages - self._pool.num_free)


class _Part(NamedTuple):
    """Tokens of a request that a step has room for.

    Attributes:
        num_tokens: How many.
        absorbed: Whether they go into the generation group.
    """

    num_tokens: int
    absorbed: bool


class _StepBuilder:
    """The step being formed, and what is left of its limits."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tokens_left = config.max_num_tokens
        self._context_keys_left = config.context_passes.total_keys
        self._context_tokens_left = config.max_context_kv_tokens
        self._context: dict[ActiveRequest, int] = {}
        self._generation: dict[ActiveRequest, int] = {}

    def plan(self) -> StepPlan:
        context, generation = (
            tuple(ScheduledChunk(active, active.chunk(count)) for active, count in group.items())
            for group in (self._context, self._generation)
        )
        return StepPlan(context, generation)

    def fit(self, active: ActiveRequest) -> _Part | None:
        """How many of a request's uncached tokens there is room for, and in which group; None for no room."""
        config = self._config
        count = min(active.num_uncached, self._tokens_left)
        if active.is_decoding:
            absorbed = config.enable_matrix_absorption
        else:
            count = min(count, config.max_chunk_tokens or count)
            if config.max_context_passes > 1:
                # New tokens beyond the first pass would send the whole chunk through the generation group.
                count = min(count, config.max_context_kv_tokens)
            too_long = active.num_cached + count > config.context_passes.total_keys
            absorbed = config.absorbs_prefill(count) or too_long
        if not count:
            return None
        if not absorbed and (active.num_cached + count > self._context_keys_left or count > self._context_tokens_left):
            return None
        return _Part(count, absorbed)

    def add(self, active: ActiveRequest, part: _Part) -> None:
        """Adds what ``fit`` found room for."""
        if not part.absorbed:
            self._context_keys_left -= active.num_cached + part.num_tokens
            self._context_tokens_left -= part.num_tokens
        self._tokens_left -= part.num_tokens
        (self._generation if part.absorbed else self._context)[active] = part.num_tokens

    def remove(self, active: ActiveRequest) -> None:
        """Takes a request out of the step; nothing happens if it is not in it."""
        count = self._context.pop(active, 0)
        if count:
            self._context_keys_left += active.num_cached + count
            self._context_tokens_left += count
        self._tokens_left += count or self._generation.pop(active, 0)
