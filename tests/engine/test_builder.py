"""Real builds with TensorRT-RTX, which needs no GPU for them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import TARGETS
from tests.engine.models import make_network
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine import builder
from trtllm_mla.engine.backend import load_backend
from trtllm_mla.engine.builder import BuildReport, build
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.engine.operation import TargetTile
from trtllm_mla.engine.plugin import _recorded, plugin_library
from trtllm_mla.errors import UserError
from trtllm_mla.network.attention import operations_per_layer
from trtllm_mla.network.directory import NetworkDirectory, store_latent_scales
from trtllm_mla.ops import OPS, OpDefinition

pytest.importorskip("tensorrt_rtx")

# The operations of a layer with a dense feed-forward block whose weights are not FP8.
DENSE_OPS = {name: op for name, op in OPS.items() if not name.startswith(("RoutedExperts", "BlockScaled"))}


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


class TestEngine:
    def test_files(self, built: BuildReport) -> None:
        path = built.directory.path
        files = {str(item.relative_to(path)) for item in path.rglob("*") if item.is_file()}
        cubins = {name for name in files if name.endswith(".cubin")}
        assert files - cubins == {
            "config.json",
            "network.onnx",
            "weights.json",
            "rank0.engine",
            "kernels/manifest.json",
        }
        assert {name.split("/")[1] for name in cubins} == set(TARGETS)

    def test_four_plugin_layers_a_layer(self, built: BuildReport, network: NetworkDirectory) -> None:
        assert built.directory.info.num_plugin_layers == 8
        nodes = [node.op_type for node in network.model().graph.node if node.domain == "trtllm_mla"]
        assert sorted(nodes) == sorted([*DENSE_OPS, *DENSE_OPS])

    def test_the_engine_names_every_plugin_and_setting(self, built: BuildReport) -> None:
        """Fields are written into the engine with their names and values."""
        engine = built.directory.read_engine()
        for name in DENSE_OPS:
            assert name.encode() in engine
        for field in ("softmax_scale", "rope_interleave", "tiles", "workspace_bytes", "model_dtype"):
            assert field.encode() in engine
        assert engine.count(b"bfloat16") >= 16  # both types of eight plugins

    def test_config_is_in_tensorrt_llms_shape(self, built: BuildReport) -> None:
        config = read_json(built.directory.path / "config.json")
        assert {"version", "pretrained_config", "build_config"} <= config.keys()
        assert config["pretrained_config"]["architecture"] == "DeepseekV3ForCausalLM"
        limits = config["build_config"]
        assert limits["max_batch_size"] == 3
        assert limits["max_num_tokens"] == 96
        assert limits["max_seq_len"] == 448
        assert limits["max_input_len"] == 447
        assert limits["strongly_typed"] is True
        assert limits["plugin_config"]["tokens_per_block"] == 64
        assert limits["plugin_config"]["dtype"] == "bfloat16"

    def test_the_effective_config_repeats_the_build(
        self, built: BuildReport, network: NetworkDirectory, cache_dir: Path, tmp_path: Path
    ) -> None:
        info = built.directory.info
        assert info.backend == "tensorrt-rtx"
        assert info.backend_version == load_backend("tensorrt-rtx").version
        assert [item.target for item in info.targets] == list(TARGETS)
        assert info.build_config.targets == TARGETS
        again = build(network.path, tmp_path / "again", config=info.build_config, cache_dir=cache_dir)
        assert again.directory.info.build_config == info.build_config
        assert again.directory.info.tiles == info.tiles
        # Engines hold a time stamp; the kernels are equal to the byte.
        cubins = [(cubin.target, cubin.key, cubin.sha256) for cubin in built.directory.kernels().cubins]
        assert [(cubin.target, cubin.key, cubin.sha256) for cubin in again.directory.kernels().cubins] == cubins

    def test_the_digest_is_the_files(self, built: BuildReport) -> None:
        engine = (built.directory.path / "rank0.engine").read_bytes()
        assert built.directory.info.engine_sha256 == hashlib.sha256(engine).hexdigest()
        assert built.directory.info.engine_bytes == len(engine)

    def test_kernels_are_those_that_plans_can_ask_for(self, built: BuildReport) -> None:
        kernels = built.directory.kernels()
        for target in TARGETS:
            entries = {cubin.entry for cubin in kernels.cubins if cubin.target == target}
            expected = {"append_latent", "gather_latent", "context_attention", "attend", "combine"}
            assert entries == expected

    def test_reads_as_a_network_too(self, built: BuildReport, network: NetworkDirectory) -> None:
        loaded = NetworkDirectory.load(built.directory.path)
        assert (loaded.spec, loaded.weights) == (network.spec, network.weights)

    def test_measures_itself(self, built: BuildReport) -> None:
        info = built.directory.info
        parts = built.parse_seconds + built.kernel_seconds + built.engine_seconds
        assert 0 < parts == pytest.approx(info.build_seconds, abs=0.1)
        assert 50e6 < info.peak_memory_bytes < 8e9
        # At least the decompressed keys and values of 320 tokens.
        assert info.activation_bytes is not None
        assert 320 * 5 * (48 + 40) * 2 < info.activation_bytes < 1e9
        assert built.warnings == ()

    def test_every_cache_is_updated_in_place(self, built: BuildReport) -> None:
        """TensorRT asked each AppendLatent which input its output is."""
        assert plugin_library(load_backend("tensorrt-rtx")).num_aliases_declared >= 2


class TestVariants:
    def test_a_native_engine_has_no_plugins(
        self, network: NetworkDirectory, build_config: BuildConfig, tmp_path: Path
    ) -> None:
        report = build(network.path, tmp_path / "engine", config=build_config, targets=("sm_89",), native=True)
        info = report.directory.info
        assert info.native
        assert info.num_plugin_layers == 0
        assert info.triton_version is None
        assert not (report.directory.path / "kernels").exists()
        engine = report.directory.read_engine()
        for field in (b"plugin_namespace", b"workspace_bytes", b"softmax_scale"):
            assert field not in engine

    def test_a_float32_network_with_a_float16_cache(
        self, build_config: BuildConfig, cache_dir: Path, tmp_path: Path
    ) -> None:
        network = make_network(
            tmp_path,
            plugin=MlaPluginConfig(kv_cache_dtype="fp16"),
            dtype=DType.FLOAT32,
            num_hidden_layers=1,
            first_k_dense_replace=1,
        )
        report = build(network.path, tmp_path / "engine", config=build_config, targets=("sm_89",), cache_dir=cache_dir)
        assert report.directory.info.num_plugin_layers == 4
        variants = {cubin.entry: dict(cubin.variant.signature) for cubin in report.directory.kernels().cubins}
        assert variants["append_latent"]["present_latent"] == "*fp16"
        assert variants["append_latent"]["latent"] == "*fp32"
        assert variants["attend"]["output"] == "*fp32"

    @pytest.mark.parametrize("native", [False, True])
    @pytest.mark.parametrize("cache", ["fp8", "nvfp4"])
    def test_a_quantized_cache_with_outer_scales(
        self, build_config: BuildConfig, cache_dir: Path, tmp_path: Path, cache: str, native: bool
    ) -> None:
        network = make_network(tmp_path, plugin=MlaPluginConfig(kv_cache_dtype=cache))
        network = store_latent_scales(network, [0.25, 1.5])
        report = build(
            network.path,
            tmp_path / "engine",
            config=build_config,
            targets=("sm_89", "sm_120"),
            cache_dir=None if native else cache_dir,
            native=native,
        )
        assert report.warnings == ()
        directory = EngineDirectory.load(report.directory.path)
        assert directory.info.num_plugin_layers == (0 if native else 8)
        assert directory.network.latent_scales == (0.25, 1.5)
        if not native:
            signatures = {cubin.entry: dict(cubin.variant.signature) for cubin in directory.kernels().cubins}
            assert signatures["append_quantized_latent"]["present_latent"] == "*i8"
            assert signatures["gather_quantized_latent"]["latent_cache"] == "*i8"
            assert signatures["attend"]["latent_cache"] == "*i8"

    def test_without_absorption_there_are_three_plugins_a_layer(
        self, build_config: BuildConfig, cache_dir: Path, tmp_path: Path
    ) -> None:
        network = make_network(
            tmp_path,
            plugin=MlaPluginConfig(enable_matrix_absorption=False),
            dtype=DType.FLOAT16,
            q_lora_rank=None,
            tie_word_embeddings=True,
            attention_bias=True,
        )
        report = build(
            network.path, tmp_path / "engine", config=build_config, targets=("sm_120",), cache_dir=cache_dir
        )
        assert report.directory.info.num_plugin_layers == 6
        entries = {cubin.entry for cubin in report.directory.kernels().cubins}
        assert entries == {"append_latent", "gather_latent", "context_attention"}

    @pytest.mark.parametrize("native", [False, True])
    def test_passes_over_a_long_history(
        self, build_config: BuildConfig, cache_dir: Path, tmp_path: Path, native: bool
    ) -> None:
        network = make_network(tmp_path, plugin=MlaPluginConfig(max_context_passes=3))
        config = build_config.model_copy(update={"max_context_kv_tokens": 100})
        report = build(
            network.path,
            tmp_path / "engine",
            config=config,
            targets=("sm_89",),
            cache_dir=None if native else cache_dir,
            native=native,
        )
        directory = EngineDirectory.load(report.directory.path)
        assert directory.info.num_plugin_layers == (0 if native else 2 * (4 + 2 * 2))
        assert directory.config.mla_plugin.max_context_passes == 3
        assert report.warnings == ()
        engine = directory.read_engine()
        for number in (1, 2):
            assert f"context_history_kv_slots_{number}".encode() in engine
        assert b"context_history_kv_slots_3" not in engine
        if not native:
            # The causal pass and the others run one kernel.
            assert [cubin.entry for cubin in directory.kernels().cubins].count("context_attention") == 1

    def test_passes_share_their_memory(self, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Latents, keys and values of a pass are most of what TensorRT plans; side by side they would add up."""
        trt = load_backend("tensorrt-rtx").module
        planned: list[int] = []

        class Log(trt.ILogger):  # type: ignore[name-defined,misc]
            def log(self, severity: Any, message: str) -> None:
                if found := re.search(r"Total Activation Memory: (\d+)", message):
                    planned.append(int(found[1]))

        log = Log()
        monkeypatch.setattr(builder, "trt_logger", lambda backend: log)
        config = BuildConfig(max_batch_size=2, max_num_tokens=16, max_seq_len=1 << 18, max_context_kv_tokens=1 << 17)
        for passes in (2, 6):
            network = make_network(
                tmp_path / str(passes),
                plugin=MlaPluginConfig(max_context_passes=passes),
                num_hidden_layers=1,
                first_k_dense_replace=1,
                max_position_embeddings=1 << 18,
            )
            build(network.path, tmp_path / f"engine-{passes}", config=config, targets=("sm_89",), cache_dir=cache_dir)
        few, many = planned
        of_one_pass = 2**17 * 2 * (5 * (48 + 40) + 96 + 32)
        assert of_one_pass < few < many < 1.2 * of_one_pass

    def test_the_build_config_sets_page_size_threshold_and_tile(
        self, network: NetworkDirectory, build_config: BuildConfig, cache_dir: Path, tmp_path: Path
    ) -> None:
        plugin = MlaPluginConfig(page_size=16, prefill_absorption_threshold=20, tile_s=32, num_stages=4)
        config = build_config.model_copy(update={"mla_plugin": plugin})
        report = build(network.path, tmp_path / "engine", config=config, targets=("sm_89",), cache_dir=cache_dir)
        directory = EngineDirectory.load(report.directory.path)
        assert directory.network.plugin.page_size == 16
        assert directory.config.mla_plugin.prefill_absorption_threshold == 20
        assert directory.config.pages_per_request == 28
        assert directory.info.tiles == (TargetTile("sm_89", 32, 4),)
        constants = [dict(cubin.variant.constants) for cubin in directory.kernels().cubins]
        assert {values["PAGE_SIZE"] for values in constants if "PAGE_SIZE" in values} == {16}
        limits = read_json(directory.path / "config.json")["build_config"]
        assert limits["plugin_config"]["tokens_per_block"] == 16

    def test_progress_is_told(
        self, network: NetworkDirectory, build_config: BuildConfig, cache_dir: Path, tmp_path: Path
    ) -> None:
        lines: list[str] = []
        build(
            network.path,
            tmp_path / "engine",
            config=build_config,
            targets=("sm_89",),
            cache_dir=cache_dir,
            progress=lines.append,
        )
        assert lines[0] == f"reading {network.onnx_path}"
        assert lines[1].startswith("compiling kernel 1 of ")
        assert lines[-1].startswith("building with tensorrt-rtx 1.")


