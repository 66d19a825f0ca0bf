"""How close is close enough, for each type of arithmetic and each depth.

All gates but the last three follow from one number: e, the mean absolute error allowed, relative to the reference's
root mean square.

| gate                              | bound                               | what it sees                             |
|-----------------------------------|-------------------------------------|------------------------------------------|
| relative mean error, at most      | e                                   | a small error everywhere                 |
| relative largest error, at most   | 20 e                                | a single wrong position or element       |
| cosine, at least                  | 1 - 2 e^2                           | a wrong direction, whatever the scale    |
| abs(norm ratio - 1), at most      | e                                   | a wrong scale, which a cosine misses     |
| largest error, at most            | what the caller asks for, or none   | an absolute promise                      |
| greedy tokens that agree          | float32: all; else not gated        | what a user sees                         |
| perplexity's relative difference  | float32 1e-4, float16 0.005,        | a bias that adds up over a text          |
|                                   | bfloat16 0.02                       |                                          |

A layer rounds every tensor it stores by at most the unit roundoff u (2^-24, 2^-11, 2^-8), and passes on the error of
its input: with attention that is far from uniform, about undiminished. Errors of L layers then add up in proportion to
L. On random checkpoints made to be sensitive in this way (tests/support/hf.py; 2 to 12 layers, every scenario, ONNX
Runtime and interpreted kernels) the relative mean error was 1.5 u to 2.2 u a layer in 16 bits, and 6 u to 9 u in
float32, where sums round as well. About three times that is allowed: e = 6 u L in 16 bits, e = 20 u L in float32, and
never more than 0.1, beyond which outputs are not the same thing any more (cosine 0.98). The largest error was 9 to 22
times the mean one, and the cosine near 1 - e^2. In float32 with two layers, logits whose root mean square is up to 4
meet 2e-4 in absolute terms wherever they meet these gates.

In 16 bits, two tokens whose logits nearly tie may change places without any mistake, so agreement is reported and not
gated; errors that make clear decisions flip are.

Quantised caches
----------------
Quantisation changes logits by far more than arithmetic does, and a difference of 1e-7 may round to another code. Gates
wide enough for that would see no mistake. So the question is asked in two parts, each of which has narrow gates:

- Does the executor compute what its cache says? The reference reads the executor's rows in place of its own. Logits
  and greedy tokens then meet the gates above.
- Does the cache say what it should? The executor's rows are compared with those that the reference would have cached,
  reading the same rows before. With c the relative root mean square error of an exact conversion of the reference's
  rows (``trtllm_mla.ops.row_codec``), and arithmetic that is off by e on average and 20 e at most:

| gate on latents and rotary keys        | bound                          | what it sees                              |
|----------------------------------------|--------------------------------|-------------------------------------------|
| root mean square error, at most        | 1.001 sqrt(c^2 + (2 e)^2)      | a worse choice of codes or scales         |
| abs(norm ratio to the conversion - 1)  | e + 0.001                      | codes that are biased, a wrong scale      |
| largest error beyond 20 e, at most     | half a step of the format      | a value that was not rounded to nearest   |
| relative root mean square error        | sqrt(r^2 + (2 e)^2)            | scales that do not cover the latents      |

Here r is the largest relative error of a number in the format's normal range: 1/16 for E4M3, 1/5 for E2M1 and 1/256
for bfloat16. Of normally distributed latents, c is about 2.6 % in fp8 and 8.7 % in nvfp4, and 0.17 % of rotary keys,
which are bfloat16. In bfloat16, 20 e is larger than the formats' steps, so that only the other three see anything, and
coarse mistakes at that: conversions are judged in float32, the type of a network's twin.

A perplexity is compared with that of the reference without quantisation. It may differ by 0.5 % in fp8 and 3 % in
nvfp4 besides the arithmetic's bound. Where the reference itself guesses hardly better than by chance, as a model with
random weights does, it tells nothing and is not gated.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType

_MEAN_ERROR_PER_LAYER = {
    DType.FLOAT32: 20 * 2.0**-24,
    DType.FLOAT16: 6 * 2.0**-11,
    DType.BFLOAT16: 6 * 2.0**-8,
}
_LARGEST_MEAN_ERROR = 0.1
_PERPLEXITY_DEVIATION = {DType.FLOAT32: 1e-4, DType.FLOAT16: 0.005, DType.BFLOAT16: 0.02}
_QUANTIZED_PERPLEXITY_DEVIATION: dict[CacheDType | None, float] = {CacheDType.FP8: 0.005, CacheDType.NVFP4: 0.03}


@dataclass(frozen=True)
class Gates:
    """Bounds on the metrics of ``trtllm_mla.validation.metrics``.

    Attributes:
        min_cosine: Smallest cosine.
        max_norm_deviation: Largest distance of the norm ratio from 1.
        max_relative_max_error: Largest error, relative to the reference's root mean square.
        max_relative_mean_error: Mean error, likewise.
        max_perplexity_deviation: Largest relative difference of two perplexities of one text.
        max_abs_error: Largest error; None where it is not gated.
        min_greedy_agreement: Share of positions whose greedy token agrees; None where it is not gated.
    """

    min_cosine: float
    max_norm_deviation: float
    max_relative_max_error: float
    max_relative_mean_error: float
    max_perplexity_deviation: float
    max_abs_error: float | None = None
    min_greedy_agreement: float | None = None


@dataclass(frozen=True)
class CacheGates:
    """Bounds on how far the rows of a quantised cache may be from those that the reference would have cached.

    Attributes:
        arithmetic_rms: Root mean square error that the arithmetic may add to the quantisation's, relative to the
            reference's root mean square.
        arithmetic_max: Largest error of a value before it is rounded, likewise.
        max_rms_ratio: Largest root mean square error, in units of what an exact conversion and the arithmetic make.
        max_norm_deviation: Largest distance of the norm ratio to an exact conversion from 1.
        max_rounding: Largest error of a value, in units of what rounding to the nearest makes.
    """

    arithmetic_rms: float
    arithmetic_max: float
    max_rms_ratio: float
    max_norm_deviation: float
    max_rounding: float


def cache_gates(gates: Gates) -> CacheGates:
    """The gates on a quantised cache that belong to those of a network's arithmetic."""
    error = gates.max_relative_mean_error
    return CacheGates(
        arithmetic_rms=2 * error,
        arithmetic_max=gates.max_relative_max_error,
        max_rms_ratio=1.001,
        max_norm_deviation=error + 1e-3,
        max_rounding=1.0,
    )


def gates_for(dtype: DType, num_layers: int, cache_dtype: CacheDType | None = None) -> Gates:
    """The gates of a network.

    Args:
        dtype: Type of its arithmetic.
        num_layers: Its layers.
        cache_dtype: Type of its cache; it matters where the cache is quantised.
    """
    error = min(_MEAN_ERROR_PER_LAYER[dtype] * num_layers, _LARGEST_MEAN_ERROR)
    return Gates(
        min_cosine=1 - 2 * error**2,
        max_norm_deviation=error,
        max_relative_max_error=20 * error,
        max_relative_mean_error=error,
        max_perplexity_deviation=_PERPLEXITY_DEVIATION[dtype] + _QUANTIZED_PERPLEXITY_DEVIATION.get(cache_dtype, 0.0),
        min_greedy_agreement=1.0 if dtype is DType.FLOAT32 else None,
    )


def coarsest(*dtypes: DType) -> DType:
    """The type with the fewest digits, whose gates apply where several are mixed."""
    return max(dtypes, key=(DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16).index)
