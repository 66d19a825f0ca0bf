"""Launch plan of ContextAttention: one launch, one program for each block of a request's rows and each head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.ops.plan import (
    KernelVariant,
    Launch,
    LaunchPlan,
    ScalarArgument,
    TensorArgument,
    next_power_of_two,
)
from trtllm_mla.targets import KIB

if TYPE_CHECKING:
    from trtllm_mla.ops.definition import Problem
    from trtllm_mla.targets import Target

# tl.dot needs at least this many rows and columns.
_MIN_DOT = 16


@dataclass(frozen=True)
class HeadBlocks:
    """A head's sizes, padded to what a tile can have: powers of two of at least 16.

    Attributes:
        nope: Query and key without rotary embedding.
        rope: Rotary query and key.
        v: Value.
    """

    nope: int
    rope: int
    v: int

    @property
    def total(self) -> int:
        """Elements of a key and its value."""
        return self.nope + self.rope + self.v


@dataclass(frozen=True)
class Tile:
    """How a program is laid out.

    Attributes:
        block_m: Query rows of a program.
        block_n: Keys it works on at once.
        num_warps: Warps.
        num_stages: Software pipelining depth.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launch: row blocks times heads programs.

    Only the device knows the requests' lengths. Request r starts at row block offsets[r] // BLOCK_M + r, which leaves
    every request the blocks it needs and bounds their number by tokens // BLOCK_M + requests; blocks too many end at
    once.
    """
    dims = problem.dims
    softmax_scale, causal = problem.attributes["softmax_scale"], problem.attributes["causal"]
    if softmax_scale <= 0:
        raise ValueError(f"ContextAttention: found softmax_scale {softmax_scale}, expected > 0")
    if causal not in (0, 1):
        raise ValueError(f"ContextAttention: found causal {causal}, expected 0 or 1")
    if dims["tokens"] == 0 or dims["requests"] == 0:
        return LaunchPlan(())
    variant = _variant(problem)
    row_blocks = dims["tokens"] // dict(variant.constants)["BLOCK_M"] + dims["requests"]
    arguments = (
        TensorArgument("q_nope"),
        TensorArgument("q_pe"),
        TensorArgument("k_nope"),
        TensorArgument("k_pe"),
        TensorArgument("v"),
        TensorArgument("query_offsets"),
        TensorArgument("key_offsets"),
        TensorArgument("output"),
        TensorArgument("log_sum_exp"),
        ScalarArgument(dims["tokens"]),
        ScalarArgument(dims["keys"]),
        ScalarArgument(dims["requests"]),
        ScalarArgument(causal),
        ScalarArgument(softmax_scale * math.log2(math.e)),
    )
    return LaunchPlan((Launch(variant, (row_blocks * dims["heads"], 1, 1), arguments),))


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """The one variant that ``plan`` uses, whatever ``causal`` is."""
    return (_variant(problem),)


def choose_tile(head: HeadBlocks, dtype: DType, target: Target) -> Tile:
    """The largest tile that fits the target's shared memory and compiles without spilling registers.

    Raises:
        UserError: The head is too large for every tile.
    """
    # Operands in shared memory leave registers for 64 keys. The accumulator of 128 rows fits the registers beside
    # heads of up to 128 + 64 and 128. Fp32 is multiplied without tensor cores, in registers.
    candidates = [
        tile
        for tile, fits_registers in (
            (Tile(128, 64, 8, 3), dtype.itemsize == 2 and head.total <= 320 and _multiplies_shared(target)),
            # On sm_80 a third stage costs the last registers.
            (Tile(128, 32, 8, 3), dtype.itemsize == 2 and head.total <= 320 and target.name != "sm_80"),
            (Tile(128, 32, 8, 2), dtype.itemsize == 2 and head.total <= 320),
            (Tile(64, 32, 8, 3), dtype.itemsize == 2),
            (Tile(64, 32, 8, 2), dtype.itemsize == 2),
            (Tile(16, 16, 8, 2), True),
        )
        if fits_registers
    ]
    for tile in candidates:
        if shared_memory_bytes(tile, head, dtype, target) <= target.shared_memory_bytes:
            return tile
    raise UserError(
        f"ContextAttention: found heads of {head.nope} + {head.rope} and {head.v} elements of {dtype} (padded), which "
        f"need {shared_memory_bytes(candidates[-1], head, dtype, target)} bytes of shared memory; {target.name} has "
        f"{target.shared_memory_bytes}. Use a 16-bit type or another target."
    )


def shared_memory_bytes(tile: Tile, head: HeadBlocks, dtype: DType, target: Target) -> int:
    """Upper bound on the shared memory of a program, as Triton 3.9 compiles it.

    The query block, the keys and values in flight, and what is rearranged between threads: the weights on their way
    to the second product, or the keys that fp32 multiplies in parts. Tensor cores that read keys and values from
    shared memory still hold a tile while the one ``num_stages`` behind it is loaded.
    """
    queries = tile.block_m * (head.nope + head.rope)
    keys_and_values = tile.block_n * head.total
    tiles_in_flight = tile.num_stages if _multiplies_shared(target) else tile.num_stages - 1
    rearranged = tile.block_n * (head.nope if dtype is DType.FLOAT32 else tile.block_m)
    elements = queries + tiles_in_flight * keys_and_values + rearranged
    return elements * dtype.itemsize + KIB


def _multiplies_shared(target: Target) -> bool:
    """Whether the tensor cores read both operands from shared memory (wgmma, tcgen05) and not from registers."""
    return target.compute_capability in (90, 100)


def _variant(problem: Problem) -> KernelVariant:
    dims = problem.dims
    head = HeadBlocks(*(max(_MIN_DOT, next_power_of_two(dims[name])) for name in ("nope_dim", "rope_dim", "v_dim")))
    tile = choose_tile(head, problem.model_dtype, problem.target)
    model = problem.model_dtype.triton
    return KernelVariant(
        op="ContextAttention",
        kernel="context_attention",
        signature=(
            ("q_nope", f"*{model}"),
            ("q_pe", f"*{model}"),
            ("k_nope", f"*{model}"),
            ("k_pe", f"*{model}"),
            ("v", f"*{model}"),
            ("query_offsets", "*i32"),
            ("key_offsets", "*i32"),
            ("output", f"*{model}"),
            ("log_sum_exp", "*fp32"),
            ("tokens", "i32"),
            ("keys", "i32"),
            ("requests", "i32"),
            ("causal", "i32"),
            ("softmax_scale_log2", "fp32"),
        ),
        constants=(
            ("HEADS", dims["heads"]),
            ("NOPE_DIM", dims["nope_dim"]),
            ("ROPE_DIM", dims["rope_dim"]),
            ("V_DIM", dims["v_dim"]),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_N", tile.block_n),
            ("BLOCK_NOPE", head.nope),
            ("BLOCK_ROPE", head.rope),
            ("BLOCK_V", head.v),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
