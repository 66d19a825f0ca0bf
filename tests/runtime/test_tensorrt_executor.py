"""The executor's logic on a stand-in for the GPU, the TensorRT engine and its context. Nothing is computed here."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.engine.fakes import Call
from tests.engine.models import make_network
from tests.runtime.fake_tensorrt import STREAM, VOCAB, FakeContext, FakeDevice, FakeTensorRT, rtx
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.engine.backend import load_backend
from trtllm_mla.engine.builder import build
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.engine.launcher import Launcher
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import history_inputs, step_inputs
from trtllm_mla.network.directory import store_latent_scales
from trtllm_mla.ops import OPS
from trtllm_mla.runtime.decode_buckets import DecodeBucket, pad_decode
from trtllm_mla.runtime.executors.decode_graphs import GraphStatistics
from trtllm_mla.runtime.executors.tensorrt import TensorRTExecutor
from trtllm_mla.runtime.step import Chunk, ContextPasses, LogitRows, StepInputs, build_step
from trtllm_mla.targets import get_target

NUM_PAGES, PAGE_SIZE, WIDTH = 5, 16, 128


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
    use_cuda_graph: bool = True,
) -> TensorRTExecutor:
    return TensorRTExecutor(
        engine,
        weights,
        ROTARY,
        num_pages=num_pages,
        use_cuda_graph=use_cuda_graph,
        device=device,
        backend=tensorrt.backend(),
    )


def step(prompt: int = 7, decoded: int = 1, rows: LogitRows = LogitRows.LAST) -> StepInputs:
    tokens = np.arange(40, 40 + prompt, dtype=np.int32)
    context = [Chunk(tokens, 0, np.array([3], np.int32), rows)] if prompt else []
    generation = [Chunk(np.array([90], np.int32), 17, np.array([1, 4], np.int32), rows)] * decoded
    return build_step(context, generation, page_size=PAGE_SIZE, num_pages=NUM_PAGES)


def context_of(tensorrt: FakeTensorRT) -> FakeContext:
    """The context of steps that are not captured."""
    return tensorrt.contexts[0]


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

    def test_other_threads_may_run_it(self, executor: TensorRTExecutor) -> None:
        """As ``LLM`` does, which makes it in the caller's thread and runs it in its own."""

        def use() -> list[Any]:
            return [executor.run(step()), executor.run(step(0, 1)), executor.run(step(0, 1)), executor.read_cache(0)]

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(use).result()
            pool.submit(executor.close).result()
        assert [item.shape for item in other[:3]] == [(2, VOCAB), (1, VOCAB), (1, VOCAB)]

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
        tensorrt.plugin_fields["GatherLatent"] = [
            SimpleNamespace(name=name, data=data) for name, data in values.items()
        ]
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


