"""How LatentAttention cuts keys into pieces, worked out one request after the other from the rule in ``plan``."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trtllm_mla.ops.plan import LaunchPlan, ScalarArgument


@dataclass(frozen=True)
class Piece:
    """Keys of a request that one program goes through for a row block.

    Attributes:
        request: The request.
        row_block: The row block, counted within the request.
        tiles: The tiles of keys, counted within the request.
        slot: Where in the workspace the partial results lie; None where the row block is not split.
    """

    request: int
    row_block: int
    tiles: range
    slot: int | None


def cut(
    queries: Sequence[int], lengths: Sequence[int], *, heads: int, block_m: int, block_n: int, target_pieces: int
) -> list[Piece]:
    """The pieces of requests with so many new tokens and keys."""
    row_blocks = [-(-count * heads // block_m) for count in queries]
    tiles = [-(-length // block_n) for length in lengths]
    total = sum(blocks * count for blocks, count in zip(row_blocks, tiles, strict=True))
    largest = max(2, -(-total // target_pieces))
    pieces, slots = [], 0
    for request, (blocks, count) in enumerate(zip(row_blocks, tiles, strict=True)):
        parts = max(1, -(-count // largest))
        size = -(-count // parts)
        for part in range(parts):
            for row_block in range(blocks):
                slot = slots if parts > 1 else None
                slots += parts > 1
                pieces.append(Piece(request, row_block, range(part * size, min(part * size + size, count)), slot))
    return pieces


def makespan(durations: Iterable[int], slots: int) -> int:
    """When the last of the pieces ends, if whichever slot is free first takes the next one."""
    free_at = [0] * slots
    for duration in durations:
        heapq.heapreplace(free_at, free_at[0] + duration)
    return max(free_at)


def scalar(plan: LaunchPlan, name: str) -> int:
    """A number that the first launch of a plan passes."""
    launch = plan.launches[0]
    argument = launch.arguments[[parameter for parameter, _ in launch.variant.signature].index(name)]
    assert isinstance(argument, ScalarArgument)
    return int(argument.value)


def pieces_of(plan: LaunchPlan, requests: Sequence[tuple[int, int]]) -> list[Piece]:
    """The pieces of a plan that splits, for requests of (new tokens, cached tokens)."""
    constants = dict(plan.launches[0].variant.constants)
    return cut(
        [count for count, _ in requests],
        [length for _, length in requests],
        heads=constants["HEADS"],
        block_m=constants["BLOCK_M"],
        block_n=constants["BLOCK_N"],
        target_pieces=scalar(plan, "target_pieces"),
    )


def parts_of(plan: LaunchPlan, requests: Sequence[tuple[int, int]]) -> list[int]:
    """Into how many pieces the row blocks of each request are cut; all whole where the plan does not split."""
    if len(plan.launches) == 1:
        return [1] * len(requests)
    pieces = pieces_of(plan, requests)
    return [
        max(1, len({piece.tiles for piece in pieces if piece.request == request})) for request in range(len(requests))
    ]
