"""Perplexity of a text, teacher-forced, through an executor or the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.checkpoint.tokenizer import TextCodec
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.generation import ForcedSequence, cut_by_threshold, run_forced
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.validation.reference import ReferenceModel

DEFAULT_WINDOW = 256
MAX_TEXT_BYTES = 1 << 26

# Logits [tokens, vocab_size] of a text.
LogitsOf = Callable[[Sequence[int]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text.

    Attributes:
        tokens: Tokens that were predicted: all but the first of each window.
        windows: Windows the text was cut into.
        window: Tokens of a window; the last one may be shorter.
        mean_nll: Mean negative log-likelihood of a predicted token, natural logarithm.
    """

    tokens: int
    windows: int
    window: int
    mean_nll: float

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood."""
        return math.exp(min(self.mean_nll, 700.0)) if math.isfinite(self.mean_nll) else math.nan


def read_text(path: Path, checkpoint: Path) -> list[int]:
    """Token ids of a text file, with the tokenizer of a checkpoint.

    Raises:
        UserError: The file is missing, larger than 64 MiB, not UTF-8 or shorter than two tokens, or the checkpoint
            has no tokenizer.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. Expected a text to measure the perplexity of.")
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise UserError(f"{path}: found {size} bytes, expected a text of at most {MAX_TEXT_BYTES}. Cut it.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}. Expected plain text.") from None
    token_ids = TextCodec.load(checkpoint).encode(text)
    if len(token_ids) < 2:
        raise UserError(f"{path}: found {len(token_ids)} tokens, expected at least 2: the first predicts the second.")
    return token_ids


def executor_perplexity(
    executor: Executor, config: SchedulerConfig, token_ids: Sequence[int], *, window: int = DEFAULT_WINDOW
) -> Perplexity:
    """Perplexity of a text through an executor.

    Each window runs in chunks as large as a step allows, each in the group that the scheduler would choose for it.

    Args:
        executor: What runs the steps; its whole pool is used.
        config: Limits of steps and requests.
        token_ids: The text, two tokens or more.
        window: Tokens of a window. Windows do not overlap, and nothing is carried from one to the next.

    Raises:
        UserError: The window is outside the limits, or a token outside the vocabulary.
    """
    limit = min(config.max_seq_len, config.num_pages * config.page_size, config.max_context_kv_tokens)
    if not 2 <= window <= limit:
        raise UserError(f"window: found {window}, expected 2 to {limit}, the limits of this network and its pool.")
    _check_vocabulary(token_ids, config.vocab_size)

    def logits_of(text: Sequence[int]) -> npt.NDArray[np.float32]:
        cut = cut_by_threshold(len(text), config.max_num_tokens, config)
        return run_forced(executor, [ForcedSequence(text, cut)])[0].logits

    return _perplexity(logits_of, token_ids, window)


def reference_perplexity(
    reference: ReferenceModel, token_ids: Sequence[int], *, window: int = DEFAULT_WINDOW
) -> Perplexity:
    """Perplexity of a text through the reference, cut into the same windows."""
    return _perplexity(lambda text: reference.run(text).logits, token_ids, window)


def _perplexity(logits_of: LogitsOf, token_ids: Sequence[int], window: int) -> Perplexity:
    total, tokens, windows = 0.0, 0, 0
    for text in _windows(token_ids, window):
        total += negative_log_likelihoods(logits_of(text)[:-1], text[1:]).sum()
        tokens += len(text) - 1
        windows += 1
    return Perplexity(tokens, windows, window, float(total) / tokens)


def negative_log_likelihoods(logits: npt.NDArray[Any], targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of each target, natural logarithm, in float64.

    Args:
        logits: [tokens, vocab_size].
        targets: The token that follows each row.
    """
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(targets)), targets]
    return result


def _windows(token_ids: Sequence[int], window: int) -> Iterator[list[int]]:
    """Consecutive windows; a last one of a single token, which predicts nothing, is left out."""
    for start in range(0, len(token_ids) - 1, window):
        yield list(token_ids[start : start + window])


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise UserError(
            f"The text holds token ids from {min(token_ids)} to {max(token_ids)}, expected ids from 0 to "
            f"{vocab_size - 1}. Use the tokenizer of this checkpoint."
        )
