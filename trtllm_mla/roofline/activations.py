"""How much memory the intermediate values of a step may take: an estimate, made from the network's graph.

Every value of the graph has a size when the step is as large as the engine allows. The estimate is what a layer takes
if no memory is used twice before it is through: all of its values, those that go through it, and the largest workspace
of its plugins; of the layers, and of the head, the one that takes most. TensorRT's own plan, known when an engine has
been built, uses memory again and fuses operations; but it also runs branches side by side and copies values, so that
it comes to a half of the estimate rather than to what is alive at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.operation import Operation, OperationSettings, TargetTile
from trtllm_mla.engine.profile import size_ranges
from trtllm_mla.network.contract import LOGITS
from trtllm_mla.network.graph import build_network, hidden_states
from trtllm_mla.ops import DOMAIN, OPS
from trtllm_mla.ops.definition import split_dim
from trtllm_mla.targets import Target

if TYPE_CHECKING:
    import onnx

# Their output is their input, under another shape.
_VIEWS = frozenset({"Reshape", "Unsqueeze"})


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step as large as an engine allows.

    Attributes:
        activation_bytes: Intermediate values and plugin workspaces, estimated from above.
        workspace_bytes: The workspace that an engine reserves for each operation with a plugin, by its name: an exact
            bound. The largest of a layer is part of ``activation_bytes``.
    """

    activation_bytes: int
    workspace_bytes: Mapping[str, int]


def step_memory(
    spec: ModelSpec, plugin: MlaPluginConfig, config: BuildConfig, target: Target, *, num_layers: int
) -> StepMemory:
    """Estimates the memory of a step.

    Layers of one kind take the same, so no more of them are looked at than it takes to see each kind.

    Args:
        spec: The model; its ``dtype`` is the network's.
        plugin: The effective plugin config.
        config: The engine's limits; its own ``mla_plugin`` is not used.
        target: The GPU generation, on which workspaces depend.
        num_layers: Layers of the network.

    Raises:
        UserError: The limits are too large for 32-bit numbers, or cached rows too wide for the target.
    """
    settings = OperationSettings(
        spec.dtype, plugin.cache_dtype(spec.dtype), (TargetTile.choose(spec, plugin, target),)
    )
    most = 0
    largest: dict[str, int] = {}
    for part in _network_parts(spec, plugin, config, num_layers):
        workspace = 0
        for use in part.uses:
            size = Operation(OPS[use.op_name], dict(use.attributes), settings).workspace_bytes(use.shapes)
            largest[use.op_name] = max(largest.get(use.op_name, 0), size)
            workspace = max(workspace, size)
        most = max(most, part.value_bytes + workspace)
    return StepMemory(most, largest)


