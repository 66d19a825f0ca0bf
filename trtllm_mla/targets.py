"""GPU generations that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mla.errors import UserError

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A compute capability and the limits the launch plans and the tile check depend on.

    Attributes:
        name: ``sm_`` followed by the compute capability without the dot.
        shared_memory_bytes: Largest dynamic shared memory of one block. CUDA C++ Programming Guide, "Technical
            Specifications per Compute Capability".
        multiprocessors: Multiprocessors of the generation's common large part. Split counts are computed from it
            until the device is known.
        example: A device of this generation, for messages.
    """

    name: str
    shared_memory_bytes: int
    multiprocessors: int
    example: str

    @property
    def compute_capability(self) -> int:
        """Compute capability without the dot: 90 for ``sm_90``."""
        return int(self.name.removeprefix("sm_"))


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 163 * KIB, 108, "A100"),
        Target("sm_86", 99 * KIB, 82, "RTX 3090"),
        Target("sm_89", 99 * KIB, 128, "RTX 4090"),
        Target("sm_90", 227 * KIB, 132, "H100"),
        Target("sm_100", 227 * KIB, 148, "B200"),
        Target("sm_120", 99 * KIB, 170, "RTX 5090"),
        Target("sm_121", 99 * KIB, 48, "GB10"),
    )
}


def get_target(name: str) -> Target:
    """Looks a target up by name.

    Raises:
        UserError: The name is not one of ``TARGETS``.
    """
    try:
        return TARGETS[name]
    except KeyError:
        raise UserError(
            f"Unknown target '{name}'. Expected one of {', '.join(TARGETS)}; pass a comma-separated list such as "
            "--targets sm_89,sm_120."
        ) from None
