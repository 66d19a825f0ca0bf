"""The absorption check: decompressed and absorbed attention are one function, up to rounding.

Decompressed, each head's keys and values are made from the latents, then attention runs at the heads' widths.
Absorbed, the up-projections move to the queries and to the output, and attention runs on the latents themselves
(DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2). Both are run here on random weights with the rounding
of the network's operations, and compared with float64 and with each other; in float64 the forms agree to float64's
own precision.

Legend of shape names: Q queries, S cached tokens, H heads, N qk_nope_head_dim, R qk_rope_head_dim, L kv_lora_rank,
V v_head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtllm_mla.checkpoint.attention_cost import (
    absorbed_flops_per_pair,
    break_even_queries,
    decompressed_flops_per_pair,
    up_projection_flops,
)
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.dtypes import DType
from trtllm_mla.validation.metrics import max_abs_error, relative_l2_error, root_mean_square

Array = npt.NDArray[Any]

# Decompressed keys and values of this many heads exist at once: 2048 x 16 x 256 float64 elements are 64 MiB.
_HEADS_AT_ONCE = 16
_STORED_ROUNDOFF = {DType.FLOAT32: 0.0, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}


@dataclass(frozen=True)
class AbsorptionSizes:
    """Sizes of one attention layer and of the problem; the defaults are DeepSeek-V3's.

    Attributes:
        num_attention_heads: Query heads.
        qk_nope_head_dim: Width of a head's part without rotary embedding.
        qk_rope_head_dim: Width of the rotary part.
        kv_lora_rank: Width of the latent.
        v_head_dim: Width of a value head.
        keys: Cached tokens.
        queries: New tokens; each sees all keys.
    """

    num_attention_heads: int = 128
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    kv_lora_rank: int = 512
    v_head_dim: int = 128
    keys: int = 2048
    queries: int = 4

    @classmethod
    def of(cls, spec: ModelSpec, *, keys: int = 2048, queries: int = 4) -> AbsorptionSizes:
        """The sizes of a model's attention layers."""
        return cls(
            spec.num_attention_heads,
            spec.qk_nope_head_dim,
            spec.qk_rope_head_dim,
            spec.kv_lora_rank,
            spec.v_head_dim,
            keys,
            queries,
        )

    @property
    def decompressed_flops(self) -> int:
        """Floating-point operations of the decompressed form: 2 for each multiplication and addition pair."""
        per_key = up_projection_flops(self)
        return self.num_attention_heads * self.keys * (per_key + self.queries * decompressed_flops_per_pair(self))

    @property
    def absorbed_flops(self) -> int:
        """Floating-point operations of the absorbed form, counted likewise."""
        per_query = up_projection_flops(self)
        return self.num_attention_heads * self.queries * (per_query + self.keys * absorbed_flops_per_pair(self))

    @property
    def break_even_queries(self) -> float:
        """Queries, sharing many keys, at which both forms cost the same."""
        return break_even_queries(self)


@dataclass(frozen=True)
class AttentionProblem:
    """Arguments of one attention layer behind its projections.

    Attributes:
        q_nope: [H, Q, N], Queries, the part without rotary embedding.
        q_pe: [H, Q, R], Queries, the rotated part.
        latent: [S, L], Cached latents.
        k_pe: [S, R], Cached rotated keys, shared by the heads.
        k_up: [H, N, L], Key rows of ``kv_b_proj``.
        v_up: [H, V, L], Value rows of ``kv_b_proj``.
        softmax_scale: Factor on the scores.
    """

    q_nope: Array
    q_pe: Array
    latent: Array
    k_pe: Array
    k_up: Array
    v_up: Array
    softmax_scale: float

    def map(self, function: Callable[[Array], Array]) -> AttentionProblem:
        """The problem with a function applied to every array."""
        return AttentionProblem(
            function(self.q_nope),
            function(self.q_pe),
            function(self.latent),
            function(self.k_pe),
            function(self.k_up),
            function(self.v_up),
            self.softmax_scale,
        )

    def head_blocks(self) -> Iterator[AttentionProblem]:
        """The problem a few heads at a time."""
        for start in range(0, len(self.k_up), _HEADS_AT_ONCE):
            heads = slice(start, start + _HEADS_AT_ONCE)
            yield replace(
                self,
                q_nope=self.q_nope[heads],
                q_pe=self.q_pe[heads],
                k_up=self.k_up[heads],
                v_up=self.v_up[heads],
            )


