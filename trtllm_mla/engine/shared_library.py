"""The compiled plugin library in an engine build: what it has, and its plugins in place of the Python ones.

Its plugins report problems through TensorRT's log, and TensorRT stops a build whose plugin fails.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trtllm_mla._version import __version__
from trtllm_mla.engine.backend import Backend
from trtllm_mla.engine.operation import Operation, OperationSettings, TargetTile
from trtllm_mla.engine.plugin import python_plugins_withdrawn
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.ops import DOMAIN, OPS

# What the library's messages in TensorRT's log begin with.
LOG_PREFIX = "trtllm_mla: "

_MAKE_ONE = "Make one with: trtllm-mla plugin-library"


class _Operation(ctypes.Structure):
    """The beginning of ``tmla_operation`` in plugins/include/trtllm_mla/plan.h."""

    _fields_ = (
        ("op", ctypes.c_void_p),
        ("compute_capability", ctypes.c_int32),
        ("model_dtype", ctypes.c_char_p),
        ("cache_dtype", ctypes.c_char_p),
        ("tile_s", ctypes.c_int32),
        ("num_stages", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LibraryContents:
    """What a compiled plugin library was made for.

    Attributes:
        version: Version of trtllm_mla that made it.
        targets: Names of the GPU generations.
        settings: Model type, cache type and tile of its operations that have a cache.
    """

    version: str
    targets: tuple[str, ...]
    settings: frozenset[tuple[str, str, TargetTile]]

    @classmethod
    def read(cls, path: Path, library: ctypes.CDLL) -> Self:
        """Asks a library.

        Raises:
            UserError: It is another library, or its data are broken.
        """
        try:
            open_data = library.trtllm_mla_plugin_library
        except AttributeError as error:
            raise UserError(f"{path}: found another shared library, expected a plugin library. {_MAKE_ONE}") from error
        open_data.restype = ctypes.c_void_p
        library.tmla_library_version.restype = ctypes.c_char_p
        library.tmla_library_operation.restype = ctypes.POINTER(_Operation)
        data = ctypes.c_void_p(open_data())
        if not data:
            raise UserError(f"{path}: found a plugin library whose data are broken. {_MAKE_ONE}")
        operations = (
            library.tmla_library_operation(data, index).contents
            for index in range(library.tmla_library_num_operations(data))
        )
        targets = (library.tmla_library_target(data, index) for index in range(library.tmla_library_num_targets(data)))
        return cls(
            library.tmla_library_version(data).decode(),
            tuple(f"sm_{target}" for target in targets),
            frozenset(
                (
                    item.model_dtype.decode(),
                    item.cache_dtype.decode(),
                    TargetTile(f"sm_{item.compute_capability}", item.tile_s, item.num_stages),
                )
                for item in operations
                if item.cache_dtype
            ),
        )

    def check(self, path: Path, settings: OperationSettings) -> None:
        """Checks that it was made by this version for an engine's targets, types and tiles.

        Args:
            path: The library, for messages.
            settings: The engine's.

        Raises:
            UserError: It was not.
        """
        advice = "Make the library with this network, build config and targets: trtllm-mla plugin-library"
        if self.version != __version__:
            raise UserError(
                f"{path}: found a plugin library of version {self.version}, expected {__version__}, which plans and "
                f"compiles the engine's kernels. {advice}"
            )
        missing = [tile.target for tile in settings.tiles if tile.target not in self.targets]
        if missing:
            raise UserError(
                f"{path}: found a plugin library for {', '.join(self.targets)}, expected one for "
                f"{', '.join(missing)} too. {advice}"
            )
        for tile in settings.tiles:
            wanted = (str(settings.model_dtype), str(settings.cache_dtype))
            tiles = {
                known for *types, known in self.settings if tuple(types) == wanted and known.target == tile.target
            }
            if tile not in tiles:
                found = ", ".join(sorted(f"{known.tile_s} x {known.num_stages}" for known in tiles)) or "none"
                raise UserError(
                    f"{path}: found tiles {found} for {tile.target}, a {wanted[0]} network and a {wanted[1]} cache, "
                    f"expected {tile.tile_s} x {tile.num_stages}. {advice}"
                )


class SharedPluginLibrary:
    """The plugins of a compiled library, for one build; it has what ``PluginLibrary`` has for a build.

    Args:
        backend: The TensorRT library.
        path: The compiled library.
        network: The network to build from.

    Attributes:
        sha256: Digest of the library; empty before it is loaded.
        built: Name and operation of each plugin layer.
        failures: Always empty: what its plugins report is in TensorRT's log, and stops the build.
    """

    def __init__(self, backend: Backend, path: Path, network: NetworkDirectory) -> None:
        self._backend, self._path, self._network = backend, path, network
        self._library: ctypes.CDLL | None = None
        self._num_aliases_before = 0
        self.sha256 = ""
        self.built: list[tuple[str, Operation]] = []
        self.failures: list[str] = []

    @property
    def num_aliases_declared(self) -> int:
        """How often this build was told that an output is an input's memory."""
        return 0 if self._library is None else self._num_aliases(self._library) - self._num_aliases_before

    @contextmanager
    def building(self, settings: OperationSettings) -> Iterator[None]:
        """While an engine is built: the library's plugins are registered, and no Python ones.

        Args:
            settings: The engine's.

        Raises:
            UserError: The library cannot be loaded, or was made for something else.
        """
        if not self._path.is_file():
            raise UserError(f"{self._path}: found no such file, expected a plugin library. {_MAKE_ONE}")
        registry = self._backend.module.get_plugin_registry()
        with python_plugins_withdrawn(self._backend):
            handle = registry.load_library(str(self._path.resolve()))
            if handle is None:
                raise UserError(
                    f"{self._path}: {self._backend.name} {self._backend.version} cannot load it, expected a plugin "
                    f"library for this machine, and no other of its plugins in this process. {_MAKE_ONE}"
                )
            try:
                self._library = ctypes.CDLL(str(self._path.resolve()))
                LibraryContents.read(self._path, self._library).check(self._path, settings)
                self.sha256 = hashlib.sha256(self._path.read_bytes()).hexdigest()
                self._num_aliases_before = self._num_aliases(self._library)
                self.built = list(_operations(self._network, settings))
                yield
            finally:
                registry.deregister_library(handle)

    def _num_aliases(self, library: ctypes.CDLL) -> int:
        count: Any = library.trtllm_mla_plugin_num_aliases
        count.restype = ctypes.c_uint64
        return int(count())


def _operations(network: NetworkDirectory, settings: OperationSettings) -> Iterator[tuple[str, Operation]]:
    """Name and operation of each MLA node of a network."""
    import onnx

    for node in network.model().graph.node:
        if node.domain == DOMAIN:
            definition = OPS[node.op_type]
            values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            attributes = {name: kind(values[name]) for name, kind in definition.attributes.items()}
            yield node.name, Operation(definition, attributes, settings)
