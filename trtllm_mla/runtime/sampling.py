"""Choosing the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt

from trtllm_mla.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen.

    Attributes:
        temperature: Divides the logits; 0 is greedy decoding.
        top_k: Only the ``top_k`` likeliest tokens can be drawn; 0 is no limit.
        top_p: Only the likeliest tokens that together reach this probability can be drawn; 1 is no limit.
        seed: Seed of the request's own random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("temperature", Real, "a number"),
            ("top_k", Integral, "a whole number"),
            ("top_p", Real, "a number"),
            ("seed", Integral, "a whole number"),
        ):
            value: object = getattr(self, name)
            if not isinstance(value, kind):
                raise UserError(f"{name}: found {value!r:.80}, expected {expected}.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature: found {self.temperature}, expected 0 (greedy) or a positive number.")
        if self.top_k < 0:
            raise UserError(f"top_k: found {self.top_k}, expected 0 (no limit) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: found {self.top_p}, expected a number above 0 and at most 1 (no limit).")
        if self.seed < 0:
            raise UserError(f"seed: found {self.seed}, expected 0 or a positive number.")


class Sampler:
    """Draws the tokens of one request.

    One random number is used a token and none is shared with other requests, so the tokens depend on the logits and
    on ``params`` alone.

    Args:
        params: How tokens are chosen.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.Generator(np.random.Philox(params.seed))

    def __call__(self, logits_V: npt.NDArray[np.float32]) -> int:
        """Chooses a token.

        Args:
            logits_V: float32 [vocab_size].

        Returns:
            Its id. Among equal logits the lowest id counts as the likeliest.

        Raises:
            UserError: A logit is NaN, or none is finite.
        """
        best = int(np.argmax(logits_V))  # NaN counts as the largest
        if not math.isfinite(logits_V[best]):
            raise UserError(
                f"The network's logit of token {best} is {logits_V[best]}, expected a finite largest logit. Look for "
                "NaN and infinity in the checkpoint's weights, or convert with --dtype bfloat16 or float32 if they "
                "are too large for float16."
            )
        if self._params.temperature == 0:
            return best
        with np.errstate(over="ignore"):  # at a tiny temperature all others are infinitely less likely
            weights_V = np.exp((logits_V.astype(np.float64) - float(logits_V[best])) / self._params.temperature)
        candidates, weights = self._likeliest(weights_V)
        sums = np.cumsum(weights)
        # Rounding can make a product equal to the last sum, behind which there is no candidate.
        index = min(int(np.searchsorted(sums, self._random.random() * sums[-1], side="right")), len(sums) - 1)
        return int(candidates[index])

    def _likeliest(self, weights_V: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Ids and weights of the tokens that ``top_k``, then ``top_p`` leave."""
        if not self._params.top_k and self._params.top_p == 1:
            return np.arange(len(weights_V)), weights_V
        order = np.argsort(-weights_V, kind="stable")[: self._params.top_k or None]
        sums = np.cumsum(weights_V[order])
        kept = order[: int(np.searchsorted(sums, self._params.top_p * sums[-1])) + 1]
        return kept, weights_V[kept]
