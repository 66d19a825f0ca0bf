"""TensorRT plugins for the MLA operations: one class for all of them, made from an operation's definition.

A plugin is thin. What it computes with is an ``Operation``, and what launches is a ``Launcher``; the class translates
between them and TensorRT's callbacks.

TensorRT reports an exception in some callbacks as a failed build and drops it in others (measured on TensorRT-RTX
1.7.1: an engine is built without the alias, or without the fields, whose callback raised). ``PluginLibrary`` therefore
keeps what its plugins raised, and whoever builds or runs an engine asks for it afterwards.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.backend import Backend
from trtllm_mla.engine.launcher import Launcher
from trtllm_mla.engine.operation import Operation, OperationSettings, Shape, TargetTile
from trtllm_mla.ops import DOMAIN, OPS, VERSION, OpDefinition
from trtllm_mla.ops.definition import Attribute, TensorContract, split_dim

if TYPE_CHECKING:
    import tensorrt as trt

logger = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Names of the fields of a serialised plugin beside the operation's attributes.
_MODEL_DTYPE, _CACHE_DTYPE, _TILES, _WORKSPACE = "model_dtype", "cache_dtype", "tiles", "workspace_bytes"


@dataclass(frozen=True)
class PluginState:
    """What a plugin is made of; its copies share it.

    Attributes:
        operation: The operation.
        workspace_bytes: Workspace that the engine reserves; 0 until the builder tells the largest shapes.
        launcher: What runs its plans; None while an engine is built, when a plugin launches nothing.
    """

    operation: Operation
    workspace_bytes: int = 0
    launcher: Launcher | None = None


class PluginLibrary:
    """The plugins of one TensorRT library, registered in this process.

    Attributes:
        backend: The TensorRT library.
        failures: What plugins raised since the last build or load began.
        built: Name and operation of each plugin layer of the last build.
        num_aliases_declared: How often the last build was told that an output is an input's memory.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.failures: list[str] = []
        self.built: list[tuple[str, Operation]] = []
        self.num_aliases_declared = 0
        self._settings: OperationSettings | None = None
        self._launcher: Launcher | None = None
        self._operations: dict[Any, Operation] = {}
        self.plugin_class = _make_plugin_class(self)
        creator_class = _make_creator_class(self)
        # TensorRT does not keep the creators alive.
        self._creators = [creator_class(op) for op in OPS.values()]
        self._register()

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """While other plugins of these names are registered: these are not."""
        registry = self.backend.module.get_plugin_registry()
        for creator in self._creators:
            registry.deregister_creator(creator)
        try:
            yield
        finally:
            self._register()

    @contextmanager
    def building(self, settings: OperationSettings) -> Iterator[None]:
        """While an engine is built: plugins have these settings, and launch nothing."""
        self.failures = []
        self.built.clear()
        self.num_aliases_declared = 0
        self._settings = settings
        try:
            yield
        finally:
            self._settings = None

    @contextmanager
    def loading(self, launcher: Launcher) -> Iterator[None]:
        """While an engine is read: its plugins will launch with this launcher."""
        self.failures = []
        self._launcher = launcher
        try:
            yield
        finally:
            self._launcher = None

    def _register(self) -> None:
        registry = self.backend.module.get_plugin_registry()
        for creator in self._creators:
            if not registry.register_creator(creator, DOMAIN):
                raise ValueError(f"{DOMAIN}::{creator.name} is registered already, by other code")

    def operation(
        self, op: OpDefinition, attributes: Mapping[str, Attribute], settings: OperationSettings
    ) -> Operation:
        """An operation; equal ones are one object, so that layers share their plans."""
        key = (op.name, tuple(sorted(attributes.items())), settings)
        if key not in self._operations:
            self._operations[key] = Operation(op, attributes, settings)
        return self._operations[key]

    def create(self, name: str, op: OpDefinition, fields: Mapping[str, Any], *, building: bool) -> Any:
        """Makes a plugin.

        Args:
            name: Name of its layer.
            op: Its operation.
            fields: Data of the fields that TensorRT gives: of an ONNX node or of a serialised plugin.
            building: Whether an engine is being built.

        Raises:
            ValueError: A field is missing, or nothing is being built or loaded.
        """
        attributes = {key: kind(_scalar(op, fields, key)) for key, kind in op.attributes.items()}
        if building:
            if self._settings is None:
                raise ValueError(f"{op.name}: TensorRT makes a plugin for a build, and none is under way")
            operation = self.operation(op, attributes, self._settings)
            self.built.append((name, operation))
            return self.plugin_class(PluginState(operation))
        if self._launcher is None:
            raise ValueError(f"{op.name}: TensorRT makes a plugin for an engine, and none is being loaded")
        operation = self.operation(op, attributes, _read_settings(op, fields))
        return self.plugin_class(PluginState(operation, int(_scalar(op, fields, _WORKSPACE)), self._launcher))

    def record(self, callback: str, error: Exception) -> None:
        """Keeps an exception that TensorRT may drop."""
        message = f"{callback}: {error}"
        logger.error("%s", message)
        self.failures.append(message)

    def take_failures(self) -> list[str]:
        """What plugins raised since the last call, the last build, or the last load."""
        failures, self.failures = self.failures, []
        return failures


