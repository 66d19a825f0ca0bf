"""Rows that the kernel writes to quantised pools, bit for bit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.append_latent.test_plan import PROBLEM
from tests.ops.checks import DTYPES, TOLERANCE, interpret, relative_error, torch_dtype
from tests.ops.quantized import POISON, QUANTIZED, RANKS, hard_latents, hard_rotary_keys, poisoned_pool, rotated
from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import DType
from trtllm_mla.engine import kernel_compiler, kernel_resources
from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.row_codec import encode_rows
from trtllm_mla.targets import TARGETS

POSITIONS, HEADS = 50, 3
# Sums of squared errors of the largest values overflow; so do casts to fp16.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


def make_inputs(
    layout: RowLayout, *, tokens: int, model_dtype: DType = DType.FLOAT32, latent_scale: float = 1.0
) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(tokens)
    pages = 6
    model = torch_dtype(model_dtype)
    angles = rng.uniform(0, 6.3, (POSITIONS, layout.rope_dim // 2))
    cos_sin = 1.1 * np.concatenate([np.cos(angles), np.sin(angles)], 1)
    return {
        "past_latent": poisoned_pool(layout, pages, 16),
        "latent": torch.from_numpy(hard_latents(layout, tokens, rng, latent_scale)).to(model),
        "k_pe": torch.from_numpy(hard_rotary_keys(layout, tokens, rng)).to(model),
        "q_pe": torch.from_numpy(rng.standard_normal((tokens, HEADS, layout.rope_dim))).to(model),
        "position_ids": torch.from_numpy(rng.integers(0, POSITIONS, tokens)).int(),
        "slot_mapping": torch.from_numpy(rng.permutation(pages * 16)[:tokens]).int(),
        "rotary_cos_sin": torch.from_numpy(cos_sin).float(),
    }


def expected_rows(inputs: dict[str, torch.Tensor], *, interleave: bool) -> np.ndarray:
    """fp32 latents and rotated rotary keys of each token."""
    cos_sin = inputs["rotary_cos_sin"][inputs["position_ids"].long()].numpy()
    k_pe = rotated(inputs["k_pe"].float().numpy(), cos_sin, interleave=interleave)
    return np.concatenate([inputs["latent"].float().numpy(), k_pe], 1)


def append(
    inputs: dict[str, torch.Tensor],
    cache_dtype: CacheDType,
    *,
    model_dtype: DType = DType.FLOAT32,
    latent_scale: float = 1.0,
    interleave: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool as rows, and the rotated queries."""
    attributes = {"rope_interleave": int(interleave), "latent_scale": latent_scale}
    present, rotated_q_pe = interpret(
        APPEND_LATENT, inputs, attributes, model_dtype=model_dtype, cache_dtype=cache_dtype
    )
    assert present.data_ptr() == inputs["past_latent"].data_ptr()
    return present.view(-1, present.shape[-1]), rotated_q_pe


@pytest.mark.parametrize("latent_scale", [1.0, 0.37])
@pytest.mark.parametrize("kv_lora_rank", RANKS)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_rows_have_the_bits_of_the_reference(cache_dtype: CacheDType, kv_lora_rank: int, latent_scale: float) -> None:
    layout = cache_dtype.layout(kv_lora_rank, 6)
    inputs = make_inputs(layout, tokens=33, latent_scale=latent_scale)
    rows, _ = append(inputs, cache_dtype, latent_scale=latent_scale)
    values = expected_rows(inputs, interleave=True)
    written = rows[inputs["slot_mapping"].long()].numpy()
    np.testing.assert_array_equal(written.view(np.uint8), reference.quantize_rows(values, layout, latent_scale))
    np.testing.assert_array_equal(written, encode_rows(values, layout, latent_scale))
    unused = torch.ones(len(rows), dtype=torch.bool)
    unused[inputs["slot_mapping"].long()] = False
    assert (rows[unused] == POISON).all()