@dataclass(frozen=True)
class Attention:
    """Result of one form.

    Attributes:
        scores: [H, Q, S], Scaled scores, before the softmax.
        output: [H, Q, V], Output of each head, before ``o_proj``.
    """

    scores: Array
    output: Array

    def first_heads(self, heads: int) -> Attention:
        """The result for the first heads only."""
        return Attention(self.scores[:heads], self.output[:heads])


Rounding = Callable[[Array], Array]


@dataclass(frozen=True)
class Bound:
    """Bounds on relative L2 errors.

    Attributes:
        scores: Of the scores.
        output: Of the output.
    """

    scores: float
    output: float

    def __add__(self, other: Bound) -> Bound:
        return Bound(self.scores + other.scores, self.output + other.output)


@dataclass(frozen=True)
class AbsorptionError:
    """An error against its bound.

    Attributes:
        quantity: ``scores`` (scaled) or ``output`` (of each head, before ``o_proj``).
        form: What was computed.
        against: What it is compared with. ``float64`` is the absorbed form in float64; the decompressed form in
            float64 is computed for the first heads only.
        relative_l2: Length of the difference divided by the length of the reference.
        max_abs: Largest absolute difference.
        bound: What ``relative_l2`` may be at most.
    """

    quantity: Literal["scores", "output"]
    form: str
    against: str
    relative_l2: float
    max_abs: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is finite and within its bound."""
        return self.relative_l2 <= self.bound


@dataclass(frozen=True)
class AbsorptionResult:
    """Result of the absorption check in one type.

    Attributes:
        dtype: Type of the arguments and of everything stored between two operations.
        sizes: Sizes of the problem.
        seed: Seed of the random arguments.
        errors: Scores and outputs of both forms against float64, and of the forms against each other.
        decompressed_flops: Operations of the decompressed form.
        absorbed_flops: Operations of the absorbed form.
    """

    dtype: DType
    sizes: AbsorptionSizes
    seed: int
    errors: tuple[AbsorptionError, ...]
    decompressed_flops: int
    absorbed_flops: int

    @property
    def passed(self) -> bool:
        """Whether every error is within its bound."""
        return all(error.passed for error in self.errors)


def check_absorption(
    dtype: DType,
    sizes: AbsorptionSizes | None = None,
    *,
    softmax_scale: float | None = None,
    seed: int = 0,
) -> AbsorptionResult:
    """Runs both forms on one random layer and compares them.

    Args:
        dtype: Type the arguments and intermediate tensors are rounded to.
        sizes: Sizes; left out, DeepSeek-V3's with 2048 keys.
        softmax_scale: Factor on the scores; left out, (qk_nope_head_dim + qk_rope_head_dim)^-0.5.
        seed: Seed of the random arguments.

    Returns:
        The errors. At the default sizes this takes some 70 GFLOP in float32 and 15 in float64, and less than 1 GB of
        memory.
    """
    sizes = sizes or AbsorptionSizes()
    scale = softmax_scale or (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim) ** -0.5
    rounding = _rounding(dtype)
    problem = _random_problem(sizes, scale, seed).map(lambda array: rounding(array.astype(np.float32)))
    problem64 = problem.map(lambda array: array.astype(np.float64))
    # Decompressing in float64 takes most of the time, so the cheap form is the reference for all heads, and is itself
    # checked against the definition on the first few.
    exact = absorbed_attention(problem64, _keep)
    definition = decompressed_attention(next(problem64.head_blocks()), _keep)
    decompressed = decompressed_attention(problem, rounding)
    absorbed = absorbed_attention(problem, rounding)

    score_rms = root_mean_square(exact.scores)
    bounds64 = error_bounds(sizes, score_rms, sum_roundoff=2.0**-53, stored_roundoff=0.0)
    bounds = error_bounds(sizes, score_rms, sum_roundoff=2.0**-24, stored_roundoff=_STORED_ROUNDOFF[dtype])
    first = exact.first_heads(len(definition.scores))
    errors = (
        *_errors("absorbed float64", "decompressed float64", first, definition, bounds64[0] + bounds64[1]),
        *_errors("decompressed", "float64", decompressed, exact, bounds[0]),
        *_errors("absorbed", "float64", absorbed, exact, bounds[1]),
        *_errors("absorbed", "decompressed", absorbed, decompressed, bounds[0] + bounds[1]),
    )
    return AbsorptionResult(dtype, sizes, seed, errors, sizes.decompressed_flops, sizes.absorbed_flops)


def error_bounds(
    sizes: AbsorptionSizes, score_rms: float, *, sum_roundoff: float, stored_roundoff: float
) -> tuple[Bound, Bound]:
    """Bounds on the relative L2 errors against exact arithmetic.

    Two sources add up. A sum of n products whose signs are random has, relative to its own root mean square, an error
    of about sqrt(n / 2) roundoffs: n additions, each off by at most one roundoff times a partial sum that grows like
    a random walk; sqrt(n) is allowed. And a tensor that is rounded when it is stored between two operations is off by
    at most one roundoff of its type, which a sum of random signs carries over to its result unamplified. So

    - decompressed scores: sums over L and N + R; one rounding, of the keys;
    - absorbed scores: sums over N and L + R; one rounding, of the queries in latent space.

    A weight exp(s) is off by the absolute error of s. Averaged over the softmax, large scores weigh more: for normally
    distributed scores of root mean square r, weights shift their mean by r^2 and the root mean square becomes
    r sqrt(1 + r^2). With the weights' own rounding and the sum over S:

    - decompressed output: scores times r sqrt(1 + r^2); sums over L and S; roundings of weights, values and output;
    - absorbed output: likewise; sums over S and L; roundings of weights, output in latent space, and output.

    Args:
        sizes: Sizes of the problem.
        score_rms: Root mean square r of the scaled scores.
        sum_roundoff: Unit roundoff of the type that sums are taken in: 2^-24 in float32, 2^-53 in float64.
        stored_roundoff: Unit roundoff of the type tensors are stored in, where it differs: 2^-8 in bfloat16, 2^-11 in
            float16; 0 where it does not, since storing then rounds nothing.

    Returns:
        The decompressed form's bounds and the absorbed form's.
    """

    def sums(*lengths: int) -> float:
        return sum_roundoff * sum(math.sqrt(length) for length in lengths)

    latent, nope, rope = sizes.kv_lora_rank, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
    decompressed = sums(latent, nope + rope) + stored_roundoff
    absorbed = sums(nope, latent + rope) + stored_roundoff
    shift = score_rms * math.sqrt(1 + score_rms**2)
    behind = sums(latent, sizes.keys) + 3 * stored_roundoff
    return Bound(decompressed, decompressed * shift + behind), Bound(absorbed, absorbed * shift + behind)


def decompressed_attention(problem: AttentionProblem, rounding: Rounding) -> Attention:
    """Attention with each head's keys and values made from the latents, as the context group does it.

    Args:
        problem: Arguments, in the type that sums are taken in.
        rounding: Applied to each tensor that is stored between two operations.
    """
    blocks = []
    for block in problem.head_blocks():
        k_nope_HSN = rounding(block.latent @ block.k_up.transpose(0, 2, 1))
        v_HSV = rounding(block.latent @ block.v_up.transpose(0, 2, 1))
        scores_HQS = block.q_nope @ k_nope_HSN.transpose(0, 2, 1) + block.q_pe @ block.k_pe.T
        scores_HQS *= scores_HQS.dtype.type(block.softmax_scale)
        weights_HQS, sums_HQ = _exponentials(scores_HQS)
        blocks.append(Attention(scores_HQS, rounding(rounding(weights_HQS) @ v_HSV / sums_HQ[..., None])))
    return _join(blocks)


def absorbed_attention(problem: AttentionProblem, rounding: Rounding) -> Attention:
    """Attention on the latents, with the up-projections applied to queries and output, as the generation group does.

    Args:
        problem: Arguments, in the type that sums are taken in.
        rounding: Applied to each tensor that is stored between two operations.
    """
    blocks = []
    for block in problem.head_blocks():
        q_latent_HQL = rounding(block.q_nope @ block.k_up)
        scores_HQS = q_latent_HQL @ block.latent.T + block.q_pe @ block.k_pe.T
        scores_HQS *= scores_HQS.dtype.type(block.softmax_scale)
        weights_HQS, sums_HQ = _exponentials(scores_HQS)
        output_HQL = rounding(rounding(weights_HQS) @ block.latent / sums_HQ[..., None])
        blocks.append(Attention(scores_HQS, rounding(output_HQL @ block.v_up.transpose(0, 2, 1))))
    return _join(blocks)


def _errors(
    form: str, against: str, actual: Attention, reference: Attention, bound: Bound
) -> tuple[AbsorptionError, AbsorptionError]:
    return (
        AbsorptionError(
            "scores",
            form,
            against,
            relative_l2_error(actual.scores, reference.scores),
            max_abs_error(actual.scores, reference.scores),
            bound.scores,
        ),
        AbsorptionError(
            "output",
            form,
            against,
            relative_l2_error(actual.output, reference.output),
            max_abs_error(actual.output, reference.output),
            bound.output,
        ),
    )


def _exponentials(scores_HQS: Array) -> tuple[Array, Array]:
    """Weights with largest 1, and their sums: the kernels divide at the end, and sum what was not yet rounded."""
    weights_HQS = np.exp(scores_HQS - scores_HQS.max(axis=-1, keepdims=True))
    return weights_HQS, weights_HQS.sum(axis=-1)


def _join(blocks: list[Attention]) -> Attention:
    return Attention(
        np.concatenate([block.scores for block in blocks]), np.concatenate([block.output for block in blocks])
    )


def _rounding(dtype: DType) -> Rounding:
    if dtype is DType.FLOAT32:
        return _keep
    return lambda array: array.astype(dtype.numpy).astype(np.float32)


def _keep(array: Array) -> Array:
    return array


def _random_problem(sizes: AbsorptionSizes, softmax_scale: float, seed: int) -> AttentionProblem:
    """Arguments at the scale of a trained layer.

    Latents come out of a norm, so they have unit variance; ``kv_b_proj`` keeps the variance; queries are such that
    scaled scores have a standard deviation of about 2, with which a softmax over 2048 keys is neither flat nor a
    single spike.
    """
    generator = np.random.default_rng(seed)
    heads, queries, latent = sizes.num_attention_heads, sizes.queries, sizes.kv_lora_rank
    query_std = 2.0 / (softmax_scale * math.sqrt(sizes.qk_nope_head_dim + sizes.qk_rope_head_dim))
    weight_std = latent**-0.5

    def normal(*shape: int, std: float = 1.0) -> Array:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)

    return AttentionProblem(
        q_nope=normal(heads, queries, sizes.qk_nope_head_dim, std=query_std),
        q_pe=normal(heads, queries, sizes.qk_rope_head_dim, std=query_std),
        latent=normal(sizes.keys, latent),
        k_pe=normal(sizes.keys, sizes.qk_rope_head_dim),
        k_up=normal(heads, sizes.qk_nope_head_dim, latent, std=weight_std),
        v_up=normal(heads, sizes.v_head_dim, latent, std=weight_std),
        softmax_scale=softmax_scale,
    )
