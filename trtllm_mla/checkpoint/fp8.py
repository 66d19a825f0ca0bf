"""FP8 checkpoints: E4M3 weights with a scale for each block of 128 x 128, as DeepSeek-V3 is released.

A tensor ``X.weight`` [rows, columns] has scales ``X.weight_scale_inv`` [ceil(rows / 128), ceil(columns / 128)], each
the factor of its block; blocks at the lower and right edge may be short. Keys and defaults of ``quantization_config``
follow transformers 5.24 (``FineGrainedFP8Config``). The config also says how activations are quantised: this package
leaves them in the network's type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import ml_dtypes
import numpy as np
from pydantic import ConfigDict, Field, StringConstraints, model_validator

from trtllm_mla.checkpoint.spec import Fp8Spec
from trtllm_mla.config import StrictModel
from trtllm_mla.dtypes import FP8_BLOCK_SIZE

SCALE_SUFFIX = "_scale_inv"
SAFETENSORS_DTYPE = "F8_E4M3"
MAX_EXCLUDED_MODULES = 1 << 13

# Plain names only: transformers takes regular expressions too, which a stranger's config should not choose.
ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]{1,256}$", strict=True)]
ModuleNames = Annotated[list[ModuleName], Field(max_length=MAX_EXCLUDED_MODULES)]

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_ROWS_AT_ONCE = 1 << 10


class QuantizationConfig(StrictModel):
    """``quantization_config`` of ``config.json``; keys without effect on the weights are ignored."""

    model_config = ConfigDict(extra="ignore")

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3", "float8_e4m3fn"] | None = None
    weight_block_size: object = (FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)
    activation_scheme: str | None = None
    expert_dtype: Literal["fp8"] | None = None
    modules_to_convert: Annotated[list[str], Field(max_length=0)] | None = None
    modules_to_not_convert: ModuleNames | None = None
    ignored_layers: ModuleNames | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_method(cls, values: Any) -> Any:
        method = values.get("quant_method") if isinstance(values, dict) else values
        if method != "fp8":
            raise ValueError(
                f"quant_method: found {method!r:.80}, expected 'fp8' (E4M3 weights with block scales), or no "
                "quantisation: other methods are not supported. Convert the checkpoint to bfloat16 first"
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        size, scheme = self.weight_block_size, self.activation_scheme
        if size is None:
            raise ValueError(
                f"weight_block_size: found null, which is one scale for a whole tensor, expected "
                f"{[FP8_BLOCK_SIZE] * 2}. Convert the checkpoint to bfloat16 first"
            )
        if not isinstance(size, list | tuple) or list(size) != [FP8_BLOCK_SIZE] * 2:
            raise ValueError(f"weight_block_size: found {size!r:.80}, expected {[FP8_BLOCK_SIZE] * 2}")
        if scheme is not None and scheme.lower() != "dynamic":
            raise ValueError(
                f"activation_scheme: found {scheme!r:.80}, expected 'dynamic': stored scales of activations are not "
                "supported"
            )
        return self

    @property
    def spec(self) -> Fp8Spec:
        """What of it the rest of the package needs."""
        excluded = self.ignored_layers if self.modules_to_not_convert is None else self.modules_to_not_convert
        return Fp8Spec(tuple(excluded or ()))


def scale_shape(shape: tuple[int, ...], *, parts: int = 1) -> tuple[int, ...]:
    """Shape of the scales of weights.

    Args:
        shape: Shape of the weights: [..., rows, columns].
        parts: Equal parts of the rows that are divided into blocks by themselves.
    """
    *leading, rows, columns = shape
    row_blocks, column_blocks = (-(-size // FP8_BLOCK_SIZE) for size in (rows // parts, columns))
    return *leading, parts * row_blocks, column_blocks


def first_nan(codes: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """Where the first NaN is among E4M3 codes, or None without one.

    Args:
        codes: int8 or uint8 [rows, ...].
    """
    for start in range(0, len(codes), _ROWS_AT_ONCE):
        wrong = np.argwhere((codes[start : start + _ROWS_AT_ONCE] & 0x7F) == 0x7F)
        if len(wrong):
            row, *rest = (int(index) for index in wrong[0])
            return start + row, *rest
    return None


def first_not_finite(scales: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """Where the first infinity or NaN is among scales, or None without one."""
    wrong = np.argwhere(~np.isfinite(scales))
    return tuple(int(index) for index in wrong[0]) if len(wrong) else None


def dequantize(codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers that a weight stands for, each rounded once.

    Args:
        codes: E4M3 as uint8 [rows, columns].
        scales: [ceil(rows / 128), ceil(columns / 128)].

    Returns:
        float32 [rows, columns].
    """
    values: np.ndarray[Any, Any] = _VALUES[codes]
    scales = scales.astype(np.float32)
    for block, row_scales in enumerate(scales):
        rows = values[block * FP8_BLOCK_SIZE : (block + 1) * FP8_BLOCK_SIZE]
        rows *= np.repeat(row_scales, FP8_BLOCK_SIZE)[: codes.shape[1]]
    return values
