"""The compiled plugins against the Python ones, on a machine without TensorRT and without a GPU.

Slow: the kernels of all operations are compiled, and the library.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.plugins.random_plans import MAX_INT64, generator
from tests.plugins.tensorrt.forms import CACHE_DTYPES, OpForm, make_form, make_forms
from tests.plugins.tensorrt.host import BUILD, DATA_TYPES, FIELD_TYPES, RUNTIME, Host, Launched, Recorded, digest
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.engine.kernel_store import KernelStore
from trtllm_mla.engine.launcher import Grid, Launcher, Parameter
from trtllm_mla.engine.operation import Operation
from trtllm_mla.engine.plugin import PluginState, _read_settings, _write_fields, run_step
from trtllm_mla.ops import OPS
from trtllm_mla.targets import Target, get_target

FORM_NAMES = tuple(
    name
    for op, definition in OPS.items()
    for name in (
        [f"{op}-{dtype}" for dtype in CACHE_DTYPES]
        if any(tensor.element_type == "cache" for tensor in definition.inputs)
        else [op]
    )
)
ALIGNMENT = 16

pytestmark = pytest.mark.slow
STREAM = 0x7F00_0000_1234
# A context is of one GPU as long as the process lives.
CONTEXTS = itertools.count(1000)


@dataclasses.dataclass
class DigestingDriver:
    """Records launches as the stand-in for CUDA's driver does."""

    target: Target
    launched: list[Launched] = dataclasses.field(default_factory=list)

    def load(self, cubin: bytes, entry: str, *, shared_bytes: int, opt_in: bool) -> Any:
        return digest(cubin), entry

    def launch(
        self, kernel: Any, grid: Grid, block: int, shared_bytes: int, parameters: Sequence[Parameter], stream: int
    ) -> None:
        code, entry = kernel
        data = tuple(parameter.tobytes() for parameter in parameters)
        self.launched.append(Launched(code, entry, tuple(grid), (block, 1, 1), shared_bytes, stream, data))


@dataclasses.dataclass(frozen=True)
class Call:
    """Addresses of a call."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace: int = 0x7E00_0000_0000
    stream: int = STREAM


def make_call(form: OpForm, rng: random.Random) -> Call:
    def address() -> int:
        return rng.randrange(1, 2**40) * ALIGNMENT

    definition = form.definition
    inputs = tuple(address() for _ in definition.inputs)
    outputs = tuple(
        inputs[definition.aliases[index]] if index in definition.aliases else address()
        for index in range(len(definition.outputs))
    )
    return Call(inputs, outputs, address(), rng.choice([0, STREAM]))


def runtime_fields(form: OpForm, workspace_bytes: int) -> dict[str, Any]:
    return _write_fields(PluginState(form.operation, workspace_bytes))


def workspace_bytes(form: OpForm) -> int:
    return form.operation.workspace_bytes(form.max_shapes)


def make_plugin(host: Host, form: OpForm, workspace: int | None = None) -> int:
    fields = runtime_fields(form, workspace_bytes(form) if workspace is None else workspace)
    plugin: int | None = host.create(form.definition.name, fields, RUNTIME)
    assert plugin is not None, host.take_log()
    return plugin


def enqueue(host: Host, plugin: int, form: OpForm, shapes: Sequence[tuple[int, ...]], call: Call) -> Recorded:
    recorded: Recorded = host.enqueue(
        plugin, form.input_types, shapes, call.inputs, call.outputs, call.workspace, call.stream
    )
    return recorded


def random_field(rng: random.Random) -> npt.NDArray[Any]:
    dtype = rng.choice(list(FIELD_TYPES))
    return np.frombuffer(rng.randbytes(dtype.itemsize * rng.choice([0, 1, 1, 1, 2, 6])), dtype)


def random_shape(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Mostly the same."""
    if rng.random() < 0.02:
        return tuple(rng.randint(-1, 9) for _ in range(rng.randint(0, 8)))
    return tuple(size if rng.random() < 0.98 else rng.choice([-1, 0, 1, 2**31, 2**62]) for size in shape)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> None:
    if "host" in request.fixturenames:
        request.getfixturevalue("host").set_device(1, 89, 128)


