"""How TensorRT finds the compiled plugins; a stand-in takes TensorRT's place.

Slow: the kernels of all operations are compiled, and the library.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.tensorrt.conftest import Builds
from tests.plugins.tensorrt.forms import OpForm
from tests.plugins.tensorrt.host import BUILD, Host, in_process
from trtllm_mla.ops import OPS

REGISTERED = [f"register trtllm_mla::{name} 1" for name in OPS]
WITHDRAWN = [f"deregister trtllm_mla::{name} 1" for name in OPS]

pytestmark = pytest.mark.slow


def load_beside_tensorrt(folder: Path, library: Path, version: int | None) -> dict[str, Any]:
    """Loads the library into a process that has TensorRT, and does what TensorRT's loadLibrary does."""
    tensorrt = ctypes.CDLL(str(folder / "libnvinfer_stand_in.so"))
    tensorrt.stand_in_take_log.restype = ctypes.c_char_p
    if version is not None:
        tensorrt.stand_in_set_version(version)

    def take_log() -> list[str]:
        return list(tensorrt.stand_in_take_log().decode().splitlines())

    plugins = ctypes.CDLL(str(library))
    found: dict[str, Any] = {"load": take_log()}
    count = ctypes.c_int32()
    plugins.getCreators.restype = ctypes.c_void_p
    for name in ("first", "second"):
        assert plugins.getCreators(ctypes.byref(count))
        found[name] = take_log()
    found["count"] = count.value
    # Loading it again runs nothing.
    ctypes.CDLL(str(library))
    found["again"] = take_log()
    return found


def run(builds: Builds, library: Path, version: int | None) -> dict[str, Any]:
    with in_process() as pool:
        return pool.submit(load_beside_tensorrt, builds.folder_of_stand_ins(), library, version).result()


class TestRegistration:
    def test_it_registers_itself_and_withdraws_when_tensorrt_asks(self, builds: Builds, library: Path) -> None:
        found = run(builds, library, None)
        assert found["load"] == REGISTERED
        assert found["first"] == WITHDRAWN
        assert found["second"] == found["again"] == []
        assert found["count"] == len(OPS)

    def test_a_registry_of_another_layout_is_left_alone(
        self, builds: Builds, library: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        found = run(builds, library, 101300)
        assert found == {"load": [], "first": [], "second": [], "again": [], "count": len(OPS)}
        assert "whose registry and logger are not those of libnvinfer.so.11" in capfd.readouterr().err


class TestGpuAtHand:
    """TensorRT builds for it; the library is asked, then, whether it has kernels for it."""

    @pytest.mark.parametrize(("capability", "is_refused"), [(89, False), (120, False), (90, True)])
    def test_is_one_of_the_librarys_targets(
        self, builds: Builds, library: Path, forms: dict[str, OpForm], capability: int, is_refused: bool
    ) -> None:
        form = forms["LatentAttention-fp8"]
        with in_process() as pool:
            host = Host(pool, builds.folder_of_stand_ins(), library, tensorrt=True)
            host.set_device(7, capability, 100)
            plugin = host.create(form.definition.name, form.fields, BUILD)
            assert host.configure(plugin, form.input_types, form.max_shapes) == int(is_refused)
            log = host.take_log()
        if is_refused:
            assert f"sm_{capability}" in log
            assert "sm_89" in log
        else:
            assert log == ""