_LIBRARIES: dict[Backend, PluginLibrary] = {}


def plugin_library(backend: Backend) -> PluginLibrary:
    """The plugins of a TensorRT library, registered at the first call."""
    if backend not in _LIBRARIES:
        _LIBRARIES[backend] = PluginLibrary(backend)
    return _LIBRARIES[backend]


@contextmanager
def python_plugins_withdrawn(backend: Backend) -> Iterator[None]:
    """While other plugins of their names are registered with a TensorRT library: those of this package are not."""
    library = _LIBRARIES.get(backend)
    with nullcontext() if library is None else library.withdrawn():
        yield


def _recorded(method: _Method) -> _Method:
    """Makes a callback keep what it raises in its library."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.library.record(f"{self.label}.{method.__name__}", error)
            raise

    return cast(_Method, wrapper)


def _make_plugin_class(library: PluginLibrary) -> Any:
    if not TYPE_CHECKING:
        trt = library.backend.module
    capabilities = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    # TensorRT's module has types only where its stubs are installed, hence the ignored errors.
    class MlaPlugin(
        trt.IPluginV3,  # type: ignore[misc]
        trt.IPluginV3OneCore,  # type: ignore[misc]
        trt.IPluginV3OneBuildV2,  # type: ignore[misc]
        trt.IPluginV3OneRuntime,  # type: ignore[misc]
    ):
        """A plugin layer. Callbacks are documented by TensorRT; they may be called on any copy."""

        def __init__(self, state: PluginState) -> None:
            for capability in capabilities:
                capability.__init__(self)
            definition = state.operation.definition
            self.library = library
            self.state = state
            self.label = definition.name
            self.plugin_name, self.plugin_namespace, self.plugin_version = definition.name, DOMAIN, VERSION
            self.num_outputs = len(definition.outputs)
            # The builder may reuse timings between plugins of one identity; there is one tactic, so none are taken.
            self.timing_cache_id = ""

        @_recorded
        def get_capability_interface(self, type: trt.PluginCapabilityType) -> Any:  # noqa: A002
            return self

        @_recorded
        def clone(self) -> Any:
            return type(self)(self.state)

        @_recorded
        def attach_to_context(self, context: trt.IPluginResourceContext) -> Any:
            return self.clone()

        @_recorded
        def get_output_data_types(self, input_types: list[trt.DataType]) -> list[trt.DataType]:
            definition = self.state.operation.definition
            for tensor, found in zip(definition.inputs, input_types, strict=True):
                if found != self._data_type(tensor):
                    raise ValueError(f"input '{tensor.name}': found {found}, expected {self._data_type(tensor)}")
            return [self._data_type(tensor) for tensor in definition.outputs]

        @_recorded
        def get_output_shapes(
            self, inputs: list[trt.DimsExprs], shape_inputs: list[trt.DimsExprs], expr_builder: trt.IExprBuilder
        ) -> list[trt.DimsExprs]:
            operation = self.state.operation
            sizes = {
                dim: inputs[index][axis]
                for index, tensor in enumerate(operation.definition.inputs)
                for axis, dim in enumerate(tensor.dims)
            }

            def expression(dim: str | int) -> Any:
                if dim in sizes:
                    return sizes[dim]
                name, offset = split_dim(dim)
                value = offset if name is None else int(operation.attributes[name]) + offset
                return expr_builder.constant(value)

            return [trt.DimsExprs([expression(dim) for dim in tensor.dims]) for tensor in operation.definition.outputs]

        @_recorded
        def get_aliased_input(self, output_index: int) -> int:
            source = self.state.operation.definition.aliases.get(output_index)
            if source is None:
                return -1
            library.num_aliases_declared += 1
            return source

        @_recorded
        def supports_format_combination(
            self, pos: int, in_out: list[trt.DynamicPluginTensorDesc], num_inputs: int
        ) -> bool:
            definition = self.state.operation.definition
            tensor = (*definition.inputs, *definition.outputs)[pos]
            found = in_out[pos].desc
            return bool(found.format == trt.TensorFormat.LINEAR and found.type == self._data_type(tensor))

        @_recorded
        def configure_plugin(
            self, inputs: list[trt.DynamicPluginTensorDesc], outputs: list[trt.DynamicPluginTensorDesc]
        ) -> None:
            operation = self.state.operation
            workspace_bytes = operation.workspace_bytes(tuple(tuple(item.max) for item in inputs))
            self.state = PluginState(operation, workspace_bytes, self.state.launcher)

        @_recorded
        def get_workspace_size(
            self, inputs: list[trt.DynamicPluginTensorDesc], outputs: list[trt.DynamicPluginTensorDesc]
        ) -> int:
            return self.state.workspace_bytes

        @_recorded
        def get_fields_to_serialize(self) -> trt.PluginFieldCollection:
            # The collection points to the arrays' memory.
            self._fields = _write_fields(self.state)
            kinds = {
                np.dtype(np.int8): trt.PluginFieldType.CHAR,
                np.dtype(np.int32): trt.PluginFieldType.INT32,
                np.dtype(np.int64): trt.PluginFieldType.INT64,
                np.dtype(np.float32): trt.PluginFieldType.FLOAT32,
            }
            return trt.PluginFieldCollection(
                [trt.PluginField(name, data, kinds[data.dtype]) for name, data in self._fields.items()]
            )

        @_recorded
        def set_tactic(self, tactic: int) -> None:
            if tactic:
                raise ValueError(f"found tactic {tactic}, expected the default one, 0")

        @_recorded
        def on_shape_change(self, inputs: list[trt.PluginTensorDesc], outputs: list[trt.PluginTensorDesc]) -> None:
            pass

        @_recorded
        def enqueue(
            self,
            input_desc: list[trt.PluginTensorDesc],
            output_desc: list[trt.PluginTensorDesc],
            inputs: list[int],
            outputs: list[int],
            workspace: int,
            stream: int,
        ) -> None:
            # A builder calls this on arbitrary memory to time the only tactic there is.
            if self.state.launcher is not None:
                shapes = tuple(tuple(item.dims) for item in input_desc)
                run_step(self.state, shapes, inputs, outputs, workspace, stream)

        def _data_type(self, tensor: TensorContract) -> trt.DataType:
            settings = self.state.operation.settings
            names = {"model": settings.model_dtype, "cache": settings.cache_dtype.storage}
            return library.backend.data_type(names.get(tensor.element_type, tensor.element_type))

    return MlaPlugin


def _make_creator_class(library: PluginLibrary) -> Any:
    if not TYPE_CHECKING:
        trt = library.backend.module

    class MlaPluginCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        """Makes the plugins of one operation: from an ONNX node, or from a serialised engine."""

        def __init__(self, definition: OpDefinition) -> None:
            super().__init__()
            self.library = library
            self.label = f"{definition.name} creator"
            self.name, self.plugin_namespace, self.plugin_version = definition.name, DOMAIN, VERSION
            kinds = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
            # What the ONNX parser reads from a node.
            self.field_names = trt.PluginFieldCollection(
                [
                    trt.PluginField(name, np.zeros(0, kinds[kind][0]), kinds[kind][1])
                    for name, kind in definition.attributes.items()
                ]
            )
            self._definition = definition

        @_recorded
        def create_plugin(
            self, name: str, field_collection: trt.PluginFieldCollection, phase: trt.TensorRTPhase
        ) -> Any:
            fields = {field.name: field.data for field in field_collection}
            return library.create(name, self._definition, fields, building=phase == trt.TensorRTPhase.BUILD)

    return MlaPluginCreator


def run_step(
    state: PluginState,
    shapes: tuple[Shape, ...],
    inputs: Sequence[int],
    outputs: Sequence[int],
    workspace: int,
    stream: int,
) -> None:
    """Plans and enqueues one call of a plugin.

    Args:
        state: The plugin's; it has a launcher.
        shapes: Shape of each input.
        inputs: Address of each input.
        outputs: Address of each output.
        workspace: Address of the workspace.
        stream: Address of the CUDA stream.

    Raises:
        ValueError: Shapes contradict the contract, or an output that an input is updated to lies elsewhere.
    """
    definition, launcher = state.operation.definition, state.launcher
    if launcher is None:
        raise ValueError(f"{definition.name}: found no launcher, expected a plugin of a loaded engine")
    for output, source in definition.aliases.items():
        if outputs[output] != inputs[source]:
            raise ValueError(
                f"output '{definition.outputs[output].name}' lies at {outputs[output]:#x} and input "
                f"'{definition.inputs[source].name}' at {inputs[source]:#x}, expected one address: it is updated in "
                "place"
            )
    plan = state.operation.plan(shapes, launcher.target, state.workspace_bytes)
    names = (tensor.name for tensor in (*definition.inputs, *definition.outputs))
    launcher.run(plan, dict(zip(names, (*inputs, *outputs), strict=True)), workspace, stream)


def _write_fields(state: PluginState) -> dict[str, Any]:
    """A plugin as named arrays."""
    operation, settings = state.operation, state.operation.settings
    kinds = {int: np.int32, float: np.float32}
    return {
        **{
            name: np.array([operation.attributes[name]], kinds[kind])
            for name, kind in operation.definition.attributes.items()
        },
        _MODEL_DTYPE: np.frombuffer(settings.model_dtype.encode(), np.int8),
        _CACHE_DTYPE: np.frombuffer(settings.cache_dtype.encode(), np.int8),
        _TILES: np.array(
            [(int(tile.target.removeprefix("sm_")), tile.tile_s, tile.num_stages) for tile in settings.tiles], np.int32
        ).ravel(),
        _WORKSPACE: np.array([state.workspace_bytes], np.int64),
    }


def _read_settings(op: OpDefinition, fields: Mapping[str, Any]) -> OperationSettings:
    def text(name: str) -> str:
        return np.asarray(_field(op, fields, name), np.int8).tobytes().decode()

    tiles = np.asarray(_field(op, fields, _TILES)).reshape(-1, 3).tolist()
    model_dtype, cache_dtype = DType(text(_MODEL_DTYPE)), text(_CACHE_DTYPE)
    return OperationSettings(
        model_dtype,
        # The compiled plugin library names no cache where an operation has none.
        CacheDType(cache_dtype) if cache_dtype else CacheDType.of(model_dtype),
        tuple(TargetTile(f"sm_{capability}", tile_s, stages) for capability, tile_s, stages in tiles),
    )


def _scalar(op: OpDefinition, fields: Mapping[str, Any], name: str) -> Any:
    data = np.asarray(_field(op, fields, name)).ravel()
    if len(data) != 1:
        raise ValueError(f"{op.name}: field '{name}': found {len(data)} values, expected one")
    return data[0].item()


def _field(op: OpDefinition, fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"{op.name}: field '{name}' is missing; found {sorted(fields)}")
    return fields[name]
