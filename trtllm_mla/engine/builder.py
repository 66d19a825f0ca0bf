"""Builds engines: a network directory and a build config become an engine directory."""

from __future__ import annotations

import hashlib
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_mla._version import __version__
from trtllm_mla.checkpoint.pretrained_config import to_pretrained_config
from trtllm_mla.config import BackendName, BuildConfig, MlaPluginConfig, check_tile, merge_plugin_configs
from trtllm_mla.engine.backend import Backend, load_backend
from trtllm_mla.engine.directory import (
    ENGINE_NAME,
    KERNELS_NAME,
    EngineDirectory,
    EngineInfo,
    TargetInfo,
    to_build_config,
)
from trtllm_mla.engine.kernel_compiler import Job, compile_kernels
from trtllm_mla.engine.logs import LogCapture, capture_logs, trt_logger
from trtllm_mla.engine.operation import OperationSettings, TargetTile
from trtllm_mla.engine.plugin import PluginLibrary, plugin_library
from trtllm_mla.engine.profile import ShapeRange, input_shape_ranges
from trtllm_mla.engine.shared_library import LOG_PREFIX, SharedPluginLibrary
from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, resolve_output
from trtllm_mla.network.contract import LOGITS, past_latent, present_latent
from trtllm_mla.network.directory import CONFIG_NAME, ONNX_NAME, WEIGHTS_NAME, NetworkConfig, NetworkDirectory
from trtllm_mla.network.graph import count_operations
from trtllm_mla.ops.definition import split_dim
from trtllm_mla.targets import Target

if TYPE_CHECKING:
    import tensorrt as trt

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BuildReport:
    """What a build made.

    Attributes:
        directory: The engine directory.
        parse_seconds: Time to read the network.
        kernel_seconds: Time to compile the kernels.
        engine_seconds: Time that TensorRT took to build the engine.
        warnings: What TensorRT warned of.
    """

    directory: EngineDirectory
    parse_seconds: float
    kernel_seconds: float
    engine_seconds: float
    warnings: tuple[str, ...]


