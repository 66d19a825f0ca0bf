"""The router against transformers' routers, with scores that are equal or nearly so; and what it does to a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from transformers import DeepseekV2Config, DeepseekV3Config, LongcatFlashConfig, Mistral4Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

from tests.network.ort_network import OrtNetwork
from tests.support.hf import HfCheckpoint, ModelType, make_checkpoint
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.dtypes import DType
from trtllm_mla.network.builder import NetworkBuilder
from trtllm_mla.network.moe import route
from trtllm_mla.runtime.executors import interpreter

HIDDEN = 24

ROUTERS: dict[str, dict[str, Any]] = {
    "v2-greedy": {"topk_method": "greedy", "n_routed_experts": 13, "num_experts_per_tok": 4},
    "v2-one-expert": {"topk_method": "greedy", "n_routed_experts": 7, "num_experts_per_tok": 1},
    "v2-groups": {"topk_method": "group_limited_greedy", "n_group": 5, "topk_group": 2, "n_routed_experts": 15},
    "v2-160": {
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 16.0,
    },
    "v3-256": {"n_group": 8, "topk_group": 4, "n_routed_experts": 256, "num_experts_per_tok": 8},
    "v3-one-group": {"n_group": 1, "topk_group": 1, "n_routed_experts": 10},
    "v3-all-groups": {"n_group": 3, "topk_group": 3, "n_routed_experts": 12},
    "v3-groups": {"n_group": 4, "topk_group": 2, "n_routed_experts": 12, "num_experts_per_tok": 5},
    "v3-groups-of-two": {"n_group": 6, "topk_group": 2, "n_routed_experts": 12, "num_experts_per_tok": 3},
    "v3-not-normalised": {"n_group": 4, "topk_group": 2, "n_routed_experts": 12, "norm_topk_prob": False},
    "mistral-groups": {
        "n_group": 4,
        "topk_group": 2,
        "n_routed_experts": 12,
        "routed_scaling_factor": 1.5,
        # The default makes queries grow with the position, which a router alone has no input for.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "longcat": {"n_routed_experts": 9, "zero_expert_num": 5, "num_experts_per_tok": 4, "routed_scaling_factor": 3.0},
}
# A router's name begins with one of these.
VERSIONS: dict[str, tuple[str, Any, Any]] = {
    "v2": ("deepseek_v2", DeepseekV2Config, DeepseekV2TopkRouter),
    "v3": ("deepseek_v3", DeepseekV3Config, DeepseekV3TopkRouter),
    "mistral": ("mistral4", Mistral4Config, Mistral4TopkRouter),
    "longcat": ("longcat_flash", LongcatFlashConfig, LongcatFlashTopkRouter),
}
RUNTIMES = ["onnxruntime", "interpreter"]


class Router:
    """A router of transformers, and the same in a graph, run as the executors of the CPU do."""

    def __init__(self, name: str, dtype: DType = DType.FLOAT32, runtime: str = "onnxruntime") -> None:
        values = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "num_attention_heads": 4} | ROUTERS[name]
        values["num_key_value_heads"] = 4
        model_type, config_class, router_class = VERSIONS[name.partition("-")[0]]
        self.hf: Any = router_class(config_class(**values))
        architecture = get_architecture(model_type, source="test")
        spec: ModelSpec = architecture.model_spec(values, None, source="config.json")
        assert spec.moe is not None
        self.moe = spec.moe
        self.experts = spec.moe.num_experts + spec.moe.num_identity_experts
        net = NetworkBuilder(spec, dtype, CacheDType.of(dtype), (1.0,), absorption=False, context_passes=1)
        hidden_TE = net._builder.input("hidden", dtype.onnx, ["rows", HIDDEN])
        for value, output in zip(route(net, "gate", spec.moe, hidden_TE), ("ids", "weights"), strict=True):
            net.output(value, output)
        model = net.build()
        for value in [value for value in model.graph.inputs if not value.uses()]:
            model.graph.inputs.remove(value)
        proto = onnx_ir.to_proto(model)
        self.dtype = dtype
        if runtime == "interpreter":
            operators = [interpreter._fp32_operator(*item) for item in interpreter._FP32_FUNCTIONS.items()]
            self._run = ReferenceEvaluator(proto, new_ops=operators).run
        else:
            self._run = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run

    def set(self, weight: np.ndarray[Any, Any], bias: np.ndarray[Any, Any] | None = None) -> None:
        """Sets the weight [experts, hidden] and, where there is one, the bias [experts]."""
        self._linear.weight.data = torch.from_numpy(weight.astype(np.float32))
        if self.moe.correction_bias:
            self.hf.e_score_correction_bias = torch.from_numpy(
                np.zeros(len(weight), np.float32) if bias is None else bias.astype(np.float32)
            )

    @property
    def _linear(self) -> Any:
        """The module that holds the weight."""
        return getattr(self.hf, "classifier", self.hf)

    def ours(self, hidden: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Expert numbers and weights, each row in the order of the numbers."""
        inputs = {"hidden": hidden.astype(self.dtype.numpy), "gate.weight": self._linear.weight.detach().numpy()}
        if self.moe.correction_bias:
            inputs["gate.e_score_correction_bias"] = self.hf.e_score_correction_bias.numpy()
        ids, weights = self._run(["ids", "weights"], inputs)
        assert ids.dtype == np.int32
        assert weights.dtype == np.float32
        return _sorted(ids, weights)

    def theirs(self, hidden: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The same by transformers."""
        with torch.no_grad():
            _, weights, ids = self.hf(torch.from_numpy(hidden.astype(self.dtype.numpy).astype(np.float32)))
        return _sorted(ids.numpy(), weights.numpy())


def _sorted(ids: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)


def assert_same(router: Router, hidden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    (ids, weights), (expected_ids, expected_weights) = router.ours(hidden), router.theirs(hidden)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-5)
    return ids


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", list(ROUTERS))
def test_experts_and_weights_of_transformers(name: str, runtime: str, generator: np.random.Generator) -> None:
    router = Router(name, runtime=runtime)
    # Scores of a softmax are smaller: about 1 / experts.
    spread = 0.3 if router.moe.scoring_func == "sigmoid" else 0.03
    router.set(generator.standard_normal((router.experts, HIDDEN)), generator.normal(0, spread, router.experts))
    hidden = generator.standard_normal((300, HIDDEN))
    ids = assert_same(router, hidden)
    assert len(np.unique(ids)) > 2 * router.moe.top_k
    # A step has a token; ONNX's evaluator cannot gather none.
    for rows in (1, 0) if runtime == "onnxruntime" else (1,):
        assert router.ours(hidden[:rows])[0].shape == (rows, router.moe.top_k)


@pytest.mark.parametrize("name", ["v2-groups", "v3-groups"])
def test_groups_and_bias_matter(name: str, generator: np.random.Generator) -> None:
    """Otherwise the comparison above would not show that they are left out."""
    router = Router(name)
    weight, bias = generator.standard_normal((router.moe.num_experts, HIDDEN)), generator.normal(0, 0.3, 12)
    hidden = generator.standard_normal((300, HIDDEN))
    router.set(weight, bias)
    ids, _ = router.ours(hidden)
    scores = hidden @ weight.T
    assert (ids != np.sort(np.argsort(-scores, axis=1)[:, : router.moe.top_k], axis=1)).any(axis=1).mean() > 0.2
    groups = ids // (router.moe.num_experts // router.moe.n_group)
    assert all(len(np.unique(row)) <= router.moe.topk_group for row in groups)
    if router.moe.correction_bias:
        router.set(weight)
        assert (router.ours(hidden)[0] != ids).any(axis=1).mean() > 0.2


@pytest.mark.parametrize("name", ["v2-groups", "v3-groups"])
def test_a_float16_network_routes_in_float32(name: str, generator: np.random.Generator) -> None:
    """Experts whose logits differ by less than float16 can tell are told apart."""
    router = Router(name, DType.FLOAT16)
    experts = router.moe.num_experts
    weight = generator.standard_normal((1, HIDDEN)) + 5e-5 * generator.standard_normal((experts, HIDDEN))
    router.set(weight)
    hidden = 4 * generator.standard_normal((200, HIDDEN))
    assert (weight.astype(np.float16) == weight[:1].astype(np.float16)).mean() > 0.8
    ids, _ = router.ours(hidden)
    logits = hidden.astype(np.float16).astype(np.float64) @ weight.astype(np.float32).astype(np.float64).T
    clear = _clear_rows(logits, router, tolerance=1e-5)
    assert clear.mean() > 0.2
    expected, _ = router.theirs(hidden)
    np.testing.assert_array_equal(ids[clear], expected[clear])


def _clear_rows(logits: np.ndarray[Any, Any], router: Router, tolerance: float = 4e-7) -> np.ndarray[Any, Any]:
    """Rows no two of whose scores, or of whose groups' scores, are closer than fp32 arithmetic is exact."""
    scores = 1 / (1 + np.exp(-logits))
    if router.moe.scoring_func == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    of_group = np.sort(scores.reshape(len(scores), router.moe.n_group, -1), axis=2)
    group_scores = of_group[:, :, -2 if router.moe.topk_method == "noaux_tc" else -1 :].sum(axis=2)

    def clear(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        gaps = np.diff(np.sort(values, axis=1), axis=1).min(axis=1, initial=np.inf)
        return gaps > tolerance * values.max(axis=1)

    found: np.ndarray[Any, Any] = clear(scores) & clear(group_scores)
    return found


class TestTies:
    """Hidden states with one element that is not 0 make logits that are exact in every runtime."""

    @staticmethod
    def weight(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A weight that gives one-hot hidden states the rows of logits [rows, experts]."""
        padded: np.ndarray[Any, Any] = np.pad(logits.T, ((0, 0), (0, HIDDEN - len(logits))))
        return padded

    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("name", ["v2-greedy", "v3-one-group", "longcat"])
    def test_equal_scores_inside_the_choice_are_all_chosen(
        self, name: str, runtime: str, generator: np.random.Generator
    ) -> None:
        router = Router(name, runtime=runtime)
        top_k, experts = router.moe.top_k, router.experts
        logits = generator.uniform(-1, 0, (HIDDEN, experts)).astype(np.float32)
        for row in logits:
            row[generator.choice(experts, top_k, replace=False)] = 0.5
        router.set(self.weight(logits))
        ids = assert_same(router, np.eye(HIDDEN))
        np.testing.assert_array_equal(np.take_along_axis(logits, ids, 1), 0.5)

    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("name", ["v2-greedy", "v2-160", "v3-one-group", "v3-256", "mistral-groups", "longcat"])
    def test_of_equal_scores_at_the_edge_the_first_experts_are_chosen(
        self, name: str, runtime: str, generator: np.random.Generator
    ) -> None:
        """PyTorch leaves open which it takes; the weights are the same whatever it takes."""
        router = Router(name, runtime=runtime)
        top_k, experts = router.moe.top_k, router.experts
        logits = np.full((HIDDEN, experts), 0.25, np.float32)
        best = generator.integers(0, experts, HIDDEN)
        logits[np.arange(HIDDEN), best] = 1.0
        router.set(self.weight(logits))
        ids, weights = router.ours(np.eye(HIDDEN))
        groups = router.moe.n_group if router.moe.group_limited else 1
        size = experts // groups
        for row, favourite in zip(ids, best, strict=True):
            # The favourite's group comes first, then those with the lowest numbers.
            order = sorted(range(groups), key=lambda group: (group != favourite // size, group))
            allowed = sorted(
                expert
                for group in order[: router.moe.topk_group]
                for expert in range(group * size, (group + 1) * size)
            )
            others = [expert for expert in allowed if expert != favourite][: top_k - 1]
            assert row.tolist() == sorted([favourite, *others])
        _, expected = router.theirs(np.eye(HIDDEN))
        np.testing.assert_allclose(np.sort(weights, axis=1), np.sort(expected, axis=1), rtol=1e-6)

    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_the_bias_decides_between_equal_scores(self, runtime: str, generator: np.random.Generator) -> None:
        router = Router("v3-groups", runtime=runtime)
        router.set(np.zeros((12, HIDDEN)), generator.normal(0, 0.3, 12))
        _, weights = router.ours(np.eye(HIDDEN))
        assert_same(router, np.eye(HIDDEN))
        np.testing.assert_allclose(weights, 2.5 / 5, rtol=1e-6)

    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("name", ["v3-groups", "v3-one-group", "v3-256"])
    def test_biases_one_unit_in_the_last_place_apart(
        self, name: str, runtime: str, generator: np.random.Generator
    ) -> None:
        """Scores of 1/2 and biases that add to them exactly: all three see the same numbers, 2^-24 apart."""
        router = Router(name, runtime=runtime)
        groups, clear = router.moe.n_group, 0
        # The sum of two scores, which groups are chosen by, is beyond 1, where numbers are 2^-23 apart.
        unit = 2.0**-23 if router.moe.group_limited else 2.0**-24
        for _ in range(100):
            bias = unit * generator.permutation(router.experts)
            of_group = np.sort(bias.reshape(groups, -1), axis=1)[:, -2:].sum(axis=1)
            if len(np.unique(of_group)) < groups:
                continue  # equal groups, of which PyTorch may take any
            clear += 1
            assert (np.float32(0.5) + bias.astype(np.float32) == 0.5 + bias).all()
            router.set(np.zeros((router.experts, HIDDEN)), bias)
            assert_same(router, np.eye(2, HIDDEN))
        assert clear > 10

    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("name", ["v2-greedy", "v3-one-group", "longcat"])
    def test_logits_one_unit_in_the_last_place_apart(
        self, name: str, runtime: str, generator: np.random.Generator
    ) -> None:
        """Functions of a score differ by as much, so that any of these experts is right: but no other is."""
        router = Router(name, runtime=runtime)
        steps = np.stack([generator.permutation(router.experts) for _ in range(HIDDEN)]) % 3
        logits = np.full(steps.shape, 0.5, np.float32)
        for step in (1, 2):
            logits[steps >= step] = np.nextafter(logits[steps >= step], np.float32(1))
        favourites = steps == 2
        logits[favourites] += np.float32(0.25)
        router.set(self.weight(logits))
        assert (favourites.sum(axis=1) <= router.moe.top_k).all()
        ids, weights = router.ours(np.eye(HIDDEN))
        for row, favourite in zip(ids, favourites, strict=True):
            assert set(np.flatnonzero(favourite)) <= set(row.tolist())
        _, expected = router.theirs(np.eye(HIDDEN))
        np.testing.assert_allclose(np.sort(weights, axis=1), np.sort(expected, axis=1), rtol=2e-6)

    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("name", ["v2-groups", "v2-160", "v3-groups", "v3-256", "mistral-groups"])
    def test_equal_groups(self, name: str, runtime: str, generator: np.random.Generator) -> None:
        """Groups that are copies of each other: those with the lowest numbers are taken, and the weights agree."""
        router = Router(name, runtime=runtime)
        groups, chosen = router.moe.n_group, router.moe.topk_group
        size = router.experts // groups
        logits = np.tile(generator.uniform(-1, 1, (HIDDEN, size)), groups).astype(np.float32)
        router.set(self.weight(logits), np.tile(generator.normal(0, 0.1, size), groups))
        ids, weights = router.ours(np.eye(HIDDEN))
        assert ids.max() < chosen * size
        _, expected = router.theirs(np.eye(HIDDEN))
        np.testing.assert_allclose(np.sort(weights, axis=1), np.sort(expected, axis=1), rtol=2e-6)

    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("gap", [1e-5, 1e-3])
    @pytest.mark.parametrize(
        "name",
        ["v2-greedy", "v2-groups", "v2-160", "v3-one-group", "v3-groups", "v3-256", "mistral-groups", "longcat"],
    )
    def test_near_ties(self, name: str, gap: float, runtime: str, generator: np.random.Generator) -> None:
        """Logits 1e-5 apart, a few units of fp32 in the scores, are told apart as transformers does."""
        router = Router(name, runtime=runtime)
        logits = 0.5 + gap * np.stack([generator.permutation(router.experts) for _ in range(HIDDEN)])
        logits = logits.astype(np.float32)
        router.set(self.weight(logits))
        clear = _clear_rows(logits.astype(np.float64), router)
        assert clear.sum() > 4
        assert_same(router, np.eye(HIDDEN)[clear])

    @pytest.mark.parametrize("logit", [-80.0, -30.0, 0.0, 30.0, 80.0])
    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("name", ["v2-greedy", "v3-one-group"])
    def test_extreme_logits(self, name: str, logit: float, runtime: str) -> None:
        """Scores near 0 and 1 are exact relative to themselves, which the weights depend on."""
        router = Router(name, runtime=runtime)
        top_k, experts = router.moe.top_k, router.moe.num_experts
        logits = logit - np.arange(experts, dtype=np.float32)[None] / 4
        router.set(self.weight(logits))
        if router.moe.correction_bias and logit > 0:
            # Scores that are 1 in fp32 are equal.
            router.set(self.weight(logits), -np.arange(experts) / 8)
        ids, weights = router.ours(np.eye(1, HIDDEN))
        expected_ids, expected = router.theirs(np.eye(1, HIDDEN))
        assert ids.tolist() == expected_ids.tolist() == [list(range(top_k))]
        np.testing.assert_allclose(weights, expected, rtol=2e-5)


class TestNetwork:
    @staticmethod
    def logits(checkpoint: HfCheckpoint) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.random.default_rng(3).integers(0, 131, 50).tolist()
        network = OrtNetwork(checkpoint)
        request = network.request(len(tokens))
        found = network.step([(request, tokens[:20])]) + network.step((), [(request, tokens[20:])])
        with torch.no_grad():
            return torch.cat(found), checkpoint.model(torch.tensor([tokens])).logits[0]

    @pytest.mark.parametrize("model_type", ["deepseek_v2", "kimi_k2"])
    def test_twin_experts(self, tmp_path: Path, model_type: ModelType) -> None:
        """Each expert stands there twice, so that half of all choices are between equal scores."""

        def make_twins(model: Any) -> None:
            for layer in model.model.layers[1:]:
                gate, experts = layer.mlp.gate, layer.mlp.experts
                for tensor in (gate.weight, experts.gate_up_proj, experts.down_proj):
                    tensor.data[1::2] = tensor.data[::2]
                if model_type == "kimi_k2":
                    gate.e_score_correction_bias[1::2] = gate.e_score_correction_bias[::2]

        found, expected = self.logits(make_checkpoint(tmp_path, model_type, edit=make_twins))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)

    def test_equal_scores_everywhere(self, tmp_path: Path) -> None:
        """A router of zeros: the bias alone chooses, and all weights are equal."""

        def make_equal(model: Any) -> None:
            for layer in model.model.layers[1:]:
                layer.mlp.gate.weight.data.zero_()

        found, expected = self.logits(
            make_checkpoint(tmp_path, "deepseek_v3", first_k_dense_replace=1, edit=make_equal)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)

    @pytest.mark.parametrize("part", ["experts.down_proj", "shared_experts.down_proj.weight", "gate.weight"])
    @pytest.mark.parametrize("model_type", ["deepseek_v2", "kimi_k2"])
    def test_every_part_matters(self, tmp_path: Path, model_type: ModelType, part: str) -> None:
        """Otherwise agreement with transformers would say little about it."""
        checkpoint = make_checkpoint(tmp_path, model_type)
        state = checkpoint.model.state_dict()
        state[f"model.layers.1.mlp.{part}"].mul_(0.8)
        changed, _ = self.logits(checkpoint)
        state[f"model.layers.1.mlp.{part}"].div_(0.8)
        plain, _ = self.logits(checkpoint)
        assert (changed - plain).abs().max() > 100 * 2e-4
