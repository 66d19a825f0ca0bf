from dataclasses import replace

import pytest
import torch

from tests.ops.checks import interpret
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.ops.plan import Launch, LaunchPlan, ScalarArgument, TensorArgument, WorkspaceLayout
from trtllm_mla.targets import TARGETS

ATTRIBUTES = {"kv_lora_rank": 16, "rope_dim": 8, "latent_scale": 1.0}


def gather_inputs() -> dict[str, torch.Tensor]:
    return {"latent_cache": torch.rand(2, 16, 24), "kv_slots": torch.tensor([17, 3, 3], dtype=torch.int32)}


def test_outputs_have_the_contracts_shapes_and_types() -> None:
    inputs = gather_inputs()
    inputs["latent_cache"] = inputs["latent_cache"].half()
    latent, k_pe = interpret(GATHER_LATENT, inputs, ATTRIBUTES, model_dtype=DType.BFLOAT16, cache_dtype=DType.FLOAT16)
    assert (latent.shape, latent.dtype) == ((3, 16), torch.bfloat16)
    assert (k_pe.shape, k_pe.dtype) == ((3, 8), torch.bfloat16)


def test_aliased_outputs_are_the_inputs_memory() -> None:
    pool = torch.full((1, 16, 24), float("nan"))
    inputs = {
        "past_latent": pool,
        "latent": torch.rand(1, 16),
        "k_pe": torch.rand(1, 8),
        "q_pe": torch.rand(1, 2, 8),
        "position_ids": torch.tensor([0], dtype=torch.int32),
        "slot_mapping": torch.tensor([5], dtype=torch.int32),
        "rotary_cos_sin": torch.tensor([[1.0] * 4 + [0.0] * 4]),
    }
    present, _ = interpret(APPEND_LATENT, inputs, {"rope_interleave": 1}, model_dtype=DType.FLOAT32)
    assert present is pool
    assert torch.equal(pool[0, 5], torch.cat([inputs["latent"][0], inputs["k_pe"][0]]))


def test_memory_that_no_kernel_writes_holds_nan() -> None:
    """An operation whose plan is empty shows what its outputs held before."""
    idle = replace(GATHER_LATENT, plan=lambda problem: LaunchPlan(()))
    for output in interpret(idle, gather_inputs(), ATTRIBUTES, model_dtype=DType.FLOAT16, cache_dtype=DType.FLOAT32):
        assert output.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_slots": torch.zeros(3, dtype=torch.int64)}, "'kv_slots': found torch.int64, expected torch.int32"),
        ({"latent_cache": torch.zeros(2, 16, 24).half()}, "'latent_cache': found torch.float16"),
        ({"latent_cache": torch.zeros(2, 16, 48)[..., ::2]}, "'latent_cache': found strides"),
        ({"latent_cache": torch.zeros(2, 24)}, "'latent_cache': found shape"),
    ],
)
def test_inputs_must_keep_the_contract(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interpret(GATHER_LATENT, gather_inputs() | change, ATTRIBUTES, model_dtype=DType.FLOAT32)


def test_launches_run_in_order_and_share_the_workspace() -> None:
    """Gathers into the workspace, then gathers from there: rows 17, 3, 3 and of those 2, 0."""
    inputs = gather_inputs()
    problem = Problem(
        dims={"pages": 2, "page_size": 16, "width": 24, "keys": 3},
        attributes=ATTRIBUTES,
        model_dtype=DType.FLOAT32,
        cache_dtype=CacheDType.FP32,
        target=TARGETS["sm_90"],
        tile_s=64,
        num_stages=2,
    )
    layout = WorkspaceLayout()
    unused, latent, k_pe = (layout.reserve("fp32", count) for count in (7, 3 * 16, 3 * 8))
    (first,) = GATHER_LATENT.plan(problem).launches
    constants = {**dict(first.variant.constants), "KV_LORA_RANK": 12, "ROPE_DIM": 4}
    variant = replace(first.variant, constants=tuple(constants.items()))
    plan = LaunchPlan(
        launches=(
            replace(first, arguments=(*first.arguments[:2], latent, k_pe, *first.arguments[4:])),
            Launch(
                variant,
                (1, 1, 1),
                (
                    latent,
                    TensorArgument("second_slots"),
                    TensorArgument("left"),
                    TensorArgument("right"),
                    ScalarArgument(2),
                    ScalarArgument(3),
                ),
            ),
        ),
        workspace_bytes=layout.size,
    )
    tensors = {
        **inputs,
        "second_slots": torch.tensor([2, 0], dtype=torch.int32),
        "left": torch.empty(2, 12),
        "right": torch.empty(2, 4),
    }
    run_plan(plan, tensors)
    rows = inputs["latent_cache"].view(32, 24)[[3, 17], :16]
    assert unused.offset == 0
    assert torch.equal(torch.cat([tensors["left"], tensors["right"]], dim=1), rows)


def test_the_workspace_starts_as_nan() -> None:
    problem_inputs = {
        "slots": torch.tensor([0], dtype=torch.int32),
        "left": torch.empty(1, 16),
        "right": torch.empty(1, 8),
    }
    layout = WorkspaceLayout()
    scratch = layout.reserve("fp32", 24)
    problem = Problem(
        dims={"pages": 1, "page_size": 1, "width": 24, "keys": 1},
        attributes=ATTRIBUTES,
        model_dtype=DType.FLOAT32,
        cache_dtype=CacheDType.FP32,
        target=TARGETS["sm_90"],
        tile_s=64,
        num_stages=2,
    )
    (variant,) = GATHER_LATENT.variants(problem)
    arguments = (
        scratch,
        TensorArgument("slots"),
        TensorArgument("left"),
        TensorArgument("right"),
        ScalarArgument(1),
        ScalarArgument(1),
    )
    run_plan(LaunchPlan((Launch(variant, (1, 1, 1), arguments),), layout.size), problem_inputs)
    assert problem_inputs["left"].isnan().all()
    assert problem_inputs["right"].isnan().all()
