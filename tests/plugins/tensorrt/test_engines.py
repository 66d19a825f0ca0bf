"""Engines that are built with the compiled plugin library, by TensorRT-RTX, which needs no GPU for it.

Slow: the library is compiled, and engines are built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engine.models import make_network
from tests.plugins.tensorrt.conftest import NETWORK_DTYPES, Builds
from tests.plugins.tensorrt.forms import TARGETS
from trtllm_mla.cli.main import app
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.builder import BuildReport, build
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.ops import OPS

pytest.importorskip("tensorrt_rtx")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FIELDS = ("softmax_scale", "latent_scale", "rope_interleave", "model_dtype", "cache_dtype", "tiles", "workspace_bytes")


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own: a library that is loaded stays."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


REGISTRY = """
import ctypes, sys
from trtllm_mla.engine.backend import load_backend
from trtllm_mla.engine.plugin import plugin_library
backend = load_backend("tensorrt-rtx")
registry = backend.module.get_plugin_registry()
handles = []
for step in sys.argv[2]:
    if step == "d":
        ctypes.CDLL(sys.argv[1])
    elif step == "l":
        handles.append(registry.load_library(sys.argv[1]))
    elif step == "u":
        registry.deregister_library(handles.pop())
    elif step == "p":
        plugin_library(backend)
    creators = [c for c in registry.all_creators if c.plugin_namespace == "trtllm_mla"]
    print(step, *sorted(f"{c.name}:{c.plugin_version}:{'+'.join(f.name for f in c.field_names)}" for c in creators))
print(handles[-1:] != [None])
"""
ALL = " ".join(sorted(f"{name}:1:{'+'.join(op.attributes)}" for name, op in OPS.items()))


class TestRegistry:
    """d: the library is only loaded; l: by the registry; u: the registry unloads it; p: Python plugins."""

    @pytest.mark.parametrize(
        ("steps", "empty_after", "is_loaded"),
        [
            ("l", "", True),
            ("d", "", True),
            ("dl", "", True),
            ("ld", "", True),
            ("lul", "u", True),
            ("dlul", "u", True),
            # A registry refuses what it has, and unloads the library while it points to it.
            ("ll", "", False),
            ("pl", "", False),
            ("pdl", "", False),
        ],
    )
    def test_creators_are_listed(self, network_library: Path, steps: str, empty_after: str, is_loaded: bool) -> None:
        result = run_python(REGISTRY, network_library, steps)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == [
            *(f"{step} {'' if step in empty_after else ALL}".strip() for step in steps),
            str(is_loaded),
        ]


def polygraphy_convert(network: NetworkDirectory, engine: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("polygraphy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None
    return subprocess.run(
        [program, "convert", str(network.onnx_path), "--convert-to", "trt", "-o", str(engine), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1"},
    )


@pytest.fixture(scope="module")
def config_file(build_config: BuildConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(build_config.model_dump_json(exclude_none=True))
    return path


@pytest.fixture(scope="module")
def polygraphy() -> None:
    pytest.importorskip("polygraphy")


class TestPolygraphy:
    @pytest.mark.parametrize("cache_dtype", NETWORK_DTYPES)
    def test_builds(
        self,
        polygraphy: None,
        networks: dict[str, NetworkDirectory],
        network_library: Path,
        config_file: Path,
        tmp_path: Path,
        cache_dtype: str,
    ) -> None:
        """The only plugins in that process are the library's."""
        network = networks[cache_dtype]
        shapes = CliRunner().invoke(app, ["shapes", str(network.path), "--config", str(config_file)])
        assert shapes.exit_code == 0, shapes.output
        options = ["--plugins", str(network_library), "--compute-capabilities", "8.9", *shapes.stdout.split()]
        options += ["--preview-features", "ALIASED_PLUGIN_IO_10_03"]
        result = polygraphy_convert(network, tmp_path / "engine", *options)
        assert result.returncode == 0, result.stdout + result.stderr
        engine = (tmp_path / "engine").read_bytes()
        assert engine.count(b"workspace_bytes") >= 8  # four plugins in each of two layers
        for name in FIELDS:
            assert name.encode() in engine

    def test_a_network_that_the_library_was_not_made_for_is_refused(
        self, polygraphy: None, network_library: Path, config_file: Path, tmp_path: Path
    ) -> None:
        network = make_network(tmp_path, num_attention_heads=7, num_key_value_heads=7)
        shapes = CliRunner().invoke(app, ["shapes", str(network.path), "--config", str(config_file)]).stdout.split()
        options = ["--plugins", str(network_library), "--compute-capabilities", "8.9", *shapes]
        options += ["--preview-features", "ALIASED_PLUGIN_IO_10_03"]
        result = polygraphy_convert(network, tmp_path / "engine", *options)
        assert result.returncode != 0
        assert re.search(
            r"trtllm_mla: AppendLatent: .*heads 7.*heads 5.*configurePlugin", result.stdout + result.stderr
        )


