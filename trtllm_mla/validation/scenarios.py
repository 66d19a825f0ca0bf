"""Ways of running given texts that together reach every path of a network.

A text must come out the same however it is cut into steps. Each scenario has several positions and several texts of
different lengths, since at a single position attention is the identity and hides most mistakes: a softmax scale, a
rotary embedding or a mask that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.config import BuildConfig
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.runtime.step import ContextPasses

Int64Array = npt.NDArray[np.int64]

DECODE_STEPS = 6

# Chunks of a text, from its number and its length.
Cut = Callable[[int, int], tuple[ForcedChunk, ...]]


@dataclass(frozen=True)
class Scenario:
    """Texts and how they are cut into steps.

    Attributes:
        name: A short name.
        meaning: What it exercises.
        sequences: The texts with their cuts.
        context_passes: Passes of the context group, with room for its fullest step and no more: where the network has
            several, histories longer than the chunks reach them.
    """

    name: str
    meaning: str
    sequences: tuple[ForcedSequence, ...]
    context_passes: ContextPasses

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_steps(self) -> int:
        """Steps until the last text ends."""
        return max(sequence.first_step + len(sequence.chunks) for sequence in self.sequences)

    def to_arrays(self) -> dict[str, Int64Array]:
        """The scenario as arrays, the form in which polygraphy hands inputs to a runner.

        Returns:
            ``input_ids`` [tokens], text after text; ``sequence_lengths`` and ``first_steps`` [texts]; ``chunks``
            [chunks, 3]: text, tokens, and 1 for a chunk in the generation group; ``context_passes`` [2]: how many, and
            the cached tokens of each.
        """
        chunks = [
            (index, chunk.num_tokens, int(chunk.absorbed))
            for index, sequence in enumerate(self.sequences)
            for chunk in sequence.chunks
        ]
        return {
            "input_ids": np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in self.sequences]),
            "sequence_lengths": np.array([len(item.token_ids) for item in self.sequences], dtype=np.int64),
            "first_steps": np.array([item.first_step for item in self.sequences], dtype=np.int64),
            "chunks": np.array(chunks, dtype=np.int64),
            "context_passes": np.array([self.context_passes.count, self.context_passes.max_keys], dtype=np.int64),
        }


def split_texts(arrays: dict[str, Any]) -> list[list[int]]:
    """The texts in arrays made by ``Scenario.to_arrays``."""
    ends = np.cumsum(arrays["sequence_lengths"])[:-1]
    return [text.tolist() for text in np.split(arrays["input_ids"], ends)]


def forced_sequences(arrays: dict[str, Any]) -> tuple[ForcedSequence, ...]:
    """The texts with their cuts, from arrays made by ``Scenario.to_arrays``."""
    return tuple(
        ForcedSequence(
            text,
            tuple(
                ForcedChunk(int(tokens), bool(absorbed))
                for owner, tokens, absorbed in arrays["chunks"]
                if owner == index
            ),
            first_step=int(arrays["first_steps"][index]),
        )
        for index, text in enumerate(split_texts(arrays))
    )


def context_passes(arrays: dict[str, Any]) -> ContextPasses:
    """The passes of the context group, from arrays made by ``Scenario.to_arrays``."""
    count, max_keys = arrays["context_passes"].tolist()
    return ContextPasses(count, max_keys)


class TokenSource:
    """Draws prompts: from a text where there is one, else at random from the vocabulary.

    Args:
        vocab_size: Token ids are below it.
        seed: Seed of the draws.
        text_ids: Token ids of a text to cut pieces from.
    """

    def __init__(self, vocab_size: int, seed: int, text_ids: Sequence[int] | None = None) -> None:
        self._generator = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._text_ids = np.array(text_ids, dtype=np.int64) if text_ids else None

    def draw(self, length: int, *, text: bool) -> tuple[int, ...]:
        """Draws a prompt.

        Args:
            length: Its tokens.
            text: Cut it from the text, if there is one. A text that is too short starts over.
        """
        if text and self._text_ids is not None:
            start = self._generator.integers(len(self._text_ids))
            return tuple(np.take(self._text_ids, np.arange(start, start + length), mode="wrap").tolist())
        return tuple(self._generator.integers(self._vocab_size, size=length).tolist())


def default_lengths(config: SchedulerConfig) -> tuple[int, ...]:
    """Lengths of the texts of a scenario: one crosses a page's end, one does not, one is short.

    They are cut down where the config's limits ask for it.
    """
    page = config.page_size
    return fit_lengths((page + 9, page // 2 + 3, 5), config)


def fit_lengths(lengths: Sequence[int], limits: BuildConfig | SchedulerConfig) -> tuple[int, ...]:
    """Lengths of texts, cut down until one step can hold all of them; texts that find no room are left out."""
    budget = min(limits.max_num_tokens, limits.max_context_kv_tokens)
    fitting = lengths[: min(limits.max_batch_size, budget)]
    fair = budget // len(fitting)
    return tuple(min(length, fair, limits.max_seq_len) for length in fitting)


def make_scenarios(source: TokenSource, config: SchedulerConfig, lengths: Sequence[int]) -> tuple[Scenario, ...]:
    """Makes the scenarios that a network can run.

    Args:
        source: Where texts come from; the first text of each scenario is cut from real text if there is any. Every
            scenario has texts of its own, so that rows another one left in the cache cannot pass for its own.
        config: Limits, and whether there is a generation group.
        lengths: Tokens of each text.
    """
    absorption = config.enable_matrix_absorption
    cuts: list[tuple[str, str, Cut, bool]] = [
        ("context", "whole texts at once, decompressed", _whole(absorbed=False), False),
    ]
    if absorption:
        cuts.append(("absorbed", "whole texts at once, absorbed", _whole(absorbed=True), False))
    cuts += [
        ("chunked", "chunks whose group changes from step to step", _chunked(absorption), False),
        ("mixed", "texts that start one after the other, so that both groups share steps", _mixed(absorption), True),
        ("decode", "all but the last tokens at once, then one token a step", _decode(absorption), False),
    ]

    def scenario(name: str, meaning: str, cut: Cut, staggered: bool) -> Scenario:
        sequences = tuple(
            ForcedSequence(source.draw(length, text=index == 0), cut(index, length), index if staggered else 0)
            for index, length in enumerate(lengths)
        )
        return Scenario(name, meaning, sequences, _tight_passes(sequences, config.max_context_passes))

    return tuple(scenario(*item) for item in cuts)


def _tight_passes(sequences: Sequence[ForcedSequence], count: int) -> ContextPasses:
    """``count`` passes with room for the new tokens and for an equal share of the keys of the fullest step."""
    tokens: Counter[int] = Counter()
    keys: Counter[int] = Counter()
    for sequence in sequences:
        length = 0
        for step, chunk in enumerate(sequence.chunks, sequence.first_step):
            length += chunk.num_tokens
            if not chunk.absorbed:
                tokens[step] += chunk.num_tokens
                keys[step] += length
    return ContextPasses(count, max((max(tokens[step], -(-keys[step] // count)) for step in keys), default=1))


def _whole(*, absorbed: bool) -> Cut:
    return lambda index, length: (ForcedChunk(length, absorbed),)


def _chunked(absorption: bool) -> Cut:
    def cut(index: int, length: int) -> tuple[ForcedChunk, ...]:
        quarter = max(length // 4, 1)
        sizes = _cut_sizes(length, (quarter + 1, max(quarter - 1, 1), quarter, length))
        return tuple(ForcedChunk(size, absorption and number % 2 == 1) for number, size in enumerate(sizes))

    return cut


def _mixed(absorption: bool) -> Cut:
    def cut(index: int, length: int) -> tuple[ForcedChunk, ...]:
        # Texts take turns in how they begin; what follows is decode steps and a last chunk of the other group.
        begins_absorbed = absorption and index % 2 == 1
        head, *rest = _cut_sizes(length, (max(length // 2, 1), 1, 1, length))
        chunks = [ForcedChunk(head, begins_absorbed)]
        chunks += [ForcedChunk(size, absorption and (size == 1 or not begins_absorbed)) for size in rest]
        return tuple(chunks)

    return cut


def _decode(absorption: bool) -> Cut:
    def cut(index: int, length: int) -> tuple[ForcedChunk, ...]:
        steps = min(DECODE_STEPS, length - 1)
        return (ForcedChunk(length - steps, False), *(ForcedChunk(1, absorption) for _ in range(steps)))

    return cut


def _cut_sizes(length: int, sizes: Sequence[int]) -> list[int]:
    """The sizes in turn as far as ``length`` goes; the last of them takes what is left."""
    result: list[int] = []
    for size in sizes:
        size = min(size, length - sum(result))
        if size:
            result.append(size)
    return result
