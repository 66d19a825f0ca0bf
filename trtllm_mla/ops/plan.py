"""Launch plans: what an operation runs, as data.

A plan holds integers, floats and names only, so it can be executed by the interpreter, by a plugin that launches
cubins, or be written to a file.

The function that makes an operation's plan is also run on sizes that are not known yet (``ops/expression.py``), to
find what it does for all of them. It therefore has ``minimum``, ``maximum`` and ``repeat`` where it could have
``min``, ``max`` and a ``for`` loop over such sizes; decisions by comparisons are followed as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.ops.expression import is_known

WORKSPACE_ALIGNMENT = 256
MAX_INT32 = 2**31 - 1
# Largest grids that CUDA launches: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MAX_GRID = (MAX_INT32, 65535, 65535)
ITEMSIZES = {"fp32": 4, "i32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class KernelVariant:
    """One compilation of a Triton kernel.

    Attributes:
        op: Name of the operation whose ``kernels`` module holds it.
        kernel: Name of the kernel function.
        signature: Name and Triton type of each run-time parameter, in order: ``*bf16``, ``i32``, ``fp32``, ...
        constants: Name and value of each ``tl.constexpr`` parameter, but for ``INTERPRET``, which every kernel has
            as its last parameter and whoever runs it sets.
        num_warps: Warps of a block.
        num_stages: Software pipelining depth.
        fp_fusion: Whether a product and a sum may become one operation, which rounds once. Without it a kernel has the
            bits of its formula.
    """

    op: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | bool], ...]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True

    @property
    def key(self) -> str:
        """A name that is the same for equal variants and no others, fit for a file name."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class TensorArgument:
    """Address of an input or output of the operation.

    Attributes:
        name: Its name in the contract.
    """

    name: str


@dataclass(frozen=True)
class WorkspaceArgument:
    """Address inside the workspace.

    Attributes:
        offset: Bytes from its start, a multiple of ``WORKSPACE_ALIGNMENT``.
        dtype: Triton element type of what lies there, for example ``fp32``.
        elements: How many of them.
    """

    offset: int
    dtype: str
    elements: int


@dataclass(frozen=True)
class ScalarArgument:
    """A number.

    Attributes:
        value: The number; its type is the parameter's.
    """

    value: int | float


Argument = TensorArgument | WorkspaceArgument | ScalarArgument


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        variant: What to launch.
        grid: Blocks along x, y and z, each at least 1.
        arguments: One for each run-time parameter of the variant's signature, in order.
    """

    variant: KernelVariant
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]

    def __post_init__(self) -> None:
        if len(self.arguments) != len(self.variant.signature):
            raise ValueError(
                f"{self.variant.kernel}: found {len(self.arguments)} arguments, expected {len(self.variant.signature)}"
            )
        if not all(1 <= blocks <= limit for blocks, limit in zip(self.grid, MAX_GRID, strict=True)):
            raise ValueError(f"{self.variant.kernel}: found grid {self.grid}, expected 1 to {MAX_GRID}")


@dataclass(frozen=True)
class LaunchPlan:
    """Launches to run one after the other on one stream. Empty where there is nothing to do.

    Attributes:
        launches: The launches.
        workspace_bytes: Scratch memory they share; its content before the first launch is arbitrary.
    """

    launches: tuple[Launch, ...]
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Repetition:
    """Launches that are repeated a number of times that is not known yet. Only traced plans have any.

    Attributes:
        stop: Where repetitions end.
        step: How far they are apart.
        launches: Makes the launches of the repetition at a number.
    """

    stop: int
    step: int
    launches: Callable[[int], Sequence[Launch]]


def repeat(stop: int, step: int, launches: Callable[[int], Sequence[Launch]]) -> tuple[Launch, ...]:
    """The launches for 0, ``step``, 2 * ``step``, ... below ``stop``, one after the other.

    Args:
        stop: Where repetitions end.
        step: How far they are apart, at least 1.
        launches: Makes the launches for a number.
    """
    if is_known(stop) and is_known(step):
        return tuple(launch for number in range(0, stop, step) for launch in launches(number))
    return (cast("Launch", Repetition(stop, step, launches)),)


class WorkspaceLayout:
    """Hands out aligned parts of a workspace while a plan is made."""

    def __init__(self) -> None:
        self.size = 0

    def reserve(self, dtype: str, elements: int) -> WorkspaceArgument:
        """Reserves room for ``elements`` of a Triton element type and returns its place."""
        offset = self.size
        self.size += ceil_div(elements * ITEMSIZES[dtype], WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        return WorkspaceArgument(offset, dtype, elements)


def ceil_div(value: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-value // divisor)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``, which is at least 1."""
    return 1 << (value - 1).bit_length()


def quantized_constants(layout: RowLayout) -> tuple[tuple[str, int | bool], ...]:
    """The compile-time parameters that tell a kernel where the parts of a quantised row are.

    CODE_BYTES, the offsets and ROW_BYTES are bytes. The latent is padded to BLOCK_LATENT elements, a power of two,
    in BLOCK_SCALES blocks that share a scale.
    """
    block_latent = max(16, next_power_of_two(layout.kv_lora_rank))
    return (
        ("FP8", layout.dtype is CacheDType.FP8),
        ("CODE_BYTES", layout.code_bytes),
        ("SCALE_OFFSET", layout.scale_offset),
        ("NUM_SCALES", layout.num_scales),
        ("ROPE_OFFSET", layout.rope_offset),
        ("ROW_BYTES", layout.row_bytes),
        ("BLOCK_LATENT", block_latent),
        ("BLOCK_SCALES", max(1, block_latent // layout.block_size)),
    )
