"""What a compiled plugin library says of itself; tests/plugins/tensorrt builds engines with one."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from trtllm_mla._version import __version__
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.operation import OperationSettings, TargetTile
from trtllm_mla.engine.shared_library import LibraryContents
from trtllm_mla.errors import UserError

PATH = Path("library.so")
CONTENTS = LibraryContents(
    __version__,
    ("sm_89", "sm_120"),
    frozenset(
        {
            ("bfloat16", "fp8", TargetTile("sm_89", 32, 2)),
            ("bfloat16", "fp8", TargetTile("sm_89", 64, 2)),
            ("bfloat16", "fp8", TargetTile("sm_120", 64, 2)),
            ("float16", "fp16", TargetTile("sm_89", 16, 3)),
        }
    ),
)


def settings(
    tiles: Sequence[tuple[str, int, int]], dtype: DType = DType.BFLOAT16, cache: CacheDType = CacheDType.FP8
) -> OperationSettings:
    return OperationSettings(dtype, cache, tuple(TargetTile(*tile) for tile in tiles))


class TestCheck:
    @pytest.mark.parametrize("tiles", [[("sm_89", 32, 2)], [("sm_120", 64, 2), ("sm_89", 64, 2)]])
    def test_what_it_was_made_for(self, tiles: Sequence[tuple[str, int, int]]) -> None:
        CONTENTS.check(PATH, settings(tiles))

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            (settings([("sm_89", 32, 2), ("sm_90", 64, 2)]), "for sm_89, sm_120, expected one for sm_90 too"),
            (settings([("sm_89", 16, 2)]), "found tiles 32 x 2, 64 x 2 for sm_89, a bfloat16 network and a fp8 cache"),
            (settings([("sm_89", 16, 2)]), "expected 16 x 2. Make the library with this network"),
            (settings([("sm_120", 32, 2)]), "found tiles 64 x 2 for sm_120"),
            (settings([("sm_120", 16, 3)], DType.FLOAT16, CacheDType.FP16), "found tiles none for sm_120, a float16"),
            (settings([("sm_89", 32, 2)], cache=CacheDType.NVFP4), "found tiles none for sm_89"),
        ],
    )
    def test_anything_else(self, wanted: OperationSettings, message: str) -> None:
        with pytest.raises(UserError, match=message):
            CONTENTS.check(PATH, wanted)

    def test_another_version(self) -> None:
        other = dataclasses.replace(CONTENTS, version="0.0.9")
        with pytest.raises(UserError, match=rf"of version 0\.0\.9, expected {__version__}"):
            other.check(PATH, settings([("sm_89", 32, 2)]))


class TestRead:
    def test_another_library(self) -> None:
        name = ctypes.util.find_library("c")
        assert name is not None
        with pytest.raises(UserError, match=r"library\.so: found another shared library, expected a plugin library"):
            LibraryContents.read(PATH, ctypes.CDLL(name))
