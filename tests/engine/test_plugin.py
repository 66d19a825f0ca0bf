from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from tests.engine.fakes import RecordingDriver
from tests.ops.test_bodies import body_types, parse_native, single_op_model
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.backend import load_backend
from trtllm_mla.engine.kernel_compiler import compile_kernels
from trtllm_mla.engine.launcher import Launcher
from trtllm_mla.engine.operation import OperationSettings, TargetTile
from trtllm_mla.engine.plugin import PluginLibrary, plugin_library, python_plugins_withdrawn
from trtllm_mla.ops import DOMAIN, OPS, VERSION
from trtllm_mla.targets import get_target

trt: Any = pytest.importorskip("tensorrt_rtx")

TILES = (TargetTile("sm_89", 32, 2), TargetTile("sm_120", 16, 3))
SETTINGS = OperationSettings(DType.BFLOAT16, CacheDType.FP16, TILES)
FIELDS: dict[str, dict[str, Any]] = {
    "AppendLatent": {"rope_interleave": np.array([1], np.int32), "latent_scale": np.array([1], np.float32)},
    "LatentAttention": {
        "softmax_scale": np.array([0.1352], np.float32),
        "latent_scale": np.array([1], np.float32),
    },
    "GatherLatent": {
        "kv_lora_rank": np.array([96], np.int32),
        "rope_dim": np.array([32], np.int32),
        "latent_scale": np.array([1], np.float32),
    },
    "ContextAttention": {
        "softmax_scale": np.array([0.1352], np.float32),
        "causal": np.array([1], np.int32),
    },
    "RoutedExperts": {"first_expert": np.array([4], np.int32)},
    "BlockScaledMatMul": {},
    "BlockScaledRoutedExperts": {"first_expert": np.array([4], np.int32)},
}
SIZES = {
    "tokens": 7,
    "heads": 5,
    "kv_lora_rank": 96,
    "rope_dim": 32,
    "nope_dim": 48,
    "v_dim": 40,
    "width": 128,
    "pages": 9,
    "page_size": 64,
    "positions": 448,
    "keys": 50,
    "requests": 2,
    "pages_per_request": 7,
    "longest_query": 4,
    "longest_key": 30,
    "experts": 6,
    "top_k": 2,
    "hidden_size": 72,
    "intermediate_size": 40,
    "gate_up_size": 80,
    "hidden_blocks": 1,
    "intermediate_blocks": 1,
    "gate_up_blocks": 2,
    "rows": 7,
    "in_features": 1100,
    "out_features": 72,
    "scale_rows": 1,
    "scale_columns": 9,
}


def size(dim: str | int) -> int:
    name, _, offset = str(dim).partition("+")
    return SIZES[name] + int(offset or 0)


def shapes(name: str) -> list[tuple[int, ...]]:
    return [tuple(size(dim) for dim in tensor.dims) for tensor in OPS[name].inputs]


def dynamic_descs(name: str) -> list[Any]:
    return [SimpleNamespace(max=shape) for shape in shapes(name)]


def descs(name: str) -> list[Any]:
    return [SimpleNamespace(dims=shape) for shape in shapes(name)]


@pytest.fixture(scope="module")
def library() -> PluginLibrary:
    return plugin_library(load_backend("tensorrt-rtx"))


@pytest.fixture
def building(library: PluginLibrary) -> Iterator[PluginLibrary]:
    with library.building(SETTINGS):
        yield library


def make(library: PluginLibrary, name: str) -> Any:
    return library.create("layer", OPS[name], FIELDS[name], building=True)


@pytest.fixture(scope="module")
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture(scope="module")
def launcher(
    driver: RecordingDriver, library: PluginLibrary, tmp_path_factory: pytest.TempPathFactory, cache_dir: Path
) -> Launcher:
    target = get_target("sm_89")
    jobs = []
    with library.building(SETTINGS):
        for name in OPS:
            fixed = {key: value for key, value in SIZES.items() if key not in OPS[name].dynamic_dims}
            jobs += [(variant, target) for variant in make(library, name).state.operation.variants(fixed, target)]
    return Launcher(driver, compile_kernels(jobs, tmp_path_factory.mktemp("kernels"), cache_dir=cache_dir))


