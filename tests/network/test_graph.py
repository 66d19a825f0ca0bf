"""The network in ONNX Runtime against transformers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch

from tests.network.ort_network import OrtNetwork, OrtRequest, graph_weights
from tests.support.hf import HfCheckpoint, ModelType, make_checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec, RopeSpec
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.contract import LOGITS, past_latent, present_latent, step_inputs
from trtllm_mla.network.graph import build_network, count_operations, hidden_states, strip_plugin_attributes
from trtllm_mla.ops import DOMAIN, OPS
from trtllm_mla.runtime.step import LogitRows

KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3-yarn": {"model_type": "deepseek_v3", "rope": "yarn"},
    "deepseek_v3-half-split": {"model_type": "deepseek_v3", "rope_interleave": False, "rope": "linear"},
    "deepseek_v3-direct-queries-biases": {"model_type": "deepseek_v3", "q_lora_rank": None, "attention_bias": True},
    "youtu-tied": {"model_type": "youtu", "attention_bias": True},
    "deepseek_v2": {"model_type": "deepseek_v2", "rope": "yarn"},
    "deepseek_v2-lite": {"model_type": "deepseek_v2", "rope": "yarn", "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3-experts": {"model_type": "deepseek_v3", "rope": "yarn", "first_k_dense_replace": 1},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite"},
    "longcat_flash": {"model_type": "longcat_flash", "rope": "yarn"},
    "axk1": {"model_type": "axk1", "rope": "yarn"},
    "mistral4": {"model_type": "mistral4", "rope": "mistral"},
    "mistral4-dense-direct-queries": {
        "model_type": "mistral4",
        "rope": "mistral",
        "q_lora_rank": None,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "rope_interleave": False,
    },
    "minicpm3": {"model_type": "minicpm3", "rope": "longrope", "attention_bias": True},
    "kimi_k2": {"model_type": "kimi_k2", "rope": "yarn"},
    "sarvam_mla": {"model_type": "sarvam_mla", "rope": "yarn", "q_lora_rank": None, "first_k_dense_replace": 0},
}
TOKENS = 83
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=list(KINDS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=7, **KINDS[request.param])


def prompt(checkpoint: HfCheckpoint, tokens: int = TOKENS, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, checkpoint.model.config.vocab_size, tokens).tolist()


def expected_logits(checkpoint: HfCheckpoint, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = checkpoint.model(torch.tensor([tokens])).logits[0]
    assert logits.std() > 0.3, "logits must be spread for the comparison to mean something"
    return logits


def expected_rows(checkpoint: HfCheckpoint, tokens: list[int]) -> list[torch.Tensor]:
    """The rows each layer caches, with the rotary keys in the checkpoint's order."""
    model = checkpoint.model
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), use_cache=True)["past_key_values"]
    rows = []
    for layer in cache.layers:
        latent, k_pe = layer.keys[0, 0], layer.values[0, 0]
        if getattr(model.config, "rope_interleave", model.config.model_type == "longcat_flash"):
            # transformers rotates to evens, then odds, but leaves DeepSeek-V2's pairs in place.
            k_pe = torch.stack(k_pe.chunk(2, dim=-1), dim=-1).flatten(1)
        rows.append(torch.cat([latent, k_pe], dim=-1))
    return rows


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("group", ["context", "generation"])
def test_one_shot_prefill_and_cached_rows(checkpoint: HfCheckpoint, group: str) -> None:
    network, tokens = OrtNetwork(checkpoint), prompt(checkpoint)
    request = network.request(TOKENS)
    (logits,) = network.step(**{group: [(request, tokens)]})
    assert_close(logits, expected_logits(checkpoint, tokens))
    for layer, rows in enumerate(expected_rows(checkpoint, tokens)):
        assert_close(network.rows(layer, request), rows)


def test_chunks_and_decode_in_either_group(checkpoint: HfCheckpoint) -> None:
    network, tokens = OrtNetwork(checkpoint), prompt(checkpoint)
    request, logits, start = network.request(TOKENS), [], 0
    for count, group in ((17, "context"), (15, "generation"), (1, "context"), (30, "context"), (16, "generation")):
        logits += network.step(**{group: [(request, tokens[start : start + count])]})
        start += count
    for position in range(start, TOKENS):
        logits += network.step(generation=[(request, tokens[position : position + 1])])
    assert_close(torch.cat(logits), expected_logits(checkpoint, tokens))


