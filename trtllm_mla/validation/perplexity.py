"""Perplexity of a text, teacher-forced, through an executor or the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.generation import DEFAULT_WINDOW, run_text, text_windows
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.validation.reference import ReferenceModel


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
    return _perplexity(
        ((text, run.logits) for text, run in run_text(executor, config, token_ids, window=window)), window
    )


def reference_perplexity(
    reference: ReferenceModel, token_ids: Sequence[int], *, window: int = DEFAULT_WINDOW
) -> Perplexity:
    """Perplexity of a text through the reference, cut into the same windows."""
    return _perplexity(((text, reference.run(text).logits) for text in text_windows(token_ids, window)), window)


def _perplexity(runs: Iterable[tuple[Sequence[int], npt.NDArray[np.float32]]], window: int) -> Perplexity:
    """Perplexity of windows, each with its logits [tokens, vocab_size]."""
    total, tokens, windows = 0.0, 0, 0
    for text, logits in runs:
        total += negative_log_likelihoods(logits[:-1], text[1:]).sum()
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