class TestCreator:
    @pytest.mark.parametrize("name", sorted(OPS))
    def test_is_registered(self, library: PluginLibrary, name: str) -> None:
        creator = trt.get_plugin_registry().get_creator(name, "1", DOMAIN)
        assert creator is not None
        assert sorted(field.name for field in creator.field_names) == sorted(OPS[name].attributes)

    def test_there_is_one_library_in_a_process(self, library: PluginLibrary) -> None:
        assert plugin_library(load_backend("tensorrt-rtx")) is library
        with pytest.raises(ValueError, match="trtllm_mla::AppendLatent is registered already"):
            PluginLibrary(load_backend("tensorrt-rtx"))

    def test_gives_way_to_other_plugins_and_comes_back(self, library: PluginLibrary) -> None:
        registry = trt.get_plugin_registry()
        with python_plugins_withdrawn(library.backend):
            assert all(registry.get_creator(name, VERSION, DOMAIN) is None for name in OPS)
        assert all(registry.get_creator(name, VERSION, DOMAIN) is not None for name in OPS)

    def test_outside_of_a_build_nothing_is_made(self, library: PluginLibrary) -> None:
        with pytest.raises(ValueError, match="none is under way"):
            make(library, "GatherLatent")
        with pytest.raises(ValueError, match="none is being loaded"):
            library.create("layer", OPS["GatherLatent"], FIELDS["GatherLatent"], building=False)

    def test_a_missing_attribute_is_named(self, building: PluginLibrary) -> None:
        with pytest.raises(ValueError, match=r"GatherLatent: field 'rope_dim' is missing; found \['kv_lora_rank'\]"):
            building.create("layer", OPS["GatherLatent"], {"kv_lora_rank": np.array([96])}, building=True)

    def test_layers_share_an_operation(self, building: PluginLibrary) -> None:
        first, second = make(building, "LatentAttention"), make(building, "LatentAttention")
        assert first is not second
        assert first.state.operation is second.state.operation


