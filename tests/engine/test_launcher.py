from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import RecordingDriver
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.kernel_compiler import compile_kernels
from trtllm_mla.engine.kernel_store import Cubin, KernelStore
from trtllm_mla.engine.launcher import CudaDriver, Launcher
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.plan import Launch, LaunchPlan, ScalarArgument, TensorArgument
from trtllm_mla.targets import get_target

SM_89 = get_target("sm_89")
STREAM, WORKSPACE = 0x5EED0, 0x7F00_0000_0100


def problem(**dims: int) -> Problem:
    sizes = {
        "heads": 5,
        "kv_lora_rank": 96,
        "rope_dim": 32,
        "width": 128,
        "page_size": 64,
        "tokens": 1,
        "pages": 40,
        "requests": 1,
        "pages_per_request": 40,
        "longest_query": 1,
        **dims,
    }
    return Problem(sizes, {"softmax_scale": 0.125, "latent_scale": 1.0}, DType.BFLOAT16, CacheDType.BF16, SM_89, 16, 2)


OP = OPS["LatentAttention"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> KernelStore:
    directory = tmp_path_factory.mktemp("kernels")
    return compile_kernels([(variant, SM_89) for variant in OP.variants(problem())], directory, cache_dir=cache_dir)


def addresses() -> dict[str, int]:
    tensors = (*OP.inputs, *OP.outputs)
    return {tensor.name: 0x7F12_3456_0000 + 4096 * index for index, tensor in enumerate(tensors)}


class TestLauncher:
    def test_launches_what_the_plan_says(self, store: KernelStore) -> None:
        driver, tensors = RecordingDriver(), addresses()
        plan = OP.plan(problem())
        Launcher(driver, store).run(plan, tensors, WORKSPACE, STREAM)

        assert [call.entry for call in driver.calls] == ["attend", "combine"]
        for call, launch in zip(driver.calls, plan.launches, strict=True):
            assert call.grid == launch.grid
            assert call.block == 32 * launch.variant.num_warps
            assert call.stream == STREAM
            assert call.shared_bytes == store.for_target(SM_89)[launch.variant.key].shared_bytes
            assert len(call.parameters) == len(launch.variant.signature) + 2

        attend, combine = driver.calls
        inputs = [tensors[tensor.name] for tensor in OP.inputs[:-1]]  # kernels do not read query_index
        assert list(attend.parameters[:6]) == inputs
        outputs = [tensors["output"], tensors["log_sum_exp"]]
        assert list(attend.parameters[6:8]) == outputs
        assert attend.parameters[8] == WORKSPACE
        partials = attend.parameters[8:11]
        assert combine.parameters[:3] == partials
        assert list(combine.parameters[3:7]) == [tensors["sequence_length"], tensors["query_offsets"], *outputs]

    def test_parameters_have_the_width_that_the_kernel_reads(self, store: KernelStore) -> None:
        driver = RecordingDriver()
        plan = OP.plan(problem())
        Launcher(driver, store).run(plan, addresses(), WORKSPACE, STREAM)
        types = {"i32": np.int32, "fp32": np.float32}
        for call, launch in zip(driver.calls, plan.launches, strict=True):
            expected = [types.get(kind, np.uint64) for _, kind in launch.variant.signature]
            assert [type(value) for value in call.parameters] == [*expected, np.uint64, np.uint64]
            assert call.parameters[-2:] == (0, 0)

    def test_kernels_are_loaded_once(self, store: KernelStore) -> None:
        driver = RecordingDriver()
        launcher = Launcher(driver, store)
        for _ in range(3):
            launcher.run(OP.plan(problem()), addresses(), WORKSPACE, STREAM)
        assert [entry for entry, _, _ in driver.loads] == ["attend", "combine"]
        assert len(driver.calls) == 6

    @pytest.mark.parametrize(("shared_bytes", "opt_in"), [(49152, False), (49153, True)])
    def test_asks_for_shared_memory_beyond_48_kib(self, store: KernelStore, shared_bytes: int, opt_in: bool) -> None:
        driver = RecordingDriver()
        cubins = [dataclasses.replace(cubin, shared_bytes=shared_bytes) for cubin in store.cubins]
        launcher = Launcher(driver, KernelStore(cubins, store.triton_version))
        launcher.run(OP.plan(problem()), addresses(), WORKSPACE, STREAM)
        assert {(size, asked) for _, size, asked in driver.loads} == {(shared_bytes, opt_in)}
        assert {call.shared_bytes for call in driver.calls} == {shared_bytes}

    def test_an_empty_plan_launches_nothing(self, store: KernelStore) -> None:
        driver = RecordingDriver()
        Launcher(driver, store).run(OP.plan(problem(tokens=0, requests=0)), addresses(), WORKSPACE, STREAM)
        assert not driver.calls

    def test_an_unaligned_tensor_is_refused_before_anything_is_launched(self, store: KernelStore) -> None:
        driver = RecordingDriver()
        # The output is written by the second launch only.
        tensors = {**addresses(), "output": 0x7F00_0000_0008}
        with pytest.raises(
            ValueError, match=r"tensor 'output' lies at address 0x7f0000000008, expected a multiple of 16"
        ):
            Launcher(driver, store).run(OP.plan(problem()), tensors, WORKSPACE, STREAM)
        assert not driver.calls

    def test_an_unaligned_workspace_is_refused(self, store: KernelStore) -> None:
        with pytest.raises(ValueError, match=r"workspace at byte 0 lies at address 0x4, expected a multiple of 16"):
            Launcher(RecordingDriver(), store).run(OP.plan(problem()), addresses(), 4, STREAM)

    def test_a_kernel_that_was_not_compiled_is_refused(self, store: KernelStore) -> None:
        driver = RecordingDriver()
        cubins: list[Cubin] = [cubin for cubin in store.cubins if cubin.entry != "combine"]
        with pytest.raises(ValueError, match=r"kernel combine-\w+ is not among the engine's kernels for sm_89"):
            Launcher(driver, KernelStore(cubins, "3.9.0")).run(OP.plan(problem()), addresses(), WORKSPACE, STREAM)
        assert not driver.calls

    def test_no_kernels_for_this_gpu(self, store: KernelStore) -> None:
        with pytest.raises(UserError, match="Build it again with --targets sm_90"):
            Launcher(RecordingDriver(get_target("sm_90")), store)

    def test_a_number_in_place_of_a_tensor_is_refused(self, store: KernelStore) -> None:
        (launch, *_) = OP.plan(problem()).launches
        arguments = (ScalarArgument(1), *launch.arguments[1:])
        plan = LaunchPlan((Launch(launch.variant, launch.grid, arguments),))
        with pytest.raises(ValueError, match=r"parameter 'q_latent' is a \*bf16, found ScalarArgument"):
            Launcher(RecordingDriver(), store).run(plan, addresses(), WORKSPACE, STREAM)

    def test_a_tensor_in_place_of_a_number_is_refused(self, store: KernelStore) -> None:
        (launch, *_) = OP.plan(problem()).launches
        arguments = (*launch.arguments[:-1], TensorArgument("output"))
        plan = LaunchPlan((Launch(launch.variant, launch.grid, arguments),))
        with pytest.raises(ValueError, match=r"parameter '\w+' is a i32, found TensorArgument"):
            Launcher(RecordingDriver(), store).run(plan, addresses(), WORKSPACE, STREAM)


class GraphBuilder:
    """``cuda.core``'s builder: where a call was not allowed, ``end_building`` raises and the capture goes on."""

    invalidated = False

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log, self.is_capturing = log, False

    def begin_building(self, mode: str) -> GraphBuilder:
        self.log.append(("begin", mode))
        self.is_capturing = True
        return self

    def end_building(self) -> GraphBuilder:
        if self.invalidated:
            raise RuntimeError("Build process encountered an error and has been invalidated.")
        self.log.append(("end",))
        self.is_capturing = False
        return self

    def complete(self) -> str:
        assert not self.is_capturing
        return "graph"

    def close(self) -> None:
        self.log.append(("close",))
        if self.is_capturing:
            self.is_capturing = False
            raise RuntimeError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")


class FakeCuda:
    """``cuda.core`` and ``cuda.bindings.driver`` as far as ``CudaDriver`` uses them, recording the calls."""

    def __init__(self, arch: str = "90") -> None:
        self.log: list[tuple[Any, ...]] = []
        log = self.log

        class Device:
            device_id, name = 0, "NVIDIA H200"
            properties = SimpleNamespace(multiprocessor_count=131)

            def __init__(self, device_id: int) -> None:
                self.arch = arch
                log.append(("device", device_id))

            def set_current(self) -> None:
                log.append(("set_current",))

            def create_stream(self) -> Any:
                return SimpleNamespace(
                    handle=77, sync=lambda: log.append(("sync",)), create_graph_builder=lambda: GraphBuilder(log)
                )

            def allocate(self, size: int, *, stream: Any) -> Any:
                fill = lambda byte, *, stream: log.append(("fill", byte, stream.handle))  # noqa: E731
                return SimpleNamespace(handle=0x1000, size=size, fill=fill)

        class ObjectCode:
            @staticmethod
            def from_cubin(cubin: bytes, *, name: str) -> Any:
                return SimpleNamespace(get_kernel=lambda entry: SimpleNamespace(handle=("kernel", cubin, entry)))

        self.core = ModuleType("cuda.core")
        self.core.Device = Device  # type: ignore[attr-defined]
        self.core.ObjectCode = ObjectCode  # type: ignore[attr-defined]
        self.core.LaunchConfig = lambda **values: values  # type: ignore[attr-defined]
        self.core.Stream = SimpleNamespace(from_handle=lambda handle: ("stream", handle))  # type: ignore[attr-defined]
        self.core.launch = lambda *args: log.append(("launch", *args))  # type: ignore[attr-defined]

        def record(name: str) -> Any:
            return lambda *args: log.append((name, *args)) or (self.result,)  # type: ignore[func-returns-value]

        self.result: Any = SimpleNamespace(name="CUDA_SUCCESS")
        self.driver = ModuleType("cuda.bindings.driver")
        self.driver.CUresult = SimpleNamespace(CUDA_SUCCESS=self.result)  # type: ignore[attr-defined]
        attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
        self.driver.CUfunction_attribute = attribute  # type: ignore[attr-defined]
        for name in ("cuKernelSetAttribute", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"):
            setattr(self.driver, name, record(name))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
        package.core, package.bindings, bindings.driver = self.core, bindings, self.driver  # type: ignore[attr-defined]
        modules = {
            "cuda": package,
            "cuda.core": self.core,
            "cuda.bindings": bindings,
            "cuda.bindings.driver": self.driver,
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)


class TestCudaDriver:
    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        cuda = FakeCuda()
        cuda.install(monkeypatch)
        return cuda

    def test_knows_the_gpu(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()
        assert driver.target == dataclasses.replace(get_target("sm_90"), multiprocessors=131)
        assert driver.device_name == "NVIDIA H200"
        assert cuda.log == [("device", 0), ("set_current",)]

    def test_other_threads_have_to_make_it_current(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()
        cuda.log.clear()
        driver.make_current()
        # cuda.core has an object for each thread.
        assert cuda.log == [("device", 0), ("set_current",)]

    def test_loads_a_kernel(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()
        cuda.log.clear()
        driver.load(b"code", "attend", shared_bytes=1000, opt_in=False)
        assert not cuda.log
        driver.load(b"code", "attend", shared_bytes=100_000, opt_in=True)
        assert cuda.log == [("cuKernelSetAttribute", "shared", 100_000, ("kernel", b"code", "attend"), 0)]

    def test_launches_on_the_stream(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()
        cuda.log.clear()
        driver.launch("kernel", (3, 2, 1), 128, 4096, (np.uint64(16), np.int32(5)), STREAM)
        config = {"grid": (3, 2, 1), "block": 128, "shmem_size": 4096}
        assert cuda.log == [("launch", ("stream", STREAM), config, "kernel", np.uint64(16), np.int32(5))]

    def test_moves_memory_in_the_order_of_the_stream(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()
        stream = driver.create_stream()
        buffer = driver.allocate(24, stream)
        source, result = np.arange(3), np.zeros(3, np.int64)
        cuda.log.clear()
        driver.fill(buffer, 0xFF, stream)
        driver.copy_to_device(buffer.handle, source, stream)
        driver.copy_to_host(result, buffer.handle, stream)
        assert cuda.log == [
            ("fill", 0xFF, 77),
            ("cuMemcpyHtoDAsync", 0x1000, source.ctypes.data, 24, 77),
            ("cuMemcpyDtoHAsync", result.ctypes.data, 0x1000, 24, 77),
            ("sync",),
        ]

    def test_captures_a_graph(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()
        stream = driver.create_stream()
        cuda.log.clear()
        assert driver.capture(lambda: cuda.log.append(("enqueue",)), stream) == "graph"
        assert cuda.log == [("begin", "thread_local"), ("enqueue",), ("end",), ("close",)]

    def test_a_failed_enqueue_ends_the_capture(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()

        def fail() -> None:
            raise ValueError("the plugin failed")

        cuda.log.clear()
        with pytest.raises(ValueError, match="the plugin failed"):
            driver.capture(fail, driver.create_stream())
        assert cuda.log == [("begin", "thread_local"), ("close",)]

    def test_an_invalid_capture_is_ended(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = CudaDriver()
        monkeypatch.setattr(GraphBuilder, "invalidated", True)
        cuda.log.clear()
        with pytest.raises(RuntimeError, match="has been invalidated"):
            driver.capture(lambda: None, driver.create_stream())
        assert cuda.log == [("begin", "thread_local"), ("close",)]

    def test_reports_what_the_driver_reports(self, cuda: FakeCuda) -> None:
        driver = CudaDriver()
        cuda.result = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
            driver.copy_to_device(0, np.zeros(1), driver.create_stream())

    def test_an_unknown_generation_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeCuda(arch="75").install(monkeypatch)
        with pytest.raises(UserError, match=r"GPU 0 \(NVIDIA H200\) is of generation sm_75; expected one of sm_80"):
            CudaDriver()

    def test_without_a_driver_the_message_says_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = FakeCuda()
        cuda.install(monkeypatch)

        def no_driver(device_id: int) -> None:
            raise RuntimeError("libcuda.so.1 was not found.")

        monkeypatch.setattr(cuda.core, "Device", no_driver)
        with pytest.raises(
            UserError, match=r"No NVIDIA GPU can be used: libcuda.so.1 was not found. Expected an NVIDIA driver"
        ):
            CudaDriver()

    def test_without_cuda_core_the_message_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'trtllm-mla\[gpu\]'"):
            CudaDriver()
