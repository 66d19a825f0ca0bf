"""What few architectures have: it is what transformers does, it matters, and it is off in the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import pytest
import torch
from transformers import LongcatFlashConfig, Mistral4Config
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter, get_llama_4_attn_scale

from tests.network.ort_network import OrtNetwork
from tests.support.hf import ModelType, make_checkpoint
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.architectures import get_architecture, read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.builder import NetworkBuilder
from trtllm_mla.network.graph import build_network
from trtllm_mla.network.moe import route

TOLERANCE = 2e-4


class ChangedNetwork(OrtNetwork):
    """The network of a checkpoint with some of its spec changed."""

    def __init__(self, checkpoint: Any, **changes: Any) -> None:
        self._changes = changes
        super().__init__(checkpoint)

    def __post_init__(self) -> None:
        super().__post_init__()
        changes = {name: value for name, value in self._changes.items() if name != "rope"}
        rope = dataclasses.replace(self.spec.rope, **self._changes.get("rope", {}))
        spec = dataclasses.replace(self.spec, rope=rope, **changes)
        proto = onnx_ir.to_proto(build_network(spec, self.plugin, self.dtype, num_layers=self.layers))
        self.session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def both_groups(network: OrtNetwork, tokens: list[int]) -> torch.Tensor:
    request = network.request(len(tokens))
    return torch.cat(network.step([(request, tokens[:30])]) + network.step((), [(request, tokens[30:])]))


@pytest.mark.parametrize(
    ("model_type", "rope", "changes"),
    [
        ("minicpm3", "longrope", {"embedding_multiplier": 1.0}),
        ("minicpm3", "longrope", {"residual_multiplier": 1.0}),
        ("minicpm3", "longrope", {"logits_scaling": 1.0}),
        ("mistral4", "mistral", {"query_scaling_beta": 0.0}),
        ("mistral4", "mistral", {"rope": {"original_max_position_embeddings": 21}}),
        ("longcat_flash", "default", {"query_multiplier": 1.0}),
        ("longcat_flash", "default", {"latent_multiplier": 1.0}),
    ],
    ids=str,
)
def test_every_factor_matters(tmp_path: Path, model_type: ModelType, rope: Any, changes: dict[str, Any]) -> None:
    """Otherwise agreement with transformers would say little about it."""
    checkpoint = make_checkpoint(tmp_path, model_type, rope=rope, seed=4)
    tokens = np.random.default_rng(1).integers(0, 131, 60).tolist()
    with torch.no_grad():
        expected = checkpoint.model(torch.tensor([tokens])).logits[0]
    assert (both_groups(OrtNetwork(checkpoint), tokens) - expected).abs().max() < TOLERANCE
    assert (both_groups(ChangedNetwork(checkpoint, **changes), tokens) - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("part", ["post_mlp_layernorm.weight", "mlp.gate.weight"])
def test_parts_of_axk1_matter(tmp_path: Path, part: str) -> None:
    checkpoint = make_checkpoint(tmp_path, "axk1", rope="yarn", seed=4)
    tokens = np.random.default_rng(1).integers(0, 131, 60).tolist()
    network = OrtNetwork(checkpoint)
    plain = both_groups(network, tokens)
    name = f"model.layers.1.{part}"
    weight = network.constants[name].numpy()
    network.constants[name] = onnxruntime.OrtValue.ortvalue_from_numpy(weight * 0.8)
    assert (both_groups(network, tokens) - plain).abs().max() > 100 * TOLERANCE


def test_parts_of_longcat_flash_matter(tmp_path: Path) -> None:
    """Without the experts that give back their input, or with their output at the end of their own half."""
    checkpoint = make_checkpoint(tmp_path, "longcat_flash", seed=4)
    tokens = np.random.default_rng(1).integers(0, 131, 60).tolist()
    network = OrtNetwork(checkpoint)
    plain = both_groups(network, tokens)
    gate = network.constants["model.layers.0.mlp.gate.e_score_correction_bias"].numpy().copy()
    gate[9:] -= 10
    changed = OrtNetwork(checkpoint)
    changed.constants["model.layers.0.mlp.gate.e_score_correction_bias"] = onnxruntime.OrtValue.ortvalue_from_numpy(
        gate
    )
    assert (both_groups(changed, tokens) - plain).abs().max() > 100 * TOLERANCE
    for name in ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.down_proj.weight"):
        changed = OrtNetwork(checkpoint)
        changed.constants[name] = onnxruntime.OrtValue.ortvalue_from_numpy(changed.constants[name].numpy() * 0.8)
        assert (both_groups(changed, tokens) - plain).abs().max() > 100 * TOLERANCE, name


class Values:
    """Values of a network's parts that depend on inputs of their own, run by ONNX Runtime."""

    def __init__(self, spec: ModelSpec, dtype: DType = DType.FLOAT32) -> None:
        self.net = NetworkBuilder(spec, dtype, CacheDType.of(dtype), (1.0,), absorption=False, context_passes=1)

    def run(self, outputs: dict[str, Any], inputs: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
        for name, value in outputs.items():
            self.net.output(value, name)
        model = self.net.build()
        for value in [value for value in model.graph.inputs if not value.uses()]:
            model.graph.inputs.remove(value)
        proto = onnx_ir.to_proto(model).SerializeToString()
        session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
        results: list[np.ndarray[Any, Any]] = session.run(list(outputs), inputs)
        return results


def spec_of(model_type: str, **values: Any) -> ModelSpec:
    return get_architecture(model_type, source="test").model_spec(values, None, source="config.json")


def test_query_factors_are_those_of_transformers() -> None:
    values = Values(spec_of("mistral4"))
    positions = np.array([0, 1, 8191, 8192, 8193, 16383, 16384, 300_000, 1_048_575, (1 << 24) - 1], np.int32)
    (found,) = values.run({"factors": values.net.query_factors}, {"context_position_ids": positions})
    expected = get_llama_4_attn_scale(torch.from_numpy(positions)[None], 0.1, 8192)[0, 0]
    np.testing.assert_allclose(found[:, 0, 0], expected[:, 0].numpy(), rtol=2e-7)
    assert found[2, 0, 0] == 1 < found[3, 0, 0]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_factors_are_fp32_in_a_16_bit_network(dtype: DType) -> None:
    """0.17780, MiniCPM3's, is 0.17773 in bfloat16."""
    spec = spec_of("minicpm3")
    values = Values(spec, DType.FLOAT16)
    x = np.random.default_rng(2).standard_normal((5, 7)).astype(np.float16)
    value = values.net._builder.input("x", DType.FLOAT16.onnx, ["rows", 7])
    (found,) = values.run({"y": values.net.multiplied(value, spec.residual_multiplier)}, {"x": x})
    expected = (x.astype(np.float32) * np.float32(spec.residual_multiplier)).astype(np.float16)
    np.testing.assert_array_equal(found, expected)
    assert values.net.multiplied(value, 1.0) is value
    proto = onnx_ir.to_proto(build_network(spec, MlaPluginConfig(), dtype, num_layers=1))
    factors = [
        tensor.data_type
        for tensor in [*proto.graph.initializer, *(a.t for n in proto.graph.node for a in n.attribute)]
        if abs(_scalar(tensor) - spec.residual_multiplier) < 1e-3
    ]
    assert set(factors) == {int(DType.FLOAT32.onnx)}


def _scalar(tensor: Any) -> float:
    import onnx

    if tensor.data_type not in (1, 10, 16) or np.prod(tensor.dims) != 1:
        return -1.0
    return float(onnx.numpy_helper.to_array(tensor).astype(np.float32).reshape(()))


@pytest.mark.parametrize(
    ("groups", "chosen", "top_k", "normalised"), [(1, 1, 4, True), (4, 2, 3, True), (6, 5, 2, False)]
)
def test_router_of_mistral4(groups: int, chosen: int, top_k: int, normalised: bool) -> None:
    keys = {"hidden_size": 24, "n_routed_experts": 12, "n_group": groups, "topk_group": chosen}
    keys |= {"num_experts_per_tok": top_k, "norm_topk_prob": normalised, "routed_scaling_factor": 1.7}
    router: Any = Mistral4TopkRouter(Mistral4Config(**keys))
    assert_same_choice(router, router.weight, spec_of("mistral4", **keys), None)


@pytest.mark.parametrize(("experts", "identity", "top_k"), [(10, 6, 5), (10, 0, 3), (3, 9, 4)])
def test_router_of_longcat_flash(experts: int, identity: int, top_k: int) -> None:
    keys = {"hidden_size": 24, "n_routed_experts": experts, "zero_expert_num": identity, "moe_topk": top_k}
    router: Any = LongcatFlashTopkRouter(LongcatFlashConfig(**keys))
    bias = torch.linspace(-0.05, 0.05, experts + identity)[torch.randperm(experts + identity)]
    router.e_score_correction_bias = bias
    assert_same_choice(router, router.classifier.weight, spec_of("longcat_flash", **keys), bias)


def assert_same_choice(router: Any, weight: torch.Tensor, spec: ModelSpec, bias: torch.Tensor | None) -> None:
    weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    hidden = np.random.default_rng(5).standard_normal((200, 24)).astype(np.float32)
    assert spec.moe is not None
    values = Values(spec)
    ids, weights = route(values.net, "gate", spec.moe, values.net._builder.input("x", DType.FLOAT32.onnx, ["t", 24]))
    inputs = {"x": hidden, "gate.weight": weight.detach().numpy()}
    if values.net.query_factors is not None:
        inputs["context_position_ids"] = np.zeros(200, np.int32)
    if bias is not None:
        inputs["gate.e_score_correction_bias"] = bias.numpy()
    found_ids, found_weights = values.run({"ids": ids, "weights": weights}, inputs)
    with torch.no_grad():
        _, expected_weights, expected_ids = router(torch.from_numpy(hidden))
    order, expected_order = np.argsort(found_ids, axis=1), np.argsort(expected_ids.numpy(), axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(found_ids, order, 1), np.take_along_axis(expected_ids.numpy(), expected_order, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(found_weights, order, 1),
        np.take_along_axis(expected_weights.numpy(), expected_order, 1),
        rtol=2e-5,
    )


@pytest.mark.parametrize("model_type", ["minicpm3", "mistral4", "axk1", "longcat_flash"])
def test_float16_is_as_exact_as_transformers(tmp_path: Path, model_type: ModelType) -> None:
    rope: Any = {"minicpm3": "longrope", "mistral4": "mistral"}.get(model_type, "yarn")
    checkpoint = make_checkpoint(tmp_path, model_type, rope=rope, dtype="float16", seed=11)
    tokens = np.random.default_rng(1).integers(0, 131, 60).tolist()
    found = both_groups(OrtNetwork(checkpoint, dtype=DType.FLOAT16), tokens)
    with torch.no_grad():
        expected = checkpoint.model(torch.tensor([tokens])).logits[0]
        peer = checkpoint.model.half()(torch.tensor([tokens])).logits[0].float()
    assert 0 < (found - expected).norm() < 1.5 * (peer - expected).norm()


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "youtu"])
def test_other_networks_have_none_of_it(tmp_path: Path, model_type: ModelType) -> None:
    spec = read_model_spec(Checkpoint.open(make_checkpoint(tmp_path, model_type).path))
    net = NetworkBuilder(spec, DType.BFLOAT16, CacheDType.BF16, (1.0,), absorption=True, context_passes=1)
    assert net.query_factors is None
    model = build_network(spec, MlaPluginConfig(), DType.BFLOAT16, num_layers=2)
    assert "Log" not in {node.op_type for node in model.graph}
    if model_type != "deepseek_v2":
        casts = [node for node in model.graph if node.op_type == "Cast"]
        assert len(casts) == 1, "that of the logits"
