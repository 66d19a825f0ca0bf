"""Making datasets of trtllm-bench: random token ids of given lengths, or pieces of a text.

The same arguments give the same bytes, as long as numpy draws the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtllm_mla.benchmark.dataset import MAX_FILE_BYTES, MAX_LINE_BYTES, MAX_OUTPUT_TOKENS
from trtllm_mla.checkpoint.tokenizer import read_text
from trtllm_mla.errors import UserError
from trtllm_mla.files import check_writable, write_json_lines

MAX_REQUESTS = 1 << 22
# A token id takes up to so many bytes in the file: ten digits, comma, blank.
_ID_BYTES = 12
_Lengths = npt.NDArray[np.int64]


class LengthDistribution(Protocol):
    """Where lengths in tokens come from."""

    def sample(self, generator: np.random.Generator, count: int) -> _Lengths:
        """Draws lengths, all at least 1.

        Args:
            generator: Source of random numbers.
            count: How many.

        Returns:
            int64 [count].
        """


@dataclass(frozen=True)
class FixedLength:
    """Always the same length.

    Attributes:
        length: Tokens.
    """

    length: int

    def __post_init__(self) -> None:
        _check_between("length", self.length, 1)

    def sample(self, generator: np.random.Generator, count: int) -> _Lengths:
        """``count`` times the length; nothing is drawn."""
        return np.full(count, self.length, dtype=np.int64)


@dataclass(frozen=True)
class NormalLength:
    """Normally distributed lengths, rounded; what is below 1 becomes 1.

    Attributes:
        mean: Mean, in tokens.
        stdev: Standard deviation, in tokens.
    """

    mean: float
    stdev: float

    def __post_init__(self) -> None:
        _check_between("mean", self.mean, 1)
        _check_between("stdev", self.stdev, 0)

    def sample(self, generator: np.random.Generator, count: int) -> _Lengths:
        """Draws lengths."""
        drawn = generator.normal(self.mean, self.stdev, size=count)
        return np.clip(np.rint(drawn), 1, MAX_OUTPUT_TOKENS).astype(np.int64)


@dataclass(frozen=True)
class UniformLength:
    """Lengths that are all equally likely.

    Attributes:
        minimum: The shortest, in tokens.
        maximum: The longest.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        _check_between("minimum", self.minimum, 1)
        if not self.minimum <= self.maximum <= MAX_OUTPUT_TOKENS:
            raise UserError(
                f"maximum: found {self.maximum}, expected a length from the minimum, {self.minimum}, to "
                f"{MAX_OUTPUT_TOKENS}."
            )

    def sample(self, generator: np.random.Generator, count: int) -> _Lengths:
        """Draws lengths."""
        return generator.integers(self.minimum, self.maximum, size=count, endpoint=True)


class PromptSource(Protocol):
    """Where the tokens of prompts come from."""

    def take(self, generator: np.random.Generator, length: int) -> list[int]:
        """The next prompt of so many tokens."""


class RandomTokens:
    """Token ids that are all equally likely.

    Args:
        vocab_size: Token ids are below it.
    """

    def __init__(self, vocab_size: int) -> None:
        _check_between("vocab_size", vocab_size, 1)
        self._vocab_size = vocab_size

    def take(self, generator: np.random.Generator, length: int) -> list[int]:
        """The next prompt of so many tokens."""
        ids: list[int] = generator.integers(self._vocab_size, size=length).tolist()
        return ids


class TextWindows:
    """Pieces of a text: one after the other, beginning anew at the end, or from places that are drawn.

    Args:
        token_ids: The text.
        shuffled: Draw the places.
        source: Name of the text, for messages.
    """

    def __init__(self, token_ids: list[int], *, shuffled: bool, source: str) -> None:
        self._token_ids = token_ids
        self._shuffled = shuffled
        self._source = source
        self._next = 0

    @classmethod
    def read(cls, path: Path, checkpoint: Path, *, shuffled: bool) -> TextWindows:
        """Reads a text file with the tokenizer of a checkpoint.

        Raises:
            UserError: The file or the tokenizer is unusable.
        """
        return cls(read_text(path, checkpoint), shuffled=shuffled, source=str(path))

    def take(self, generator: np.random.Generator, length: int) -> list[int]:
        """The next piece of so many tokens.

        Raises:
            UserError: The text is shorter.
        """
        last = len(self._token_ids) - length
        if last < 0:
            raise UserError(
                f"{self._source}: found {len(self._token_ids)} tokens, expected at least the {length} of a prompt. "
                "Ask for shorter prompts, or name a longer text."
            )
        if self._shuffled:
            start = int(generator.integers(last + 1))
        else:
            start = self._next if self._next <= last else 0
            self._next = start + length
        return self._token_ids[start : start + length]


@dataclass(frozen=True)
class DatasetRecipe:
    """What a dataset is made of.

    Attributes:
        num_requests: Its requests.
        input_length: Where the lengths of prompts come from.
        output_length: Where the numbers of new tokens come from.
        seed: Decides all that is random.
        shared_prefix: Tokens at the start of every prompt that are the same in all; a shorter prompt has as many of
            them as fit. They count as part of its length.
    """

    num_requests: int
    input_length: LengthDistribution
    output_length: LengthDistribution
    seed: int = 0
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise UserError(f"num_requests: found {self.num_requests}, expected 1 to {MAX_REQUESTS}.")
        _check_between("seed", self.seed, 0)
        _check_between("shared_prefix", self.shared_prefix, 0)


def write_dataset(path: Path, recipe: DatasetRecipe, prompts: PromptSource) -> int:
    """Makes a dataset and writes it, atomically.

    Args:
        path: The file.
        recipe: What it is made of.
        prompts: Where the tokens come from.

    Returns:
        The tokens of all its prompts.

    Raises:
        UserError: The file cannot be written, or would be larger than ``load_dataset`` reads.
    """
    check_writable(path)
    # Lengths and tokens are drawn from streams of their own: prompts of the same seed are alike in both.
    lengths, tokens = (np.random.default_rng([recipe.seed, number]) for number in range(2))
    input_lengths = recipe.input_length.sample(lengths, recipe.num_requests)
    output_lengths = recipe.output_length.sample(lengths, recipe.num_requests)
    total, longest = int(input_lengths.sum()), int(input_lengths.max())
    for what, count, most_bytes in (("together", total, MAX_FILE_BYTES), ("in one of them", longest, MAX_LINE_BYTES)):
        if count * _ID_BYTES > most_bytes:
            raise UserError(
                f"The prompts have {count} tokens {what}, expected at most {most_bytes // _ID_BYTES}. Ask for fewer "
                "or shorter ones."
            )
    shared = prompts.take(tokens, min(recipe.shared_prefix, longest)) if recipe.shared_prefix else []

    def lines() -> Iterator[dict[str, object]]:
        for number, (input_length, output_length) in enumerate(zip(input_lengths, output_lengths, strict=True)):
            prefix = shared[:input_length]
            own = int(input_length) - len(prefix)
            ids = [*prefix, *(prompts.take(tokens, own) if own else [])]
            yield {"task_id": number, "input_ids": ids, "output_tokens": int(output_length)}

    write_json_lines(path, lines())
    return total


def _check_between(name: str, value: float, least: int) -> None:
    if not least <= value <= MAX_OUTPUT_TOKENS:
        raise UserError(f"{name}: found {value}, expected {least} to {MAX_OUTPUT_TOKENS}.")
