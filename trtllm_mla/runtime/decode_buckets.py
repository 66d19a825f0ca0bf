"""Decode steps in a few shapes: what a CUDA graph, which repeats launches of fixed shapes, can be captured for.

A decode step of R requests has one new token and one row of logits for each, and no context group. It is padded to a
bucket of B >= R requests and a page table of W columns with requests that touch nothing:

- The slot of their token lies outside the pool, so that AppendLatent writes no row.
- They have no cached tokens, so that LatentAttention's output for them is 0 and no key is read.
- Token 0 at position 0 goes through the rest of the network, whose rows do not depend on each other. All padding is
  alike, and reads the weights of the same few experts.

Plans and kernels of LatentAttention find the pieces of the real requests as without padding: a request without keys
adds nothing to the sum of tiles that sizes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.ops.plan import next_power_of_two
from trtllm_mla.runtime.step import StepInputs

NO_SLOT = -1


@dataclass(frozen=True)
class DecodeBucket:
    """The shape of padded decode steps.

    Attributes:
        num_requests: Requests, real ones and padding.
        num_pages: Columns of the page table.
    """

    num_requests: int
    num_pages: int


@dataclass(frozen=True)
class DecodeBuckets:
    """The buckets of an engine: powers of two and the limits themselves, in both dimensions.

    Attributes:
        max_requests: Requests of the largest.
        max_pages: Columns of the widest page table.
        pad_requests: Whether requests may be padded. Otherwise each number of requests is a bucket.
    """

    max_requests: int
    max_pages: int
    pad_requests: bool = True

    def find(self, step: StepInputs) -> DecodeBucket | None:
        """The smallest bucket that holds a step; None where it is no decode step, or too large."""
        requests, pages = step.kv_cache_block_offsets.shape
        if not _is_decode(step) or requests > self.max_requests or pages > self.max_pages:
            return None
        padded = min(next_power_of_two(requests), self.max_requests) if self.pad_requests else requests
        return DecodeBucket(padded, min(next_power_of_two(pages), self.max_pages))


def pad_decode(step: StepInputs, bucket: DecodeBucket) -> StepInputs:
    """Pads a decode step to a bucket.

    Args:
        step: A step that ``DecodeBuckets.find`` has a bucket for.
        bucket: That bucket, or a larger one.

    Returns:
        The padded step. Its first rows of logits are the step's, its other rows mean nothing.

    Raises:
        ValueError: The step is no decode step, or does not fit.
    """
    requests, pages = step.kv_cache_block_offsets.shape
    if not _is_decode(step) or requests > bucket.num_requests or pages > bucket.num_pages:
        raise ValueError(
            f"found a step of {len(step.input_ids)} tokens, {requests} requests and {pages} pages, expected a decode "
            f"step within {bucket}"
        )
    more = bucket.num_requests - requests
    rows = np.arange(bucket.num_requests + 1, dtype=np.int32)
    return replace(
        step,
        input_ids=_padded(step.input_ids, more, 0),
        slot_mapping=_padded(step.slot_mapping, more, NO_SLOT),
        last_token_ids=rows[:-1],
        generation_position_ids=_padded(step.generation_position_ids, more, 0),
        generation_query_offsets=rows,
        generation_sequence_length=_padded(step.generation_sequence_length, more, 0),
        generation_query_index=rows[:-1, None],
        kv_cache_block_offsets=np.pad(step.kv_cache_block_offsets, ((0, more), (0, bucket.num_pages - pages))),
    )


def _is_decode(step: StepInputs) -> bool:
    requests = len(step.generation_sequence_length)
    return (
        requests > 0
        and len(step.input_ids) == len(step.generation_position_ids) == len(step.last_token_ids) == requests
        and step.generation_query_index.shape == (requests, 1)
    )


def _padded(values: npt.NDArray[Any], count: int, value: int) -> npt.NDArray[Any]:
    return np.pad(values, (0, count), constant_values=value)