@dataclass(frozen=True)
class _PluginUse:
    """An operation with a plugin, as large as it can be.

    Attributes:
        op_name: Its name.
        attributes: Its attributes, by name.
        shapes: Shapes of its inputs.
    """

    op_name: str
    attributes: tuple[tuple[str, int | float], ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Part:
    """A layer, or the head.

    Attributes:
        value_bytes: What its values take, with those that go through it.
        uses: Its operations with plugins, equal ones once.
    """

    value_bytes: int
    uses: tuple[_PluginUse, ...]


# The same for all targets.
@functools.lru_cache(maxsize=64)
def _network_parts(
    spec: ModelSpec, plugin: MlaPluginConfig, config: BuildConfig, num_layers: int
) -> tuple[_Part, ...]:
    import onnx_ir

    first_moe = next((layer for layer in range(num_layers) if spec.is_moe_layer(layer)), 0)
    seen = min(num_layers, first_moe + 2)
    # Engines are built so that passes over older tokens run one after the other, in the same memory.
    short = plugin.model_copy(update={"max_context_passes": min(plugin.max_context_passes, 2)})
    model = onnx_ir.to_proto(build_network(spec, short, spec.dtype, num_layers=seen))
    ranges = size_ranges(config.model_copy(update={"mla_plugin": plugin}))
    sizes = {name: size.max for name, size in ranges.items()}
    shapes = _Shapes(model, sizes, spec.dtype, plugin.cache_dtype(spec.dtype))
    return _divide(model.graph, shapes, frozenset(map(hidden_states, range(seen))))


def _divide(graph: onnx.GraphProto, shapes: _Shapes, layer_ends: frozenset[str]) -> tuple[_Part, ...]:
    """Divides a graph behind each of the values that layers end with."""
    storage = _storage(graph, shapes.constants)
    last_use = {storage.get(name): index for index, node in enumerate(graph.node) for name in node.input}
    parts = []
    held: dict[str, int] = {}
    uses: dict[_PluginUse, None] = {}
    for index, node in enumerate(graph.node):
        held |= {name: shapes.num_bytes(name) for name in node.output if storage.get(name) == name}
        if node.domain == DOMAIN:
            uses[shapes.uses[node.name]] = None
        if layer_ends & set(node.output) or index == len(graph.node) - 1:
            parts.append(_Part(sum(held.values()), tuple(uses)))
            held = {name: size for name, size in held.items() if last_use.get(name, index) > index}
            uses = {}
    return tuple(parts)


def _storage(graph: onnx.GraphProto, constants: Mapping[str, onnx.TensorProto]) -> dict[str, str]:
    """For each intermediate value, the one whose memory it lies in: itself, but for views.

    The network's inputs, caches and constants lie in memory of their own. So do the logits, but TensorRT may make them
    elsewhere first, as it does for some sizes of the vocabulary.
    """
    caches = {item.name for item in graph.output} - {LOGITS}
    storage: dict[str, str] = {}
    for node in graph.node:
        for name in node.output:
            if node.op_type in _VIEWS:
                if node.input[0] in storage:
                    storage[name] = storage[node.input[0]]
            elif name not in caches and name not in constants:
                storage[name] = name
    return storage


class _Shapes:
    """Type and shape of every value of a graph.

    Attributes:
        constants: Values that are known: constants, and sizes that follow from shapes.
        uses: Each node with a plugin, by its name.

    Args:
        model: The network.
        sizes: Size of each named dimension.
        dtype: The network's type.
        cache_dtype: Type of its cache.
    """

    def __init__(
        self, model: onnx.ModelProto, sizes: Mapping[str, int], dtype: DType, cache_dtype: CacheDType
    ) -> None:
        import onnx

        self.constants: dict[str, onnx.TensorProto] = {item.name: item for item in model.graph.initializer}
        self.uses: dict[str, _PluginUse] = {}
        self._opset = next(item for item in model.opset_import if item.domain == "")
        self._dtype, self._cache_dtype = dtype, cache_dtype
        self._types: dict[str, onnx.TypeProto] = {}
        for value in model.graph.input:
            tensor = value.type.tensor_type
            shape = [_size(dim, sizes) for dim in tensor.shape.dim]
            self._types[value.name] = onnx.helper.make_tensor_type_proto(tensor.elem_type, shape)
        for constant in model.graph.initializer:
            shape = list(constant.dims)
            self._types[constant.name] = onnx.helper.make_tensor_type_proto(constant.data_type, shape)
        for node in model.graph.node:
            if node.domain == DOMAIN:
                self._add_plugin(node)
            else:
                self._add_operator(node)

    def num_bytes(self, name: str) -> int:
        """What a value takes."""
        import onnx

        item = onnx.helper.tensor_dtype_to_np_dtype(self._types[name].tensor_type.elem_type)
        return math.prod(self._shape(name)) * item.itemsize

    def _shape(self, name: str) -> tuple[int, ...]:
        dims = self._types[name].tensor_type.shape.dim
        if not all(dim.HasField("dim_value") for dim in dims):
            raise ValueError(f"{name}: found a shape that does not follow from the network's inputs")
        return tuple(dim.dim_value for dim in dims)

    def _add_operator(self, node: onnx.NodeProto) -> None:
        """Infers the outputs of an operator of ONNX."""
        import onnx

        schema = onnx.defs.get_schema(node.op_type, self._opset.version, "")
        types = {name: self._types[name] for name in node.input}
        known = {name: self.constants[name] for name in node.input if name in self.constants}
        outputs = onnx.shape_inference.infer_node_outputs(schema, node, types, known, opset_imports=[self._opset])
        self._types.update(outputs)
        values = self._known_sizes(node)
        if values is not None:
            constant = onnx.helper.make_tensor(node.output[0], onnx.TensorProto.INT64, [len(values)], values)
            self.constants[node.output[0]] = constant

    def _known_sizes(self, node: onnx.NodeProto) -> list[int] | None:
        """The whole numbers that an operator gives, if they are known, since shapes may follow from them."""
        import onnx

        if node.op_type == "Shape":
            return list(self._shape(node.input[0]))
        if node.op_type == "Concat" and all(name in self.constants for name in node.input):
            return [int(size) for name in node.input for size in onnx.numpy_helper.to_array(self.constants[name])]
        if node.op_type == "Constant" and node.attribute[0].name == "value_ints":
            return list(node.attribute[0].ints)
        return None

    def _add_plugin(self, node: onnx.NodeProto) -> None:
        """Gives the outputs of an operation with a plugin the shapes of its contract."""
        import onnx

        definition = OPS[node.op_type]
        given = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        attributes = {name: given[name] for name in definition.attributes}
        shapes = {
            contract.name: self._shape(name) for contract, name in zip(definition.inputs, node.input, strict=True)
        }
        dims = definition.resolve_dims(shapes)
        kinds = {
            "model": int(self._dtype.onnx),
            "float32": onnx.TensorProto.FLOAT,
            "int32": onnx.TensorProto.INT32,
            "int8": onnx.TensorProto.INT8,
            "cache": int(self._cache_dtype.onnx),
        }
        for index, (name, contract) in enumerate(zip(node.output, definition.outputs, strict=True)):
            shape = definition.output_shape(index, dims, attributes)
            self._types[name] = onnx.helper.make_tensor_type_proto(kinds[contract.element_type], shape)
        self.uses[node.name] = _PluginUse(node.op_type, tuple(sorted(attributes.items())), tuple(shapes.values()))


def _size(dim: onnx.TensorShapeProto.Dimension, sizes: Mapping[str, int]) -> int:
    if not dim.dim_param:
        return dim.dim_value
    name, offset = split_dim(dim.dim_param)
    return sizes[str(name)] + offset
