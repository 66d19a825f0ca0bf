"""Inputs and outputs of a network: what the graph declares, an engine's profiles bound, and a runtime fills.

New tokens are packed without padding: first the context group, then the generation group. The groups' sizes travel
as shapes, so that the host knows them without reading device memory.

The context group's attention runs in a fixed number of passes. The first is causal, over each request's newest cached
tokens, the new ones among them; each further one reads older tokens, of which there may be none, without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StepInput:
    """An input that differs from step to step.

    Attributes:
        name: Its name.
        dtype: Element type.
        dims: Names of its dimensions; ``name+1`` is one more than ``name``.
        group: Group it belongs to, or None for both. Without matrix absorption there is no generation group.
        meaning: What it holds.
    """

    name: str
    dtype: Literal["int32", "float32"]
    dims: tuple[str, ...]
    group: Literal["context", "generation"] | None
    meaning: str


STEP_INPUTS = (
    StepInput("input_ids", "int32", ("tokens",), None, "new tokens, context group first"),
    StepInput("slot_mapping", "int32", ("tokens",), None, "cache slot of each new token: page * page_size + offset"),
    StepInput("last_token_ids", "int32", ("logit_rows",), None, "rows (from 0) whose logits are wanted"),
    StepInput(
        "rotary_cos_sin",
        "float32",
        ("positions", "qk_rope_head_dim"),
        None,
        "cosines of each position's qk_rope_head_dim / 2 angles, then their sines",
    ),
    StepInput("context_position_ids", "int32", ("context_tokens",), "context", "position of each new token"),
    StepInput(
        "context_kv_slots",
        "int32",
        ("context_keys",),
        "context",
        "slots of the cached tokens of the first pass, the new ones included, request after request",
    ),
    StepInput(
        "context_query_offsets", "int32", ("context_requests+1",), "context", "prefix sums of new tokens a request"
    ),
    StepInput(
        "context_key_offsets",
        "int32",
        ("context_requests+1",),
        "context",
        "prefix sums of the first pass's cached tokens a request",
    ),
    StepInput(
        "context_query_index",
        "int32",
        ("context_requests", "context_longest_query"),
        "context",
        "rows in the group of each request's new tokens, padded with 0",
    ),
    StepInput(
        "context_key_index",
        "int32",
        ("context_requests", "context_longest_key"),
        "context",
        "rows in context_kv_slots of each request's cached tokens, padded with 0",
    ),
    StepInput("generation_position_ids", "int32", ("generation_tokens",), "generation", "position of each new token"),
    StepInput(
        "generation_query_offsets",
        "int32",
        ("generation_requests+1",),
        "generation",
        "prefix sums of new tokens a request",
    ),
    StepInput(
        "generation_sequence_length",
        "int32",
        ("generation_requests",),
        "generation",
        "cached tokens of each request, the new ones included",
    ),
    StepInput(
        "generation_query_index",
        "int32",
        ("generation_requests", "generation_longest_query"),
        "generation",
        "rows in the group of each request's new tokens, padded with 0",
    ),
    StepInput(
        "kv_cache_block_offsets",
        "int32",
        ("generation_requests", "pages_per_request"),
        "generation",
        "page numbers of each request; entries behind its last page are never read",
    ),
)

LATENT_DIMS = ("pages", "page_size", "latent_width")
LOGITS = "logits"
# Key of the graph's metadata that holds the type of the latent cache: the pools of all quantised types are int8.
CACHE_DTYPE_KEY = "kv_cache_dtype"


def history_inputs(number: int) -> tuple[StepInput, StepInput, StepInput]:
    """The step inputs of a pass over older tokens: slots, offsets, index.

    Args:
        number: The pass, from 1.
    """
    slots = f"context_history_kv_slots_{number}"
    return (
        StepInput(
            slots,
            "int32",
            (f"context_history_keys_{number}",),
            "context",
            f"slots of the cached tokens of pass {number}, request after request",
        ),
        StepInput(
            f"context_history_key_offsets_{number}",
            "int32",
            ("context_requests+1",),
            "context",
            f"prefix sums of the cached tokens of pass {number} a request",
        ),
        StepInput(
            f"context_history_key_index_{number}",
            "int32",
            ("context_requests", f"context_longest_history_key_{number}"),
            "context",
            f"rows in {slots} of each request's cached tokens, padded with 0",
        ),
    )


def step_inputs(*, absorption: bool, context_passes: int = 1) -> tuple[StepInput, ...]:
    """The step inputs of a network.

    Args:
        absorption: Whether there is a generation group.
        context_passes: Passes of the context group's attention.
    """
    history = tuple(item for number in range(1, context_passes) for item in history_inputs(number))
    return tuple(item for item in STEP_INPUTS if absorption or item.group != "generation") + history


def past_latent(layer: int) -> str:
    """Name of a layer's cache input: a pool of ``LATENT_DIMS``."""
    return f"past_latent_{layer}"


def present_latent(layer: int) -> str:
    """Name of a layer's cache output, the same memory as its input."""
    return f"present_latent_{layer}"
