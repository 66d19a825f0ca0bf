"""Launch plan of AppendLatent: one launch writes the cache rows and rotates the query heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
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

# Heads a program rotates: with 64 rotary dimensions, 32 bytes of a 16-bit type for each of its 64 threads.
_BLOCK_H = 16
_NUM_WARPS = 2
# A row of 512 quantised latents: 16 for each of 32 threads, whose maximum takes no shared memory. With so many fp32
# latents the encoding to nvfp4 would keep some in local memory.
_NUM_WARPS_QUANTIZED = 1
_NUM_WARPS_FP32_TO_NVFP4 = 2


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
        *((ScalarArgument(problem.attributes["latent_scale"]),) if problem.cache_dtype.is_quantized else ()),
        # Slots are int32: the kernel cannot be asked for a row beyond.
        ScalarArgument(minimum(dims["pages"] * dims["page_size"], MAX_INT32)),
        ScalarArgument(dims["positions"]),
    )
    return LaunchPlan((Launch(variant, (dims["tokens"], 1 + head_blocks, 1), arguments),))


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """The one variant that ``plan`` uses."""
    return (_variant(problem),)


def _variant(problem: Problem) -> KernelVariant:
    dims = problem.dims
    layout = row_layout("AppendLatent", problem, dims["kv_lora_rank"], dims["rope_dim"])
    if dims["rope_dim"] % 2:
        raise ValueError(f"AppendLatent: found rope_dim {dims['rope_dim']}, expected an even number")
    quantized = layout.dtype.is_quantized
    model, cache = problem.model_dtype.triton, problem.cache_dtype.triton
    return KernelVariant(
        op="AppendLatent",
        kernel="append_quantized_latent" if quantized else "append_latent",
        signature=(
            ("present_latent", f"*{cache}"),
            ("latent", f"*{model}"),
            ("k_pe", f"*{model}"),
            ("q_pe", f"*{model}"),
            ("position_ids", "*i32"),
            ("slot_mapping", "*i32"),
            ("rotary_cos_sin", "*fp32"),
            ("rotated_q_pe", f"*{model}"),
            *((("latent_scale", "fp32"),) if quantized else ()),
            ("slots", "i32"),
            ("positions", "i32"),
        ),
        constants=(
            ("KV_LORA_RANK", dims["kv_lora_rank"]),
            ("ROPE_DIM", dims["rope_dim"]),
            ("HEADS", dims["heads"]),
            ("ROPE_INTERLEAVE", bool(problem.attributes["rope_interleave"])),
            *(
                quantized_constants(layout)
                if quantized
                else (("BLOCK_LATENT", next_power_of_two(layout.kv_lora_rank)),)
            ),
            ("BLOCK_HALF", next_power_of_two(dims["rope_dim"] // 2)),
            ("BLOCK_H", min(_BLOCK_H, next_power_of_two(dims["heads"]))),
        ),
        num_warps=_num_warps(problem),
        num_stages=1,
        fp_fusion=not quantized,
    )


def _num_warps(problem: Problem) -> int:
    if not problem.cache_dtype.is_quantized:
        return _NUM_WARPS
    if problem.model_dtype is DType.FLOAT32 and problem.cache_dtype is CacheDType.NVFP4:
        return _NUM_WARPS_FP32_TO_NVFP4
    return _NUM_WARPS_QUANTIZED
