"""Launch plan of AppendLatent: one launch writes the cache rows and rotates the query heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_mla.ops.plan import (
    MAX_INT32,
    KernelVariant,
    Launch,
    LaunchPlan,
    ScalarArgument,
    TensorArgument,
    ceil_div,
    next_power_of_two,
)

if TYPE_CHECKING:
    from trtllm_mla.ops.definition import Problem

# Heads a program rotates: with 64 rotary dimensions, 32 bytes of a 16-bit type for each of its 64 threads.
_BLOCK_H = 16
_NUM_WARPS = 2


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launch: for each token one program for the cache row, and one for each block of query heads."""
    dims = problem.dims
    if dims["tokens"] == 0:
        return LaunchPlan(())
    variant = _variant(problem)
    head_blocks = ceil_div(dims["heads"], dict(variant.constants)["BLOCK_H"])
    arguments = (
        TensorArgument("present_latent"),
        TensorArgument("latent"),
        TensorArgument("k_pe"),
        TensorArgument("q_pe"),
        TensorArgument("position_ids"),
        TensorArgument("slot_mapping"),
        TensorArgument("rotary_cos_sin"),
        TensorArgument("rotated_q_pe"),
        # Slots are int32: the kernel cannot be asked for a row beyond.
        ScalarArgument(min(dims["pages"] * dims["page_size"], MAX_INT32)),
        ScalarArgument(dims["positions"]),
    )
    return LaunchPlan((Launch(variant, (dims["tokens"], 1 + head_blocks, 1), arguments),))


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """The one variant that ``plan`` uses."""
    return (_variant(problem),)


def _variant(problem: Problem) -> KernelVariant:
    dims = problem.dims
    if dims["width"] != dims["kv_lora_rank"] + dims["rope_dim"] or dims["rope_dim"] % 2:
        raise ValueError(
            f"AppendLatent: found width {dims['width']}, kv_lora_rank {dims['kv_lora_rank']}, rope_dim "
            f"{dims['rope_dim']}; expected width = kv_lora_rank + rope_dim, and an even rope_dim"
        )
    model, cache = problem.model_dtype.triton, problem.cache_dtype.triton
    return KernelVariant(
        op="AppendLatent",
        kernel="append_latent",
        signature=(
            ("present_latent", f"*{cache}"),
            ("latent", f"*{model}"),
            ("k_pe", f"*{model}"),
            ("q_pe", f"*{model}"),
            ("position_ids", "*i32"),
            ("slot_mapping", "*i32"),
            ("rotary_cos_sin", "*fp32"),
            ("rotated_q_pe", f"*{model}"),
            ("slots", "i32"),
            ("positions", "i32"),
        ),
        constants=(
            ("KV_LORA_RANK", dims["kv_lora_rank"]),
            ("ROPE_DIM", dims["rope_dim"]),
            ("HEADS", dims["heads"]),
            ("ROPE_INTERLEAVE", bool(problem.attributes["rope_interleave"])),
            ("BLOCK_LATENT", next_power_of_two(dims["kv_lora_rank"])),
            ("BLOCK_HALF", next_power_of_two(dims["rope_dim"] // 2)),
            ("BLOCK_H", min(_BLOCK_H, next_power_of_two(dims["heads"]))),
        ),
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
