"""The compiled plugin library in a process of its own, with stand-ins for TensorRT and the CUDA driver.

The stand-in for the driver takes the place of every ``libcuda.so.1`` of the process that loads it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BUILD, RUNTIME = 0, 1
DATA_TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bfloat16": 7}
# TensorRT's PluginFieldType, and what an array of it holds.
FIELD_TYPES = {np.dtype(np.float32): 1, np.dtype(np.int32): 5, np.dtype(np.int8): 6, np.dtype(np.int64): 10}

Shape = tuple[int, ...]
Fields = Mapping[str, npt.NDArray[Any]]


class HostTensor(ctypes.Structure):
    _fields_ = (("type", c_int32), ("rank", c_int32), ("sizes", c_int64 * 8))


@dataclass(frozen=True)
class Launched:
    """A launch as the driver's stand-in saw it; parameters are their bytes."""

    digest: int
    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    parameters: tuple[bytes, ...]


@dataclass(frozen=True)
class Recorded:
    """What came of a call: its status, what was logged, loaded and launched."""

    status: int
    log: str
    loaded: tuple[tuple[int, int], ...]
    launched: tuple[Launched, ...]


def digest(code: bytes) -> int:
    """FNV-1a, as the stand-in computes it of a module."""
    value = 14695981039346656037
    for byte in code:
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


class _Host:
    """What runs in the other process."""

    def __init__(self, folder: Path, library: Path, *, driver: bool, tensorrt: bool) -> None:
        if tensorrt:
            ctypes.CDLL(str(folder / "libnvinfer_stand_in.so"))
        self._driver = ctypes.CDLL(str(folder / "libcuda_stand_in.so")) if driver else None
        if self._driver:
            self._driver.stand_in_take_log.restype = c_char_p
        self._host = ctypes.CDLL(str(folder / "libplugin_host.so"))
        for name in ("host_create", "host_attach"):
            getattr(self._host, name).restype = c_void_p
        for name in ("host_take_log", "host_fields"):
            getattr(self._host, name).restype = c_char_p
        self._host.host_workspace_bytes.restype = c_int64
        if self._host.host_open(str(library).encode()):
            raise ValueError(f"{library} does not load")

    def num_creators(self) -> int:
        return int(self._host.host_num_creators())

    def set_device(self, context: int, capability: int, multiprocessors: int) -> None:
        assert self._driver is not None
        self._driver.stand_in_set_device(c_uint64(context), capability, multiprocessors)

    def fail(self, function: str, code: int) -> None:
        assert self._driver is not None
        # The stand-in keeps a copy.
        self._driver.stand_in_fail(function.encode(), code)

    def take_log(self) -> str:
        return str(self._host.host_take_log().decode())

    def create(self, op: str, fields: Fields, phase: int) -> int | None:
        arrays = {name: np.ascontiguousarray(array) for name, array in fields.items()}
        count = len(arrays)
        plugin = self._host.host_create(
            op.encode(),
            b"layer",
            count,
            (c_char_p * count)(*(name.encode() for name in arrays)),
            (c_void_p * count)(*(array.ctypes.data for array in arrays.values())),
            (c_int32 * count)(*(FIELD_TYPES[array.dtype] for array in arrays.values())),
            (c_int32 * count)(*(array.size for array in arrays.values())),
            phase,
        )
        return None if plugin is None else int(plugin)

    def attach(self, plugin: int) -> int:
        return int(self._host.host_attach(c_void_p(plugin)))

    def destroy(self, plugin: int) -> None:
        self._host.host_destroy(c_void_p(plugin))

    def output_types(self, plugin: int, types: Sequence[str], num_outputs: int) -> tuple[int, ...] | None:
        found = (c_int32 * num_outputs)()
        inputs = (c_int32 * len(types))(*(DATA_TYPES[name] for name in types))
        status = self._host.host_output_types(c_void_p(plugin), inputs, len(types), found, num_outputs)
        return None if status else tuple(found)

    def aliased_input(self, plugin: int, output: int) -> int:
        return int(self._host.host_aliased_input(c_void_p(plugin), output))

    def supports(self, plugin: int, position: int, types: Sequence[str], num_inputs: int, linear: bool) -> bool:
        tensors = _tensors(types, [()] * len(types))
        outputs = len(types) - num_inputs
        return bool(self._host.host_supports(c_void_p(plugin), position, tensors, num_inputs, outputs, int(linear)))

    def configure(self, plugin: int, types: Sequence[str], shapes: Sequence[Shape]) -> int:
        return int(self._host.host_configure(c_void_p(plugin), _tensors(types, shapes), len(shapes), 0))

    def workspace_bytes(self, plugin: int) -> int:
        return int(self._host.host_workspace_bytes(c_void_p(plugin)))

    def fields(self, plugin: int) -> dict[str, npt.NDArray[Any]]:
        kinds = {number: dtype for dtype, number in FIELD_TYPES.items()}
        lines = (line.split(" ") for line in self._host.host_fields(c_void_p(plugin)).decode().splitlines())
        return {
            name: np.frombuffer(bytes.fromhex(data), kinds[int(kind)])[: int(length)]
            for name, kind, length, data in lines
        }

    def enqueue(
        self,
        plugin: int,
        types: Sequence[str],
        shapes: Sequence[Shape],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> Recorded:
        self.take_log()
        if self._driver:
            self._driver.stand_in_take_log()
        status = self._host.host_enqueue(
            c_void_p(plugin),
            _tensors(types, shapes),
            len(shapes),
            (c_void_p * len(inputs))(*inputs),
            (c_void_p * len(outputs))(*outputs),
            c_void_p(workspace),
            c_void_p(stream),
        )
        lines = self._driver.stand_in_take_log().decode().splitlines() if self._driver else []
        loaded, launched = [], []
        for line in lines:
            kind, module, *rest = line.split(" ")
            found = int.from_bytes(bytes.fromhex(module), "little")
            if kind == "load":
                loaded.append((found, int(rest[0])))
                continue
            entry, *numbers = rest[:9]
            x = [int(number) for number in numbers]
            parameters = tuple(bytes.fromhex(text) for text in rest[9:])
            launched.append(Launched(found, entry, tuple(x[:3]), tuple(x[3:6]), x[6], int(x[7]), parameters))
        return Recorded(int(status), self.take_log(), tuple(loaded), tuple(launched))


def _tensors(types: Sequence[str], shapes: Sequence[Shape]) -> Any:
    tensors = (HostTensor * len(types))()
    for tensor, name, shape in zip(tensors, types, shapes, strict=True):
        tensor.type, tensor.rank = DATA_TYPES[name], len(shape)
        tensor.sizes[: len(shape)] = list(shape)
    return tensors


_hosts: list[_Host] = []


def _start(folder: Path, library: Path, driver: bool, tensorrt: bool) -> None:
    _hosts.append(_Host(folder, library, driver=driver, tensorrt=tensorrt))


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_hosts[0], name)(*arguments)


@contextmanager
def in_process() -> Iterator[ProcessPoolExecutor]:
    """A process that shares nothing with this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


class Host:
    """A process with the plugin library; its methods are ``_Host``'s.

    Args:
        pool: The process, alone.
        folder: Where the stand-ins are.
        library: The plugin library.
        driver: Whether there is a CUDA driver.
        tensorrt: Whether there is a TensorRT.
    """

    def __init__(
        self, pool: ProcessPoolExecutor, folder: Path, library: Path, *, driver: bool = True, tensorrt: bool = False
    ) -> None:
        self._pool = pool
        pool.submit(_start, folder, library, driver, tensorrt).result()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._pool.submit(_call, name, arguments).result()
