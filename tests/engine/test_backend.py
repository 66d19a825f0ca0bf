from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trtllm_mla.engine import backend as backend_module
from trtllm_mla.engine.backend import Backend, load_backend
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.targets import get_target


@pytest.fixture
def rtx() -> Backend:
    pytest.importorskip("tensorrt_rtx")
    return load_backend("tensorrt-rtx")


def names(targets: tuple[Any, ...]) -> list[str]:
    return [target.name for target in targets]


class TestTensorRTRTX:
    def test_builds_for_other_gpus(self, rtx: Backend) -> None:
        assert rtx.ahead_of_time_targets == ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
        assert rtx.version.startswith("1.")

    def test_targets_keep_their_order_and_appear_once(self, rtx: Backend) -> None:
        assert names(rtx.resolve_targets(("sm_120", "sm_80", "sm_120"))) == ["sm_120", "sm_80"]
        assert names(rtx.resolve_targets(None)) == ["sm_89", "sm_120"]

    def test_a_target_it_cannot_build_for_is_refused(self, rtx: Backend) -> None:
        message = (
            r"cannot build for sm_90 \(H100\), sm_100 \(B200\)\. It builds for sm_80, sm_86, sm_89, sm_120, sm_121"
        )
        with pytest.raises(UserError, match=message):
            rtx.resolve_targets(("sm_90", "sm_89", "sm_100"))

    def test_an_unknown_target_is_refused(self, rtx: Backend) -> None:
        with pytest.raises(UserError, match="Unknown target 'sm_99'"):
            rtx.resolve_targets(("sm_99",))

    def test_configures_a_build(self, rtx: Backend) -> None:
        trt: Any = rtx.module
        config = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_builder_config()
        rtx.configure(config, rtx.resolve_targets(("sm_120", "sm_86")))
        assert config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
        # Without it, no engine can be captured in a CUDA graph.
        assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        assert config.num_compute_capabilities == 2
        assert config.get_compute_capability(0) == trt.ComputeCapability.SM120
        assert config.get_compute_capability(1) == trt.ComputeCapability.SM86

    @pytest.mark.parametrize("for_capture", [True, False])
    def test_contexts_have_memory_of_the_caller(self, rtx: Backend, for_capture: bool) -> None:
        config = FakeRuntimeConfig()
        config.dynamic_shapes_kernel_specialization_strategy = None
        engine: Any = FakeEngine(config)
        assert rtx.create_context(engine, for_capture=for_capture) == "context"
        assert config.allocation == rtx.module.ExecutionContextAllocationStrategy.USER_MANAGED
        eager = rtx.module.DynamicShapesKernelSpecializationStrategy.EAGER
        assert config.dynamic_shapes_kernel_specialization_strategy == (eager if for_capture else None)

    def test_asks_whether_a_context_can_be_captured(self, rtx: Backend) -> None:
        context: Any = SimpleNamespace(is_stream_capturable=lambda stream: stream == 77)
        assert rtx.is_capturable(context, 77)
        assert not rtx.is_capturable(context, 78)

    def test_what_contexts_need_is_in_the_library(self, rtx: Backend) -> None:
        trt: Any = rtx.module
        for owner, name in (
            (trt.ICudaEngine, "create_runtime_config"),
            (trt.ICudaEngine, "device_memory_size_v2"),
            (trt.IExecutionContext, "set_device_memory"),
            (trt.IExecutionContext, "is_stream_capturable"),
            (trt.IRuntimeConfig, "set_execution_context_allocation_strategy"),
            (trt.IRuntimeConfig, "dynamic_shapes_kernel_specialization_strategy"),
        ):
            assert hasattr(owner, name)

    def test_networks_are_strongly_typed(self, rtx: Backend) -> None:
        trt: Any = rtx.module
        assert rtx.network_flags() == 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


class FakeConfig:
    """A builder config of TensorRT: it has no compute capabilities."""

    def __init__(self) -> None:
        self.features: dict[str, bool] = {}

    def set_preview_feature(self, feature: str, value: bool) -> None:
        self.features[feature] = value

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "features", f"TensorRT's config has no {name}"
        super().__setattr__(name, value)


class FakeRuntimeConfig:
    """A runtime config. TensorRT's has no strategy for kernels."""

    __slots__ = ("allocation", "dynamic_shapes_kernel_specialization_strategy")

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy


@dataclasses.dataclass
class FakeEngine:
    config: FakeRuntimeConfig

    def create_runtime_config(self) -> FakeRuntimeConfig:
        return self.config

    def create_execution_context(self, config: FakeRuntimeConfig) -> str:
        assert config is self.config
        return "context"


