"""Stand-ins for what only a GPU machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_mla.engine.launcher import Grid, Parameter
from trtllm_mla.targets import Target, get_target


@dataclass(frozen=True)
class Call:
    """A launch as the driver saw it."""

    entry: str
    grid: Grid
    block: int
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    stream: int


@dataclass
class RecordingDriver:
    """Records what is loaded and launched."""

    target: Target = field(default_factory=lambda: get_target("sm_89"))
    loads: list[tuple[str, int, bool]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def load(self, cubin: bytes, entry: str, *, shared_bytes: int, opt_in: bool) -> Any:
        assert cubin.startswith(b"\x7fELF")
        self.loads.append((entry, shared_bytes, opt_in))
        return entry

    def launch(
        self, kernel: Any, grid: Grid, block: int, shared_bytes: int, parameters: Sequence[Parameter], stream: int
    ) -> None:
        self.calls.append(Call(kernel, grid, block, shared_bytes, tuple(parameters), stream))
