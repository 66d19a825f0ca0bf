"""Files written piece by piece are what the safetensors library reads, and incomplete ones are noticed."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.torch import load_file

from trtllm_mla.checkpoint.files import read_safetensors_header
from trtllm_mla.checkpoint.safetensors_writer import SafetensorsWriter, TensorType, file_bytes
from trtllm_mla.dtypes import DType

TYPES = {
    "odd": TensorType(DType.BFLOAT16, (3, 5)),
    "wide": TensorType(DType.FLOAT32, (7,)),
    "half": TensorType(DType.FLOAT16, (2, 3, 5)),
}


def values(name: str, seed: int = 0) -> np.ndarray:
    tensor = TYPES[name]
    return np.random.default_rng(seed).standard_normal(tensor.shape).astype(tensor.dtype.numpy)


def test_pieces_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    with SafetensorsWriter(file, TYPES) as writer:
        writer.write("half", 11, values("half").reshape(-1)[11:])
        writer.write("odd", 0, values("odd"))
        writer.write("wide", 0, values("wide"))
        writer.write("half", 0, values("half").reshape(-1)[:11])
    loaded = load_file(file)
    assert loaded.keys() == TYPES.keys()
    for name in TYPES:
        found = loaded[name].float().numpy()
        assert np.array_equal(found, values(name).astype(np.float32))
    assert file.stat().st_size == file_bytes(TYPES)
    for info in read_safetensors_header(file).values():
        assert info.offsets[0] % {"BF16": 2, "F16": 2, "F32": 4}[info.dtype] == 0


def test_a_tensor_left_out(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "a.safetensors", TYPES)
    writer.write("odd", 0, values("odd")[:1])
    writer.write("wide", 0, values("wide"))
    with pytest.raises(ValueError, match="2 tensors were not written whole, of them odd"), writer:
        pass


@pytest.mark.parametrize(
    ("name", "start", "data"),
    [
        ("odd", 0, np.zeros((3, 5), np.float32)),
        ("wide", 3, np.zeros(5, np.float32)),
        ("odd", 0, np.zeros((5, 3), ml_dtypes.bfloat16).T),
    ],
)
def test_pieces_that_do_not_fit(tmp_path: Path, name: str, start: int, data: np.ndarray) -> None:
    with SafetensorsWriter(tmp_path / "a.safetensors", TYPES) as writer:
        with pytest.raises(ValueError, match=name):
            writer.write(name, start, data)
        for each in TYPES:
            writer.write(each, 0, values(each))
        with pytest.raises(ValueError, match="more than"):
            writer.write("wide", 0, values("wide"))


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "a.safetensors", TYPES)