class TestTensorRT:
    @pytest.fixture
    def tensorrt(self, monkeypatch: pytest.MonkeyPatch) -> Backend:
        """TensorRT 11 on a machine with an H200."""
        target = dataclasses.replace(get_target("sm_90"), multiprocessors=132)
        monkeypatch.setattr(backend_module, "CudaDriver", lambda: SimpleNamespace(target=target))
        module = ModuleType("tensorrt")
        module.__dict__.update(
            __version__="11.4.0",
            Builder=object,
            NetworkDefinitionCreationFlag=SimpleNamespace(),
            PreviewFeature=SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased"),
            ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
        )
        monkeypatch.setitem(sys.modules, "tensorrt", module)
        load_backend.cache_clear()
        yield load_backend("tensorrt")
        load_backend.cache_clear()

    def test_builds_for_the_gpu_at_hand(self, tensorrt: Backend) -> None:
        assert names(tensorrt.resolve_targets(None)) == ["sm_90"]
        assert names(tensorrt.resolve_targets(("sm_90",))) == ["sm_90"]
        assert tensorrt.version == "11.4.0"

    def test_another_target_is_refused(self, tensorrt: Backend) -> None:
        with pytest.raises(UserError, match=r"the GPU at hand, which is sm_90 \(H100\); found the target sm_89"):
            tensorrt.resolve_targets(("sm_90", "sm_89"))

    def test_configures_a_build(self, tensorrt: Backend) -> None:
        config: Any = FakeConfig()
        tensorrt.configure(config, tensorrt.resolve_targets(None))
        assert config.features == {"aliased": True}

    def test_contexts_have_memory_of_the_caller(self, tensorrt: Backend) -> None:
        config = FakeRuntimeConfig()
        engine: Any = FakeEngine(config)
        assert tensorrt.create_context(engine, for_capture=True) == "context"
        assert config.allocation == "user"
        assert not hasattr(config, "dynamic_shapes_kernel_specialization_strategy")
        any_context: Any = object()
        assert tensorrt.is_capturable(any_context, 77)

    def test_the_flag_may_be_gone(self, tensorrt: Backend) -> None:
        assert tensorrt.network_flags() == 0


class TestLoading:
    @pytest.fixture(autouse=True)
    def _forget(self) -> Any:
        load_backend.cache_clear()
        yield
        load_backend.cache_clear()

    @pytest.mark.parametrize(
        ("name", "module", "extra"), [("tensorrt-rtx", "tensorrt_rtx", "rtx"), ("tensorrt", "tensorrt", "tensorrt")]
    )
    def test_a_missing_package_is_named(
        self, monkeypatch: pytest.MonkeyPatch, name: Any, module: str, extra: str
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingDependencyError, match=rf"'{module}' is needed to .*trtllm-mla\[{extra}\]"):
            load_backend(name)

    def test_type_stubs_alone_are_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
        with pytest.raises(MissingDependencyError, match="'tensorrt' is needed"):
            load_backend("tensorrt")

    def test_a_package_that_does_not_load_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> ModuleType:
            raise OSError("libnvinfer.so.11: cannot open shared object file")

        monkeypatch.setattr(backend_module.importlib, "import_module", broken)
        with pytest.raises(UserError, match=r"'tensorrt' is installed but does not load: libnvinfer\.so\.11"):
            load_backend("tensorrt")


class TestLibraryLink:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        libraries = ModuleType("tensorrt_rtx_libs")
        libraries.__file__ = str(tmp_path / "__init__.py")
        monkeypatch.setitem(sys.modules, "tensorrt_rtx_libs", libraries)
        (tmp_path / "libtensorrt_rtx.so.1").write_text("library")
        return tmp_path

    def test_is_made(self, folder: Path) -> None:
        for _ in range(2):
            backend_module._link_library()
            assert (folder / "libtensorrt_rtx.so").read_text() == "library"

    def test_is_not_made_where_the_package_has_it(self, folder: Path) -> None:
        (folder / "libtensorrt_rtx.so").write_text("own")
        backend_module._link_library()
        assert (folder / "libtensorrt_rtx.so").read_text() == "own"

    def test_a_folder_that_cannot_be_written_is_reported(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Path, target: str) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "symlink_to", refuse)
        with pytest.raises(UserError, match=r"libtensorrt_rtx\.so'.*Permission denied.*ln -s libtensorrt_rtx\.so\.1"):
            backend_module._link_library()

    def test_libraries_of_the_system_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt_rtx_libs", None)
        backend_module._link_library()
