"""Every architecture, with the rotary settings it is released with: both executors of the CPU against transformers.

And one of every kind of router, whose experts have equal scores.

Long texts, many schedules, and settings that make rotary scaling show within a few tokens: ``test_end_to_end.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.networks import Network, network_of
from trtllm_mla.checkpoint.architectures import architectures
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence, GenerationSession, run_forced
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.scheduler import SchedulerConfig

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MISTRAL4 = _YARN | {
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 64 / (48 + 64),
}
_KIMI = _YARN | {"factor": 32.0, "beta_fast": 1.0, "rope_theta": 50000.0}
_MINICPM3_FACTORS = [
    1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734,
    3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353,
    14.85530648787323, 15.906017515851266, 16.461961959767827, 16.740306425132907, 16.87581087164081,
    16.940876586213285,
]  # fmt: skip
_MINICPM3 = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32768,
    "short_factor": _MINICPM3_FACTORS,
    "long_factor": _MINICPM3_FACTORS,
}

# A.X-K1's and GLM's rotary settings are transformers' defaults.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "axk1": {},
    "deepseek_v2": {"rope": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v2, Lite": {
        "model_type": "deepseek_v2",
        "rope": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "q_lora_rank": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {"rope": _YARN, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8},
    "kimi_k2": {"rope": _KIMI},
    "kimi_k25": {"rope": _KIMI | {"factor": 64.0, "beta_fast": 32.0}},
    "longcat_flash": {"rope": {"rope_type": "default", "rope_theta": 1e7}, "head_dim": 64},
    "minicpm3": {"rope": _MINICPM3, "qk_rope_head_dim": 32, "max_position_embeddings": 32768},
    "mistral3": {"rope": _MISTRAL4},
    "mistral4": {"rope": _MISTRAL4},
    "sarvam_mla": {"rope": _YARN, "q_lora_rank": None},
    "youtu": {"rope": {"rope_type": "default", "rope_theta": 1.6e6}},
}
_TINY: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 72,
    "num_attention_heads": 3,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 64,
    "v_head_dim": 20,
    "max_position_embeddings": 16384,
}
PAGE_SIZE, NUM_PAGES = 16, 6
EXECUTORS = ["onnxruntime", "interpreter"]


@cache
def make_network(name: str, edit: Callable[[Any], None] | None = None) -> Network:
    return network_of({"model_type": name, "seed": 5} | _TINY | CHECKPOINTS[name] | {"edit": edit})


def make_executor(network: Network, name: str) -> Any:
    return getattr(network, name)(num_pages=NUM_PAGES, page_size=PAGE_SIZE)


def random_tokens(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 131, count).tolist()
    return tokens


def test_no_architecture_is_left_out() -> None:
    assert {values.get("model_type", name) for name, values in CHECKPOINTS.items()} == architectures().keys()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_tokens(name: str, executor: str) -> None:
    """A prompt in chunks of both groups beside one that decodes already: steps of one kind and mixed ones."""
    network = make_network(name)
    config = SchedulerConfig(
        vocab_size=131,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_batch_size=2,
        max_num_tokens=20,
        max_input_len=40,
        max_seq_len=48,
        max_context_kv_tokens=48,
        enable_matrix_absorption=True,
        prefill_absorption_threshold=8,
        max_chunk_tokens=11,
    )
    prompts = [random_tokens(18), random_tokens(3)]
    session = GenerationSession(make_executor(network, executor), config)
    results = session.generate([Request(prompt, 4) for prompt in prompts])
    assert [result.output_ids for result in results] == [network.hf_greedy(prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits(name: str, executor: str) -> None:
    """At every position: chunks of both groups, one token alone, and another request in the same steps."""
    check_logits(make_network(name), executor)


def check_logits(network: Network, executor: str) -> None:
    sequences = [
        ForcedSequence(random_tokens(21), [ForcedChunk(17, False), ForcedChunk(3, True), ForcedChunk(1, True)]),
        ForcedSequence(random_tokens(6), [ForcedChunk(2, True), ForcedChunk(4, False)], first_step=1),
    ]
    results = run_forced(make_executor(network, executor), sequences)
    for sequence, result in zip(sequences, results, strict=True):
        expected = network.hf_logits(sequence.token_ids)
        assert expected.std() > 0.2
        assert np.abs(result.logits - expected).max() < 2e-4


def tie(model: Any, copy: Callable[[torch.Tensor], None], apart: Callable[[torch.Tensor], None]) -> None:
    """Copies experts onto others in every router and mixture of a model; ``apart`` changes what routers have then."""
    for mlp in (layer.mlp for layer in getattr(model.model, "language_model", model.model).layers):
        if hasattr(mlp, "experts"):
            router = mlp.router if hasattr(mlp, "router") else mlp.gate
            weight = getattr(router, "classifier", router).weight.data
            bias = getattr(router, "e_score_correction_bias", torch.zeros(len(weight)))
            for tensor in (weight, bias, mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data):
                copy(tensor)
            apart(weight)


def copy_neighbours(tensor: torch.Tensor) -> None:
    """Of the first three groups of three experts, the second expert becomes the one before it."""
    tensor[1:8:3] = tensor[0:7:3].clone()


def copy_groups(tensor: torch.Tensor) -> None:
    """Of four groups of three experts, the second and the last become the ones before them."""
    tensor[3:6], tensor[9:12] = tensor[0:3].clone(), tensor[6:9].clone()


def one_unit_in_the_last_place(weight: torch.Tensor) -> None:
    """Moves one weight of the copies, so that scores differ as little as fp32 can tell, or not at all."""
    weight[1:8:3, 0] = torch.nextafter(weight[1:8:3, 0], torch.tensor(9.0))


TIES = {
    "equal experts": partial(tie, copy=copy_neighbours, apart=lambda weight: None),
    "equal groups": partial(tie, copy=copy_groups, apart=lambda weight: None),
    "nearly equal experts": partial(tie, copy=copy_neighbours, apart=one_unit_in_the_last_place),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("name", "ties"),
    [
        *product(("deepseek_v2", "deepseek_v3", "kimi_k2", "mistral4"), TIES),
        *product(("longcat_flash",), ("equal experts", "nearly equal experts")),
    ],
)
def test_logits_where_experts_tie(name: str, ties: str, executor: str) -> None:
    """transformers may take the other of two such experts, which computes the same."""
    check_logits(make_network(name, TIES[ties]), executor)
