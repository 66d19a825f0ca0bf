"""An engine's kernels on disk: cubins for each target, and a manifest that says what they are.

```
kernels/manifest.json
kernels/sm_89/attend-0123456789abcdef.cubin
```
A cubin's place follows from its variant and target, so the manifest holds no paths. Nothing here needs Triton.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator

from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.errors import UserError
from trtllm_mla.files import read_table, write_json
from trtllm_mla.ops.plan import KernelVariant
from trtllm_mla.targets import TARGETS, Target

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 22
MAX_CUBIN_BYTES = 1 << 26

_Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$", strict=True)]
_ParameterType = Annotated[str, StringConstraints(pattern=r"^(\*(fp32|fp16|bf16|i32|i8)|i32|fp32)$", strict=True)]
_Count = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes:
        variant: What was compiled.
        target: Name of the GPU generation it was compiled for.
        entry: The kernel's name in the machine code.
        shared_bytes: Dynamic shared memory of a block.
        sha256: Digest of the machine code, in hexadecimal digits.
        path: Where the machine code is.
    """

    variant: KernelVariant
    target: str
    entry: str
    shared_bytes: int
    sha256: str
    path: Path

    @property
    def key(self) -> str:
        """The variant's key."""
        return self.variant.key

    def read(self) -> bytes:
        """The machine code.

        Raises:
            UserError: The file is missing, too large, or not what was compiled.
        """
        if not self.path.is_file():
            raise UserError(f"{self.path}: no such file; the engine's kernels are incomplete. Build the engine again.")
        size = self.path.stat().st_size
        if size > MAX_CUBIN_BYTES:
            raise UserError(f"{self.path}: found {size} bytes, expected a kernel of at most {MAX_CUBIN_BYTES}.")
        code = self.path.read_bytes()
        digest = hashlib.sha256(code).hexdigest()
        if digest != self.sha256:
            raise UserError(
                f"{self.path}: found a file with the SHA-256 digest {digest}, expected {self.sha256} as in "
                f"{MANIFEST}: the kernel was changed after it was compiled. Build the engine again."
            )
        return code


class KernelStore:
    """The kernels of an engine.

    Args:
        cubins: The kernels.
        triton_version: The Triton that compiled them.
    """

    def __init__(self, cubins: Sequence[Cubin], triton_version: str) -> None:
        self.cubins = tuple(cubins)
        self.triton_version = triton_version

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets there are kernels for."""
        return tuple(dict.fromkeys(cubin.target for cubin in self.cubins))

    def for_target(self, target: Target) -> Mapping[str, Cubin]:
        """The kernels of a target, by variant key.

        Machine code runs on the generation it was compiled for only, and tiles are chosen for its shared memory.

        Raises:
            UserError: There are none.
        """
        found = {cubin.key: cubin for cubin in self.cubins if cubin.target == target.name}
        if not found:
            raise UserError(
                f"The engine has kernels for {', '.join(self.targets)}; found a GPU of generation {target.name}. "
                f"Build it again with --targets {target.name}."
            )
        return found

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads an engine's kernels, and checks each file.

        Args:
            directory: The folder that ``compile_kernels`` filled.

        Raises:
            UserError: The manifest is malformed, or a cubin is missing or not what was compiled.
        """
        path = directory / MANIFEST
        manifest = parse_config(read_table(path, max_bytes=MAX_MANIFEST_BYTES), _Manifest, source=str(path))
        cubins = [
            Cubin(
                entry.variant.to_variant(),
                entry.target,
                entry.entry,
                entry.shared_bytes,
                entry.sha256,
                cubin_path(directory, entry.variant.to_variant(), entry.target),
            )
            for entry in manifest.kernels
        ]
        for cubin in cubins:
            cubin.read()
        return cls(cubins, manifest.triton_version)

    def write_manifest(self, directory: Path) -> None:
        """Writes the manifest beside the cubins, which are in their places already."""
        write_json(
            directory / MANIFEST,
            {
                "version": 1,
                "triton_version": self.triton_version,
                "kernels": [
                    {
                        "target": cubin.target,
                        "variant": asdict(cubin.variant),
                        "entry": cubin.entry,
                        "shared_bytes": cubin.shared_bytes,
                        "sha256": cubin.sha256,
                    }
                    for cubin in self.cubins
                ],
            },
        )


def cubin_path(directory: Path, variant: KernelVariant, target: str) -> Path:
    """Where a cubin is, below an engine's folder of kernels."""
    return directory / target / f"{variant.key}.cubin"


class _Variant(StrictModel):
    op: _Identifier
    kernel: _Identifier
    signature: Annotated[tuple[tuple[_Identifier, _ParameterType], ...], Field(max_length=64)]
    constants: Annotated[tuple[tuple[_Identifier, bool | _Count], ...], Field(max_length=64)]
    num_warps: Annotated[int, Field(ge=1, le=32, strict=True)]
    num_stages: Annotated[int, Field(ge=1, le=16, strict=True)]
    fp_fusion: Annotated[bool, Field(strict=True)]

    def to_variant(self) -> KernelVariant:
        values: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        return KernelVariant(**values)


class _Kernel(StrictModel):
    target: str
    variant: _Variant
    entry: _Identifier
    shared_bytes: _Count
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$", strict=True)]

    @field_validator("target")
    @classmethod
    def _check_target(cls, name: str) -> str:
        if name not in TARGETS:
            raise ValueError(f"found {name!r}, expected one of {', '.join(TARGETS)}")
        return name


class _Manifest(StrictModel):
    version: Literal[1]
    triton_version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.+-]{1,64}$", strict=True)]
    kernels: Annotated[tuple[_Kernel, ...], Field(min_length=1, max_length=4096)]
