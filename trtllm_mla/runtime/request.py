"""A request: what was asked for, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from trtllm_mla.errors import UserError
from trtllm_mla.runtime.pages import PageKey, page_key, pages_for
from trtllm_mla.runtime.sampling import Sampler, SamplingParams
from trtllm_mla.runtime.step import Chunk, Int32Array, LogitRows

FinishReason = Literal["length", "stop", "cancelled"]


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


class RequestState(Enum):
    """Where a request is on its way."""

    WAITING = "waiting"
    CONTEXT = "context"
    GENERATION = "generation"
    FINISHED = "finished"


class ActiveRequest:
    """A request, its tokens so far, and its pages.

    Args:
        request: What was asked for, checked against the limits.
        page_size: Tokens in a page.

    Attributes:
        request: What was asked for.
        num_cached: Tokens in the cache.
        num_tokens: Tokens known: the prompt and the output.
        num_pages: Pages held.
        submit_time: ``time.perf_counter()`` when the request was made.
        token_times: ``time.perf_counter()`` at each new token.
        finish_reason: Why generation ended, or None while it has not.
        num_preemptions: How often the request lost its pages.
        num_reused_tokens: Prompt tokens whose rows were found in the cache when the request was first admitted.
        last_pages: int32 page table that the request had when it ended; empty before. The pages are no longer its own.
    """

    def __init__(self, request: Request, page_size: int) -> None:
        prompt = token_array(request.prompt_ids)
        self.request = request
        self.prompt_len = len(prompt)
        self.max_tokens = self.prompt_len + request.max_new_tokens
        self.num_cached = 0
        self.num_tokens = self.prompt_len
        self.num_pages = 0
        self.submit_time = time.perf_counter()
        self.token_times: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self.last_pages: Int32Array = np.zeros(0, dtype=np.int32)
        self.is_running = False
        self._page_size = page_size
        self._tokens: Int32Array = np.concatenate([prompt, np.zeros(request.max_new_tokens)]).astype(np.int32)
        self._table: Int32Array = np.zeros(pages_for(self.max_tokens, page_size), dtype=np.int32)
        self._page_keys: list[PageKey] = []
        self._sampler = Sampler(request.sampling)

    @property
    def state(self) -> RequestState:
        """Where the request is on its way."""
        if self.finish_reason is not None:
            return RequestState.FINISHED
        if not self.is_running:
            return RequestState.WAITING
        return RequestState.GENERATION if self.is_decoding else RequestState.CONTEXT

    @property
    def is_decoding(self) -> bool:
        """Whether its newest token, which the network chose, is the only one that is not cached."""
        return self.num_tokens == self.num_cached + 1 and self.num_tokens > self.prompt_len

    @property
    def num_uncached(self) -> int:
        """Known tokens that are not in the cache: what is left of the prompt, or one new token."""
        return self.num_tokens - self.num_cached

    @property
    def pages(self) -> Int32Array:
        """int32 page table; empty while waiting and when finished."""
        return self._table[: self.num_pages]

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

    def page_keys(self, count: int) -> list[PageKey]:
        """Keys of the first ``count`` pages, all full of known tokens."""
        keys, size = self._page_keys, self._page_size
        while len(keys) < count:
            begin = len(keys) * size
            keys.append(page_key(keys[-1] if keys else None, self._tokens[begin : begin + size]))
        return keys[:count]

    def add_pages(self, pages: Sequence[int]) -> None:
        """Appends pages to the page table."""
        self._table[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)

    def take_pages(self) -> list[int]:
        """Empties the page table; what was cached is no longer the request's.

        Returns:
            The pages, to be released.
        """
        pages: list[int] = self.pages.tolist()
        self.num_pages = self.num_cached = 0
        self.is_running = False
        return pages

    def choose_token(self, logits_V: npt.NDArray[np.float32]) -> int:
        """Chooses the next token from the logits of the last known one."""
        return self._sampler(logits_V)

    def append(self, token: int) -> None:
        """Appends a token, and sees whether it is the last one."""
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.token_times.append(time.perf_counter())
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_tokens == self.max_tokens:
            self.finish_reason = "length"


def token_array(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """A prompt as an array.

    Raises:
        UserError: It holds something else than whole numbers.
    """
    array = np.asarray(token_ids)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise UserError("The prompt holds something that is not a token id; expected one list of whole numbers.")
    return array.astype(np.int64)
