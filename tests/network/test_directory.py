"""Network directories: what convert writes, what load accepts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from tests.support.hf import make_checkpoint
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.contract import past_latent, step_inputs
from trtllm_mla.network.directory import (
    NetworkConfig,
    NetworkDirectory,
    convert,
    effective_plugin,
    store_latent_scales,
)
from trtllm_mla.ops import DOMAIN


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), dtype="bfloat16", rope="yarn", num_layers=3).path


@pytest.fixture(scope="module")
def converted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("network") / "network"
    convert(checkpoint, path, plugin=MlaPluginConfig(page_size=32))
    return path


@pytest.fixture
def directory(converted: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    copy = tmp_path / "network"
    copy.mkdir()
    for file in converted.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_convert_writes_what_load_reads(checkpoint: Path, tmp_path: Path) -> None:
    written = convert(checkpoint, tmp_path / "out" / "network", plugin=MlaPluginConfig(page_size=32), num_layers=2)
    assert sorted(file.name for file in written.path.iterdir()) == ["config.json", "network.onnx", "weights.json"]
    assert list(written.path.parent.iterdir()) == [written.path]
    assert NetworkDirectory.load(written.path) == written
    assert (written.dtype, written.num_layers) == (DType.BFLOAT16, 2)
    assert (written.spec.num_hidden_layers, written.spec.rope.rope_type) == (3, "yarn")


def test_config_is_effective_and_complete(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert list(config) == ["version", "pretrained_config", "mla_plugin", "num_layers"]
    assert config["pretrained_config"]["dtype"] == "bfloat16"
    plugin = config["mla_plugin"]
    sizes = {key: plugin[key] for key in ("num_heads", "head_dim_content", "latent_kv_dim", "rope_dim")}
    assert sizes == {"num_heads": 5, "head_dim_content": 48, "latent_kv_dim": 96, "rope_dim": 32}
    assert (plugin["page_size"], plugin["kv_cache_dtype"]) == (32, "bf16")


def test_weight_inputs_are_those_of_the_weight_map(converted: Path) -> None:
    network = NetworkDirectory.load(converted)
    known = {item.name for item in step_inputs(absorption=True)} | {past_latent(layer) for layer in range(3)}
    inputs = {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in network.model().graph.input
        if value.name not in known
    }
    assert inputs == network.weights.shapes


@pytest.mark.parametrize("options", [{}, {"tie": True}, {"q_lora_rank": None}, {"attention_bias": True}])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "youtu"])
def test_every_kind_of_checkpoint_converts(model_type: Any, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "checkpoint", model_type, **options).path
    network = convert(path, tmp_path / "network", plugin=MlaPluginConfig())
    onnx.checker.check_model(network.model(), full_check=True)


def test_weights_may_be_absent_and_no_weight_is_copied(checkpoint: Path, converted: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in checkpoint.glob("*.json"):
        (bare / file.name).write_bytes(file.read_bytes())
    network = convert(bare, tmp_path / "network", plugin=MlaPluginConfig(page_size=32))
    for file in converted.iterdir():
        assert (network.path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("dtype", list(DType))
def test_dtype(checkpoint: Path, tmp_path: Path, dtype: DType) -> None:
    network = convert(checkpoint, tmp_path / "network", plugin=MlaPluginConfig(kv_cache_dtype="bf16"), dtype=dtype)
    network = NetworkDirectory.load(network.path)
    inputs = {value.name: value.type.tensor_type.elem_type for value in network.model().graph.input}
    assert inputs["model.norm.weight"] == dtype.onnx
    assert inputs[past_latent(0)] == onnx.TensorProto.BFLOAT16
    twin = {value.name: value.type.tensor_type.elem_type for value in network.float32_twin().graph.input}
    assert twin.keys() == inputs.keys()
    assert set(twin.values()) == {onnx.TensorProto.FLOAT, onnx.TensorProto.INT32}


def test_onnx_runtime_loads_the_twin_of_a_bfloat16_network(converted: Path) -> None:
    network = NetworkDirectory.load(converted)
    twin = network.float32_twin().SerializeToString()
    onnxruntime.InferenceSession(twin, providers=["CPUExecutionProvider"])


def test_native_model_names_no_plugin(converted: Path) -> None:
    network = NetworkDirectory.load(converted)
    assert b"plugin_namespace" in network.model().SerializeToString()
    native = network.model(native=True)
    assert b"plugin_namespace" not in native.SerializeToString()
    assert [node.name for node in native.graph.node if node.domain == DOMAIN] == [
        node.name for node in network.model().graph.node if node.domain == DOMAIN
    ]


@pytest.mark.parametrize(
    ("key", "model_key", "size"),
    [
        ("num_heads", "num_attention_heads", 5),
        ("head_dim_content", "qk_nope_head_dim", 48),
        ("latent_kv_dim", "kv_lora_rank", 96),
        ("rope_dim", "qk_rope_head_dim", 32),
    ],
)
def test_a_size_that_contradicts_the_checkpoint_names_both_values(
    checkpoint: Path, tmp_path: Path, key: str, model_key: str, size: int
) -> None:
    right = MlaPluginConfig.model_validate({key: size})
    assert getattr(convert(checkpoint, tmp_path / "right", plugin=right).plugin, key) == size
    wrong = MlaPluginConfig.model_validate({key: size + 16})
    with pytest.raises(UserError, match=f"{key}: found {size + 16}, the checkpoint's {model_key} is {size}"):
        convert(checkpoint, tmp_path / "wrong", plugin=wrong)
    assert not (tmp_path / "wrong").exists()


def test_effective_plugin_is_a_fixed_point(converted: Path) -> None:
    network = NetworkDirectory.load(converted)
    assert effective_plugin(network.plugin, network.spec) == network.plugin


@pytest.mark.parametrize("num_layers", [0, 4])
def test_layers_that_the_model_lacks(checkpoint: Path, tmp_path: Path, num_layers: int) -> None:
    with pytest.raises(UserError, match=f"found {num_layers}, expected 1 to"):
        convert(checkpoint, tmp_path / "network", plugin=MlaPluginConfig(), num_layers=num_layers)
    assert not (tmp_path / "network").exists()


def test_output_with_content_needs_overwrite(checkpoint: Path, directory: Path) -> None:
    with pytest.raises(UserError, match="not empty"):
        convert(checkpoint, directory, plugin=MlaPluginConfig(page_size=64))
    assert NetworkDirectory.load(directory).plugin.page_size == 32
    convert(checkpoint, directory, plugin=MlaPluginConfig(page_size=64), overwrite=True)
    assert NetworkDirectory.load(directory).plugin.page_size == 64


@pytest.mark.parametrize("where", [".", ".."])
def test_output_may_not_replace_the_checkpoint(tmp_path: Path, where: str) -> None:
    path = make_checkpoint(tmp_path / "parent" / "checkpoint", num_layers=1).path
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(UserError, match="would replace the checkpoint"):
        convert(path, path / where, plugin=MlaPluginConfig(), overwrite=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path / "checkpoint", num_layers=1).path
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        convert(path, tmp_path / "network", plugin=MlaPluginConfig())
    assert not (tmp_path / "network").exists()


def test_load_names_what_is_missing(directory: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        NetworkDirectory.load(directory / "nowhere")
    (directory / "network.onnx").unlink()
    with pytest.raises(UserError, match=r"found no network\.onnx"):
        NetworkDirectory.load(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(extra=1), "extra: unknown key"),
        (lambda config: config.pop("mla_plugin"), "mla_plugin"),
        (lambda config: config.update(num_layers=4), "num_layers: found 4, expected at most"),
        (lambda config: config.update(num_layers="2"), "num_layers"),
        (lambda config: config.update(num_layers=2), "weights that are not those of the model"),
        (lambda config: config["mla_plugin"].update(num_heads=7), "num_heads: found 7"),
        (lambda config: config["mla_plugin"].update(page_size=48), "page_size"),
        (lambda config: config["pretrained_config"].update(model_type="llama"), "llama"),
        (lambda config: config["pretrained_config"].update(hidden_size=64), "weights that are not those of the model"),
    ],
)
def test_load_refuses_a_config_that_is_not_convert_s(
    directory: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(directory / "config.json", change)
    with pytest.raises(UserError, match=message):
        NetworkDirectory.load(directory)


def test_load_reads_an_engine_directory(directory: Path) -> None:
    before = NetworkDirectory.load(directory)
    edit(directory / "config.json", lambda config: config.update(build_config={"max_batch_size": 4}))
    (directory / "rank0.engine").write_bytes(b"engine")
    assert NetworkDirectory.load(directory) == before


def test_model_refuses_what_is_no_graph_of_this_config(directory: Path) -> None:
    network = NetworkDirectory.load(directory)
    proto = network.model()
    other = onnx.ModelProto()
    other.CopyFrom(proto)
    other.graph.input[-1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    network.onnx_path.write_bytes(other.SerializeToString())
    with pytest.raises(UserError, match="written together"):
        network.model()
    other.CopyFrom(proto)
    other.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    network.onnx_path.write_bytes(other.SerializeToString())
    with pytest.raises(UserError, match="other files"):
        network.model()
    network.onnx_path.write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="not an ONNX file"):
        network.model()


def test_a_graph_has_the_passes_of_its_config(checkpoint: Path, tmp_path: Path) -> None:
    network = convert(checkpoint, tmp_path / "network", plugin=MlaPluginConfig(max_context_passes=3))
    proto = NetworkDirectory.load(network.path).model()
    onnx.checker.check_model(proto, full_check=True)
    assert {item.name for item in network.step_inputs} <= {value.name for value in proto.graph.input}
    edit(network.path / "config.json", lambda config: config["mla_plugin"].update(max_context_passes=2))
    with pytest.raises(UserError, match=r"input 'context_history_\w+_2' is not as in .*written together"):
        NetworkDirectory.load(network.path).model()


def constant(**values: Any) -> Callable[[onnx.ModelProto], None]:
    """Adds a constant inside a function body, where no list of initializers shows it."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, **values)
        proto.functions[0].node.append(onnx.helper.make_node("Constant", [], ["extra"], value=tensor))

    return change