class TestEnqueue:
    @pytest.mark.parametrize("name", FORM_NAMES)
    @pytest.mark.parametrize("target", ["sm_89", "sm_120"])
    def test_launches_what_the_python_plugin_launches(
        self, host: Host, forms: dict[str, OpForm], store: KernelStore, name: str, target: str
    ) -> None:
        form, rng = forms[name], generator()
        known = get_target(target)
        launches = 0
        for context in itertools.islice(CONTEXTS, 12):
            multiprocessors = rng.choice([1, known.multiprocessors, rng.randint(1, 200)])
            host.set_device(context, known.compute_capability, multiprocessors)
            driver = DigestingDriver(dataclasses.replace(known, multiprocessors=multiprocessors))
            state = PluginState(form.operation, workspace_bytes(form), Launcher(driver, store))
            plugin = make_plugin(host, form)
            for _ in range(4):
                shapes, call = form.random_shapes(rng), make_call(form, rng)
                driver.launched.clear()
                error = ""
                try:
                    run_step(state, shapes, call.inputs, call.outputs, call.workspace, call.stream)
                except ValueError as problem:
                    error = str(problem)
                recorded = enqueue(host, plugin, form, shapes, call)
                assert recorded.status == int(bool(error)), recorded.log
                assert error in recorded.log
                assert recorded.launched == tuple(driver.launched)
                launches += len(driver.launched)
            host.destroy(plugin)
        assert launches >= 20

    def test_the_kernels_of_an_operation_are_loaded_at_its_first_call_in_a_context(
        self, host: Host, forms: dict[str, OpForm], store: KernelStore
    ) -> None:
        """What is captured in a CUDA graph after that loads nothing."""
        form, rng = forms["LatentAttention-fp8"], generator()
        keys = {variant.key for variant in form.planned[0].variants}
        codes = [cubin.read() for cubin in store.cubins if cubin.target == "sm_89" and cubin.key in keys]
        first, second = make_plugin(host, form), make_plugin(host, form)
        shapes = form.shapes(dict.fromkeys(form.definition.dynamic_dims, 3))
        for context in (101, 102):
            host.set_device(context, 89, 128)
            recorded = enqueue(host, first, form, shapes, make_call(form, rng))
            assert sorted(recorded.loaded) == sorted((digest(code), len(code)) for code in codes)
            for plugin in (first, second):
                again = enqueue(host, plugin, form, form.max_shapes, make_call(form, rng))
                assert (again.status, again.loaded) == (0, ()), again.log
                assert again.launched

    def test_a_context_that_ends_takes_its_kernels_along(self, host: Host, forms: dict[str, OpForm]) -> None:
        form, rng = forms["GatherLatent-bf16"], generator()
        plugin = make_plugin(host, form)
        for context in (201, 202, 201):
            host.set_device(context, 89, 128)
            # The stand-in refuses functions of another context.
            assert enqueue(host, plugin, form, form.max_shapes, make_call(form, rng)).status == 0

    def test_a_builder_times_it_on_arbitrary_memory(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["GatherLatent-bf16"]
        plugin = host.create(form.definition.name, form.fields, BUILD)
        recorded = enqueue(host, plugin, form, form.max_shapes, Call((1,) * 9, (3,) * 9))
        assert (recorded.status, recorded.loaded, recorded.launched) == (0, (), ())


class TestRefusedCalls:
    """Each is logged with the operation's name, and nothing is launched."""

    def refuse(
        self, host: Host, form: OpForm, shapes: Sequence[tuple[int, ...]], call: Call, *, workspace: int | None = None
    ) -> str:
        recorded = enqueue(host, make_plugin(host, form, workspace), form, shapes, call)
        assert recorded.status == 1
        assert recorded.launched == ()
        severity, _, message = recorded.log.partition(" trtllm_mla: ")
        assert severity == "1"  # ILogger::Severity::kERROR
        assert message.startswith(f"{form.definition.name}: ")
        assert "layer 'layer'" in message
        assert message.count("\n") == 1
        return message

    def test_an_output_that_is_not_updated_in_place(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["AppendLatent-fp8"]
        call = make_call(form, generator())
        ((output, source),) = form.definition.aliases.items()
        outputs = list(call.outputs)
        outputs[output] += 4096
        message = self.refuse(host, form, form.max_shapes, dataclasses.replace(call, outputs=tuple(outputs)))
        assert f"lies at {outputs[output]:#x} and input '{form.definition.inputs[source].name}'" in message

    @pytest.mark.parametrize("what", ["input", "output", "workspace"])
    def test_an_address_that_is_not_aligned(self, host: Host, forms: dict[str, OpForm], what: str) -> None:
        form = forms["LatentAttention-bf16"]
        call = make_call(form, generator())
        if what == "input":
            call = dataclasses.replace(call, inputs=(call.inputs[0] + 8, *call.inputs[1:]))
            expected = f"tensor '{form.definition.inputs[0].name}' lies at address {call.inputs[0]:#x}"
        elif what == "output":
            call = dataclasses.replace(call, outputs=(call.outputs[0] + 2,))
            expected = f"tensor '{form.definition.outputs[0].name}' lies at address {call.outputs[0]:#x}"
        else:
            call = dataclasses.replace(call, workspace=call.workspace + 1)
            expected = "workspace at byte"
        message = self.refuse(host, form, form.max_shapes, call)
        assert expected in message
        assert "expected a multiple of 16 bytes" in message

    def test_shapes_beyond_the_workspace(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["LatentAttention-bf16"]
        message = self.refuse(host, form, form.max_shapes, make_call(form, generator()), workspace=1000)
        assert "need a workspace of" in message
        assert "found 1000" in message

    def test_shapes_that_contradict_each_other(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["ContextAttention"]
        shapes = list(form.max_shapes)
        shapes[0] = (shapes[0][0] + 1, *shapes[0][1:])
        assert "found 400 on axis 0, expected" in self.refuse(host, form, shapes, make_call(form, generator()))

    @pytest.mark.parametrize("capability", [90, 80])
    def test_a_gpu_that_the_library_was_not_made_for(
        self, host: Host, forms: dict[str, OpForm], capability: int
    ) -> None:
        host.set_device(300 + capability, capability, 132)
        form = forms["GatherLatent-nvfp4"]
        message = self.refuse(host, form, form.max_shapes, make_call(form, generator()))
        assert f"sm_{capability}" in message
        assert "sm_89" in message
        assert "sm_120" in message

    def test_sizes_that_the_library_was_not_made_for(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["ContextAttention"]
        other = dataclasses.replace(form, sizes={**form.sizes, "heads": 7})
        message = self.refuse(host, form, other.max_shapes, make_call(form, generator()))
        assert "7" in message

    def test_no_current_context(self, host: Host, forms: dict[str, OpForm]) -> None:
        host.set_device(0, 89, 128)
        form = forms["GatherLatent-bf16"]
        assert "no current CUDA context" in self.refuse(host, form, form.max_shapes, make_call(form, generator()))

    @pytest.mark.parametrize(
        "function",
        ["cuCtxGetCurrent", "cuCtxGetId", "cuDeviceGetAttribute", "cuModuleLoadData", "cuModuleGetFunction"],
    )
    def test_what_the_driver_reports(self, host: Host, forms: dict[str, OpForm], function: str) -> None:
        host.set_device(400 + len(function), 89, 128)
        form = forms["GatherLatent-bf16"]
        host.fail(function, 1)
        try:
            message = self.refuse(host, form, form.max_shapes, make_call(form, generator()))
        finally:
            host.fail("", 0)
        assert function in message
        assert "the CUDA driver reports CUDA_ERROR_INVALID_VALUE" in message

    def test_a_launch_that_fails_ends_the_call(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["LatentAttention-bf16"]
        plugin, call = make_plugin(host, form), make_call(form, generator())
        host.fail("cuLaunchKernel", 700)
        try:
            recorded = enqueue(host, plugin, form, form.max_shapes, call)
        finally:
            host.fail("", 0)
        assert recorded.status == 1
        assert len(recorded.launched) == 1
        assert "cuLaunchKernel for kernel" in recorded.log
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in recorded.log

    def test_no_driver(self, start_host: Callable[[bool], Host], forms: dict[str, OpForm]) -> None:
        host, form = start_host(False), forms["GatherLatent-bf16"]
        assert host.num_creators() == len(OPS)
        recorded = enqueue(host, make_plugin(host, form), form, form.max_shapes, make_call(form, generator()))
        assert recorded.status == 1
        # Where there is a driver, there may be no context.
        assert "found no CUDA driver" in recorded.log or "the CUDA driver reports" in recorded.log


class TestBuild:
    @pytest.mark.parametrize("name", FORM_NAMES)
    def test_fields_and_workspace_are_those_of_the_python_plugin(
        self, host: Host, forms: dict[str, OpForm], name: str
    ) -> None:
        form = forms[name]
        plugin = host.create(form.definition.name, form.fields, BUILD)
        assert host.configure(plugin, form.input_types, form.max_shapes) == 0, host.take_log()
        assert host.workspace_bytes(plugin) == workspace_bytes(form)
        found = host.fields(plugin)
        expected = runtime_fields(form, workspace_bytes(form))
        assert found.keys() == expected.keys()
        if not form.has_cache:
            # Networks with different caches share such an operation.
            expected["cache_dtype"] = np.zeros(0, np.int8)
            expected["tiles"] = np.array([89, 0, 0, 120, 0, 0], np.int32)
        for key, array in expected.items():
            assert found[key].dtype == array.dtype
            assert found[key].tolist() == array.tolist(), key

    @pytest.mark.parametrize("name", FORM_NAMES)
    def test_a_python_plugin_reads_them(self, host: Host, forms: dict[str, OpForm], name: str) -> None:
        form = forms[name]
        plugin = host.create(form.definition.name, form.fields, BUILD)
        assert host.configure(plugin, form.input_types, form.max_shapes) == 0, host.take_log()
        settings = _read_settings(form.definition, host.fields(plugin))
        read = Operation(form.definition, form.operation.attributes, settings)
        for target in map(get_target, ("sm_89", "sm_120")):
            assert read.plan(form.max_shapes, target, MAX_INT64) == form.operation.plan(
                form.max_shapes, target, MAX_INT64
            )

    def test_a_later_smaller_profile_keeps_the_workspace(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["LatentAttention-fp8"]
        plugin = host.create(form.definition.name, form.fields, BUILD)
        small = form.shapes(dict.fromkeys(form.definition.dynamic_dims, 2))
        for shapes in (small, form.max_shapes, small):
            assert host.configure(plugin, form.input_types, shapes) == 0
        assert host.workspace_bytes(plugin) == workspace_bytes(form) > form.operation.workspace_bytes(small)

    @pytest.mark.parametrize("name", FORM_NAMES)
    def test_types_are_those_of_the_contract(self, host: Host, forms: dict[str, OpForm], name: str) -> None:
        form = forms[name]
        num_inputs, num_outputs = len(form.definition.inputs), len(form.definition.outputs)
        plugin = host.create(form.definition.name, form.fields, BUILD)
        expected = tuple(DATA_TYPES[kind] for kind in form.types[num_inputs:])
        assert host.output_types(plugin, form.input_types, num_outputs) == expected
        for position in range(len(form.types)):
            assert host.supports(plugin, position, form.types, num_inputs, True)
            assert not host.supports(plugin, position, form.types, num_inputs, False)
            wrong = list(form.types)
            wrong[position] = "float16"
            assert not host.supports(plugin, position, wrong, num_inputs, True)

    def test_only_the_cache_is_updated_in_place(self, host: Host, forms: dict[str, OpForm]) -> None:
        for form in forms.values():
            plugin = host.create(form.definition.name, form.fields, BUILD)
            for output in range(-1, len(form.definition.outputs) + 1):
                assert host.aliased_input(plugin, output) == form.definition.aliases.get(output, -1)

    def test_another_type_is_refused(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["ContextAttention"]
        plugin = host.create(form.definition.name, form.fields, BUILD)
        host.take_log()
        types = ["float16" if kind == "bfloat16" else kind for kind in form.input_types]
        assert host.output_types(plugin, types, len(form.definition.outputs)) is None
        assert host.configure(plugin, types, form.max_shapes) == 1
        for line in host.take_log().splitlines():
            assert line.startswith("1 trtllm_mla: ContextAttention: ")
            assert "bfloat16" in line

    def test_another_size_is_refused(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["LatentAttention-nvfp4"]
        fp8 = make_form("LatentAttention", CacheDType.FP8)
        for sizes in ({**form.sizes, "heads": 6}, {**form.sizes, "page_size": 32}):
            other = dataclasses.replace(fp8, sizes=sizes)
            plugin = host.create(form.definition.name, form.fields, BUILD)
            host.take_log()
            assert host.configure(plugin, other.input_types, other.max_shapes) == 1
            assert "LatentAttention: " in host.take_log()

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"causal": None}, "field 'causal' is missing; found softmax_scale"),
            ({"causal": np.array([1, 1], np.int32)}, "field 'causal': found 2 values, expected one"),
            ({"causal": np.array([1.0], np.float32)}, "field 'causal': found a field of type 1, expected whole"),
            ({"softmax_scale": np.array([1], np.int32)}, "field 'softmax_scale': found a field of type 5, expected"),
            ({"causal": np.array([17], np.int32)}, "17"),
        ],
    )
    @pytest.mark.parametrize("phase", [BUILD, RUNTIME])
    def test_wrong_attributes_are_refused(
        self, host: Host, forms: dict[str, OpForm], change: dict[str, Any], expected: str, phase: int
    ) -> None:
        form = forms["ContextAttention"]
        fields = {**(form.fields if phase == BUILD else runtime_fields(form, 0)), **change}
        host.take_log()
        assert host.create(form.definition.name, {k: v for k, v in fields.items() if v is not None}, phase) is None
        log = host.take_log()
        assert log.startswith("1 trtllm_mla: ContextAttention: ")
        assert expected in log

    def test_random_fields_and_shapes_make_no_crash(self, host: Host, forms: dict[str, OpForm]) -> None:
        rng, made = generator(), 0
        for _ in range(1500):
            form, phase = rng.choice(list(forms.values())), rng.choice([BUILD, RUNTIME])
            fields = dict(form.fields if phase == BUILD else runtime_fields(form, rng.choice([0, 10**6, -1])))
            for name in list(fields):
                if rng.random() < 0.2:
                    fields[name] = random_field(rng)
            plugin = host.create(form.definition.name, fields, phase)
            host.take_log()
            if plugin is None:
                continue
            made += 1
            shapes = [random_shape(rng, shape) for shape in form.max_shapes]
            types = [kind if rng.random() < 0.98 else rng.choice(list(DATA_TYPES)) for kind in form.input_types]
            call = make_call(form, rng)
            # Nothing fails in silence.
            assert bool(host.configure(plugin, types, shapes)) == bool(host.take_log())
            recorded = host.enqueue(
                plugin, types, shapes, call.inputs, call.outputs, rng.choice([0, call.workspace]), call.stream
            )
            assert bool(recorded.status) == bool(recorded.log)
            host.fields(plugin)
            host.destroy(plugin)
        assert made >= 300

    def test_a_serialised_plugin_without_its_settings_is_refused(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["ContextAttention"]
        for name in ("model_dtype", "cache_dtype", "tiles", "workspace_bytes"):
            fields = {key: value for key, value in runtime_fields(form, 0).items() if key != name}
            assert host.create(form.definition.name, fields, RUNTIME) is None
            assert f"field '{name}' is missing" in host.take_log()

    def test_an_attached_plugin_is_one_of_its_own(self, host: Host, forms: dict[str, OpForm]) -> None:
        form = forms["GatherLatent-bf16"]
        plugin = make_plugin(host, form)
        attached = host.attach(plugin)
        assert attached != plugin
        host.destroy(plugin)
        recorded = enqueue(host, attached, form, form.max_shapes, make_call(form, generator()))
        assert recorded.status == 0
        assert recorded.launched


def test_all_forms_are_tested() -> None:
    assert tuple(make_forms()) == FORM_NAMES