class TestCudaGraphs:
    """What the executor gives to ``DecodeGraphs``, whose own tests are elsewhere."""

    @pytest.fixture
    def engine(self, engines: dict[bool, EngineDirectory]) -> EngineDirectory:
        return engines[False]

    def test_decode_steps_are_launched_as_graphs(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        steps = [step(), decode(17, 33), decode(3, 40), step(16), decode(36, 20), decode(5)]
        for inputs in steps:
            expected = inputs.input_ids[inputs.last_token_ids, None] * 1000 + np.arange(VOCAB)
            np.testing.assert_array_equal(executor.run(inputs), expected)
        assert executor.graph_statistics == GraphStatistics(num_captured=2, num_replayed=2, num_eager=2)
        eager, *captured = tensorrt.contexts
        assert [len(context.runs) for context in (eager, *captured)] == [2, 4, 2]
        fixed = [*weights, "rotary_cos_sin", *(f"{kind}_latent_{n}" for kind in ("past", "present") for n in range(2))]
        for context in captured:
            # Weights and caches are where they are; a step's inputs, which prefill moves, are elsewhere.
            for name, address in context.addresses.items():
                assert (address == eager.addresses[name]) == (name in fixed), name
            assert context.scratch == eager.scratch
            assert {name: context.shapes[name] for name in weights} == {
                name: array.shape for name, array in weights.items()
            }

    @pytest.mark.parametrize(("requests", "bucket"), [(1, 1), (2, 2), (3, 3)])
    def test_the_last_bucket_is_the_engines_limit(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, requests: int, bucket: int
    ) -> None:
        executor.run(decode(*[7] * requests))
        assert tensorrt.contexts[1].shapes["generation_sequence_length"] == (bucket,)
        assert tensorrt.contexts[1].shapes["kv_cache_block_offsets"] == (bucket, 1)

    def test_a_native_engine_has_no_padding_requests(
        self, engines: dict[bool, EngineDirectory], tmp_path: Path, weights: WeightArrays
    ) -> None:
        """The function body of AppendLatent writes a row for every token."""
        device = FakeDevice()
        for native, bucket in ((True, 5), (False, 8)):
            engine = engines[native]
            info = engine.info.build_config.model_copy(update={"max_batch_size": 11})
            engine = replace(engine, info=engine.info.model_copy(update={"build_config": info}))
            tensorrt = FakeTensorRT(engine_types(engine, rtx.DataType.BF16), device)
            executor = make(engine, device, tensorrt, weights, num_pages=9)
            executor.run(decode(*[7] * 5, num_pages=9))
            assert tensorrt.contexts[1].shapes["generation_sequence_length"] == (bucket,)

    def test_without_graphs(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        executor = make(engine, device, tensorrt, weights, use_cuda_graph=False)
        for _ in range(3):
            executor.run(decode(17, 33))
        assert executor.graph_statistics is None
        assert len(tensorrt.contexts) == 1
        assert not device.graphs

    def test_without_absorption(self, engine: EngineDirectory, device: FakeDevice, weights: WeightArrays) -> None:
        """Decode goes through the context group, whose shapes follow the lengths."""
        plugin = engine.network.plugin.model_copy(update={"enable_matrix_absorption": False})
        engine = replace(engine, network=replace(engine.network, plugin=plugin))
        generation = [item.name for item in step_inputs(absorption=True) if item.group == "generation"]
        types = engine_types(engine, rtx.DataType.BF16)
        tensorrt = FakeTensorRT({name: types[name] for name in types if name not in generation}, device)
        executor = make(engine, device, tensorrt, weights)
        chunk = Chunk(np.array([90], np.int32), 17, np.array([1, 4], np.int32))
        for _ in range(2):
            executor.run(build_step([chunk], [], page_size=PAGE_SIZE, num_pages=NUM_PAGES))
        assert executor.graph_statistics is None
        assert len(tensorrt.contexts) == 1

    def test_without_a_further_context_steps_go_on(
        self, executor: TensorRTExecutor, tensorrt: FakeTensorRT, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert tensorrt.engine is not None
        tensorrt.engine.most_contexts = 1
        inputs = decode(17, 33)
        for _ in range(2):
            np.testing.assert_array_equal(executor.run(inputs), inputs.input_ids[:, None] * 1000 + np.arange(VOCAB))
        (record,) = caplog.records
        assert record.getMessage().startswith("decode steps run without CUDA graphs: tensorrt-rtx makes no execution")
        assert executor.graph_statistics == GraphStatistics(num_eager=2)

    def test_launches_follow_from_a_buckets_shapes(
        self, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT, weights: WeightArrays
    ) -> None:
        """Two steps of one bucket, with other lengths, pages and numbers of requests, have the same launches."""
        tensorrt.plugin_fields = {name: plugin_fields(engine, name) for name in ("AppendLatent", "LatentAttention")}
        executor = make(engine, device, tensorrt, weights, use_cuda_graph=False)
        context_of(tensorrt).on_enqueue = partial(enqueue_plugins, tensorrt.plugins)

        def launches(inputs: StepInputs, bucket: DecodeBucket) -> list[Call]:
            device.calls.clear()
            executor.run(pad_decode(inputs, bucket))
            return list(device.calls)

        bucket = DecodeBucket(3, 4)
        expected = launches(decode(17, 33), bucket)
        assert [call.entry for call in expected] == ["append_latent", "attend"]
        for lengths in ((5,), (64,), (1, 2), (16, 17, 18)):
            assert launches(decode(*lengths), bucket) == expected
        assert launches(decode(17, 33), DecodeBucket(2, 4)) != expected
        assert launches(decode(17, 33), DecodeBucket(3, 7)) != expected

    def test_a_captured_graph_holds_the_launches_of_plugins(
        self, executor: TensorRTExecutor, engine: EngineDirectory, device: FakeDevice, tensorrt: FakeTensorRT
    ) -> None:
        library = tensorrt.creators["LatentAttention"].library
        with library.loading(Launcher(device, engine.kernels())):
            plugins = [
                tensorrt.creators[name].create_plugin("layer", plugin_fields(engine, name), rtx.TensorRTPhase.RUNTIME)
                for name in ("AppendLatent", "LatentAttention")
            ]
        tensorrt.contexts.append(FakeContext(tensorrt.contexts[0].engine))
        tensorrt.contexts[1].on_enqueue = partial(enqueue_plugins, plugins)
        executor.run(decode(17, 33))
        # Enqueued to run, then to be captured: on the same stream and addresses.
        half = len(device.calls) // 2
        assert half >= 2
        assert device.calls[:half] == device.calls[half:]
        assert {call.stream for call in device.calls} == {STREAM}
        device.calls.clear()
        executor.run(decode(36, 20))
        assert not device.calls

    def test_a_plugin_that_fails_in_the_capture(
        self, executor: TensorRTExecutor, device: FakeDevice, tensorrt: FakeTensorRT, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(context: FakeContext) -> None:
            if device.captured is not None:
                tensorrt.creators["LatentAttention"].library.record("LatentAttention.enqueue", ValueError("no"))

        tensorrt.contexts.append(FakeContext(tensorrt.contexts[0].engine))
        tensorrt.contexts[1].on_enqueue = fail
        inputs = decode(17, 33)
        np.testing.assert_array_equal(executor.run(inputs), inputs.input_ids[:, None] * 1000 + np.arange(VOCAB))
        assert "LatentAttention.enqueue: no" in caplog.records[-1].getMessage()
        assert not device.graphs


def decode(*lengths: int, num_pages: int = NUM_PAGES) -> StepInputs:
    """A decode step of requests that have so many tokens after it."""
    free = iter(np.random.default_rng(lengths).permutation(num_pages).astype(np.int32))
    chunks = [
        Chunk(
            np.array([40 + index], np.int32),
            length - 1,
            np.array([next(free) for _ in range(-(-length // PAGE_SIZE))], np.int32),
        )
        for index, length in enumerate(lengths)
    ]
    return build_step([], chunks, page_size=PAGE_SIZE, num_pages=num_pages)


def plugin_fields(engine: EngineDirectory, op: str) -> list[Any]:
    """A serialised plugin's fields."""
    attributes = {"softmax_scale": np.array([0.1]), "latent_scale": np.array([1.0]), "rope_interleave": np.array([1])}
    values = {
        **{name: attributes[name] for name in OPS[op].attributes},
        "model_dtype": np.frombuffer(b"bfloat16", np.int8),
        "cache_dtype": np.frombuffer(b"bf16", np.int8),
        "tiles": np.array([89, *_tile(engine)]),
        "workspace_bytes": np.array([1 << 30]),
    }
    return [SimpleNamespace(name=name, data=data) for name, data in values.items()]


def enqueue_plugins(plugins: list[Any], context: FakeContext) -> None:
    """Enqueues AppendLatent and LatentAttention with a context's shapes and addresses."""
    (tokens,) = context.shapes["input_ids"]
    step_tensors = {
        "position_ids": "generation_position_ids",
        "slot_mapping": "slot_mapping",
        "rotary_cos_sin": "rotary_cos_sin",
        "past_latent": "past_latent_0",
        "latent_cache": "past_latent_0",
        "present_latent": "past_latent_0",
        "block_offsets": "kv_cache_block_offsets",
        "sequence_length": "generation_sequence_length",
        "query_offsets": "generation_query_offsets",
        "query_index": "generation_query_index",
    }
    activations = {"latent": (tokens, 96), "k_pe": (tokens, 32), "q_pe": (tokens, 5, 32), "q_latent": (tokens, 5, 96)}
    activations |= dict.fromkeys(("rotated_q_pe", "output", "log_sum_exp"), ())
    addresses = {name: 0x10000 * (index + 1) for index, name in enumerate(activations)}
    addresses |= {name: context.addresses[tensor] for name, tensor in step_tensors.items()}
    shapes = {**activations, **{name: context.shapes[tensor] for name, tensor in step_tensors.items()}}
    for plugin in plugins:
        definition = plugin.state.operation.definition
        descriptions = [SimpleNamespace(dims=shapes[tensor.name]) for tensor in definition.inputs]
        inputs, outputs = (
            [addresses[tensor.name] for tensor in tensors] for tensors in (definition.inputs, definition.outputs)
        )
        plugin.enqueue(descriptions, [], inputs, outputs, 0x100000, STREAM)


def test_close_frees_the_memory(executor: TensorRTExecutor, device: FakeDevice) -> None:
    executor.run(step(0, 1))
    executor.close()
    assert device.synced
    assert not executor._buffers
    assert [graph.is_closed for graph in device.graphs] == [True]


def _tile(engine: EngineDirectory) -> tuple[int, int]:
    (tile,) = engine.info.tiles
    return tile.tile_s, tile.num_stages
