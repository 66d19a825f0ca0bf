"""Compiles kernel variants ahead of time, as an engine build does, and reads what came out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trtllm_mla.engine import kernel_compiler, kernel_resources
from trtllm_mla.ops.plan import KernelVariant
from trtllm_mla.targets import Target


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes and does.

    Attributes:
        shared_memory_bytes: Dynamic shared memory of a block.
        stack_bytes: Local memory of a thread; more than 0 means that registers were spilled.
        ptx: The code before assembly.
    """

    shared_memory_bytes: int
    stack_bytes: int
    ptx: str

    @property
    def wide_accesses(self) -> int:
        """Global loads and stores, and copies to shared memory, of 16 bytes."""
        return len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32|cp\.async\.cg\S* \[[^]]*\], \[[^]]*\], 0x10", self.ptx))


def compile_variant(variant: KernelVariant, target: Target, directory: Path) -> Compiled:
    """Compiles a variant for a target; needs no GPU.

    Args:
        variant: The variant.
        target: The GPU generation.
        directory: Where Triton's cache is put.
    """
    with kernel_compiler.triton_cache(directory / "triton-cache"):
        compiled = kernel_compiler.compile_variant(variant, target)
    _, stack_bytes = kernel_resources.resource_usage(compiled.asm["cubin"])
    return Compiled(compiled.metadata.shared, stack_bytes, compiled.asm["ptx"])
