from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import make_network
from tests.plugins.conftest import build
from tests.plugins.tensorrt.forms import TARGETS, OpForm, make_forms
from tests.plugins.tensorrt.host import Host, in_process
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.kernel_compiler import compile_kernels
from trtllm_mla.engine.kernel_store import KernelStore
from trtllm_mla.engine.plan_data import library_data
from trtllm_mla.engine.plugin_library import DATA_NAME, LIBRARY_NAME, make_plugin_library
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.ops import OPS
from trtllm_mla.targets import get_target

# The network's type beside each type of cache.
NETWORK_DTYPES = {
    "bf16": DType.BFLOAT16,
    "fp8": DType.BFLOAT16,
    "nvfp4": DType.BFLOAT16,
    "fp16": DType.FLOAT16,
    "fp32": DType.FLOAT32,
}
QUANTIZED = ("fp8", "nvfp4")
# Networks whose second layer has experts, with a bf16 cache.
MOE = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 192,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
MOE_NETWORKS: dict[str, dict[str, Any]] = {
    "experts": MOE,
    "fp8 experts": MOE | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
}

# What the compiled libraries' build folder has besides them.
STAND_INS = ("libcuda_stand_in.so", "libplugin_host.so", "libnvinfer_stand_in.so")


@dataclass(frozen=True)
class Builds:
    """Plugin libraries are compiled in one folder, one after the other: they differ in their data alone.

    Attributes:
        path: The folder.
        options: CMake's, without the data.
    """

    path: Path
    options: tuple[str, ...]

    def compile(self, data: Path, output: Path) -> str:
        """Embeds library data in a library; returns what CMake and the compiler said."""
        text = build(self.path, "all", f"-DTRTLLM_MLA_LIBRARY_DATA={data}", *self.options)
        (library,) = self.path.rglob(LIBRARY_NAME)
        shutil.copyfile(library, output)
        return text

    def folder_of_stand_ins(self) -> Path:
        (folder,) = {path.parent for name in STAND_INS for path in self.path.rglob(name)}
        return folder


@pytest.fixture(scope="session")
def tensorrt_include() -> Path:
    """TensorRT's headers, which are in no Python package."""
    folder = os.environ.get("TENSORRT_INCLUDE_DIR")
    if not folder or not (Path(folder) / "NvInferRuntime.h").is_file():
        pytest.skip("found no folder with TensorRT's headers in TENSORRT_INCLUDE_DIR")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps compiled kernels for the session."""
    return tmp_path_factory.mktemp("kernel-cache")


@pytest.fixture(scope="session")
def builds(tools: None, tensorrt_include: Path, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("build"), (f"-DTENSORRT_INCLUDE_DIR={tensorrt_include}",))


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NetworkDirectory]:
    """A network for each type of cache, and those with experts, by name."""
    folder = tmp_path_factory.mktemp("networks")
    dense = {
        name: make_network(
            folder / name, plugin=MlaPluginConfig(kv_cache_dtype=name if name in QUANTIZED else "auto"), dtype=dtype
        )
        for name, dtype in NETWORK_DTYPES.items()
    }
    return dense | {name: make_network(folder / name, **values) for name, values in MOE_NETWORKS.items()}


@pytest.fixture(scope="session")
def build_config() -> BuildConfig:
    return BuildConfig(max_batch_size=3, max_num_tokens=96, max_seq_len=448, max_context_kv_tokens=320)


@pytest.fixture(scope="session")
def network_library(
    builds: Builds,
    networks: dict[str, NetworkDirectory],
    build_config: BuildConfig,
    cache_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The compiled plugin library of all networks."""
    folder = tmp_path_factory.mktemp("network-library")
    make_plugin_library(
        folder / "data",
        [network.path for network in networks.values()],
        config=build_config,
        targets=TARGETS,
        cache_dir=cache_dir,
    )
    builds.compile(folder / "data" / DATA_NAME, folder / LIBRARY_NAME)
    return folder / LIBRARY_NAME


@pytest.fixture(scope="session")
def forms() -> dict[str, OpForm]:
    """All operations, those with a cache for each of its types."""
    return make_forms()


@pytest.fixture(scope="session")
def store(forms: dict[str, OpForm], cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> KernelStore:
    """Their kernels."""
    jobs = [
        (variant, get_target(planned.target))
        for form in forms.values()
        for planned in form.planned
        for variant in planned.variants
    ]
    return compile_kernels(jobs, tmp_path_factory.mktemp("kernels"), cache_dir=cache_dir)


@pytest.fixture(scope="session")
def library(
    builds: Builds, forms: dict[str, OpForm], store: KernelStore, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The compiled plugin library of these operations."""
    folder = tmp_path_factory.mktemp("library")
    planned = {item.key: item for form in forms.values() for item in form.planned}
    (folder / DATA_NAME).write_bytes(library_data(tuple(OPS.values()), tuple(planned.values()), store.cubins))
    builds.compile(folder / DATA_NAME, folder / LIBRARY_NAME)
    return folder / LIBRARY_NAME


@pytest.fixture(scope="session")
def start_host(builds: Builds, library: Path) -> Iterator[Callable[[bool], Host]]:
    """Starts a process with the library, and with a CUDA driver or without."""
    with ExitStack() as stack:

        def start(driver: bool) -> Host:
            return Host(stack.enter_context(in_process()), builds.folder_of_stand_ins(), library, driver=driver)

        yield start


@pytest.fixture(scope="session")
def host(start_host: Callable[[bool], Host]) -> Host:
    return start_host(True)
