from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.engine.models import make_network
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.plan_data import MAGIC
from trtllm_mla.engine.plugin_library import (
    CMAKE_NAME,
    DATA_NAME,
    LIBRARY_NAME,
    SOURCES,
    CompilerSettings,
    LibraryReport,
    make_plugin_library,
)
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory

TARGETS = ("sm_89", "sm_120")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> NetworkDirectory:
    """The network again, with an nvfp4 cache."""
    return make_network(tmp_path_factory.mktemp("quantized"), plugin=MlaPluginConfig(kv_cache_dtype="nvfp4"))


@pytest.fixture(scope="module")
def report(
    network: NetworkDirectory,
    quantized: NetworkDirectory,
    build_config: BuildConfig,
    cache_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> LibraryReport:
    """The library of both networks."""
    return make_plugin_library(
        tmp_path_factory.mktemp("library") / "library",
        [network.path, quantized.path],
        config=build_config,
        targets=TARGETS,
        cache_dir=cache_dir,
    )


def test_the_data_holds_what_the_report_says(report: LibraryReport) -> None:
    data = (report.path / DATA_NAME).read_bytes()
    assert data.startswith(MAGIC)
    assert (len(data), hashlib.sha256(data).hexdigest()) == (report.data_bytes, report.sha256)
    assert report.targets == TARGETS
    assert not report.compiled
    config = json.loads((report.path / "config.json").read_text())
    assert config["data_sha256"] == report.sha256
    assert len(config["operations"]) == report.operations
    assert len(config["kernels"]) == report.kernels
    # Both networks have these four on two targets; ContextAttention reads no cache, and is the same in both.
    names = [item["name"] for item in config["operations"]]
    assert {name: names.count(name) for name in names} == {
        "AppendLatent": 4,
        "ContextAttention": 2,
        "GatherLatent": 4,
        "LatentAttention": 4,
    }
    wanted = {(item["target"], key) for item in config["operations"] for key in item["kernels"]}
    assert wanted == {(item["target"], item["key"]) for item in config["kernels"]}


def test_every_kernel_is_embedded(report: LibraryReport, cache_dir: Path) -> None:
    data = (report.path / DATA_NAME).read_bytes()
    digests = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in cache_dir.rglob("*.cubin")}
    for kernel in json.loads((report.path / "config.json").read_text())["kernels"]:
        code = digests[kernel["sha256"]].read_bytes()
        assert data.count(code) == 1


FILES = (DATA_NAME, CMAKE_NAME, "config.json")


def test_the_order_of_networks_does_not_matter(
    report: LibraryReport,
    network: NetworkDirectory,
    quantized: NetworkDirectory,
    build_config: BuildConfig,
    cache_dir: Path,
    tmp_path: Path,
) -> None:
    again = make_plugin_library(
        tmp_path / "again",
        [quantized.path, network.path],
        config=build_config,
        targets=TARGETS,
        cache_dir=cache_dir,
    )
    for name in FILES:
        assert (again.path / name).read_bytes() == (report.path / name).read_bytes(), name


def test_kernels_that_are_compiled_anew_are_the_same(
    network: NetworkDirectory, build_config: BuildConfig, cache_dir: Path, tmp_path: Path
) -> None:
    first, second = (
        make_plugin_library(tmp_path / name, [network.path], config=build_config, targets=["sm_89"], cache_dir=cache)
        for name, cache in (("first", cache_dir), ("second", tmp_path / "cache"))
    )
    for name in FILES:
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes(), name


def test_the_latent_scale_of_a_layer_makes_no_operation_of_its_own(
    quantized: NetworkDirectory, build_config: BuildConfig, cache_dir: Path, tmp_path: Path
) -> None:
    from trtllm_mla.network.directory import convert, store_latent_scales

    checkpoint = quantized.path.parent / "checkpoint"
    scaled = convert(checkpoint, tmp_path / "scaled", plugin=quantized.plugin)
    store_latent_scales(scaled, (0.5, 3.0))
    reports = [
        make_plugin_library(tmp_path / name, [path], config=build_config, targets=["sm_89"], cache_dir=cache_dir)
        for name, path in (("plain", quantized.path), ("scaled-library", scaled.path))
    ]
    assert reports[0].sha256 == reports[1].sha256
    assert reports[0].operations == 4