class TestBuildTime:
    @pytest.mark.parametrize("name", sorted(OPS))
    def test_types_are_those_of_the_contract(self, building: PluginLibrary, name: str) -> None:
        plugin = make(building, name)
        types = {
            "model": trt.DataType.BF16,
            "cache": trt.DataType.HALF,
            "int8": trt.DataType.INT8,
            "int32": trt.DataType.INT32,
            "float32": trt.DataType.FLOAT,
        }
        inputs = [types[tensor.element_type] for tensor in OPS[name].inputs]
        outputs = [types[tensor.element_type] for tensor in OPS[name].outputs]
        assert plugin.get_output_data_types(inputs) == outputs
        for position in range(len(inputs) + len(outputs)):
            wanted = (*inputs, *outputs)[position]
            for found in types.values():
                for layout in (trt.TensorFormat.LINEAR, trt.TensorFormat.CHW32):
                    item = SimpleNamespace(desc=SimpleNamespace(format=layout, type=found))
                    supported = plugin.supports_format_combination(position, [item] * 20, len(inputs))
                    assert supported == (found == wanted and layout == trt.TensorFormat.LINEAR)

    def test_another_input_type_is_refused(self, building: PluginLibrary) -> None:
        plugin = make(building, "GatherLatent")
        with pytest.raises(ValueError, match=r"input 'latent_cache': found DataType.BF16, expected DataType.HALF"):
            plugin.get_output_data_types([trt.DataType.BF16, trt.DataType.INT32])

    @pytest.mark.parametrize("name", sorted(OPS))
    def test_output_shapes_are_those_of_the_contract(
        self, building: PluginLibrary, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trt, "DimsExprs", list)
        builder = SimpleNamespace(constant=lambda value: value)
        found = make(building, name).get_output_shapes(shapes(name), [], builder)
        assert found == [[size(dim) for dim in tensor.dims] for tensor in OPS[name].outputs]

    def test_only_the_cache_is_updated_in_place(self, building: PluginLibrary) -> None:
        aliases = {
            (name, index): make(building, name).get_aliased_input(index)
            for name, op in OPS.items()
            for index in range(len(op.outputs))
        }
        assert {key: source for key, source in aliases.items() if source != -1} == {("AppendLatent", 0): 0}

    def test_the_workspace_is_what_the_largest_shapes_need(self, building: PluginLibrary) -> None:
        plugin = make(building, "LatentAttention")
        inputs = dynamic_descs("LatentAttention")
        plugin.configure_plugin(inputs, [])
        reserved = plugin.get_workspace_size(inputs, [])
        assert reserved == plugin.state.operation.workspace_bytes(tuple(shapes("LatentAttention"))) > 0
        assert plugin.clone().get_workspace_size(inputs, []) == reserved

    @pytest.mark.parametrize("name", sorted(OPS))
    def test_launches_nothing(self, building: PluginLibrary, name: str) -> None:
        """A builder may call it on arbitrary memory, to time it."""
        make(building, name).enqueue(descs(name), [], [1] * 9, [2] * 2, 3, 4)

    def test_keeps_what_a_callback_raises(self, building: PluginLibrary) -> None:
        with pytest.raises(ValueError, match="tactic 3"):
            make(building, "GatherLatent").set_tactic(3)
        assert building.failures == ["GatherLatent.set_tactic: found tactic 3, expected the default one, 0"]

    def test_a_new_build_forgets_the_last_one(self, library: PluginLibrary) -> None:
        with library.building(SETTINGS):
            library.record("x", ValueError("y"))
            make(library, "AppendLatent").get_aliased_input(0)
            assert (len(library.built), library.num_aliases_declared, len(library.failures)) == (1, 1, 1)
        with library.building(SETTINGS):
            assert (len(library.built), library.num_aliases_declared, len(library.failures)) == (0, 0, 0)


class TestBuild:
    @pytest.mark.parametrize("name", ["RoutedExperts", "BlockScaledRoutedExperts"])
    @pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
    def test_routed_experts_become_a_plugin_layer(self, library: PluginLibrary, dtype: DType, name: str) -> None:
        """The parser takes the plugin, although the function's body is there too, and the builder its workspace."""
        op = OPS[name]
        settings = OperationSettings(dtype, CacheDType.BF16, (TargetTile("sm_89", 32, 2),))
        fixed = {key: value for key, value in SIZES.items() if key not in op.dynamic_dims}
        model = single_op_model(op, body_types(dtype, CacheDType.BF16), {"first_expert": 4}, fixed)
        for key, value in (("plugin_namespace", DOMAIN), ("plugin_version", VERSION)):
            model.graph.node[0].attribute.append(onnx.helper.make_attribute(key, value))
            model.functions[0].attribute.append(key)
        with library.building(settings):
            builder, network = parse_native(model)
            assert [network.get_layer(index).type for index in range(network.num_layers)] == [trt.LayerType.PLUGIN_V3]
            assert tuple(network.get_output(0).shape) == (-1, SIZES["hidden_size"])
            config, profile = builder.create_builder_config(), builder.create_optimization_profile()
            config.num_compute_capabilities = 1
            config.set_compute_capability(trt.ComputeCapability.SM89, 0)
            for tensor in op.inputs:
                limits = [[fixed.get(str(dim), tokens) for dim in tensor.dims] for tokens in (0, 7, 300)]
                profile.set_shape(tensor.name, *limits)
            assert config.add_optimization_profile(profile) == 0
            engine = builder.build_serialized_network(network, config)
            assert library.failures == []
        assert engine is not None
        ((_, operation),) = library.built
        assert operation.attributes == {"first_expert": 4}
        for field in (name, "first_expert", "workspace_bytes", str(dtype)):
            assert field.encode() in bytes(engine)


