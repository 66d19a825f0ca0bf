"""Launch plan of GatherLatent: one launch, a few rows a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_mla.ops.definition import row_layout
from trtllm_mla.ops.expression import minimum
from trtllm_mla.ops.plan import (
    MAX_INT32,
    KernelVariant,
    Launch,
    LaunchPlan,
    ScalarArgument,
    TensorArgument,
    ceil_div,
    next_power_of_two,
    quantized_constants,
)

if TYPE_CHECKING:
    from trtllm_mla.ops.definition import Problem

# Rows a program copies: at 512 latents of a 16-bit type, four 16-byte loads for each of its 128 threads.
_BLOCK_S = 8
_NUM_WARPS = 4


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launch: one program for each block of keys."""
    dims = problem.dims
    if dims["keys"] == 0:
        return LaunchPlan(())
    arguments = (
        TensorArgument("latent_cache"),
        TensorArgument("kv_slots"),
        TensorArgument("latent"),
        TensorArgument("k_pe"),
        *((ScalarArgument(problem.attributes["latent_scale"]),) if problem.cache_dtype.is_quantized else ()),
        ScalarArgument(dims["keys"]),
        # Slots are int32: the kernel cannot be asked for a row beyond.
        ScalarArgument(minimum(dims["pages"] * dims["page_size"], MAX_INT32)),
    )
    return LaunchPlan((Launch(_variant(problem), (ceil_div(dims["keys"], _BLOCK_S), 1, 1), arguments),))


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """The one variant that ``plan`` uses."""
    return (_variant(problem),)


def _variant(problem: Problem) -> KernelVariant:
    kv_lora_rank, rope_dim = int(problem.attributes["kv_lora_rank"]), int(problem.attributes["rope_dim"])
    layout = row_layout("GatherLatent", problem, kv_lora_rank, rope_dim)
    quantized = layout.dtype.is_quantized
    model, cache = problem.model_dtype.triton, problem.cache_dtype.triton
    return KernelVariant(
        op="GatherLatent",
        kernel="gather_quantized_latent" if quantized else "gather_latent",
        signature=(
            ("latent_cache", f"*{cache}"),
            ("kv_slots", "*i32"),
            ("latent", f"*{model}"),
            ("k_pe", f"*{model}"),
            *((("latent_scale", "fp32"),) if quantized else ()),
            ("keys", "i32"),
            ("slots", "i32"),
        ),
        constants=(
            ("KV_LORA_RANK", kv_lora_rank),
            ("ROPE_DIM", rope_dim),
            *(quantized_constants(layout) if quantized else (("BLOCK_LATENT", next_power_of_two(kv_lora_rank)),)),
            ("BLOCK_ROPE", next_power_of_two(rope_dim)),
            ("BLOCK_S", _BLOCK_S),
        ),
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