def widen_the_cache(proto: onnx.ModelProto) -> None:
    cache = next(value for value in proto.graph.input if value.name == "past_latent_0")
    cache.type.tensor_type.shape.dim[2].dim_value = 1 << 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (constant(dims=[4], data_location=onnx.TensorProto.EXTERNAL), "other files"),
        (constant(dims=[1 << 20, 1 << 20]), r"constant of shape \[1048576, 1048576\], expected at most"),
        (widen_the_cache, "input 'past_latent_0' is not as in"),
        (lambda proto: proto.graph.ClearField("output"), "found the outputs none, expected logits"),
    ],
)
def test_model_refuses_a_graph_that_was_tampered_with(
    directory: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    network = NetworkDirectory.load(directory)
    proto = network.model()
    change(proto)
    network.onnx_path.write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=message):
        network.model()


def test_output_through_links_in_a_circle_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UserError, match="links that lead in a circle"):
        convert(checkpoint, tmp_path / "link", plugin=MlaPluginConfig())


@pytest.fixture(scope="module")
def quantized(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> NetworkDirectory:
    path = tmp_path_factory.mktemp("quantized") / "network"
    return convert(checkpoint, path, plugin=MlaPluginConfig(page_size=32, kv_cache_dtype="nvfp4"))


SCALES = (0.5, 0.1, 3.0)
FP32_SCALES = (0.5, 0.10000000149011612, 3.0)


def graph_scales(proto: onnx.ModelProto) -> list[set[float]]:
    """The outer scales of each layer's three operations that have one."""
    found: dict[str, set[float]] = {}
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "latent_scale":
                found.setdefault(node.name.split("/")[0], set()).add(attribute.f)
    return [found[f"layers.{layer}"] for layer in range(len(found))]


def test_scales_are_stored_in_another_directory(quantized: NetworkDirectory, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in quantized.path.iterdir()}
    assert graph_scales(quantized.model()) == [{1.0}] * 3
    stored = store_latent_scales(quantized, SCALES, output=tmp_path / "out")
    assert stored.latent_scales == FP32_SCALES
    loaded = NetworkDirectory.load(tmp_path / "out")
    assert loaded == stored
    assert graph_scales(loaded.model()) == graph_scales(loaded.float32_twin()) == [{scale} for scale in FP32_SCALES]
    assert {file.name: file.read_bytes() for file in quantized.path.iterdir()} == before
    with pytest.raises(UserError, match="not empty"):
        store_latent_scales(quantized, SCALES, output=tmp_path / "out")
    again = store_latent_scales(quantized, (1.0, 2.0, 4.0), output=tmp_path / "out", overwrite=True)
    assert NetworkDirectory.load(tmp_path / "out") == again


def test_scales_are_stored_in_place(quantized: NetworkDirectory, tmp_path: Path) -> None:
    path = tmp_path / "network"
    shutil.copytree(quantized.path, path)
    (path / "notes.txt").write_text("mine")
    stored = store_latent_scales(NetworkDirectory.load(path), SCALES)
    assert NetworkDirectory.load(path) == stored
    assert graph_scales(stored.model()) == [{scale} for scale in FP32_SCALES]
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "network.onnx", "notes.txt", "weights.json"]
    assert (path / "weights.json").read_bytes() == (quantized.path / "weights.json").read_bytes()