class TestSerialisation:
    @pytest.mark.parametrize("name", sorted(OPS))
    def test_survives_the_way_through_the_fields(self, building: PluginLibrary, launcher: Launcher, name: str) -> None:
        """Through TensorRT's own field collection, and its registry's creator."""
        plugin = make(building, name)
        plugin.configure_plugin(dynamic_descs(name), [])
        fields = plugin.get_fields_to_serialize()
        creator = trt.get_plugin_registry().get_creator(name, "1", DOMAIN)
        with building.loading(launcher):
            copy = creator.create_plugin("layer", fields, trt.TensorRTPhase.RUNTIME)
        assert copy.state.workspace_bytes == plugin.state.workspace_bytes
        assert copy.state.operation is plugin.state.operation
        assert copy.state.operation.settings == SETTINGS
        assert copy.state.launcher is launcher
        assert (copy.plugin_name, copy.plugin_namespace, copy.plugin_version) == (name, DOMAIN, "1")


class TestRunTime:
    def loaded(self, library: PluginLibrary, launcher: Launcher, name: str) -> Any:
        with library.building(SETTINGS):
            plugin = make(library, name)
            plugin.configure_plugin(dynamic_descs(name), [])
            fields = {field.name: field.data for field in plugin.get_fields_to_serialize()}
        with library.loading(launcher):
            return library.create("layer", OPS[name], fields, building=False)

    def addresses(self, name: str) -> tuple[list[int], list[int]]:
        op = OPS[name]
        inputs = [0x7F0000000000 + 4096 * index for index in range(len(op.inputs))]
        free = [0x7E0000000000 + 4096 * index for index in range(len(op.outputs))]
        outputs = [inputs[op.aliases[i]] if i in op.aliases else address for i, address in enumerate(free)]
        return inputs, outputs

    @pytest.mark.parametrize("name", sorted(OPS))
    def test_launches_the_plan_of_the_shapes(
        self, library: PluginLibrary, launcher: Launcher, driver: RecordingDriver, name: str
    ) -> None:
        plugin = self.loaded(library, launcher, name).attach_to_context(None)
        inputs, outputs = self.addresses(name)
        driver.calls.clear()
        plugin.enqueue(descs(name), [], inputs, outputs, 0x7D0000000000, 99)
        plan = plugin.state.operation.plan(tuple(shapes(name)), driver.target, plugin.state.workspace_bytes)
        assert [call.grid for call in driver.calls] == [launch.grid for launch in plan.launches]
        assert driver.calls
        assert {call.stream for call in driver.calls} == {99}
        named = dict(
            zip((tensor.name for tensor in (*OPS[name].inputs, *OPS[name].outputs)), [*inputs, *outputs], strict=True)
        )
        for call, launch in zip(driver.calls, plan.launches, strict=True):
            for (parameter, kind), value in zip(launch.variant.signature, call.parameters, strict=False):
                if kind.startswith("*") and parameter in named:
                    assert value == named[parameter], parameter

    def test_a_cache_that_is_not_updated_in_place_is_refused(
        self, library: PluginLibrary, launcher: Launcher, driver: RecordingDriver
    ) -> None:
        plugin = self.loaded(library, launcher, "AppendLatent")
        inputs, outputs = self.addresses("AppendLatent")
        driver.calls.clear()
        with pytest.raises(ValueError, match=r"output 'present_latent' lies at 0x10 .* expected one address"):
            plugin.enqueue(descs("AppendLatent"), [], inputs, [0x10, outputs[1]], 0, 99)
        assert not driver.calls
        assert len(library.failures) == 1

    def test_shapes_that_contradict_each_other_are_refused(
        self, library: PluginLibrary, launcher: Launcher, driver: RecordingDriver
    ) -> None:
        plugin = self.loaded(library, launcher, "GatherLatent")
        inputs, outputs = self.addresses("GatherLatent")
        driver.calls.clear()
        with pytest.raises(ValueError, match="expected dimensions"):
            plugin.enqueue([SimpleNamespace(dims=(9, 64))] * 2, [], inputs, outputs, 0, 99)
        assert not driver.calls
