"""The executor's logic on a stand-in for the GPU, the TensorRT engine and its context. Nothing is computed here."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.engine.fakes import RecordingDriver
from tests.engine.models import make_network
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.engine.backend import Backend, load_backend
from trtllm_mla.engine.builder import build
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import history_inputs, step_inputs
from trtllm_mla.network.directory import store_latent_scales
from trtllm_mla.ops import OPS
from trtllm_mla.runtime.executors.tensorrt import TensorRTExecutor
from trtllm_mla.runtime.step import Chunk, ContextPasses, LogitRows, StepInputs, build_step
from trtllm_mla.targets import Target, get_target

rtx: Any = pytest.importorskip("tensorrt_rtx")

NUM_PAGES, PAGE_SIZE, WIDTH, VOCAB = 5, 16, 128, 131
STREAM = 4242


class FakeDevice(RecordingDriver):
    """A GPU whose memory is a dictionary."""

    device_name = "NVIDIA GeForce RTX 4090"

    def __init__(self, target: Target | None = None) -> None:
        super().__init__(target or get_target("sm_89"))
        self.memory: dict[int, bytearray] = {}
        self.uploads: list[int] = []
        self.synced = 0
        self._next = 0x7F0000000000

    def create_stream(self) -> Any:
        def sync() -> None:
            self.synced += 1

        return SimpleNamespace(handle=STREAM, sync=sync)

    def allocate(self, size: int, stream: Any) -> Any:
        assert stream.handle == STREAM
        assert size > 0
        address, self._next = self._next, self._next + -(-size // 4096) * 4096
        self.memory[address] = bytearray(size)
        return SimpleNamespace(handle=address, size=size)

    def fill(self, buffer: Any, byte: int, stream: Any) -> None:
        self.memory[buffer.handle][:] = bytes([byte]) * buffer.size

    def copy_to_device(self, address: int, source: np.ndarray[Any, Any], stream: Any) -> None:
        assert source.flags.c_contiguous
        self.uploads.append(address)
        start = max(handle for handle in self.memory if handle <= address)
        assert address + source.nbytes <= start + len(self.memory[start])
        self.memory[start][address - start : address - start + source.nbytes] = source.tobytes()

    def copy_to_host(self, destination: np.ndarray[Any, Any], address: int, stream: Any) -> None:
        data = bytes(self.memory[address][: destination.nbytes])
        destination[...] = np.frombuffer(data, destination.dtype).reshape(destination.shape)

    def read(self, address: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        count = int(np.prod(shape))
        return np.frombuffer(bytes(self.memory[address]), dtype, count).reshape(shape)


class FakeEngine:
    """An engine with a network's inputs and outputs."""

    def __init__(self, dtypes: dict[str, Any], device: FakeDevice) -> None:
        self.dtypes, self.device = dtypes, device
        self.context: FakeContext | None = FakeContext(self)
        self.num_io_tensors = len(dtypes)

    def get_tensor_name(self, index: int) -> str:
        return list(self.dtypes)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return self.dtypes[name]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(0,), (8,), (96,)]

    def create_execution_context(self) -> FakeContext | None:
        return self.context