def test_mixed_batches(checkpoint: HfCheckpoint) -> None:
    network = OrtNetwork(checkpoint)
    prompts = [prompt(checkpoint, tokens, seed=tokens) for tokens in (40, 23, 64, 35)]
    requests = [network.request(len(tokens)) for tokens in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def run(context: dict[int, int], generation: dict[int, int]) -> None:
        def group(counts: dict[int, int]) -> list[tuple[OrtRequest, list[int]]]:
            return [
                (requests[i], prompts[i][requests[i].length : requests[i].length + count])
                for i, count in counts.items()
            ]

        found = network.step(group(context), group(generation))
        for i, value in zip((*context, *generation), found, strict=True):
            logits[i].append(value)

    run({0: 40 - 3, 2: 16}, {})
    run({2: 33, 1: 20}, {0: 1})
    run({3: 31}, {0: 1, 1: 2, 2: 14})
    run({}, {0: 1, 3: 4, 1: 1, 2: 1})
    for tokens, values in zip(prompts, logits, strict=True):
        assert_close(torch.cat(values), expected_logits(checkpoint, tokens))


def test_without_absorption_there_is_no_generation_group(checkpoint: HfCheckpoint) -> None:
    plugin = MlaPluginConfig(page_size=32, enable_matrix_absorption=False)
    network, tokens = OrtNetwork(checkpoint, plugin), prompt(checkpoint)
    assert not [value.name for value in network.session.get_inputs() if value.name.startswith("generation")]
    request = network.request(TOKENS)
    logits = network.step([(request, tokens[:50])])
    for start, stop in ((50, 82), (82, 83)):
        logits += network.step([(request, tokens[start:stop])])
    assert_close(torch.cat(logits), expected_logits(checkpoint, tokens))


def test_logits_of_the_wanted_rows_only(checkpoint: HfCheckpoint) -> None:
    network, tokens = OrtNetwork(checkpoint), [prompt(checkpoint, 20, seed=1), prompt(checkpoint, 9, seed=2)]
    requests = [network.request(len(each)) for each in tokens]
    found = network.step([(requests[0], tokens[0])], [(requests[1], tokens[1])], rows=LogitRows.LAST)
    for logits, each in zip(found, tokens, strict=True):
        assert logits.shape == (1, network.spec.vocab_size)
        assert_close(logits, expected_logits(checkpoint, each)[-1:])


def both_groups(network: OrtNetwork, tokens: list[int]) -> torch.Tensor:
    request = network.request(len(tokens))
    return torch.cat(network.step([(request, tokens[:50])]) + network.step((), [(request, tokens[50:])]))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2"])
def test_float16_is_as_exact_as_transformers(tmp_path: Path, model_type: ModelType) -> None:
    checkpoint = make_checkpoint(tmp_path, model_type, rope="yarn", dtype="float16", seed=11)
    tokens = prompt(checkpoint)
    expected = expected_logits(checkpoint, tokens)
    found = both_groups(OrtNetwork(checkpoint, dtype=DType.FLOAT16), tokens)
    with torch.no_grad():
        peer = checkpoint.model.half()(torch.tensor([tokens])).logits[0].float()
    assert found.dtype == torch.float32
    assert 0 < relative_error(found, expected) < 1.5 * relative_error(peer, expected)


def test_bfloat16_cache_rounds_the_cached_rows_and_nothing_else(tmp_path: Path) -> None:
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states.bfloat16().float(), value_states.bfloat16().float(), *args, **kwargs)

    checkpoint = make_checkpoint(tmp_path, rope="yarn", seed=11)
    tokens = prompt(checkpoint)
    found = both_groups(OrtNetwork(checkpoint, MlaPluginConfig(page_size=16, kv_cache_dtype="bf16")), tokens)
    with torch.no_grad():
        rounded = checkpoint.model(torch.tensor([tokens]), cache=RoundingCache()).logits[0]
    exact = expected_logits(checkpoint, tokens)
    # A value halfway between two bfloat16 numbers may go either way, so the two differ by a few roundings.
    assert relative_error(found, rounded) < 0.1 * relative_error(exact, rounded)


def test_cache_is_updated_in_place_whatever_the_pool_s_size(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, seed=3)
    tokens, seconds = prompt(checkpoint, 40), {}
    for num_pages in (5, 16384):
        network = OrtNetwork(checkpoint, num_pages=num_pages)
        request = network.request(80)
        network.step([(request, tokens)])
        addresses = [pool.data_ptr() for pool in network.pools]
        runs = []
        for _ in range(10):
            start = time.perf_counter()
            network.step(generation=[(request, tokens[:1])])
            runs.append(time.perf_counter() - start)
        seconds[num_pages] = min(runs)
        assert [value.data_ptr() for value in network.presents] == addresses
        assert network.rows(0, request).isfinite().all()
    # To copy the larger pools, 134 MB each, takes tens of milliseconds.
    assert seconds[16384] < seconds[5] + 5e-3