class TestBuild:
    @pytest.mark.parametrize("cache_dtype", NETWORK_DTYPES)
    def test_an_engine_like_that_of_the_python_plugins(
        self,
        networks: dict[str, NetworkDirectory],
        network_library: Path,
        build_config: BuildConfig,
        cache_dir: Path,
        tmp_path: Path,
        cache_dtype: str,
    ) -> None:
        """The builder compares inputs, outputs and plugin layers with the network's, and counts aliases."""

        def make(name: str, library: Path | None) -> BuildReport:
            return build(
                networks[cache_dtype].path,
                tmp_path / name,
                config=build_config,
                targets=TARGETS,
                plugin_library_path=library,
                cache_dir=cache_dir,
            )

        # Python plugins before and after: they give way and come back.
        reports = [make("python", None), make("library", network_library), make("again", None)]
        first, second, third = (report.directory for report in reports)
        assert (first.info.plugin_library_sha256, third.info.plugin_library_sha256) == (None, None)
        assert second.info.plugin_library_sha256 is not None
        assert second.info.num_plugin_layers == first.info.num_plugin_layers == 8
        assert second.info.activation_bytes == first.info.activation_bytes
        assert second.info.targets == first.info.targets
        assert [cubin.key for cubin in second.kernels().cubins] == [cubin.key for cubin in first.kernels().cubins]
        engines = [item.read_engine() for item in (first, second, third)]
        for name in (*FIELDS, *OPS):
            assert (
                engines[1].count(name.encode()) == engines[0].count(name.encode()) == engines[2].count(name.encode())
            )
        # Types, tiles and workspaces of plugins lie behind each other. Those of plugins with a cache are the same.
        compiled = with_cache(engines[1], cache_dtype)
        assert compiled
        assert compiled <= with_cache(engines[0], cache_dtype)

    @pytest.mark.parametrize(
        ("name", "num_plugin_layers"), [("experts", 4 * 2 + 1), ("fp8 experts", 4 * 2 + 1 + 2 * 7)]
    )
    def test_experts_and_fp8_weights(
        self,
        networks: dict[str, NetworkDirectory],
        network_library: Path,
        build_config: BuildConfig,
        cache_dir: Path,
        tmp_path: Path,
        name: str,
        num_plugin_layers: int,
    ) -> None:
        report = build(
            networks[name].path,
            tmp_path / "engine",
            config=build_config,
            targets=["sm_120"],
            plugin_library_path=network_library,
            cache_dir=cache_dir,
        )
        assert report.directory.info.num_plugin_layers == num_plugin_layers
        engine = report.directory.read_engine()
        assert (b"BlockScaledRoutedExperts" in engine) == (b"BlockScaledMatMul" in engine) == (name == "fp8 experts")
        assert b"RoutedExperts" in engine

    def test_from_the_command_line(
        self, networks: dict[str, NetworkDirectory], network_library: Path, config_file: Path, tmp_path: Path
    ) -> None:
        arguments = ["build", str(networks["nvfp4"].path), str(tmp_path / "engine"), "--targets", "sm_120", "--json"]
        arguments += ["--config", str(config_file), "--plugin-library", str(network_library)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert '"plugin_library_sha256"' in result.stdout

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (
                {"num_attention_heads": 7, "num_key_value_heads": 7},
                "AppendLatent: .*heads 7.*heads 5.*configurePlugin",
            ),
            ({"v_head_dim": 48}, "ContextAttention: .*v_dim 48.*v_dim 40.*configurePlugin"),
            ({"kv_lora_rank": 64}, "GatherLatent: .*kv_lora_rank 64.*kv_lora_rank 96.*createPlugin"),
            ({"rope_interleave": False}, "AppendLatent: .*rope_interleave 0.*rope_interleave 1.*createPlugin"),
        ],
    )
    def test_another_network_is_refused(
        self,
        network_library: Path,
        build_config: BuildConfig,
        cache_dir: Path,
        tmp_path: Path,
        change: dict[str, int],
        expected: str,
    ) -> None:
        network = make_network(tmp_path, **change)
        with pytest.raises(UserError, match=expected):
            build(
                network.path,
                tmp_path / "engine",
                config=build_config,
                targets=["sm_89"],
                plugin_library_path=network_library,
                cache_dir=cache_dir,
            )
        assert not (tmp_path / "engine").exists()

    @pytest.mark.parametrize(
        ("plugin", "dtype", "targets", "expected"),
        [
            ({}, None, ["sm_89", "sm_86"], "for sm_89, sm_120, expected one for sm_86 too"),
            (
                {"kv_cache_dtype": "fp8"},
                DType.FLOAT16,
                ["sm_89"],
                "found tiles none for sm_89, a float16 network and a fp8 cache",
            ),
            ({"tile_s": 16, "num_stages": 1}, None, ["sm_89"], "a bf16 cache, expected 16 x 1"),
            ({"page_size": 32}, None, ["sm_89"], "AppendLatent: .*page_size 32.*page_size 64.*configurePlugin"),
        ],
    )
    def test_other_settings_are_refused(
        self,
        network_library: Path,
        build_config: BuildConfig,
        tmp_path: Path,
        plugin: dict[str, Any],
        dtype: DType | None,
        targets: list[str],
        expected: str,
    ) -> None:
        network = make_network(tmp_path, plugin=MlaPluginConfig(**plugin), dtype=dtype)
        with pytest.raises(UserError, match=expected):
            build(
                network.path,
                tmp_path / "engine",
                config=build_config,
                targets=targets,
                plugin_library_path=network_library,
            )

    def test_what_is_no_plugin_library_is_refused(
        self, builds: Builds, networks: dict[str, NetworkDirectory], build_config: BuildConfig, tmp_path: Path
    ) -> None:
        text = tmp_path / "text.so"
        text.write_text("no library")
        evaluator = builds.path / "libtrtllm_mla_plan.so"
        for path, expected in [
            (tmp_path / "missing.so", "found no such file"),
            (text, "cannot load it"),
            (evaluator, "cannot load it"),
        ]:
            with pytest.raises(UserError, match=expected):
                build(
                    networks["bf16"].path,
                    tmp_path / "engine",
                    config=build_config,
                    targets=["sm_89"],
                    plugin_library_path=path,
                )

    def test_not_both_native_and_a_library(
        self, networks: dict[str, NetworkDirectory], build_config: BuildConfig, tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match="expected one of them"):
            build(
                networks["bf16"].path,
                tmp_path / "engine",
                config=build_config,
                native=True,
                plugin_library_path=tmp_path,
            )