class FakeContext:
    """An execution context. A step's logits are made up of its own inputs."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.streams: list[int] = []
        self.fails = False
        self.refused: set[str] = set()
        self.misplaced: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name not in self.refused

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address in self.engine.device.memory
        self.addresses[name] = address
        return True

    def get_tensor_address(self, name: str) -> int:
        return self.misplaced.get(name, self.addresses[name])

    def execute_async_v3(self, stream: int) -> bool:
        assert set(self.addresses) == set(self.engine.dtypes)
        assert set(self.shapes) == {name for name in self.engine.dtypes if name != "logits" and "present" not in name}
        self.streams.append(stream)
        device = self.engine.device
        rows = device.read(self.addresses["last_token_ids"], np.int32, self.shapes["last_token_ids"])
        tokens = device.read(self.addresses["input_ids"], np.int32, self.shapes["input_ids"])
        logits = (tokens[rows, None] * 1000 + np.arange(VOCAB)).astype(np.float32)
        device.memory[self.addresses["logits"]][: logits.nbytes] = logits.tobytes()
        return not self.fails


class FakeTensorRT:
    """TensorRT-RTX's module, with engines that are stand-ins."""

    def __init__(self, dtypes: dict[str, Any], device: FakeDevice) -> None:
        self.engine: FakeEngine | None = FakeEngine(dtypes, device)
        self.serialized: list[bytes] = []
        self.creators: dict[str, Any] = {}
        self.plugins: list[Any] = []
        self.plugin_fields: list[Any] = []
        self.module = ModuleType("tensorrt_rtx")
        self.module.__dict__.update(vars(rtx))
        self.module.__dict__.update(Runtime=self.runtime, get_plugin_registry=lambda: self)

    def backend(self) -> Backend:
        return Backend("tensorrt-rtx", self.module, ("sm_89",), ("sm_89",))

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name] = creator
        return True

    def runtime(self, logger: Any) -> Any:
        def deserialize(serialized: bytes) -> FakeEngine | None:
            self.serialized.append(serialized)
            if self.plugin_fields:
                phase = rtx.TensorRTPhase.RUNTIME
                self.plugins.append(self.creators["GatherLatent"].create_plugin("layer", self.plugin_fields, phase))
            if self.engine is None:
                logger.log(rtx.ILogger.Severity.ERROR, "the engine is of another version")
            return self.engine

        return SimpleNamespace(deserialize_cuda_engine=deserialize)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, EngineDirectory]:
    """A native engine and one with plugins."""
    path = tmp_path_factory.mktemp("engines")
    plugin = MlaPluginConfig(page_size=PAGE_SIZE)
    network = make_network(path, plugin=plugin)
    config = BuildConfig(
        max_batch_size=3, max_num_tokens=96, max_seq_len=100, mla_plugin=MlaPluginConfig(page_size=PAGE_SIZE)
    )
    cache = path / "cache"
    return {
        native: build(
            network.path, path / f"engine-{native}", config=config, targets=("sm_89",), native=native, cache_dir=cache
        ).directory
        for native in (True, False)
    }


@pytest.fixture
def engine(engines: dict[bool, EngineDirectory]) -> EngineDirectory:
    return engines[True]


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def tensorrt(engine: EngineDirectory, device: FakeDevice) -> FakeTensorRT:
    return FakeTensorRT(engine_types(engine, rtx.DataType.BF16), device)


def engine_types(engine: EngineDirectory, cache: Any) -> dict[str, Any]:
    """Type of each input and output of an engine for a bfloat16 network of two layers."""
    types = rtx.DataType
    dtypes = dict.fromkeys(engine.network.weights.shapes, types.BF16)
    for item in step_inputs(absorption=True):
        dtypes[item.name] = types.INT32 if item.dtype == "int32" else types.FLOAT
    dtypes |= {f"{kind}_latent_{layer}": cache for kind in ("past", "present") for layer in range(2)}
    return {**dtypes, "logits": types.FLOAT}


class WeightArrays(dict[str, Any]):
    """Weights that come in as many parts as a test wants."""

    num_parts = 1

    def parts(self, name: str) -> list[Any]:
        return np.array_split(self[name], self.num_parts)


@pytest.fixture
def weights(engine: EngineDirectory) -> WeightArrays:
    generator = np.random.default_rng(7)
    return WeightArrays(
        (name, generator.standard_normal(shape).astype(ml_dtypes.bfloat16))
        for name, shape in engine.network.weights.shapes.items()
    )


ROTARY = np.random.default_rng(3).standard_normal((640, 32)).astype(np.float32)


@pytest.fixture
def executor(
    engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
) -> TensorRTExecutor:
    return make(engine, device, tensorrt, weights)


def make(
    engine: EngineDirectory,
    device: FakeDevice,
    tensorrt: FakeTensorRT,
    weights: WeightArrays,
    num_pages: int = NUM_PAGES,
) -> TensorRTExecutor:
    return TensorRTExecutor(engine, weights, ROTARY, num_pages=num_pages, device=device, backend=tensorrt.backend())