@pytest.mark.parametrize("model_dtype", DTYPES)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_every_network_type_and_pair_order(cache_dtype: CacheDType, interleave: bool, model_dtype: DType) -> None:
    layout = cache_dtype.layout(96, 32)
    inputs = make_inputs(layout, tokens=14, model_dtype=model_dtype)
    rows, rotated_q_pe = append(inputs, cache_dtype, model_dtype=model_dtype, interleave=interleave)
    values = expected_rows(inputs, interleave=interleave)
    written = rows[inputs["slot_mapping"].long()].numpy()
    np.testing.assert_array_equal(written.view(np.uint8), reference.quantize_rows(values, layout))
    expected = reference.rotate(
        inputs["q_pe"], inputs["position_ids"], inputs["rotary_cos_sin"], rope_interleave=interleave
    )
    assert relative_error(rotated_q_pe, expected) <= TOLERANCE[model_dtype]


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize(("kv_lora_rank", "rope_dim"), [(1, 2), (15, 4), (16, 8), (129, 62)])
def test_bytes_between_sections_are_0(cache_dtype: CacheDType, kv_lora_rank: int, rope_dim: int) -> None:
    layout = cache_dtype.layout(kv_lora_rank, rope_dim)
    inputs = make_inputs(layout, tokens=9)
    rows, _ = append(inputs, cache_dtype)
    written = rows[inputs["slot_mapping"].long()].numpy()
    expected = reference.quantize_rows(expected_rows(inputs, interleave=True), layout)
    np.testing.assert_array_equal(written.view(np.uint8), expected)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_slots_outside_the_pool_are_not_written(cache_dtype: CacheDType) -> None:
    layout = cache_dtype.layout(96, 32)
    inputs = make_inputs(layout, tokens=7)
    memory = torch.full((3, *inputs["past_latent"].shape), 77, dtype=torch.int8)
    memory[1] = POISON
    inputs["past_latent"] = memory[1]
    inputs["slot_mapping"] = torch.tensor([-1, 96, 5, 97, 2**31 - 1, -(2**31), -17], dtype=torch.int32)
    rows, _ = append(inputs, cache_dtype)
    assert (rows != POISON).any(1).nonzero().flatten().tolist() == [5]
    assert (memory[0] == 77).all()
    assert (memory[2] == 77).all()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_positions_outside_the_table_read_nothing(cache_dtype: CacheDType) -> None:
    layout = cache_dtype.layout(96, 32)
    inputs = make_inputs(layout, tokens=3)
    inputs["k_pe"] = torch.ones(3, 32)
    inputs["position_ids"] = torch.tensor([-1, POSITIONS, 2**31 - 1], dtype=torch.int32)
    rows, rotated_q_pe = append(inputs, cache_dtype)
    assert not rotated_q_pe.any()
    written = rows[inputs["slot_mapping"].long()]
    assert not written[:, layout.rope_offset :].any()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_no_tokens_and_no_pages(cache_dtype: CacheDType) -> None:
    layout = cache_dtype.layout(96, 32)
    rows, rotated_q_pe = append(make_inputs(layout, tokens=0), cache_dtype)
    assert (rows == POISON).all()
    assert rotated_q_pe.shape == (0, HEADS, 32)
    inputs = make_inputs(layout, tokens=2)
    inputs["past_latent"] = inputs["past_latent"][:0]
    _, rotated_q_pe = append(inputs, cache_dtype)
    assert rotated_q_pe.isfinite().all()


def problem(cache_dtype: CacheDType, target: str, model_dtype: DType = DType.BFLOAT16) -> Problem:
    dims = {**PROBLEM.dims, "width": cache_dtype.layout(512, 64).width, "heads": 128}
    return replace(PROBLEM, dims=dims, cache_dtype=cache_dtype, target=TARGETS[target], model_dtype=model_dtype)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_compiles_without_spills_to_wide_accesses(cache_dtype: CacheDType, target: str, tmp_path: Path) -> None:
    (variant,) = APPEND_LATENT.variants(problem(cache_dtype, target))
    compiled = compile_variant(variant, TARGETS[target], tmp_path)
    assert compiled.stack_bytes == 0
    assert ".ftz" not in compiled.ptx
    # Latent in, and each rotated part in and out; codes of fp8 fill 16 bytes of each of 32 threads, of nvfp4 8.
    stores = Counter(re.findall(r"st\.global\S*", compiled.ptx))
    assert compiled.wide_accesses >= 8
    assert stores["st.global.v2.b32"] == (cache_dtype is CacheDType.NVFP4)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_products_and_sums_round_apart(cache_dtype: CacheDType, tmp_path: Path) -> None:
    """No product of the formula is fused with a sum: the machine has as many as the code before assembly.

    What fused operations there are divide. If the compiler were free to fuse, products would be missing.
    """
    (variant,) = APPEND_LATENT.variants(problem(cache_dtype, "sm_80"))
    assert not variant.fp_fusion
    missing = {}
    for fp_fusion in (False, True):
        with kernel_compiler.triton_cache(tmp_path):
            compiled = kernel_compiler.compile_variant(replace(variant, fp_fusion=fp_fusion), TARGETS["sm_80"])
        ptx = compiled.asm["ptx"]
        code = kernel_resources.parse_sass(kernel_resources.disassemble(compiled.asm["cubin"]))
        opcodes = Counter(instruction.opcode.partition(".")[0] for instruction in code.instructions)
        found = (len(re.findall(rf"\b(?:{names})\.(?:rn\.)?f32", ptx)) for names in ("mul", "add|sub", "fma"))
        products, sums, fused = found
        missing[fp_fusion] = fused + max(products - opcodes["FMUL"], 0) + max(sums - opcodes["FADD"], 0)
    assert missing[False] == 0
    assert missing[True] > 0