def test_scales_of_1_give_what_convert_gives(quantized: NetworkDirectory, tmp_path: Path) -> None:
    store_latent_scales(quantized, (1.0,) * 3, output=tmp_path / "out")
    for file in quantized.path.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["config.json", "network.onnx"])
def test_scales_that_were_stored_by_half_are_refused(quantized: NetworkDirectory, tmp_path: Path, name: str) -> None:
    store_latent_scales(quantized, SCALES, output=tmp_path / "out")
    shutil.copyfile(quantized.path / name, tmp_path / "out" / name)
    with pytest.raises(UserError, match="other outer scales than the latent_scales in"):
        NetworkDirectory.load(tmp_path / "out").model()


def test_one_operation_with_another_scale_is_refused(quantized: NetworkDirectory, tmp_path: Path) -> None:
    stored = store_latent_scales(quantized, SCALES, output=tmp_path / "out")
    proto = stored.model()
    node = next(node for node in proto.graph.node if node.op_type == "LatentAttention")
    next(attribute for attribute in node.attribute if attribute.name == "latent_scale").f = 1.0
    stored.onnx_path.write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match="other outer scales"):
        stored.model()


def test_a_failure_stores_nothing(
    quantized: NetworkDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "network"
    shutil.copytree(quantized.path, path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(NetworkConfig, "save", fail)
    with pytest.raises(OSError, match="no space"):
        store_latent_scales(NetworkDirectory.load(path), SCALES)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_scales_are_refused_without_a_quantised_cache(converted: Path) -> None:
    with pytest.raises(UserError, match=r"found a network with a bf16 cache.*expected an fp8 or nvfp4 cache"):
        store_latent_scales(NetworkDirectory.load(converted), SCALES)


def test_scales_are_refused_in_an_engine(quantized: NetworkDirectory, tmp_path: Path) -> None:
    path = tmp_path / "engine"
    shutil.copytree(quantized.path, path)
    edit(path / "config.json", lambda config: config.update(build_config={"max_batch_size": 4}))
    with pytest.raises(UserError, match=r"found an engine directory.*build again"):
        store_latent_scales(NetworkDirectory.load(path), SCALES)


def test_scales_may_not_replace_the_network_they_came_from(quantized: NetworkDirectory) -> None:
    for output in (quantized.path, quantized.path.parent):
        with pytest.raises(UserError, match="would replace the network"):
            store_latent_scales(quantized, SCALES, output=output, overwrite=True)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.0, 1.0, 0.0), (1.0, 1.0, 2.0**65), (1.0, 1.0, float("nan"))])
def test_impossible_scales(quantized: NetworkDirectory, tmp_path: Path, scales: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected 3 from"):
        store_latent_scales(quantized, scales, output=tmp_path / "out")


def test_the_unquantised_twin_has_a_plain_cache(quantized: NetworkDirectory, tmp_path: Path) -> None:
    stored = store_latent_scales(quantized, SCALES, output=tmp_path / "out").unquantized()
    assert (stored.row_layout.width, stored.plugin.kv_cache_dtype) == (96 + 32, "bf16")
    assert graph_scales(stored.float32_twin()) == [{1.0}] * 3