def step(prompt: int = 7, decoded: int = 1, rows: LogitRows = LogitRows.LAST) -> StepInputs:
    tokens = np.arange(40, 40 + prompt, dtype=np.int32)
    context = [Chunk(tokens, 0, np.array([3], np.int32), rows)] if prompt else []
    generation = [Chunk(np.array([90], np.int32), 17, np.array([1, 4], np.int32), rows)] * decoded
    return build_step(context, generation, page_size=PAGE_SIZE, num_pages=NUM_PAGES)


def context_of(tensorrt: FakeTensorRT) -> FakeContext:
    assert tensorrt.engine is not None
    assert tensorrt.engine.context is not None
    return tensorrt.engine.context


class TestBinding:
    def test_weights_are_on_the_gpu(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, device: FakeDevice, weights: WeightArrays
    ) -> None:
        context = context_of(tensorrt)
        for name, array in weights.items():
            assert context.shapes[name] == array.shape
            found = device.read(context.addresses[name], ml_dtypes.bfloat16, array.shape)
            np.testing.assert_array_equal(found, array)

    def test_weights_in_parts_lie_behind_one_another(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        weights.num_parts = 7
        make(engine, device, tensorrt, weights)
        context = context_of(tensorrt)
        for name, array in weights.items():
            assert context.shapes[name] == array.shape
            found = device.read(context.addresses[name], ml_dtypes.bfloat16, array.shape)
            np.testing.assert_array_equal(found, array)

    def test_too_few_parts_are_refused(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
        with pytest.raises(ValueError, match=r"input 'model.norm.weight': found 158 bytes, expected 160"):
            make(engine, device, tensorrt, weights)

    def test_the_rotary_table_ends_at_the_engines_longest_request(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, device: FakeDevice
    ) -> None:
        context = context_of(tensorrt)
        assert context.shapes["rotary_cos_sin"] == (100, 32)
        found = device.read(context.addresses["rotary_cos_sin"], np.float32, (100, 32))
        np.testing.assert_array_equal(found, ROTARY[:100])

    def test_a_cache_goes_in_and_out_at_one_address(self, executor: TensorRTExecutor, tensorrt: FakeTensorRT) -> None:
        context = context_of(tensorrt)
        pools = [context.addresses[f"past_latent_{layer}"] for layer in range(2)]
        assert [context.addresses[f"present_latent_{layer}"] for layer in range(2)] == pools
        assert len(set(pools)) == 2
        assert context.shapes["past_latent_1"] == (NUM_PAGES, PAGE_SIZE, WIDTH)

    def test_a_cache_that_tensorrt_binds_elsewhere_is_refused(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        context_of(tensorrt).misplaced["present_latent_1"] = 64
        with pytest.raises(ValueError, match=r"layer 1: the cache is bound at \[\d+, 64\], expected one address"):
            make(engine, device, tensorrt, weights)

    def test_a_cache_that_kernels_could_not_read_in_wide_accesses_is_refused(
        self,
        engine: EngineDirectory,
        device: FakeDevice,
        tensorrt: FakeTensorRT,
        weights: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        allocate = device.allocate

        def misaligned(size: int, stream: Any) -> Any:
            buffer = allocate(size, stream)
            if size != NUM_PAGES * PAGE_SIZE * WIDTH * 2:
                return buffer
            device.memory[buffer.handle + 8] = device.memory[buffer.handle]
            return SimpleNamespace(handle=buffer.handle + 8, size=size)

        monkeypatch.setattr(device, "allocate", misaligned)
        with pytest.raises(ValueError, match=r"layer 0: the cache lies at 0x\w+8, expected a multiple of 16 bytes"):
            make(engine, device, tensorrt, weights)

    def test_unwritten_slots_hold_nan(self, executor: TensorRTExecutor) -> None:
        cache = executor.read_cache(1)
        assert cache.shape == (NUM_PAGES, PAGE_SIZE, WIDTH)
        assert cache.dtype == np.float32
        assert np.isnan(cache).all()

    def test_reads_the_cache_of_the_layer(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, device: FakeDevice
    ) -> None:
        values = np.random.default_rng(0).standard_normal((NUM_PAGES, PAGE_SIZE, WIDTH)).astype(ml_dtypes.bfloat16)
        device.memory[context_of(tensorrt).addresses["past_latent_1"]][:] = values.tobytes()
        np.testing.assert_array_equal(executor.read_cache(1), values.astype(np.float32))
        assert np.isnan(executor.read_cache(0)).all()

    def test_a_weight_of_another_type_is_refused(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float32)
        with pytest.raises(ValueError, match=r"input 'model.norm.weight': found float32, expected DataType.BF16"):
            make(engine, device, tensorrt, weights)

    def test_an_array_with_gaps_is_refused(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        weights["model.norm.weight"] = np.repeat(weights["model.norm.weight"], 2)[::2]
        with pytest.raises(
            ValueError, match=r"input 'model.norm.weight': found strides \(4,\), expected a contiguous"
        ):
            make(engine, device, tensorrt, weights)

    def test_describes_itself(self, executor: TensorRTExecutor) -> None:
        assert (executor.name, executor.num_pages, executor.page_size) == ("tensorrt", NUM_PAGES, PAGE_SIZE)
        version = load_backend("tensorrt-rtx").version
        expected = f"tensorrt-rtx {version} on NVIDIA GeForce RTX 4090, bfloat16 network, native layers"
        assert executor.description == expected


class TestQuantizedCache:
    @pytest.fixture
    def engine(self, tmp_path: Path) -> EngineDirectory:
        plugin = MlaPluginConfig(page_size=PAGE_SIZE, kv_cache_dtype="nvfp4")
        network = store_latent_scales(make_network(tmp_path, plugin=plugin), [1.0, 0.25])
        config = BuildConfig(
            max_batch_size=3, max_num_tokens=96, max_seq_len=100, mla_plugin=MlaPluginConfig(page_size=PAGE_SIZE)
        )
        return build(network.path, tmp_path / "engine", config=config, targets=("sm_89",), native=True).directory

    @pytest.fixture
    def tensorrt(self, engine: EngineDirectory, device: FakeDevice) -> FakeTensorRT:
        return FakeTensorRT(engine_types(engine, rtx.DataType.INT8), device)

    def test_pools_are_bytes_that_read_as_nan_until_they_are_written(
        self, engine: EngineDirectory, executor: TensorRTExecutor, tensorrt: FakeTensorRT, device: FakeDevice
    ) -> None:
        layout = engine.network.row_layout
        context = context_of(tensorrt)
        assert context.shapes["past_latent_1"] == (NUM_PAGES, PAGE_SIZE, layout.row_bytes)
        assert np.isnan(executor.read_cache(1)).all()
        row = bytearray(layout.row_bytes)
        row[0] = 0x29  # -0.5 (code 9) and 1 (code 2), the even element in the low nibble
        row[layout.scale_offset] = 0x40  # 2 in E4M3
        row[layout.rope_offset : layout.rope_offset + 2] = b"\x40\xc0"  # -3 in bfloat16
        device.memory[context.addresses["past_latent_1"]][: len(row)] = row
        values = executor.read_cache(1)[0, 0]
        # The layer's outer scale is 0.25.
        np.testing.assert_array_equal(values[:3], [-0.25, 0.5, 0.0])
        assert values[layout.kv_lora_rank] == -3.0


class TestRun:
    def test_logits_of_a_mixed_step(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, device: FakeDevice
    ) -> None:
        inputs = step()
        logits = executor.run(inputs)
        np.testing.assert_array_equal(logits, np.array([[46000], [90000]]) + np.arange(VOCAB))
        context = context_of(tensorrt)
        assert context.streams == [STREAM]
        for name, array in inputs.arrays(absorption=True).items():
            assert context.shapes[name] == array.shape, name
            np.testing.assert_array_equal(device.read(context.addresses[name], np.int32, array.shape), array)

    def test_each_pass_over_older_tokens_is_bound(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: dict[str, Any]
    ) -> None:
        plugin = engine.network.plugin.model_copy(update={"max_context_passes": 3})
        engine = replace(engine, network=replace(engine.network, plugin=plugin))
        assert tensorrt.engine is not None
        tensorrt.engine.dtypes |= {item.name: rtx.DataType.INT32 for n in (1, 2) for item in history_inputs(n)}
        tensorrt.engine.num_io_tensors = len(tensorrt.engine.dtypes)
        executor = make(engine, device, tensorrt, weights)
        chunk = Chunk(np.arange(40, 47, dtype=np.int32), 9, np.array([3], np.int32))
        inputs = build_step([chunk], [], page_size=PAGE_SIZE, num_pages=5, context_passes=ContextPasses(3, 8))
        executor.run(inputs)
        context = context_of(tensorrt)
        arrays = inputs.arrays(absorption=True, context_passes=3)
        assert [arrays[f"context_history_kv_slots_{n}"].tolist() for n in (1, 2)] == [list(range(48, 56)), []]
        for name, array in arrays.items():
            assert context.shapes[name] == array.shape, name
            np.testing.assert_array_equal(device.read(context.addresses[name], np.int32, array.shape), array)

    def test_steps_of_other_sizes(self, executor: TensorRTExecutor) -> None:
        for inputs in (step(2, 0), step(9, 1, LogitRows.ALL), step(0, 1), step(16, 0, LogitRows.ALL)):
            expected = inputs.input_ids[inputs.last_token_ids, None] * 1000 + np.arange(VOCAB)
            np.testing.assert_array_equal(executor.run(inputs), expected)

    def test_a_step_without_logits(self, executor: TensorRTExecutor, device: FakeDevice) -> None:
        before = device.synced
        assert executor.run(step(5, 0, LogitRows.NONE)).shape == (0, VOCAB)
        assert device.synced == before + 1

    def test_only_step_inputs_are_copied_again(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, device: FakeDevice
    ) -> None:
        executor.run(step())
        device.uploads.clear()
        buffers = dict(context_of(tensorrt).addresses)
        executor.run(step())
        assert context_of(tensorrt).addresses == buffers
        names = {item.name for item in step_inputs(absorption=True)} - {"rotary_cos_sin"}
        assert sorted(device.uploads) == sorted(buffers[name] for name in names)

    def test_every_tensor_has_an_address_of_its_own(self, executor: TensorRTExecutor, tensorrt: FakeTensorRT) -> None:
        executor.run(step(0, 1))
        addresses = context_of(tensorrt).addresses
        assert len(set(addresses.values())) == len(addresses) - 2  # two caches go in and out

    def test_a_failure_is_raised(self, executor: TensorRTExecutor, tensorrt: FakeTensorRT) -> None:
        context_of(tensorrt).fails = True
        with pytest.raises(RuntimeError, match="tensorrt-rtx could not run a step: no reason given"):
            executor.run(step())

    def test_a_step_beyond_the_engines_limits(self, executor: TensorRTExecutor, tensorrt: FakeTensorRT) -> None:
        context_of(tensorrt).refused.add("slot_mapping")
        with pytest.raises(
            UserError, match=r"'slot_mapping' of the engine: found the shape \(8,\), expected \(0,\) to"
        ):
            executor.run(step())


class TestLoading:
    def test_the_engine_is_read_from_its_file(self, executor: TensorRTExecutor, tensorrt: FakeTensorRT) -> None:
        assert [len(item) > 1000 for item in tensorrt.serialized] == [True]

    def test_plugins_launch_on_the_device(
        self,
        engines: dict[bool, EngineDirectory],
        device: FakeDevice,
        tensorrt: FakeTensorRT,
        weights: WeightArrays,
    ) -> None:
        values = {
            "kv_lora_rank": np.array([96]),
            "rope_dim": np.array([32]),
            "model_dtype": np.frombuffer(b"bfloat16", np.int8),
            "cache_dtype": np.frombuffer(b"bf16", np.int8),
            "latent_scale": np.array([1.0]),
            "tiles": np.array([89, *_tile(engines[False])]),
            "workspace_bytes": np.array([0]),
        }
        tensorrt.plugin_fields = [SimpleNamespace(name=name, data=data) for name, data in values.items()]
        executor = make(engines[False], device, tensorrt, weights)
        assert executor.description.endswith("MLA plugins")
        assert set(tensorrt.creators) == set(OPS)
        (plugin,) = tensorrt.plugins
        shapes = [SimpleNamespace(dims=(NUM_PAGES, PAGE_SIZE, WIDTH)), SimpleNamespace(dims=(33,))]
        plugin.enqueue(shapes, [], [0x1000, 0x2000], [0x3000, 0x4000], 0, STREAM)
        assert [(call.entry, call.stream) for call in device.calls] == [("gather_latent", STREAM)]

    def test_a_failing_plugin_fails_the_step(
        self,
        engines: dict[bool, EngineDirectory],
        device: FakeDevice,
        tensorrt: FakeTensorRT,
        weights: WeightArrays,
    ) -> None:
        """TensorRT may drop what a plugin raises."""
        executor = make(engines[False], device, tensorrt, weights)
        tensorrt.creators["GatherLatent"].library.record("GatherLatent.enqueue", ValueError("misaligned"))
        with pytest.raises(RuntimeError, match=r"could not run a step: GatherLatent\.enqueue: misaligned"):
            executor.run(step())
        executor.run(step())

    def test_an_engine_that_does_not_load(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        tensorrt.engine = None
        with pytest.raises(
            UserError, match=r"cannot load the engine, which tensorrt-rtx .* another version\. Build it"
        ):
            make(engine, device, tensorrt, weights)

    def test_an_engine_for_another_gpu(
        self, engine: EngineDirectory, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        other = FakeDevice(get_target("sm_90"))
        with pytest.raises(
            UserError, match=r"built for sm_89, found .* \(sm_90\)\. Build it again with --targets sm_90"
        ):
            make(engine, other, tensorrt, weights)

    def test_too_many_pages(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        make(engine, device, tensorrt, weights, num_pages=21)
        with pytest.raises(UserError, match=r"num_pages: found 22, expected at most 21: .*max_batch_size 3"):
            make(engine, device, tensorrt, weights, num_pages=22)

    def test_an_engine_of_another_network(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        assert tensorrt.engine is not None
        del tensorrt.engine.dtypes["context_kv_slots"]
        tensorrt.engine.num_io_tensors -= 1
        with pytest.raises(ValueError, match=r"tensor 'context_kv_slots': found None, expected DataType\.INT32"):
            make(engine, device, tensorrt, weights)

    def test_without_a_gpu_the_message_says_what_is_missing(
        self, engine: EngineDirectory, weights: WeightArrays, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from trtllm_mla.runtime.executors import tensorrt as module

        def no_gpu() -> None:
            raise UserError("No NVIDIA GPU can be used")

        monkeypatch.setattr(module, "CudaDriver", no_gpu)
        with pytest.raises(UserError, match="No NVIDIA GPU can be used"):
            TensorRTExecutor(engine, weights, ROTARY, num_pages=NUM_PAGES)

    def test_a_tampered_engine(
        self,
        engine: EngineDirectory,
        device: FakeDevice,
        tensorrt: FakeTensorRT,
        weights: WeightArrays,
        tmp_path: Path,
    ) -> None:
        shutil.copytree(engine.path, tmp_path / "engine")
        path = tmp_path / "engine" / "rank0.engine"
        code = bytearray(path.read_bytes())
        code[100] ^= 1
        path.write_bytes(code)
        with pytest.raises(UserError, match=r"rank0\.engine: found the SHA-256 digest"):
            make(EngineDirectory.load(tmp_path / "engine"), device, tensorrt, weights)


def test_close_frees_the_memory(executor: TensorRTExecutor, device: FakeDevice) -> None:
    executor.close()
    assert device.synced
    assert not executor._buffers


def _tile(engine: EngineDirectory) -> tuple[int, int]:
    (tile,) = engine.info.tiles
    return tile.tile_s, tile.num_stages
