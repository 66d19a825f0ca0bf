"""The network directory: what ``convert`` writes and every later stage reads.

``config.json`` holds the model and the effective plugin config, ``network.onnx`` the graph, ``weights.json`` the
source of each weight input. An engine directory holds the same three, and is read the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from trtllm_mla._version import __version__
from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.pretrained_config import from_pretrained_config, to_pretrained_config
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import WeightMap, build_weight_map, check_checkpoint
from trtllm_mla.config import MlaPluginConfig, StrictModel, merge_plugin_configs, parse_config
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, atomic_file, read_table, resolve_output, write_json
from trtllm_mla.network.contract import LOGITS, StepInput, past_latent, present_latent, step_inputs
from trtllm_mla.network.graph import build_network, strip_plugin_attributes

if TYPE_CHECKING:
    import onnx

CONFIG_NAME = "config.json"
ONNX_NAME = "network.onnx"
WEIGHTS_NAME = "weights.json"

# What fine-tunes of one architecture may differ in.
_NOT_IN_GRAPH = frozenset({"hf_architecture", "dtype", "max_position_embeddings", "bos_token_id", "eos_token_ids"})

MAX_CONFIG_BYTES = 1 << 20
MAX_ONNX_BYTES = 1 << 28
MAX_CONSTANT_ELEMENTS = 1 << 16
MIN_LATENT_SCALE, MAX_LATENT_SCALE = 2.0**-64, 2.0**64

_CACHE_PREFIXES = (past_latent(0).removesuffix("0"), present_latent(0).removesuffix("0"))

Progress = Callable[[str, int, int], None]
_STAGES = 2  # of ``convert``, behind reading headers

LatentScale = Annotated[float, Field(ge=MIN_LATENT_SCALE, le=MAX_LATENT_SCALE)]


class NetworkConfig(StrictModel):
    """``config.json`` of a network or an engine directory.

    Attributes:
        version: Version of this package that wrote it.
        pretrained_config: The whole model; its ``dtype`` is the network's.
        mla_plugin: The effective plugin config: every size filled in.
        num_layers: Layers of the network, at most the model's.
        latent_scales: Outer scale of each layer's quantised latents; None is 1 for all.
        build_config: How the engine was built; engine directories only.
    """

    version: Annotated[str, Field(max_length=64)]
    pretrained_config: dict[str, Any]
    mla_plugin: MlaPluginConfig
    num_layers: Annotated[int, Field(gt=0, strict=True)]
    latent_scales: tuple[LatentScale, ...] | None = None
    build_config: dict[str, Any] | None = None

    def save(self, path: Path) -> None:
        """Writes the file, atomically; what is absent has no key."""
        values = self.model_dump(mode="json")
        write_json(path, {key: value for key, value in values.items() if value is not None})


@dataclass(frozen=True)
class NetworkDirectory:
    """A network on disk.

    Attributes:
        path: The directory.
        spec: The whole model; its ``dtype`` is the network's.
        plugin: The effective plugin config.
        num_layers: Layers of the network.
        weights: Where each weight input comes from.
        latent_scales: Outer scale of each layer's quantised latents, 1 where the cache is not quantised.
    """

    path: Path
    spec: ModelSpec
    plugin: MlaPluginConfig
    num_layers: int
    weights: WeightMap
    latent_scales: tuple[float, ...]

    @classmethod
    def load(cls, path: Path) -> NetworkDirectory:
        """Reads a network or an engine directory, but for the graph itself.

        Raises:
            UserError: The directory or one of its files is missing, or not what ``convert`` writes.
        """
        if not path.is_dir():
            raise UserError(f"{path}: no such directory. Make a network directory with: trtllm-mla convert")
        missing = [name for name in (CONFIG_NAME, ONNX_NAME, WEIGHTS_NAME) if not (path / name).is_file()]
        if missing:
            raise UserError(
                f"{path}: found no {' and no '.join(missing)}, expected a network or engine directory. Make one with: "
                "trtllm-mla convert"
            )
        source = str(path / CONFIG_NAME)
        config = parse_config(read_table(path / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES), NetworkConfig, source=source)
        spec = from_pretrained_config(config.pretrained_config, source=f"{source}: pretrained_config")
        if config.num_layers > spec.num_hidden_layers:
            raise UserError(
                f"{source}: num_layers: found {config.num_layers}, expected at most num_hidden_layers = "
                f"{spec.num_hidden_layers}. Convert the checkpoint again."
            )
        plugin = effective_plugin(config.mla_plugin, spec, source=f"{source}: mla_plugin")
        weights = WeightMap.load(path / WEIGHTS_NAME)
        expected = build_weight_map(spec, config.num_layers)
        if weights.shapes != expected.shapes or weights.dtypes(spec.dtype) != expected.dtypes(spec.dtype):
            raise UserError(
                f"{path / WEIGHTS_NAME}: found weights that are not those of the model in {CONFIG_NAME}, expected "
                "the same names, shapes and types. Convert the checkpoint again."
            )
        scales = config.latent_scales or (1.0,) * config.num_layers
        quantized = plugin.cache_dtype(spec.dtype).is_quantized
        if len(scales) != config.num_layers or not (quantized or set(scales) == {1.0}):
            raise UserError(
                f"{source}: latent_scales: found {len(scales)} for a {plugin.kv_cache_dtype} cache of "
                f"{config.num_layers} layers, expected one a layer with an fp8 or nvfp4 cache, and none otherwise. "
                "Convert the checkpoint again."
            )
        return cls(path, spec, plugin, config.num_layers, weights, scales)

    def configured(self, build: MlaPluginConfig) -> NetworkDirectory:
        """The directory with what a build config's section changes; see ``merge_plugin_configs``."""
        return dataclasses.replace(self, plugin=merge_plugin_configs(self.plugin, build))

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Checks that a checkpoint's config describes this network; its tensors are checked when they are bound.

        Raises:
            UserError: Something that the graph or the rotary table was made from differs; both values are named.
        """
        found = read_model_spec(checkpoint)
        for field in dataclasses.fields(ModelSpec):
            theirs, ours = getattr(found, field.name), getattr(self.spec, field.name)
            if field.name not in _NOT_IN_GRAPH and theirs != ours:
                raise UserError(
                    f"{checkpoint.path}: {field.name}: found {theirs}, the network in {self.path} was made for "
                    f"{ours}. Name the checkpoint it was converted from or a fine-tune of it, or convert this one."
                )

    @property
    def dtype(self) -> DType:
        """Type of activations and weights."""
        return self.spec.dtype

    @property
    def step_inputs(self) -> tuple[StepInput, ...]:
        """Inputs that differ from step to step."""
        plugin = self.plugin
        return step_inputs(absorption=plugin.enable_matrix_absorption, context_passes=plugin.max_context_passes)

    @property
    def row_layout(self) -> RowLayout:
        """A row of the latent cache."""
        spec = self.spec
        return self.plugin.cache_dtype(spec.dtype).layout(spec.kv_lora_rank, spec.qk_rope_head_dim)

    @property
    def onnx_path(self) -> Path:
        """The graph's file."""
        return self.path / ONNX_NAME

    def model(self, *, native: bool = False) -> onnx.ModelProto:
        """Reads the graph.

        Args:
            native: Leave out the attributes that make TensorRT look for plugins.

        Raises:
            UserError: The file is too large, no ONNX file, or not the graph of this directory's config.
        """
        import onnx
        import onnx_ir

        size = self.onnx_path.stat().st_size
        if size > MAX_ONNX_BYTES:
            raise UserError(f"{self.onnx_path}: found {size} bytes, expected at most {MAX_ONNX_BYTES}.")
        try:
            proto = onnx.load_model_from_string(self.onnx_path.read_bytes())
        except Exception as error:  # protobuf's DecodeError, whose module differs between its implementations
            raise UserError(f"{self.onnx_path}: not an ONNX file: {error}. Convert the checkpoint again.") from None
        try:
            self._check(proto)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.onnx_path}: found a name that is no UTF-8: {error}. Convert the checkpoint again."
            ) from None
        if native:
            model = onnx_ir.from_proto(proto)
            strip_plugin_attributes(model)
            proto = onnx_ir.to_proto(model)
        return proto

    def unquantized(self) -> NetworkDirectory:
        """The directory with a cache of the network's type, to make a twin of; its graph on disk stays quantised."""
        plugin = self.plugin.model_copy(update={"kv_cache_dtype": CacheDType.of(self.dtype).value})
        return dataclasses.replace(self, plugin=plugin, latent_scales=(1.0,) * self.num_layers)

    def check_calibratable(self) -> None:
        """Checks that outer scales can be stored in this directory.

        Raises:
            UserError: The cache is not quantised, or the directory is an engine's, which has its scales built in.
        """
        if not self.row_layout.dtype.is_quantized:
            raise UserError(
                f"{self.path}: found a network with a {self.row_layout.dtype} cache, whose rows have no scales; "
                "expected an fp8 or nvfp4 cache. Set kv_cache_dtype in the plugin config, and convert again."
            )
        if "build_config" in read_table(self.path / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES):
            raise UserError(
                f"{self.path}: found an engine directory, whose scales were built into the engine, expected a network "
                "directory. Calibrate the network, and build again."
            )

    def float32_twin(self) -> onnx.ModelProto:
        """The graph of the same config in float32: for runtimes without products of this type.

        A quantised cache stays as it is, any other becomes fp32.
        """
        import onnx_ir

        dtype = self.row_layout.dtype if self.row_layout.dtype.is_quantized else CacheDType.FP32
        plugin = self.plugin.model_copy(update={"kv_cache_dtype": dtype.value})
        return onnx_ir.to_proto(
            build_network(
                self.spec, plugin, DType.FLOAT32, num_layers=self.num_layers, latent_scales=self.latent_scales
            )
        )

    def _check(self, proto: onnx.ModelProto) -> None:
        """Refuses a graph with other inputs or outputs than the config's, with large constants, or other files."""
        import onnx

        found = {
            value.name: (value.type.tensor_type.elem_type, [dim.dim_value for dim in value.type.tensor_type.shape.dim])
            for value in proto.graph.input
        }
        dtypes = self.weights.dtypes(self.dtype)
        expected = {name: (int(dtypes[name].onnx), list(shape)) for name, shape in self.weights.shapes.items()}
        others = {item.name for item in self.step_inputs}
        for layer in range(self.num_layers):
            expected[past_latent(layer)] = (int(self.row_layout.dtype.onnx), [0, 0, self.row_layout.width])
        wrong = sorted(name for name, value in expected.items() if found.get(name) != value)
        wrong += sorted((found.keys() - expected.keys()) ^ others)
        if wrong:
            raise UserError(
                f"{self.onnx_path}: found a graph whose input '{wrong[0]}' is not as in {CONFIG_NAME} and "
                f"{WEIGHTS_NAME}, expected files that were written together. Convert the checkpoint again."
            )
        outputs = {value.name for value in proto.graph.output}
        if outputs != {LOGITS, *(present_latent(layer) for layer in range(self.num_layers))}:
            raise UserError(
                f"{self.onnx_path}: found the outputs {', '.join(sorted(outputs)) or 'none':.200}, expected {LOGITS} "
                "and the cache of each layer. Convert the checkpoint again."
            )
        if _latent_scales(proto) != {
            name(layer): float(np.float32(scale))
            for layer, scale in enumerate(self.latent_scales)
            for name in (past_latent, present_latent)
        }:
            raise UserError(
                f"{self.onnx_path}: found other outer scales than the latent_scales in {CONFIG_NAME}, expected files "
                "that were written together. Calibrate the network again, or convert the checkpoint again."
            )
        for tensor in _tensors(proto):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise UserError(
                    f"{self.onnx_path}: found tensors kept in other files, expected none. Convert the checkpoint "
                    "again."
                )
            if not 0 <= math.prod(tensor.dims) <= MAX_CONSTANT_ELEMENTS:
                raise UserError(
                    f"{self.onnx_path}: found a constant of shape {list(tensor.dims)!s:.80}, expected at most "
                    f"{MAX_CONSTANT_ELEMENTS} elements. Convert the checkpoint again."
                )


