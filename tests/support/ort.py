"""ONNX Runtime values from and to torch tensors, bfloat16 included."""

from __future__ import annotations

import ctypes

import numpy as np
import onnx
import onnxruntime
import torch

from trtllm_mla.dtypes import DType


def to_ort(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    if tensor.dtype is torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())


def from_ort(value: onnxruntime.OrtValue) -> torch.Tensor:
    if value.element_type() == onnx.TensorProto.BFLOAT16:
        shape = tuple(value.shape())
        count = int(np.prod(shape))
        if count == 0:
            return torch.empty(shape, dtype=torch.bfloat16)
        raw = bytearray(ctypes.string_at(value.data_ptr(), 2 * count))
        return torch.frombuffer(raw, dtype=torch.bfloat16).reshape(shape)
    return torch.from_numpy(value.numpy())


def torch_dtype(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype)
