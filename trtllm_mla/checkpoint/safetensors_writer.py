"""Writing a safetensors file piece by piece.

The safetensors library writes a file from tensors that are all in memory. Here the header is written first, from
names, types and shapes alone, and values follow in any order, so that a file may be larger than the memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from trtllm_mla.dtypes import DType

_LENGTH_BYTES = 8
_ALIGNMENT = 8  # the safetensors library pads headers to this


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a tensor in a file."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """A safetensors file whose values are written one piece at a time.

    Tensors with wider elements come first, so that each is aligned to its elements without gaps, which the format does
    not allow. Use it in a ``with`` block, whose end sees that every byte was written.

    Args:
        path: The file to make.
        tensors: Its tensors by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorType]) -> None:
        header, self._starts, self.nbytes = _layout(tensors)
        self._missing = {name: tensor.nbytes for name, tensor in tensors.items()}
        self._tensors = tensors
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(memoryview(header), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        incomplete = [name for name, missing in self._missing.items() if missing]
        if kind is None and incomplete:
            raise ValueError(f"{len(incomplete)} tensors were not written whole, of them {incomplete[0]}")

    def write(self, name: str, start: int, values: np.ndarray[Any, Any]) -> None:
        """Writes a piece of a tensor; the caller writes each element once.

        Args:
            name: The tensor.
            start: Number of its elements before the first one written.
            values: Contiguous, in the tensor's type.
        """
        tensor = self._tensors[name]
        if values.dtype != tensor.dtype.numpy or not values.flags.c_contiguous:
            raise ValueError(f"{name}: expected contiguous {tensor.dtype}, found {values.dtype}")
        offset = start * tensor.dtype.itemsize
        if offset + values.nbytes > tensor.nbytes or values.nbytes > self._missing[name]:
            raise ValueError(f"{name}: {values.nbytes} bytes at {offset} are more than its {tensor.nbytes}")
        self._write(values.reshape(-1).view(np.uint8).data, self._starts[name] + offset)
        self._missing[name] -= values.nbytes

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written


def file_bytes(tensors: Mapping[str, TensorType]) -> int:
    """Size of a safetensors file with these tensors."""
    return _layout(tensors)[2]


def _layout(tensors: Mapping[str, TensorType]) -> tuple[bytes, dict[str, int], int]:
    """The header, the first byte of each tensor in the file, and the file's size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # as in files that transformers saves
    starts: dict[str, int] = {}
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        stop = position + tensor.nbytes
        entries[name] = {
            "dtype": tensor.dtype.safetensors,
            "shape": tensor.shape,
            "data_offsets": (position, stop),
        }
        starts[name] = position
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data_start = _LENGTH_BYTES + len(text)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, {name: data_start + start for name, start in starts.items()}, data_start + position
