from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.operation import Operation, OperationSettings, TargetTile
from trtllm_mla.ops import OPS
from trtllm_mla.targets import get_target

TILES = (TargetTile("sm_89", 32, 2), TargetTile("sm_120", 16, 2))
SETTINGS = OperationSettings(DType.BFLOAT16, CacheDType.BF16, TILES)
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "AppendLatent": {"rope_interleave": 1, "latent_scale": 1.0},
    "LatentAttention": {"softmax_scale": 0.125, "latent_scale": 1.0},
    "GatherLatent": {"kv_lora_rank": 96, "rope_dim": 32, "latent_scale": 1.0},
    "ContextAttention": {"softmax_scale": 0.125, "causal": 1},
}
HEADS, LATENT, ROPE, PAGE = 5, 96, 32, 64


def operation(name: str) -> Operation:
    return Operation(OPS[name], ATTRIBUTES[name], SETTINGS)


def latent_attention_shapes(
    tokens: int, pages: int, requests: int, table: int, longest: int
) -> tuple[tuple[int, ...], ...]:
    return (
        (tokens, HEADS, LATENT),
        (tokens, HEADS, ROPE),
        (pages, PAGE, LATENT + ROPE),
        (requests, table),
        (requests,),
        (requests + 1,),
        (requests, longest),
    )


MAX_SHAPES = latent_attention_shapes(96, 21, 3, 7, 40)


class TestWorkspace:
    @settings(deadline=None, max_examples=200)
    @given(
        tokens=st.integers(1, 96),
        requests=st.integers(1, 3),
        table=st.integers(1, 7),
        longest=st.integers(1, 40),
        multiprocessors=st.sampled_from([1, 40, 128, 144, 200, 500]),
        target=st.sampled_from(["sm_89", "sm_120"]),
    )
    def test_the_reserved_size_is_enough_for_every_step_on_every_part(
        self, tokens: int, requests: int, table: int, longest: int, multiprocessors: int, target: str
    ) -> None:
        op = operation("LatentAttention")
        reserved = op.workspace_bytes(MAX_SHAPES)
        part = dataclasses.replace(get_target(target), multiprocessors=multiprocessors)
        plan = op.plan(latent_attention_shapes(tokens, 21, requests, table, longest), part, reserved)
        assert plan.workspace_bytes <= reserved

    def test_more_multiprocessors_split_the_keys_more(self) -> None:
        op = operation("LatentAttention")
        reserved = op.workspace_bytes(MAX_SHAPES)
        shapes = latent_attention_shapes(1, 21, 1, 7, 1)
        sizes = [
            op.plan(shapes, dataclasses.replace(get_target("sm_89"), multiprocessors=count), reserved).workspace_bytes
            for count in (1, 128)
        ]
        assert sizes[0] < sizes[1]

    def test_a_step_beyond_the_engine_is_refused(self) -> None:
        op = operation("LatentAttention")
        shapes = latent_attention_shapes(1, 21, 1, 7, 1)
        with pytest.raises(ValueError, match=r"LatentAttention.*need a workspace of \d+ bytes; found 16"):
            op.plan(shapes, get_target("sm_89"), 16)


class TestPlan:
    def test_plans_are_remembered(self) -> None:
        op = operation("LatentAttention")
        first, second = (op.plan(MAX_SHAPES, get_target("sm_89"), 1 << 30) for _ in range(2))
        assert first is second

    def test_contradicting_shapes_are_refused(self) -> None:
        shapes = list(MAX_SHAPES)
        shapes[1] = (95, HEADS, ROPE)
        with pytest.raises(ValueError, match=r"input 'q_pe': found 95 on axis 0, expected tokens = 96"):
            operation("LatentAttention").plan(tuple(shapes), get_target("sm_89"), 1 << 30)

    def test_a_target_that_was_not_built_for_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"found a GPU of generation sm_90; .* built for sm_89, sm_120"):
            operation("LatentAttention").plan(MAX_SHAPES, get_target("sm_90"), 1 << 30)

    def test_attributes_must_be_those_of_the_operation(self) -> None:
        with pytest.raises(ValueError, match=r"found the attributes \['scale'\], expected \['latent_scale'"):
            Operation(OPS["LatentAttention"], {"scale": 1.0}, SETTINGS)


class TestVariants:
    def test_fixed_sizes_are_enough(self) -> None:
        sizes = {"heads": HEADS, "kv_lora_rank": LATENT, "rope_dim": ROPE, "width": LATENT + ROPE, "page_size": PAGE}
        variants = operation("LatentAttention").variants(sizes, get_target("sm_120"))
        assert {dict(variant.constants)["BLOCK_N"] for variant in variants if variant.kernel != "combine"} == {16}

    def test_a_missing_size_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"LatentAttention: the sizes \['heads', 'page_size'.*must be fixed"):
            operation("LatentAttention").variants({"kv_lora_rank": LATENT}, get_target("sm_89"))
