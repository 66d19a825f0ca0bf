"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("numpy", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13", "torch", "triton", "transformers")


@dataclass(frozen=True)
class Machine:
    """A host.

    Attributes:
        name: The processor's name.
        logical_cores: Logical processors of the host.
        usable_cores: Those that this process may use.
        memory_bytes: Main memory.
        system: Operating system and its release.
        python: Version of Python.
        packages: Versions of the packages that measurements depend on, where installed.
    """

    name: str
    logical_cores: int
    usable_cores: int
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]

    @classmethod
    def here(cls) -> Machine:
        """The host this process runs on."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return cls(
            name=_processor_name(),
            logical_cores=os.cpu_count() or 1,
            usable_cores=usable or 1,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            packages=_package_versions(),
        )


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
