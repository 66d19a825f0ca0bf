"""Compiles kernels ahead of time, on any machine: Triton to cubins.

Compilation is sequential: a kernel takes about a second, and most of it holds Python's interpreter lock.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_mla.engine.launcher import POINTER_ALIGNMENT, WARP_SIZE
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.ops.kernels import jit_kernel
from trtllm_mla.ops.plan import KernelVariant
from trtllm_mla.targets import KIB, Target

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from trtllm_mla.engine.kernel_store import KernelStore

CACHE_ENVIRONMENT_VARIABLE = "TRTLLM_MLA_CACHE_DIR"

Job = tuple[KernelVariant, Target]
Progress = Callable[[str, int, int], None]


def default_cache_dir() -> Path:
    """Where compiled kernels are kept between builds.

    ``$TRTLLM_MLA_CACHE_DIR``, else ``trtllm-mla`` below the XDG cache directory.
    """
    named = os.environ.get(CACHE_ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trtllm-mla"


def compile_kernels(
    jobs: Sequence[Job], directory: Path, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> KernelStore:
    """Compiles kernel variants and writes them with their manifest.

    Args:
        jobs: What to compile, for which target.
        directory: Folder to write to; it exists and is empty.
        cache_dir: Where compiled kernels are kept between builds, under a digest of their source, Triton's version and
            all options; None for the default.
        progress: Called before each kernel with its name, its index from 0, and the number of kernels.

    Returns:
        What was written.

    Raises:
        MissingDependencyError: Triton is not installed.
        UserError: A kernel takes more shared memory than its target has.
    """
    # Compiling alone takes nothing but Triton; the manifest's checks are pydantic's.
    from trtllm_mla.engine.kernel_store import Cubin, KernelStore, cubin_path

    try:
        import triton
    except ModuleNotFoundError as error:
        raise MissingDependencyError("triton", "compile the MLA kernels", "rtx") from error
    jobs = tuple(dict.fromkeys(jobs))
    cubins = []
    with triton_cache(cache_dir or default_cache_dir()):
        for index, (variant, target) in enumerate(jobs):
            if progress is not None:
                progress(f"{variant.kernel} for {target.name}", index, len(jobs))
            compiled = compile_variant(variant, target)
            code: bytes = compiled.asm["cubin"]
            path = cubin_path(directory, variant, target.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(code)
            metadata = compiled.metadata
            digest = hashlib.sha256(code).hexdigest()
            cubins.append(Cubin(variant, target.name, metadata.name, metadata.shared, digest, path))
    store = KernelStore(cubins, triton.__version__)
    store.write_manifest(directory)
    return store


def compile_variant(variant: KernelVariant, target: Target) -> CompiledKernel:
    """Compiles one variant for a target; needs no GPU. ``triton_cache`` says where Triton keeps it.

    Raises:
        UserError: The kernel takes more shared memory than the target has.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants: dict[str, Any] = {**dict(variant.constants), "INTERPRET": False}
    # Without the hint, pointers count as unaligned and 16-byte loads fall apart into 4-byte ones.
    alignment = [["tt.divisibility", POINTER_ALIGNMENT]]
    source = ASTSource(
        fn=jit_kernel(variant.op, variant.kernel),
        signature={**dict(variant.signature), **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(i,): alignment for i, (_, kind) in enumerate(variant.signature) if kind.startswith("*")},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", target.compute_capability, WARP_SIZE),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "enable_fp_fusion": variant.fp_fusion,
        },
    )
    metadata = compiled.metadata
    if metadata.shared > target.shared_memory_bytes:
        raise UserError(
            f"{variant.op}: the kernel '{variant.kernel}' takes {metadata.shared} bytes "
            f"({metadata.shared / KIB:g} KiB) of shared memory; {target.name} ({target.example}) has "
            f"{target.shared_memory_bytes} bytes ({target.shared_memory_bytes / KIB:g} KiB). Choose a smaller tile_s "
            "or fewer num_stages, or leave both out."
        )
    # The launcher passes null scratch pointers and a plain grid.
    unsupported = {
        name: getattr(metadata, name)
        for name, supported in (("global_scratch_size", 0), ("profile_scratch_size", 0), ("num_ctas", 1))
        if getattr(metadata, name) != supported
    }
    if unsupported or metadata.num_warps != variant.num_warps:
        raise ValueError(f"{variant.key} for {target.name} cannot be launched: {unsupported}, {metadata.num_warps}")
    return compiled


@contextmanager
def triton_cache(directory: Path) -> Iterator[None]:
    """Makes Triton keep compiled kernels in ``directory``.

    Raises:
        UserError: The directory cannot be made or written.
    """
    from triton import knobs

    try:
        directory.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(directory, os.W_OK) else "no permission to write"
    except OSError as error:
        problem = error.strerror
    if problem:
        raise UserError(
            f"{directory}: compiled kernels cannot be kept there: {problem}. Set {CACHE_ENVIRONMENT_VARIABLE} to a "
            "directory that can be written."
        )
    with knobs.cache.scope():
        knobs.cache.dir = str(directory)
        yield
