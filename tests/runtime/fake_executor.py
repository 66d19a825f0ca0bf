"""An executor without a network: it stores what a cache would hold and derives logits from what it finds there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_mla.runtime.executors.base import Float32Array
from trtllm_mla.runtime.step import StepInputs

VOCAB_SIZE = 61
EMPTY = -1.0


def logits_after(tokens: Sequence[int]) -> Float32Array:
    """Logits that depend on every token and its position, and on nothing else."""
    return np.random.default_rng([len(tokens), *map(int, tokens)]).standard_normal(VOCAB_SIZE).astype(np.float32)


def greedy(prompt: Sequence[int], max_new_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """Greedy decoding without cache, steps or batches."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(np.argmax(logits_after(tokens))))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def pass_slots(kv_slots: np.ndarray, key_offsets: np.ndarray, key_index: np.ndarray, request: int) -> np.ndarray:
    """A request's slots in one pass of the context group."""
    first, last = key_offsets[request : request + 2]
    assert key_index[request, : last - first].tolist() == list(range(first, last))
    return kv_slots[first:last]


class FakeExecutor:
    """Caches (token, position) of each slot, and reads histories back through the step's own indices.

    A wrong slot, page table, length or offset gives a history with a gap, which is refused, or with a foreign token,
    which changes the logits.
    """

    name = "fake"
    description = "hash of the cached tokens"

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.steps: list[StepInputs] = []
        self._slots = np.full((num_pages * page_size, 2), EMPTY, dtype=np.float32)

    def run(self, step: StepInputs) -> Float32Array:
        self.steps.append(step)
        positions = np.concatenate([step.context_position_ids, step.generation_position_ids])
        self._slots[step.slot_mapping] = np.stack([step.input_ids, positions], axis=1)
        histories = [*self._context_histories(step), *self._generation_histories(step)]
        assert len(histories) == len(step.input_ids)
        rows = [logits_after(histories[row]) for row in step.last_token_ids]
        return np.stack(rows) if rows else np.zeros((0, VOCAB_SIZE), np.float32)

    def read_cache(self, layer: int) -> Float32Array:
        return self._slots.reshape(self.num_pages, self.page_size, 2).copy()

    def close(self) -> None:
        pass

    def _context_histories(self, step: StepInputs) -> list[list[int]]:
        histories = []
        for request in range(len(step.context_query_offsets) - 1):
            first, last = step.context_query_offsets[request : request + 2]
            rows = step.context_query_index[request, : last - first]
            assert rows.tolist() == list(range(first, last))
            newest = pass_slots(step.context_kv_slots, step.context_key_offsets, step.context_key_index, request)
            older = [
                pass_slots(item.kv_slots, item.key_offsets, item.key_index, request) for item in step.context_history
            ]
            histories += self._histories(np.concatenate([*older, newest]), step.context_position_ids[rows])
            assert len(newest) >= last - first, "the causal pass holds all new tokens"
        return histories

    def _generation_histories(self, step: StepInputs) -> list[list[int]]:
        histories = []
        for request, length in enumerate(step.generation_sequence_length):
            first, last = step.generation_query_offsets[request : request + 2]
            rows = step.generation_query_index[request, : last - first]
            assert rows.tolist() == list(range(first, last))
            positions = np.arange(length)
            pages = step.kv_cache_block_offsets[request, positions // self.page_size]
            slots = pages * self.page_size + positions % self.page_size
            histories += self._histories(slots, step.generation_position_ids[rows])
        return histories

    def _histories(self, slots: np.ndarray, positions: np.ndarray) -> list[list[int]]:
        """For each new token of a request, the tokens up to it."""
        tokens, cached_positions = self._slots[slots].T
        assert cached_positions.tolist() == list(range(len(slots)))
        assert positions.tolist() == list(range(len(slots) - len(positions), len(slots)))
        return [tokens[: position + 1].astype(int).tolist() for position in positions]
