"""Compiles kernel variants ahead of time, as an engine build does, and reads what came out."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trtllm_mla.ops.kernels import jit_kernel
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

    @property
    def scalar_global_accesses(self) -> int:
        """Global loads and stores of a single element."""
        return len(re.findall(r"(?:ld|st)\.global(?!\S*\.v[24]\.)", self.ptx))


def compile_variant(variant: KernelVariant, target: Target, directory: Path) -> Compiled:
    """Compiles a variant for a target; needs no GPU.

    Args:
        variant: The variant.
        target: The GPU generation.
        directory: Where the cubin is put.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**dict(variant.constants), "INTERPRET": False}
    source = ASTSource(
        fn=jit_kernel(variant.op, variant.kernel),
        signature={**dict(variant.signature), **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, (_, parameter_type) in enumerate(variant.signature)
            if parameter_type.startswith("*")
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", target.compute_capability, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True},
    )
    cubin = directory / f"{variant.key}-{target.name}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack, usage
    return Compiled(compiled.metadata.shared, int(stack[1]), compiled.asm["ptx"])
