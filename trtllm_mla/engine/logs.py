"""Catches what TensorRT logs, so that it ends in messages and reports instead of on standard error."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtllm_mla.engine.backend import Backend

if TYPE_CHECKING:
    import tensorrt as trt

_SHOWN = 3
# Inlined function bodies repeat the names of their nodes from layer to layer, which does no harm.
_IGNORED = "already exists, the output tensors of this new instance will not be queryable"
_MAX_CHARACTERS = 600
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+)")


@dataclass
class LogCapture:
    """What TensorRT said.

    Attributes:
        errors: Its errors, each once, oldest first.
        warnings: Its warnings, likewise.
        activation_bytes: Memory that it planned for the intermediate values and workspaces of the engine it built,
            the most of all targets; None if it has not said.
    """

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    activation_bytes: int | None = None

    def summary(self) -> str:
        """The first errors in one line."""
        if not self.errors:
            return "it gave no reason"
        more = f" (and {len(self.errors) - _SHOWN} more errors)" if len(self.errors) > _SHOWN else ""
        return "; ".join(message[:_MAX_CHARACTERS] for message in self.errors[:_SHOWN]) + more


@contextmanager
def capture_logs(backend: Backend) -> Iterator[LogCapture]:
    """Collects what TensorRT logs inside the block."""
    logger = trt_logger(backend)
    previous, logger.capture = logger.capture, LogCapture()
    try:
        yield logger.capture
    finally:
        logger.capture = previous


@functools.cache
def trt_logger(backend: Backend) -> Any:
    """The process's logger for a TensorRT library, which wants the same one everywhere."""
    if not TYPE_CHECKING:
        trt = backend.module

    class CapturingLogger(trt.ILogger):  # type: ignore[misc]
        """Keeps warnings, errors, and the memory that an engine takes."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.capture = LogCapture()

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            kinds = {
                trt.ILogger.Severity.INTERNAL_ERROR: self.capture.errors,
                trt.ILogger.Severity.ERROR: self.capture.errors,
                trt.ILogger.Severity.WARNING: self.capture.warnings,
            }
            if severity == trt.ILogger.Severity.INFO and (planned := _ACTIVATIONS.search(msg)):
                self.capture.activation_bytes = max(self.capture.activation_bytes or 0, int(planned[1]))
            messages, message = kinds.get(severity), " ".join(msg.split())
            if messages is not None and message not in messages and _IGNORED not in message:
                messages.append(message)

    return CapturingLogger()
