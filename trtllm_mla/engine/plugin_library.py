"""Makes the plugin library: kernels and launch plans of networks, as a shared library that needs no Python.

```
config.json                what the library is for, and how its kernels were compiled
library.bin                operations, launch plans and kernels (``engine/plan_data.py``)
library.cmake              makes plugins/CMakeLists.txt embed it: cmake -C library.cmake -S plugins -B build
libtrtllm_mla_plugin.so    the library, if it was compiled
```
The same networks, config and targets give the same bytes in all files but the compiled library, which depends on the
compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trtllm_mla
from trtllm_mla._version import __version__
from trtllm_mla.config import BuildConfig, merge_plugin_configs
from trtllm_mla.engine.backend import RTX_DEFAULT_TARGETS
from trtllm_mla.engine.builder import choose_tile
from trtllm_mla.engine.kernel_compiler import compile_kernels
from trtllm_mla.engine.kernel_store import Cubin
from trtllm_mla.engine.operation import OperationSettings
from trtllm_mla.engine.plan_data import FORMAT, PlannedOperation, library_data, trace_operation
from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, write_json
from trtllm_mla.network.directory import CONFIG_NAME, NetworkDirectory
from trtllm_mla.ops import DOMAIN, OPS, OpDefinition
from trtllm_mla.ops.definition import Attribute, split_dim
from trtllm_mla.targets import Target, get_target

DATA_NAME = "library.bin"
CMAKE_NAME = "library.cmake"
LIBRARY_NAME = "libtrtllm_mla_plugin.so"
# CMakeLists.txt and C++ sources, in a checkout of the repository.
SOURCES = Path(trtllm_mla.__file__).parents[1] / "plugins"
HEADER = "NvInferRuntime.h"
_TARGET = "trtllm_mla_plugin"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CompilerSettings:
    """How the library is compiled.

    Attributes:
        tensorrt_include: Folder with TensorRT's headers.
        sources: Folder of the plugin library's sources.
    """

    tensorrt_include: Path
    sources: Path = SOURCES

    def check(self) -> None:
        """Checks, before the long work, what compiling needs.

        Raises:
            UserError: A program, the sources or the headers are missing.
        """
        missing = [name for name in ("cmake", "c++") if shutil.which(name) is None]
        if missing:
            raise UserError(
                f"found no {' and no '.join(missing)}, which compile the plugin library. Install them, or pass "
                "--no-compile and compile it elsewhere."
            )
        if not (self.sources / "CMakeLists.txt").is_file():
            raise UserError(
                f"{self.sources}: found no CMakeLists.txt, expected the folder plugins of the repository. Name it "
                "with --sources, or pass --no-compile."
            )
        if not (self.tensorrt_include / HEADER).is_file():
            raise UserError(
                f"{self.tensorrt_include}: found no {HEADER}, expected TensorRT's headers. They are in the folder "
                "include of TensorRT's and TensorRT-RTX's archives (developer.nvidia.com/tensorrt) and of "
                "github.com/NVIDIA/TensorRT, and in the system package libnvinfer-headers-dev, but not in the pip "
                "packages. Name the folder with --tensorrt-include, or pass --no-compile."
            )


@dataclass(frozen=True)
class LibraryReport:
    """What was made.

    Attributes:
        path: The directory.
        targets: Names of the GPU generations.
        operations: Operations, each on one target.
        kernels: Kernels, each for one target.
        data_bytes: Size of the library data.
        sha256: Its digest.
        compiled: Whether the library was compiled too.
    """

    path: Path
    targets: tuple[str, ...]
    operations: int
    kernels: int
    data_bytes: int
    sha256: str
    compiled: bool


def make_plugin_library(
    output: Path,
    networks: Sequence[Path],
    *,
    config: BuildConfig,
    targets: Sequence[str] | None = None,
    compiler: CompilerSettings | None = None,
    overwrite: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> LibraryReport:
    """Makes the plugin library of some networks.

    Args:
        output: The directory to make.
        networks: Network directories; the library serves engines that are built from any of them.
        config: Its section ``mla_plugin`` applies to all networks, as when an engine is built.
        targets: GPU generations; None is the config's, or else TensorRT-RTX's default.
        compiler: How to compile it; None to write its data alone.
        overwrite: Replace what is in ``output``.
        cache_dir: Where compiled kernels are kept; see ``compile_kernels``.
        progress: Called with a line at the beginning of each stage.

    Raises:
        MissingDependencyError: Triton is not installed.
        UserError: Networks, config and targets do not go together, two networks cannot share a library, or what
            compiling needs is missing. Nothing is written then.
    """
    say = progress or (lambda line: None)
    if not networks:
        raise UserError("found no network, expected at least one. Name it with --network.")
    resolved = tuple(get_target(name) for name in dict.fromkeys(targets or config.targets or RTX_DEFAULT_TARGETS))
    if compiler is not None:
        compiler.check()
    with atomic_directory(output, marker=DATA_NAME, overwrite=overwrite) as directory:
        planned = _plan_networks(networks, config, resolved, say)
        jobs = dict.fromkeys(
            (variant, get_target(operation.target)) for operation in planned for variant in operation.variants
        )
        with tempfile.TemporaryDirectory() as kernels:
            store = compile_kernels(
                sorted(jobs, key=lambda job: (job[1].compute_capability, job[0].key)),
                Path(kernels),
                cache_dir=cache_dir,
                progress=lambda name, index, count: say(f"compiling kernel {index + 1} of {count}: {name}"),
            )
            say("writing the library's data")
            data = library_data(tuple(OPS.values()), planned, store.cubins)
        (directory / DATA_NAME).write_bytes(data)
        (directory / CMAKE_NAME).write_text(
            "# Makes plugins/CMakeLists.txt embed the data beside this file.\n"
            f'set(TRTLLM_MLA_LIBRARY_DATA "${{CMAKE_CURRENT_LIST_DIR}}/{DATA_NAME}" CACHE FILEPATH "" FORCE)\n',
            encoding="utf-8",
        )
        digest = hashlib.sha256(data).hexdigest()
        names = tuple(target.name for target in resolved)
        write_json(
            directory / CONFIG_NAME,
            {
                "version": __version__,
                "format": FORMAT,
                "triton_version": store.triton_version,
                "targets": names,
                "data_sha256": digest,
                "operations": [_describe(operation) for operation in planned],
                "kernels": [_describe_kernel(cubin) for cubin in store.cubins],
            },
        )
        if compiler is not None:
            say("compiling the library")
            _compile(directory, compiler)
    return LibraryReport(output, names, len(planned), len(store.cubins), len(data), digest, compiler is not None)


def _plan_networks(
    networks: Sequence[Path], config: BuildConfig, targets: Sequence[Target], say: Progress
) -> list[PlannedOperation]:
    """The operations of all networks, each once on each target, in an order that does not depend on theirs."""
    found: dict[Any, tuple[PlannedOperation, Path]] = {}
    for path in networks:
        say(f"planning {path}")
        network = NetworkDirectory.load(path)
        plugin = merge_plugin_configs(network.plugin, config.mla_plugin)
        tiles = tuple(choose_tile(network, plugin, target) for target in targets)
        settings = OperationSettings(network.dtype, plugin.cache_dtype(network.dtype), tiles)
        for definition, attributes, sizes in _operations(network, {"page_size": plugin.page_size}):
            for target in targets:
                operation = trace_operation(definition, attributes, settings, sizes, target)
                known, source = found.setdefault(operation.key, (operation, path))
                if known.behaviour != operation.behaviour:
                    raise UserError(
                        f"{path}: its {definition.name} on {target.name} takes what that of {source} takes, but runs "
                        "otherwise: their types or tiles differ, and the library could not tell them apart. Make a "
                        "library of its own for each."
                    )
    planned = [found[key][0] for key in sorted(found)]
    _check_output_types(planned)
    return planned


def _check_output_types(planned: Sequence[PlannedOperation]) -> None:
    """TensorRT asks for the types of outputs when it knows no sizes."""
    found: dict[Any, PlannedOperation] = {}
    for operation in planned:
        inputs = operation.types[: len(operation.definition.inputs)]
        known = found.setdefault((operation.definition.name, operation.int_attributes, inputs), operation)
        if known.types != operation.types:
            raise UserError(
                f"{operation.definition.name}: found networks in {known.settings.model_dtype} and "
                f"{operation.settings.model_dtype} with caches of one type, whose outputs TensorRT could not tell "
                "apart. Make a library of its own for each."
            )


def _operations(
    network: NetworkDirectory, fixed_dims: Mapping[str, int]
) -> Iterator[tuple[OpDefinition, dict[str, Attribute], dict[str, int]]]:
    """Operations of a network, each once: definition, attributes, and the sizes that are fixed."""
    import onnx_ir

    found = set()
    for node in onnx_ir.from_proto(network.model()).graph:
        if node.domain != DOMAIN:
            continue
        definition = OPS[node.op_type]
        attributes: dict[str, Attribute] = {
            name: kind(node.attributes[name].value) for name, kind in definition.attributes.items()
        }
        sizes = dict(fixed_dims)
        for tensor, value in zip(definition.inputs, node.inputs, strict=True):
            if value is None or value.shape is None:
                raise ValueError(f"{node.name}: found no shape of '{tensor.name}', expected that convert wrote it")
            for dim, size in zip(tensor.dims, value.shape, strict=True):
                name, offset = split_dim(dim)
                if name is not None and isinstance(size, int):
                    sizes[name] = size - offset
        # Plans serve every value of a real attribute.
        fixed = tuple((name, value) for name, value in attributes.items() if definition.attributes[name] is int)
        key = (definition.name, fixed, tuple(sorted(sizes.items())))
        if key not in found:
            found.add(key)
            yield definition, attributes, sizes


def _describe(operation: PlannedOperation) -> dict[str, Any]:
    definition = operation.definition
    integers = (name for name, kind in definition.attributes.items() if kind is int)
    return {
        "name": definition.name,
        "target": operation.target,
        "attributes": dict(zip(integers, operation.int_attributes, strict=True)),
        "types": dict(
            zip((item.name for item in (*definition.inputs, *definition.outputs)), operation.types, strict=True)
        ),
        "sizes": {
            str(definition.inputs[index].dims[axis]): size
            for (index, axis), size in sorted(operation.fixed_sizes.items())
        },
        "kernels": [variant.key for variant in operation.variants],
    }


def _describe_kernel(cubin: Cubin) -> dict[str, Any]:
    return {
        "key": cubin.key,
        "target": cubin.target,
        "variant": asdict(cubin.variant),
        "entry": cubin.entry,
        "shared_bytes": cubin.shared_bytes,
        "sha256": cubin.sha256,
    }


def _compile(directory: Path, compiler: CompilerSettings) -> None:
    """Compiles the library beside its data.

    Raises:
        UserError: CMake or the compiler fails.
    """
    with tempfile.TemporaryDirectory() as build:
        for command in (
            [
                "cmake",
                "-C",
                str(directory / CMAKE_NAME),
                "-S",
                str(compiler.sources),
                "-B",
                build,
                f"-DTENSORRT_INCLUDE_DIR={compiler.tensorrt_include.resolve()}",
                *_cuda_headers(),
            ],
            ["cmake", "--build", build, "--target", _TARGET],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
            if result.returncode:
                reason = _reason(f"{result.stderr}\n{result.stdout}")
                raise UserError(
                    f"{compiler.sources}: the library cannot be compiled: {reason}. Pass --no-compile to write the "
                    f"data alone, and run cmake with {CMAKE_NAME} to see all of its output."
                )
        built = next(Path(build).rglob(LIBRARY_NAME), None)
        if built is None:
            raise UserError(f"{compiler.sources}: cmake made no {LIBRARY_NAME}, expected the sources of this version.")
        shutil.copyfile(built, directory / LIBRARY_NAME)


def _cuda_headers() -> tuple[str, ...]:
    """CMake's option for CUDA's headers, which Triton brings along."""
    spec = importlib.util.find_spec("triton")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    headers = (Path(folder) / "backends" / "nvidia" / "include" for folder in folders)
    return tuple(f"-DCUDA_INCLUDE_DIR={folder}" for folder in headers if folder.is_dir())


def _reason(output: str) -> str:
    """The first error that CMake or a compiler prints, up to the next empty line."""
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if "error" in line.lower()), 0)
    text = " ".join(itertools.takewhile(str.strip, lines[first:]))
    return " ".join(text.split())[:400].rstrip(".") or "it printed nothing"
