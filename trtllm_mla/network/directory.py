"""The network directory: what ``convert`` writes and every later stage reads.

``config.json`` holds the model and the effective plugin config, ``network.onnx`` the graph, ``weights.json`` the
source of each weight input. An engine directory holds the same three, and is read the same way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trtllm_mla._version import __version__
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.pretrained_config import from_pretrained_config, to_pretrained_config
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import WeightMap, build_weight_map, check_checkpoint
from trtllm_mla.config import MlaPluginConfig, StrictModel, merge_plugin_configs, parse_config
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, read_table, resolve_output, write_json
from trtllm_mla.network.contract import LOGITS, past_latent, present_latent, step_inputs
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


class NetworkConfig(StrictModel):
    """``config.json`` of a network or an engine directory.

    Attributes:
        version: Version of this package that wrote it.
        pretrained_config: The whole model; its ``dtype`` is the network's.
        mla_plugin: The effective plugin config: every size filled in.
        num_layers: Layers of the network, at most the model's.
        build_config: How the engine was built; engine directories only.
    """

    version: Annotated[str, Field(max_length=64)]
    pretrained_config: dict[str, Any]
    mla_plugin: MlaPluginConfig
    num_layers: Annotated[int, Field(gt=0, strict=True)]
    build_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class NetworkDirectory:
    """A network on disk.

    Attributes:
        path: The directory.
        spec: The whole model; its ``dtype`` is the network's.
        plugin: The effective plugin config.
        num_layers: Layers of the network.
        weights: Where each weight input comes from.
    """

    path: Path
    spec: ModelSpec
    plugin: MlaPluginConfig
    num_layers: int
    weights: WeightMap

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
        if weights.shapes != build_weight_map(spec, config.num_layers).shapes:
            raise UserError(
                f"{path / WEIGHTS_NAME}: found weights that are not those of the model in {CONFIG_NAME}, expected "
                "the same names and shapes. Convert the checkpoint again."
            )
        return cls(path, spec, plugin, config.num_layers, weights)

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

    def float32_twin(self) -> onnx.ModelProto:
        """The graph of the same config in float32, cache included: for runtimes without products of this type."""
        import onnx_ir

        plugin = self.plugin.model_copy(update={"kv_cache_dtype": "fp32"})
        return onnx_ir.to_proto(build_network(self.spec, plugin, DType.FLOAT32, num_layers=self.num_layers))

    def _check(self, proto: onnx.ModelProto) -> None:
        """Refuses a graph with other inputs or outputs than the config's, with large constants, or other files."""
        import onnx

        found = {
            value.name: (value.type.tensor_type.elem_type, [dim.dim_value for dim in value.type.tensor_type.shape.dim])
            for value in proto.graph.input
        }
        expected = {name: (int(self.dtype.onnx), list(shape)) for name, shape in self.weights.shapes.items()}
        others = {item.name for item in step_inputs(absorption=self.plugin.enable_matrix_absorption)}
        cache_dtype = self.plugin.cache_dtype(self.dtype)
        for layer in range(self.num_layers):
            expected[past_latent(layer)] = (int(cache_dtype.onnx), [0, 0, self.spec.latent_width])
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
) -> NetworkDirectory:
    """Turns a checkpoint into a network directory. No weight is read or copied.

    Args:
        checkpoint_path: A Hugging Face directory. Its tensors are checked where there are any.
        output: The directory to make.
        plugin: The plugin config; sizes left out are filled in.
        dtype: Type of the network; None is the checkpoint's.
        num_layers: Layers to keep, from the first; None keeps all.
        overwrite: Replace what is in ``output``.

    Raises:
        UserError: The checkpoint is unusable, it contradicts the plugin config, or ``output`` cannot be written to.
            Nothing is written then.
    """
    import onnx_ir

    checkpoint = Checkpoint.open(checkpoint_path)
    source = checkpoint_path.resolve()
    if source.is_relative_to(resolve_output(output)):
        raise UserError(f"{output}: the output directory would replace the checkpoint in it. Name another one.")
    spec = read_model_spec(checkpoint)
    spec = dataclasses.replace(spec, dtype=dtype or spec.dtype)
    plugin = effective_plugin(plugin, spec)
    weights = build_weight_map(spec, num_layers)
    if checkpoint.has_weights:
        check_checkpoint(weights, checkpoint)
    layers = spec.num_hidden_layers if num_layers is None else num_layers
    config = NetworkConfig(
        version=__version__, pretrained_config=to_pretrained_config(spec), mla_plugin=plugin, num_layers=layers
    )
    with atomic_directory(output, marker=ONNX_NAME, overwrite=overwrite) as directory:
        write_json(directory / CONFIG_NAME, config.model_dump(mode="json", exclude={"build_config"}))
        onnx_ir.save(build_network(spec, plugin, spec.dtype, num_layers=layers), directory / ONNX_NAME)
        weights.save(directory / WEIGHTS_NAME)
    return NetworkDirectory(output, spec, plugin, layers, weights)


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
    return plugin.model_copy(update={**{key: size for key, _, size in sizes}, "kv_cache_dtype": cache_dtype.triton})