def with_cache(engine: bytes, cache_dtype: str) -> set[bytes]:
    """Settings of the plugins in an engine that have a type of cache, as they are serialised."""
    found = re.findall(rb"model_dtype.{1,700}?INT64.{30}", engine, re.DOTALL)
    return {item for item in found if cache_dtype.encode() in item}


class TestExample:
    def test_it_compiles_and_says_what_it_lacks(
        self, tools: None, tensorrt_include: Path, network_library: Path, tmp_path: Path
    ) -> None:
        libraries = Path(pytest.importorskip("tensorrt_rtx_libs").__file__).parent
        cuda = next(
            (path for path in Path("/usr/local").glob("cuda*") if (path / "lib64/libcudart.so").exists()), None
        )
        if cuda is None:
            pytest.skip("found no CUDA runtime library, to which the example links")
        source, program = ROOT / "examples/load_engine.cpp", tmp_path / "load_engine"
        assert len(source.read_text().splitlines()) < 60
        command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", str(tensorrt_include)]
        command += ["-isystem", str(cuda / "include"), str(source), f"-L{cuda / 'lib64'}", f"-L{libraries}"]
        command += ["-l:libtensorrt_rtx.so.1", "-lcudart", "-o", str(program)]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        assert compiled.returncode == 0, compiled.stderr
        empty = tmp_path / "engine"
        empty.touch()
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{cuda / 'lib64'}"}
        for arguments, expected in [
            ([], "cannot start: expected LIBRARY.so and ENGINE"),
            ([str(empty), str(empty)], "cannot load the plugin library"),
            ([str(network_library), str(empty)], "cannot read the engine"),
        ]:
            result = subprocess.run(
                [str(program), *arguments], capture_output=True, text=True, check=False, env=environment
            )
            assert result.returncode == 1
            assert expected in result.stderr