def build(
    network_dir: Path,
    engine_dir: Path,
    *,
    config: BuildConfig,
    backend: BackendName | None = None,
    targets: Sequence[str] | None = None,
    native: bool = False,
    plugin_library_path: Path | None = None,
    overwrite: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Builds an engine.

    Args:
        network_dir: The network directory.
        engine_dir: The directory to make.
        config: Limits and settings.
        backend: TensorRT library; None is the config's.
        targets: GPU generations; None is the config's, or else the backend's default.
        native: Build without plugins, from the operations' function bodies.
        plugin_library_path: The compiled plugin library to build with; None for the Python plugins. The engine has the
            same inputs, outputs and plugin fields, and either of them runs it.
        overwrite: Replace what is in ``engine_dir``.
        cache_dir: Where compiled kernels are kept between builds; see ``compile_kernels``.
        progress: Called with a line at the beginning of each stage.

    Raises:
        MissingDependencyError: TensorRT or Triton is not installed.
        UserError: The network, the config and the targets do not go together, or TensorRT refuses the network. Nothing
            is written then.
    """
    begin = time.perf_counter()
    say = progress or (lambda line: None)
    if network_dir.resolve().is_relative_to(resolve_output(engine_dir)):
        raise UserError(f"{engine_dir}: the engine directory would replace the network in it. Name another one.")
    if native and plugin_library_path is not None:
        raise UserError(f"found --native and the plugin library {plugin_library_path}, expected one of them.")
    network = NetworkDirectory.load(network_dir)
    library = load_backend(backend or config.backend)
    plugin = merge_plugin_configs(network.plugin, config.mla_plugin)
    resolved = library.resolve_targets(targets or config.targets)
    config = config.model_copy(
        update={
            "mla_plugin": plugin,
            "backend": library.name,
            "targets": tuple(target.name for target in resolved),
        }
    )
    spec = network.spec
    shapes = input_shape_ranges(network, config)
    tiles = tuple(choose_tile(network, plugin, target) for target in resolved)

    with (
        atomic_directory(engine_dir, marker=ENGINE_NAME, overwrite=overwrite) as directory,
        capture_logs(library) as log,
    ):
        plugins = (
            plugin_library(library)
            if plugin_library_path is None
            else SharedPluginLibrary(library, plugin_library_path, network)
        )
        settings = OperationSettings(spec.dtype, plugin.cache_dtype(spec.dtype), tiles)
        with plugins.building(settings):
            say(f"reading {network.onnx_path}")
            engine = _EngineBuild(library, plugins, network, log, native=native)
            engine.check_network()
            parsed = time.perf_counter()
            triton_version = None
            if not native:
                kernels_dir = directory / KERNELS_NAME
                kernels_dir.mkdir()
                store = compile_kernels(
                    engine.kernel_jobs(resolved, {"page_size": plugin.page_size}),
                    kernels_dir,
                    cache_dir=cache_dir,
                    progress=lambda name, index, count: say(f"compiling kernel {index + 1} of {count}: {name}"),
                )
                triton_version = store.triton_version
            compiled = time.perf_counter()
            say(f"building with {library.name} {library.version} for {', '.join(config.targets or ())}")
            digest, size = engine.build(resolved, shapes, directory / ENGINE_NAME)
        built = time.perf_counter()
        info = EngineInfo(
            backend=library.name,
            backend_version=library.version,
            native=native,
            targets=tuple(TargetInfo(target=t.target, tile_s=t.tile_s, num_stages=t.num_stages) for t in tiles),
            triton_version=triton_version,
            engine_bytes=size,
            engine_sha256=digest,
            num_plugin_layers=len(plugins.built),
            plugin_library_sha256=plugins.sha256 if isinstance(plugins, SharedPluginLibrary) else None,
            activation_bytes=log.activation_bytes,
            build_seconds=round(built - begin, 3),
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            build_config=config,
        )
        for name in (ONNX_NAME, WEIGHTS_NAME):
            shutil.copyfile(network_dir / name, directory / name)
        written = NetworkConfig(
            version=__version__,
            pretrained_config=to_pretrained_config(spec),
            mla_plugin=plugin,
            num_layers=network.num_layers,
            latent_scales=network.latent_scales if network.row_layout.dtype.is_quantized else None,
            build_config=to_build_config(info, dtype=spec.dtype),
        )
        written.save(directory / CONFIG_NAME)
    return BuildReport(
        EngineDirectory.load(engine_dir), parsed - begin, compiled - parsed, built - compiled, tuple(log.warnings)
    )


class _EngineBuild:
    """One use of TensorRT's builder: the network, parsed, and what is checked and made of it.

    Args:
        backend: The TensorRT library.
        plugins: Its plugins; a build is under way.
        network: The network directory.
        log: Where TensorRT's messages go.
        native: Build without plugins.

    Raises:
        UserError: TensorRT cannot read the network.
    """

    def __init__(
        self,
        backend: Backend,
        plugins: PluginLibrary | SharedPluginLibrary,
        network: NetworkDirectory,
        log: LogCapture,
        *,
        native: bool,
    ) -> None:
        if not TYPE_CHECKING:
            trt = backend.module
        self._backend, self._plugins, self._network, self._log, self._native = backend, plugins, network, log, native
        self._builder = trt.Builder(trt_logger(backend))
        self._definition = self._builder.create_network(backend.network_flags())
        parser = trt.OnnxParser(self._definition, trt_logger(backend))
        if not parser.parse(network.model(native=native).SerializeToString()):
            errors = (parser.get_error(i) for i in range(parser.num_errors))
            # What a compiled plugin logs says more than the parser, which has its own errors in the log too.
            log.errors[:] = [
                *(message for message in log.errors if message.startswith(LOG_PREFIX)),
                *(f"{e.node_operator()} '{e.node_name()}': {' '.join(e.desc().split())}" for e in errors),
            ]
            raise self._failure("read the network")

    def check_network(self) -> None:
        """Checks what TensorRT made of the network.

        Raises:
            ValueError: Inputs, outputs or plugin layers are not what the network's config says.
        """
        network, definition = self._network, self._definition
        dtype, storage = network.dtype, network.row_layout.dtype.storage
        expected = {name: str(weight) for name, weight in network.weights.dtypes(dtype).items()}
        expected |= {item.name: item.dtype for item in network.step_inputs}
        expected |= {past_latent(layer): storage for layer in range(network.num_layers)}
        self._compare("input", expected, [definition.get_input(i) for i in range(definition.num_inputs)])
        expected = {present_latent(layer): storage for layer in range(network.num_layers)}
        expected[LOGITS] = "float32"
        self._compare("output", expected, [definition.get_output(i) for i in range(definition.num_outputs)])

        layers = self._plugin_layers()
        count = count_operations(network.spec, network.plugin, num_layers=network.num_layers)
        if len(layers) != (0 if self._native else count):
            raise ValueError(f"found {len(layers)} plugin layers, expected {0 if self._native else count}")
        if not self._native:
            self._check_aliases(layers)

    def kernel_jobs(self, targets: Sequence[Target], fixed_dims: Mapping[str, int]) -> list[Job]:
        """Kernels that the network's plugins can launch.

        Args:
            targets: GPU generations.
            fixed_dims: Sizes that the network leaves open and the profile fixes.
        """
        operations = dict(self._plugins.built)
        jobs: dict[Job, None] = {}
        for layer in self._plugin_layers():
            operation = operations[layer.name]
            sizes = dict(fixed_dims)
            for index, tensor in enumerate(operation.definition.inputs):
                for dim, size in zip(tensor.dims, tuple(layer.get_input(index).shape), strict=True):
                    name, offset = split_dim(dim)
                    if name is not None and size >= 0:
                        sizes[name] = size - offset
            for target in targets:
                jobs.update(dict.fromkeys((variant, target) for variant in operation.variants(sizes, target)))
        return list(jobs)

    def build(self, targets: Sequence[Target], shapes: Mapping[str, ShapeRange], path: Path) -> tuple[str, int]:
        """Builds and writes the engine.

        Args:
            targets: GPU generations.
            shapes: Shapes of the inputs in which they differ.
            path: File to write.

        Returns:
            SHA-256 digest and size of the engine.

        Raises:
            UserError: TensorRT refuses.
        """
        config = self._builder.create_builder_config()
        self._backend.configure(config, targets)
        if self._network.plugin.max_context_passes > 1:
            # Side by side on streams of their own, the passes would hold decompressed keys and values all at once.
            config.max_aux_streams = 0
        profile = self._builder.create_optimization_profile()
        for name, shape in shapes.items():
            profile.set_shape(name, *shape)
        if config.add_optimization_profile(profile) < 0:
            raise self._failure("use the optimization profile")
        serialized = self._builder.build_serialized_network(self._definition, config)
        if serialized is None or self._plugins.failures:
            raise self._failure("build the engine")
        if not self._native and self._plugins.num_aliases_declared < self._network.num_layers:
            raise ValueError(
                f"TensorRT asked for {self._plugins.num_aliases_declared} aliases, expected one for each of "
                f"{self._network.num_layers} layers: the cache would be copied in every step"
            )
        engine = memoryview(serialized)
        path.write_bytes(engine)
        return hashlib.sha256(engine).hexdigest(), engine.nbytes

    def _plugin_layers(self) -> list[trt.ILayer]:
        plugin_type = self._backend.module.LayerType.PLUGIN_V3
        layers = (self._definition.get_layer(i) for i in range(self._definition.num_layers))
        return [layer for layer in layers if layer.type == plugin_type]

    def _check_aliases(self, layers: Sequence[trt.ILayer]) -> None:
        """Every cache goes in and out through one plugin, which updates it in place."""
        operations = dict(self._plugins.built)
        updated = {
            (layer.get_input(source).name, layer.get_output(output).name)
            for layer in layers
            for output, source in operations[layer.name].definition.aliases.items()
        }
        expected = {(past_latent(layer), present_latent(layer)) for layer in range(self._network.num_layers)}
        if updated != expected:
            raise ValueError(f"found in-place updates of {sorted(updated)}, expected {sorted(expected)}")

    def _compare(self, kind: str, expected: Mapping[str, str], tensors: Sequence[trt.ITensor]) -> None:
        found = {tensor.name: tensor.dtype for tensor in tensors}
        wanted = {name: self._backend.data_type(dtype) for name, dtype in expected.items()}
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(f"{kind} '{name}': found {found.get(name)}, expected {wanted.get(name)}")

    def _failure(self, what: str) -> UserError:
        reasons = LogCapture(errors=[*self._plugins.failures, *self._log.errors])
        return UserError(
            f"{self._network.onnx_path}: {self._backend.name} {self._backend.version} cannot {what}: "
            f"{reasons.summary()}"
        )


def choose_tile(network: NetworkDirectory, plugin: MlaPluginConfig, target: Target) -> TargetTile:
    """The config's tile, or where it gives none the best for the target.

    Raises:
        UserError: It does not fit the target's shared memory.
    """
    tile = TargetTile.choose(network.spec, plugin, target)
    check_tile(tile.tile_s, tile.num_stages, network.row_layout.row_bytes, target)
    return tile