class TestRefusals:
    def make(
        self,
        output: Path,
        *networks: Path,
        config: BuildConfig | None = None,
        compiler: CompilerSettings | None = None,
    ) -> None:
        make_plugin_library(output, networks, config=config or BuildConfig(), targets=["sm_89"], compiler=compiler)

    def test_networks_that_the_library_could_not_tell_apart(self, network: NetworkDirectory, tmp_path: Path) -> None:
        tile = MlaPluginConfig(tile_s=16, num_stages=1)
        other = make_network(tmp_path / "other", plugin=tile)
        with pytest.raises(UserError, match=r"LatentAttention on sm_89 .*, but runs otherwise: .* library of its own"):
            self.make(tmp_path / "library", network.path, other.path)
        assert not (tmp_path / "library").exists()

    def test_outputs_of_two_types(self, tmp_path: Path) -> None:
        plugin = MlaPluginConfig(kv_cache_dtype="fp8")
        paths = [
            make_network(tmp_path / dtype, plugin=plugin, dtype=dtype, kv_lora_rank=rank).path
            for dtype, rank in ((DType.BFLOAT16, 96), (DType.FLOAT16, 96))
        ]
        with pytest.raises(UserError, match=r"GatherLatent.*library of its own"):
            self.make(tmp_path / "library", *paths)

    def test_outputs_of_two_types_with_other_pages(self, tmp_path: Path) -> None:
        """TensorRT asks for types before it knows sizes."""
        paths = [
            make_network(
                tmp_path / dtype, plugin=MlaPluginConfig(kv_cache_dtype="fp8", page_size=page), dtype=dtype
            ).path
            for dtype, page in ((DType.BFLOAT16, 64), (DType.FLOAT16, 32))
        ]
        with pytest.raises(
            UserError, match=r"GatherLatent: found networks in (bfloat16 and float16|float16 and bfloa)"
        ):
            self.make(tmp_path / "library", *paths)

    def test_no_network(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="found no network, expected at least one"):
            self.make(tmp_path / "library")

    def test_no_headers(self, network: NetworkDirectory, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"found no NvInferRuntime.h, .*developer.nvidia.com/tensorrt"):
            self.make(tmp_path / "library", network.path, compiler=CompilerSettings(tmp_path))
        assert not (tmp_path / "library").exists()

    def test_no_sources(self, network: NetworkDirectory, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"found no CMakeLists.txt, expected the folder plugins"):
            self.make(tmp_path / "library", network.path, compiler=CompilerSettings(tmp_path, tmp_path))

    def test_no_compiler(self, network: NetworkDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UserError, match=r"found no cmake and no c\+\+"):
            self.make(tmp_path / "library", network.path, compiler=CompilerSettings(tmp_path))

    def test_a_compiler_that_fails(self, network: NetworkDirectory, cache_dir: Path, tmp_path: Path) -> None:
        sources = tmp_path / "sources"
        sources.mkdir()
        (sources / "CMakeLists.txt").write_text('message(FATAL_ERROR "found a moth in relay 70")')
        (tmp_path / "NvInferRuntime.h").touch()
        with pytest.raises(
            UserError, match=r"cannot be compiled: CMake Error .*: found a moth in relay 70. Pass --no-compile"
        ):
            make_plugin_library(
                tmp_path / "library",
                [network.path],
                config=BuildConfig(),
                targets=["sm_89"],
                compiler=CompilerSettings(tmp_path, sources),
                cache_dir=cache_dir,
            )
        assert not (tmp_path / "library").exists()


@pytest.mark.skipif("TENSORRT_INCLUDE_DIR" not in os.environ, reason="needs TensorRT's headers: TENSORRT_INCLUDE_DIR")
def test_it_is_compiled(network: NetworkDirectory, cache_dir: Path, tmp_path: Path) -> None:
    report = make_plugin_library(
        tmp_path / "library",
        [network.path],
        config=BuildConfig(),
        targets=["sm_89"],
        compiler=CompilerSettings(Path(os.environ["TENSORRT_INCLUDE_DIR"]), SOURCES),
        cache_dir=cache_dir,
    )
    assert report.compiled
    assert (report.path / LIBRARY_NAME).stat().st_size > report.data_bytes