class TestMistakes:
    """Each is one message, and nothing is written."""

    def refused(self, network: NetworkDirectory, tmp_path: Path, message: str, **arguments: Any) -> None:
        values = {"config": BuildConfig(max_seq_len=448), "targets": ("sm_89",), **arguments}
        before = sorted(tmp_path.iterdir())
        with pytest.raises(UserError, match=message):
            build(network.path, tmp_path / "engine", **values)
        assert sorted(tmp_path.iterdir()) == before

    def test_a_target_the_backend_cannot_build_for(self, network: NetworkDirectory, tmp_path: Path) -> None:
        message = r"cannot build for sm_90 \(H100\)\. It builds for sm_80, sm_86, sm_89, sm_120, sm_121"
        self.refused(network, tmp_path, message, targets=("sm_90",))

    def test_a_tile_that_does_not_fit(self, network: NetworkDirectory, tmp_path: Path) -> None:
        plugin = MlaPluginConfig(tile_s=128, num_stages=8)
        message = (
            r"tile_s 128 with num_stages 8 takes 262144 bytes .* sm_89 \(RTX 4090\) has 101376 bytes .*"
            r"Use tile_s 128 with num_stages 3"
        )
        self.refused(network, tmp_path, message, config=BuildConfig(max_seq_len=448, mla_plugin=plugin))

    def test_a_tile_that_does_not_fit_beside_the_query(self, network: NetworkDirectory, tmp_path: Path) -> None:
        plugin = MlaPluginConfig(tile_s=64, num_stages=6)  # 98304 bytes of tiles alone
        message = r"tile_s 64 with num_stages 6 takes \d+ bytes .*query block.*Use tile_s \d+ with num_stages \d"
        self.refused(network, tmp_path, message, config=BuildConfig(max_seq_len=448, mla_plugin=plugin))

    def test_a_key_that_the_network_was_converted_with(self, network: NetworkDirectory, tmp_path: Path) -> None:
        plugin = MlaPluginConfig(enable_matrix_absorption=False)
        message = r"mla_plugin\.enable_matrix_absorption: the build config says False, the network .* True"
        self.refused(network, tmp_path, message, config=BuildConfig(mla_plugin=plugin))

    def test_an_output_directory_with_content(self, network: NetworkDirectory, tmp_path: Path) -> None:
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "notes.txt").write_text("mine")
        self.refused(network, tmp_path, "never replaced")
        assert (tmp_path / "engine" / "notes.txt").read_text() == "mine"

    def test_the_network_is_not_overwritten(self, network: NetworkDirectory) -> None:
        for target in (network.path, network.path.parent):
            with pytest.raises(UserError, match="would replace the network in it"):
                build(network.path, target, config=BuildConfig(), overwrite=True)
        assert network.onnx_path.is_file()

    def test_a_network_that_tensorrt_cannot_read(self, tmp_path: Path) -> None:
        network = make_network(tmp_path / "made")
        model = network.model()
        for node in model.graph.node:
            if node.op_type == "Gemm":
                node.op_type = "NoSuchOperator"
        network.onnx_path.write_bytes(model.SerializeToString())
        self.refused(
            network,
            tmp_path,
            r"network\.onnx: tensorrt-rtx 1\.\S+ cannot read the network: NoSuchOperator 'layers\.0/\w+': ",
        )

    def test_no_such_network(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no such directory"):
            build(tmp_path / "network", tmp_path / "engine", config=BuildConfig())
        assert not list(tmp_path.iterdir())


class TestWhatIsVerified:
    """What a builder that goes wrong unnoticed would leave behind, caught before anything is written."""

    def build(self, network: NetworkDirectory, tmp_path: Path, config: BuildConfig, cache_dir: Path) -> None:
        build(network.path, tmp_path / "engine", config=config, targets=("sm_89",), cache_dir=cache_dir)

    def test_a_callback_that_raises(
        self,
        network: NetworkDirectory,
        build_config: BuildConfig,
        cache_dir: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """TensorRT-RTX drops what this callback raises, and builds an engine that copies the cache."""
        plugin_class = plugin_library(load_backend("tensorrt-rtx")).plugin_class
        broken: Callable[..., int] = lambda self, index: self.no_such_attribute  # noqa: E731
        broken.__name__ = "get_aliased_input"
        monkeypatch.setattr(plugin_class, "get_aliased_input", _recorded(broken))
        with pytest.raises(UserError, match=r"cannot build the engine: AppendLatent\.get_aliased_input: .*no_such"):
            self.build(network, tmp_path, build_config, cache_dir)
        assert not list(tmp_path.iterdir())

    def test_an_alias_that_tensorrt_never_asked_for(
        self,
        network: NetworkDirectory,
        build_config: BuildConfig,
        cache_dir: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        plugin_class = plugin_library(load_backend("tensorrt-rtx")).plugin_class
        monkeypatch.setattr(plugin_class, "get_aliased_input", lambda self, index: -1)
        with pytest.raises(ValueError, match=r"asked for 0 aliases, expected one for each of 2 layers"):
            self.build(network, tmp_path, build_config, cache_dir)
        assert not list(tmp_path.iterdir())

    def test_a_plugin_that_was_not_taken(
        self,
        network: NetworkDirectory,
        build_config: BuildConfig,
        cache_dir: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = NetworkDirectory.model
        monkeypatch.setattr(NetworkDirectory, "model", lambda self, *, native: real(self, native=True))
        with pytest.raises(ValueError, match="found 0 plugin layers, expected 8"):
            self.build(network, tmp_path, build_config, cache_dir)

    def test_another_cache_type(
        self,
        network: NetworkDirectory,
        build_config: BuildConfig,
        cache_dir: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = NetworkDirectory.load
        plugin = network.plugin.model_copy(update={"kv_cache_dtype": "fp16"})
        monkeypatch.setattr(
            NetworkDirectory, "load", classmethod(lambda cls, path: dataclasses.replace(real(path), plugin=plugin))
        )
        with pytest.raises((ValueError, UserError), match=r"past_latent_0|past_latent"):
            self.build(network, tmp_path, build_config, cache_dir)
        assert not list(tmp_path.iterdir())


def test_operations_a_layer_match_the_operations() -> None:
    generation_only = {name for name, op in DENSE_OPS.items() if _reads(op, "block_offsets")}
    assert operations_per_layer(absorption=True, context_passes=1) == len(DENSE_OPS)
    assert operations_per_layer(absorption=False, context_passes=1) == len(DENSE_OPS) - len(generation_only)
    # A further pass gathers and attends.
    assert operations_per_layer(absorption=True, context_passes=5) == len(DENSE_OPS) + 4 * 2


def _reads(op: OpDefinition, name: str) -> bool:
    return any(tensor.name == name for tensor in op.inputs)
