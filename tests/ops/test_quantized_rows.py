"""Device functions of quantised rows: every code with every scale, and what the compiler makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.ops.checks import DTYPES, torch_dtype
from trtllm_mla.dtypes import DType
from trtllm_mla.engine import kernel_compiler, kernel_resources
from trtllm_mla.ops import kernels
from trtllm_mla.ops.quantized_rows import decode_e4m3, decode_fp8, decode_nvfp4
from trtllm_mla.targets import TARGETS

BYTES = np.arange(256, dtype=np.uint8)
E4M3 = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
WARPS = 4
E2M1 = (BYTES[:16] % 16).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


@triton.jit
def decode_fp8_rows(
    codes, scales, values, ROWS: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, INTERPRET: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    words = tl.load((codes + row * (4 * WORDS)).to(tl.pointer_type(tl.int32)) + tl.arange(0, WORDS)[None, :])
    scale = tl.load(scales + row * SCALES + tl.arange(0, SCALES)[None, :])
    decoded = decode_fp8(words, scale, values.dtype.element_ty, INTERPRET)
    tl.store(values + row * (4 * WORDS) + tl.arange(0, 4 * WORDS)[None, :], decoded)


@triton.jit
def decode_nvfp4_rows(
    codes, scales, values, ROWS: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, INTERPRET: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    words = tl.load((codes + row * (4 * WORDS)).to(tl.pointer_type(tl.int32)) + tl.arange(0, WORDS)[None, :])
    scale = decode_e4m3(tl.load(scales + row * SCALES + tl.arange(0, SCALES)[None, :]))
    even = decode_nvfp4(words, scale, False, values.dtype.element_ty, INTERPRET)
    odd = decode_nvfp4(words, scale, True, values.dtype.element_ty, INTERPRET)
    decoded = tl.reshape(tl.join(even, odd), [ROWS, 8 * WORDS])
    tl.store(values + row * (8 * WORDS) + tl.arange(0, 8 * WORDS)[None, :], decoded)


def interpret(kernel: Any, codes: np.ndarray, scales: np.ndarray, width: int, dtype: DType) -> np.ndarray:
    """Decodes rows of bytes [n, 4 * words] and scales [n, scales] to float64 [n, width]."""
    values = torch.full((len(codes), width), 7.0, dtype=torch_dtype(dtype))
    arguments = {"codes": torch.from_numpy(codes.view(np.int8)), "scales": torch.from_numpy(scales), "values": values}
    constants = {"ROWS": len(codes), "WORDS": codes.shape[1] // 4, "SCALES": scales.shape[1], "INTERPRET": True}
    kernels._interpreted(kernel.fn)[(1,)](**arguments, **constants)
    return values.double().numpy()


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether values and their signs are equal, and NaN at the same places."""
    nan = np.isnan(expected)
    signs = (np.signbit(found) == np.signbit(expected)) | nan
    return bool(np.array_equal(found, expected, equal_nan=True) and signs.all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_e4m3_code_with_every_scale(dtype: DType) -> None:
    scales = np.full((128, 2), np.nan, np.float32)
    scales[:72] = np.exp2(np.arange(-64, 8))[:, None]
    found = interpret(decode_fp8_rows, np.tile(BYTES, (128, 1)), scales, 256, dtype)
    expected = torch.from_numpy(E4M3 * scales[:, :1].astype(np.float64))
    if dtype is DType.FLOAT16:
        # The one type whose exponents do not reach.
        expected = expected.to(torch.float16).double()
    has_code = ~np.isnan(E4M3)
    assert same_bits(found[:, has_code], expected.numpy()[:, has_code])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_e2m1_codes_with_every_e4m3_scale(dtype: DType) -> None:
    scales = np.tile(BYTES[:, None].view(np.int8), (1, 32))
    found = interpret(decode_nvfp4_rows, np.tile(BYTES, (256, 1)), scales, 512, dtype)
    pairs = np.stack([E2M1[BYTES & 15], E2M1[BYTES >> 4]], -1).reshape(-1)
    assert same_bits(found, pairs * E4M3[:, None])


def test_each_block_has_its_own_scale() -> None:
    ones = np.full((1, 512), 0x38, np.uint8)
    scales = np.array([[1.0, 0.5, 4.0, 2.0**-30]], np.float32)
    found = interpret(decode_fp8_rows, ones, scales, 512, DType.BFLOAT16)
    np.testing.assert_array_equal(found[0], np.repeat(scales[0], 128))
    codes = np.array([[0x38, 0x30, 0x48, 0x01]], np.int8)
    found = interpret(decode_nvfp4_rows, np.full((1, 32), 0x22, np.uint8), codes, 64, DType.BFLOAT16)
    np.testing.assert_array_equal(found[0], np.repeat(E4M3[codes[0]], 16))


@pytest.mark.parametrize(
    ("kernel", "row_bytes", "budget"), [(decode_fp8_rows, 512, 4.5), (decode_nvfp4_rows, 256, 6.5)]
)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_instructions_for_an_element(kernel: Any, row_bytes: int, budget: float, target: str, tmp_path: Path) -> None:
    """What another bf16 element costs a thread: decoding, its share of loads, and its store in the order of memory."""
    counts = {}
    for rows in (16, 8):
        compiled = compile_decoder(kernel, rows, row_bytes, target, tmp_path)
        ptx = compiled.asm["ptx"]
        # Flushed to zero, the subnormal numbers that codes become would be lost.
        assert ".ftz" not in ptx
        assert max(kernel_resources.global_loads(ptx)) == 16
        assert kernel_resources.resource_usage(compiled.asm["cubin"])[1] == 0
        code = kernel_resources.parse_sass(kernel_resources.disassemble(compiled.asm["cubin"]))
        counts[rows] = sum(instruction.opcode != "NOP" for instruction in code.instructions)
    assert (counts[16] - counts[8]) / (8 * 512 / (32 * WARPS)) <= budget


def compile_decoder(kernel: Any, rows: int, row_bytes: int, target: str, directory: Path) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    scales, scale_type = (4, "*fp32") if kernel is decode_fp8_rows else (32, "*i8")
    constants = {"ROWS": rows, "WORDS": row_bytes // 4, "SCALES": scales, "INTERPRET": False}
    signature = {"codes": "*i8", "scales": scale_type, "values": "*bf16", **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    with kernel_compiler.triton_cache(directory):
        return triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", TARGETS[target].compute_capability, 32),
            options={"num_warps": WARPS, "enable_fp_fusion": True},
        )
