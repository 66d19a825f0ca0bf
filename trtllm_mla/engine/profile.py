"""The optimization profile: the least, usual and greatest size of every dimension that an engine accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_mla.config import BuildConfig
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import LATENT_DIMS, past_latent
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.ops.definition import split_dim
from trtllm_mla.ops.plan import MAX_INT32

# Least, usual and greatest shape of a tensor.
ShapeRange = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class SizeRange:
    """Sizes of a dimension.

    Attributes:
        min: Least size.
        opt: Size that TensorRT tunes for.
        max: Greatest size.
    """

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise ValueError(f"found {self}, expected 0 <= min <= opt <= max")

    def __add__(self, other: SizeRange | int) -> SizeRange:
        """Sizes of a dimension that is the sum of two, or of one and a number."""
        if isinstance(other, int):
            other = SizeRange(other, other, other)
        return SizeRange(self.min + other.min, self.opt + other.opt, self.max + other.max)


def size_ranges(config: BuildConfig) -> dict[str, SizeRange]:
    """Sizes of the dimensions of ``network/contract.py``.

    TensorRT checks shapes where all dimensions are least, usual, and greatest, so ``tokens`` is the sum of the two
    groups' sizes at each, although a step has at most ``max_num_tokens``. A pool has at most the pages of
    ``max_batch_size`` requests of ``max_seq_len`` tokens: no more requests run at once. Index matrices and page tables
    have at least one column.

    Args:
        config: The effective build config: its ``mla_plugin`` is the engine's.

    Raises:
        UserError: Cache slots of the largest pool, or the tokens of both groups, do not fit in 32 bits.
    """
    plugin = config.mla_plugin
    tokens, requests = config.max_num_tokens, config.max_batch_size
    pages = requests * config.pages_per_request
    if pages * plugin.page_size > MAX_INT32:
        raise UserError(
            f"max_batch_size {requests} and max_seq_len {config.max_seq_len} make a cache of {pages} pages of "
            f"{plugin.page_size} tokens, expected at most {MAX_INT32} tokens: slots are 32-bit numbers. Lower one of "
            "them."
        )
    opt_tokens, opt_requests = config.effective_opt_num_tokens, config.effective_opt_batch_size
    context_tokens = SizeRange(0, opt_tokens, tokens)
    context_keys = config.max_context_kv_tokens
    longest_key = min(config.max_seq_len, context_keys)
    history: dict[str, SizeRange] = {}
    for number in range(1, plugin.max_context_passes):
        # A pass over older tokens that has any is full more often than not.
        history[f"context_history_keys_{number}"] = SizeRange(0, context_keys, context_keys)
        history[f"context_longest_history_key_{number}"] = SizeRange(1, longest_key, longest_key)
    ranges = {
        "logit_rows": SizeRange(0, opt_requests, tokens),
        "positions": SizeRange(1, config.max_seq_len, config.max_seq_len),
        "pages": SizeRange(1, pages, pages),
        "page_size": SizeRange(plugin.page_size, plugin.page_size, plugin.page_size),
        "context_tokens": context_tokens,
        "context_keys": SizeRange(0, min(opt_tokens, context_keys), context_keys),
        "context_requests": SizeRange(0, 1, requests),
        "context_longest_query": SizeRange(1, opt_tokens, tokens),
        "context_longest_key": SizeRange(1, min(opt_tokens, longest_key), longest_key),
        **history,
    }
    if not plugin.enable_matrix_absorption:
        return {**ranges, "tokens": context_tokens}
    absorbed = _max_generation_tokens(config)
    if tokens + absorbed >= MAX_INT32:
        raise UserError(
            f"max_num_tokens: found {tokens}, expected at most {MAX_INT32 // 2}: both groups' tokens together are a "
            "32-bit number. Lower it."
        )
    generation_tokens = SizeRange(0, min(opt_requests, absorbed), absorbed)
    return {
        **ranges,
        "tokens": context_tokens + generation_tokens,
        "generation_tokens": generation_tokens,
        "generation_requests": SizeRange(0, opt_requests, requests),
        "generation_longest_query": SizeRange(1, 1, absorbed),
        "pages_per_request": SizeRange(1, config.pages_per_request, config.pages_per_request),
    }


def shape_ranges(dims: tuple[str | int, ...], ranges: Mapping[str, SizeRange]) -> ShapeRange:
    """Least, usual and greatest shape of a tensor.

    Args:
        dims: Its dimensions, in the contract's notation: names, ``name+1``, or sizes.
        ranges: Sizes of the named ones.
    """
    sizes = []
    for dim in dims:
        name, offset = split_dim(dim)
        sizes.append(SizeRange(offset, offset, offset) if name is None else ranges[name] + offset)
    return (
        tuple(size.min for size in sizes),
        tuple(size.opt for size in sizes),
        tuple(size.max for size in sizes),
    )


def input_shape_ranges(network: NetworkDirectory, config: BuildConfig) -> dict[str, ShapeRange]:
    """Least, usual and greatest shape of every input whose shape differs from step to step or is the profile's.

    Args:
        network: The network.
        config: The effective build config: its ``mla_plugin`` is the engine's.

    Raises:
        UserError: See ``size_ranges``.
    """
    ranges = size_ranges(config)
    ranges["qk_rope_head_dim"] = SizeRange(*3 * (network.spec.qk_rope_head_dim,))
    ranges["latent_width"] = SizeRange(*3 * (network.row_layout.width,))
    dims: dict[str, tuple[str | int, ...]] = {item.name: item.dims for item in network.step_inputs}
    dims |= {past_latent(layer): LATENT_DIMS for layer in range(network.num_layers)}
    return {name: shape_ranges(names, ranges) for name, names in dims.items()}


def _max_generation_tokens(config: BuildConfig) -> int:
    """Tokens of the generation group: chunks below the threshold, or longer ones whose history is too long."""
    if config.max_seq_len > config.max_context_kv_tokens * config.mla_plugin.max_context_passes:
        return config.max_num_tokens
    longest_chunk = max(config.mla_plugin.prefill_absorption_threshold - 1, 1)
    return min(config.max_num_tokens, config.max_batch_size * longest_chunk)