@pytest.mark.parametrize("passes", [1, 3])
def test_inputs_and_outputs_are_the_contract(checkpoint: HfCheckpoint, passes: int) -> None:
    network = OrtNetwork(checkpoint)
    plugin = network.plugin.model_copy(update={"max_context_passes": passes})
    model = build_network(network.spec, plugin, DType.BFLOAT16, num_layers=2)
    proto = onnx_ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert (proto.ir_version, proto.opset_import[0].version) == (10, 23)
    names = [value.name for value in model.graph.inputs]
    assert len(set(names)) == len(names)
    for item in step_inputs(absorption=True, context_passes=passes):
        value = model.graph.inputs[names.index(item.name)]
        found = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
        assert found == [network.spec.qk_rope_head_dim if dim == "qk_rope_head_dim" else dim for dim in item.dims]
    assert set(names) == {
        *(item.name for item in step_inputs(absorption=True, context_passes=passes)),
        *(past_latent(layer) for layer in range(2)),
        *graph_weights(checkpoint.model, network.spec, DType.BFLOAT16),
    }
    outputs = {value.name: value for value in model.graph.outputs}
    assert set(outputs) == {LOGITS, *(present_latent(layer) for layer in range(2))}
    assert outputs[LOGITS].dtype == onnx_ir.DataType.FLOAT
    assert outputs[present_latent(1)].dtype == onnx_ir.DataType.BFLOAT16


def test_nodes_are_named_and_the_bodies_stand_once(checkpoint: HfCheckpoint) -> None:
    network = OrtNetwork(checkpoint)
    model = build_network(network.spec, network.plugin, DType.FLOAT32, num_layers=2)
    plain = {name for name in OPS if not name.startswith("BlockScaled")}
    of_layer = [plain - ({"RoutedExperts"} if not network.spec.is_moe_layer(i) else set()) for i in range(2)]
    assert {function.name for function in model.functions.values()} == of_layer[0] | of_layer[1]
    assert len(model.functions) == len(of_layer[0] | of_layer[1])
    mla_nodes = [node for node in model.graph if node.domain == DOMAIN]
    assert {node.name for node in mla_nodes} == {f"layers.{i}/{name}" for i in range(2) for name in of_layer[i]}
    assert len(mla_nodes) == count_operations(network.spec, network.plugin, num_layers=2)
    assert all(node.attributes["plugin_namespace"].as_string() == DOMAIN for node in mla_nodes)
    assert all(node.attributes["plugin_version"].as_string() == "1" for node in mla_nodes)
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)
    values = {value.name for node in model.graph for value in node.outputs}
    assert {hidden_states(0), hidden_states(1)} <= values


def test_passes_are_named_and_the_first_alone_is_causal(checkpoint: HfCheckpoint) -> None:
    network = OrtNetwork(checkpoint)
    plugin = network.plugin.model_copy(update={"max_context_passes": 3})
    model = build_network(network.spec, plugin, DType.FLOAT16, num_layers=2)
    one_pass = build_network(network.spec, network.plugin, DType.FLOAT16, num_layers=2)
    assert model.functions.keys() == one_pass.functions.keys()
    attention = {node.name: node for node in model.graph if node.op_type == "ContextAttention"}
    causal = {name: node.attributes["causal"].as_int() for name, node in attention.items()}
    assert causal == {
        f"layers.{layer}/{scope}ContextAttention": int(not scope)
        for layer in range(2)
        for scope in ("", "pass_1/", "pass_2/")
    }
    gathered = [node.inputs[1].name for node in model.graph if node.op_type == "GatherLatent"]
    assert gathered == ["context_kv_slots", "context_history_kv_slots_1", "context_history_kv_slots_2"] * 2
    # The merge is computed in fp32, whatever the network's type.
    merges = [node for node in model.graph if node.op_type in ("Exp", "Div")]
    assert len(merges) - sum(node.op_type in ("Exp", "Div") for node in one_pass.graph) == 2 * (2 * 2 + 1)
    assert all(node.outputs[0].dtype == onnx_ir.DataType.FLOAT for node in merges if node.op_type == "Exp")


def test_native_network_has_no_plugin_attributes_and_computes_the_same(checkpoint: HfCheckpoint) -> None:
    network = OrtNetwork(checkpoint)
    native = build_network(network.spec, network.plugin, DType.FLOAT32, num_layers=2)
    assert b"plugin_namespace" in onnx_ir.to_proto(native).SerializeToString()
    strip_plugin_attributes(native)
    assert b"plugin_namespace" not in onnx_ir.to_proto(native).SerializeToString()
    tokens = prompt(checkpoint)
    plain = both_groups(network, tokens)
    torch.testing.assert_close(both_groups(OrtNetwork(checkpoint, native=True), tokens), plain, rtol=0, atol=0)


def test_full_size_network_is_small_and_quick() -> None:
    """DeepSeek-V3's attention and dense MLP, 61 layers."""
    rope = RopeSpec(64, 10000.0, "default", True)
    spec = ModelSpec(
        model_type="deepseek_v3",
        hf_architecture="DeepseekV3ForCausalLM",
        dtype=DType.BFLOAT16,
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        softmax_scale=0.135,
        rms_norm_eps=1e-6,
        latent_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        rope=rope,
        bos_token_id=0,
        eos_token_ids=(1,),
    )
    start = time.process_time()
    proto = onnx_ir.to_proto(build_network(spec, MlaPluginConfig(), DType.BFLOAT16, num_layers=61))
    assert time.process_time() - start < 10
    assert proto.ByteSize() < 4 << 20
    assert sum(node.domain == DOMAIN for node in proto.graph.node) == 4 * 61