def _latent_scales(proto: onnx.ModelProto) -> dict[str, float]:
    """Outer scale of each cache tensor that an operation reads or writes; NaN where operations disagree."""
    found: dict[str, float] = {}
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "latent_scale":
                for name in node.input:
                    if name.startswith(_CACHE_PREFIXES):
                        found[name] = attribute.f if found.get(name, attribute.f) == attribute.f else math.nan
    return found


def _tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Every tensor in a protobuf message: initializers, and constants of nodes, subgraphs and functions."""
    import onnx

    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in (value,) if hasattr(value, "ListFields") else value:
                yield from _tensors(item)


def convert(
    checkpoint_path: Path,
    output: Path,
    *,
    plugin: MlaPluginConfig,
    dtype: DType | None = None,
    num_layers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> NetworkDirectory:
    """Turns a checkpoint into a network directory. No weight is read or copied.

    Args:
        checkpoint_path: A Hugging Face directory. Its tensors are checked where there are any.
        output: The directory to make.
        plugin: The plugin config; sizes left out are filled in.
        dtype: Type of the network; None is the checkpoint's.
        num_layers: Layers to keep, from the first; None keeps all.
        overwrite: Replace what is in ``output``.
        progress: Told the stage that is under way, how much of it is done, and how much there is: first headers,
            then the stages that follow.

    Raises:
        UserError: The checkpoint is unusable, it contradicts the plugin config, or ``output`` cannot be written to.
            Nothing is written then.
    """
    say = progress or (lambda stage, done, total: None)
    checkpoint = Checkpoint.open(checkpoint_path, progress=functools.partial(say, "Reading headers"))
    source = checkpoint_path.resolve()
    if source.is_relative_to(resolve_output(output)):
        raise UserError(f"{output}: the output directory would replace the checkpoint in it. Name another one.")
    spec = read_model_spec(checkpoint)
    spec = dataclasses.replace(spec, dtype=dtype or spec.dtype)
    plugin = effective_plugin(plugin, spec)
    weights = build_weight_map(spec, num_layers)
    if checkpoint.has_weights:
        say("Checking tensors", 0, _STAGES)
        check_checkpoint(weights, checkpoint)
    layers = spec.num_hidden_layers if num_layers is None else num_layers
    network = NetworkDirectory(output, spec, plugin, layers, weights, (1.0,) * layers)
    say("Writing the network", 1, _STAGES)
    _write(network, overwrite=overwrite)
    say("Writing the network", _STAGES, _STAGES)
    return network


def store_latent_scales(
    network: NetworkDirectory, latent_scales: Sequence[float], *, output: Path | None = None, overwrite: bool = False
) -> NetworkDirectory:
    """Gives the quantised latents of a network other outer scales.

    In place, the two files that hold them are replaced one after the other; ``NetworkDirectory.model`` refuses a graph
    whose scales are not the config's, so that an interruption in between shows.

    Args:
        network: A network directory with a quantised cache.
        latent_scales: One a layer, rounded to fp32.
        output: A directory to make; None changes ``network`` itself.
        overwrite: Replace what is in ``output``.

    Raises:
        UserError: The network has no quantised cache or is an engine's, or ``output`` cannot be written to.
        ValueError: There is not one scale a layer, or one is outside 2^-64 to 2^64.
    """
    network.check_calibratable()
    scales = tuple(float(np.float32(scale)) for scale in latent_scales)
    if len(scales) != network.num_layers or not all(MIN_LATENT_SCALE <= scale <= MAX_LATENT_SCALE for scale in scales):
        raise ValueError(f"found the scales {scales}, expected {network.num_layers} from 2^-64 to 2^64")
    result = dataclasses.replace(network, path=output or network.path, latent_scales=scales)
    if output is not None:
        check_output(network, output)
        _write(result, overwrite=overwrite)
        return result
    with atomic_file(network.onnx_path) as graph, atomic_file(network.path / CONFIG_NAME) as config:
        _save_graph(result, graph)
        _to_config(result).save(config)
    return result


def check_output(network: NetworkDirectory, output: Path) -> None:
    """Checks that writing to a directory would not replace the network that it is made from.

    Raises:
        UserError: It would.
    """
    if network.path.resolve().is_relative_to(resolve_output(output)):
        raise UserError(f"{output}: the output directory would replace the network in it. Name another one.")


def _write(network: NetworkDirectory, *, overwrite: bool) -> None:
    with atomic_directory(network.path, marker=ONNX_NAME, overwrite=overwrite) as directory:
        _to_config(network).save(directory / CONFIG_NAME)
        _save_graph(network, directory / ONNX_NAME)
        network.weights.save(directory / WEIGHTS_NAME)


def _to_config(network: NetworkDirectory) -> NetworkConfig:
    return NetworkConfig(
        version=__version__,
        pretrained_config=to_pretrained_config(network.spec),
        mla_plugin=network.plugin,
        num_layers=network.num_layers,
        latent_scales=network.latent_scales if network.row_layout.dtype.is_quantized else None,
    )


def _save_graph(network: NetworkDirectory, path: Path) -> None:
    import onnx_ir

    graph = build_network(
        network.spec,
        network.plugin,
        network.dtype,
        num_layers=network.num_layers,
        latent_scales=network.latent_scales,
    )
    onnx_ir.save(graph, path)


def effective_plugin(plugin: MlaPluginConfig, spec: ModelSpec, *, source: str = "mla_plugin") -> MlaPluginConfig:
    """The plugin config with the model's sizes and the cache's type filled in.

    Args:
        plugin: What the user wrote.
        spec: The model; ``auto`` stands for its type.
        source: Where the plugin config comes from, for messages.

    Raises:
        UserError: A size is not the model's; the message names both values.
    """
    sizes = (
        ("num_heads", "num_attention_heads", spec.num_attention_heads),
        ("head_dim_content", "qk_nope_head_dim", spec.qk_nope_head_dim),
        ("latent_kv_dim", "kv_lora_rank", spec.kv_lora_rank),
        ("rope_dim", "qk_rope_head_dim", spec.qk_rope_head_dim),
    )
    for key, model_key, size in sizes:
        found = getattr(plugin, key)
        if found not in (None, size):
            raise UserError(
                f"{source}: {key}: found {found}, the checkpoint's {model_key} is {size}. Correct {key}, or leave it "
                "out: sizes are then taken from the checkpoint."
            )
    cache_dtype = plugin.cache_dtype(spec.dtype)
    return plugin.model_copy(update={**{key: size for key, _, size in sizes}, "kv_cache_dtype": cache_dtype.value})
